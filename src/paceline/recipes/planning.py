"""A recipe's model in a pipeline, planned: the model, a mini-batch of training data, and what each layer costs here.

    recipe ──> model, worker.batch_size samples ──> traced and measured ──> cut for [pipeline] ──> plan

Layers are measured with one torch thread, as a rank has where several share a machine; `threads` says otherwise. What
the optimiser keeps for each weight is counted from a step that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.optim import make_optimizer
from paceline.pipeline.devices import Device, Link
from paceline.recipes.assembly import load_data, make_model
from paceline.recipes.pipeline_section import BYTES_PER_SECOND_OF_MBIT, PipelineSection
from paceline.recipes.recipe import Recipe

if TYPE_CHECKING:
    from paceline.pipeline.plan import Plan

MOST_REPEATS, MOST_THREADS, MOST_STATES = 1_000, 1_024, 1_000
OnRound = Callable[[int, int], None]


def plan_recipe(
    recipe: Recipe,
    *,
    speeds: Sequence[float] = (),
    states: float | None = None,
    repeats: int = 5,
    threads: int = 1,
    on_round: OnRound = lambda done, of: None,
) -> Plan:
    """The plan of a recipe's model under its [pipeline], measured on this machine.

    `speeds` are those of the devices, one for each stage, if they differ. `states` is how many numbers the optimiser
    keeps for each weight; None counts those of the recipe's.

    >>> recipe = Recipe().with_settings(pipeline={"stages": 2})
    >>> plan = plan_recipe(recipe, repeats=3)
    >>> plan.model, plan.stages, plan.batch.samples, plan.states
    ('mlp', 2, 32, 1.0)
    """
    check(recipe.pipeline, speeds=speeds, states=states, repeats=repeats, threads=threads)
    from paceline.pipeline.planning import make_plan

    dataset = load_data(recipe)
    samples, found = recipe.worker.batch_size, len(dataset.train)
    if samples > found:
        told = f"the training samples of {recipe.data.name} (batch_size={samples})"
        raise ValueError(f"batch_size must be between 1 and {found:,}, {told}")
    section, model = recipe.pipeline, make_model(recipe, dataset)
    with _threads(threads):
        plan = make_plan(
            model,
            dataset.train.inputs[:samples],
            stages=section.stages,
            microbatches=section.microbatches,
            schedule=section.schedule,
            chunks=section.chunks or None,
            devices=devices_of(section, speeds),
            links=link_of(section),
            states=optimizer_states(recipe) if states is None else states,
            repeats=repeats,
            on_round=on_round,
        )
    return replace(plan, model=recipe.model.name)


def check(
    section: PipelineSection, *, speeds: Sequence[float], states: float | None, repeats: int, threads: int
) -> None:
    """Refuse what cannot be, before anything is loaded for it.

    >>> check(PipelineSection(stages=2), speeds=(1.0,), states=None, repeats=5, threads=1)
    Traceback (most recent call last):
    ValueError: speeds must be one for each stage (speeds=1.0, stages=2)
    >>> check(PipelineSection(), speeds=(), states=None, repeats=1, threads=1)
    Traceback (most recent call last):
    ValueError: repeats must be between 3 and 1,000 (repeats=1)
    """
    if speeds and len(speeds) != section.stages:
        given = ",".join(map(str, speeds))
        raise ValueError(f"speeds must be one for each stage (speeds={given}, stages={section.stages})")
    devices_of(section, speeds)  # a speed that cannot be is refused
    for name, value, least, most in (
        ("repeats", repeats, 3, MOST_REPEATS),
        ("threads", threads, 1, MOST_THREADS),
        ("optimizer_states", states or 0, 0, MOST_STATES),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name} must be between {least} and {most:,} ({name}={value})")


def devices_of(section: PipelineSection, speeds: Sequence[float] = ()) -> tuple[Device, ...]:
    """The devices of a section, each with its memory, and its speed where speeds are given.

    >>> [device.memory_bytes for device in devices_of(PipelineSection(stages=2, memory_mb=8.0))]
    [8000000, 8000000]
    """
    return tuple(Device(speed=speed, memory_bytes=section.memory_bytes) for speed in speeds or (1.0,) * section.stages)


def link_of(section: PipelineSection) -> Link:
    """What lies between the devices of a section.

    >>> link_of(PipelineSection(bandwidth_mbit=8.0)).bytes_per_second
    1000000.0
    """
    rate = section.bandwidth_mbit * BYTES_PER_SECOND_OF_MBIT
    return Link(bytes_per_second=rate or math.inf, latency_seconds=section.latency_ms / 1000)


def optimizer_states(recipe: Recipe) -> float:
    """How many numbers the recipe's optimiser keeps for each weight: counted after a step with one of 64 weights.

    >>> [optimizer_states(Recipe().with_settings(optimizer=each)) for each in (
    ...     {"name": "sgd"}, {"name": "sgd", "momentum": 0.0}, {"name": "adamw"})]
    [1.0, 0.0, 2.0]
    """
    import torch

    weight = torch.nn.Parameter(torch.ones(8, 8))
    weight.grad = torch.ones(8, 8)
    settings = recipe.optimizer
    optimizer, _ = make_optimizer(settings, [weight], total_steps=1)
    optimizer.step()
    kept = (value for state in optimizer.state.values() for value in state.values())
    return float(sum(value.numel() for value in kept if isinstance(value, torch.Tensor)) // weight.numel())


def revised_plan(
    plan: Plan,
    section: PipelineSection,
    *,
    given: Collection[str] = (),
    speeds: Sequence[float] = (),
    states: float | None = None,
) -> Plan:
    """A plan that was made before, placed anew for a section; nothing is measured again.

    `given` names the settings of the section that were asked for: devices and links are else as they were. So are
    micro-batches in any case, as the costs are of their size.
    """
    if section.microbatches != plan.microbatches:
        raise ValueError(
            f"microbatches must be those of the plan, {plan.microbatches}, as it was measured with their size "
            f"(microbatches={section.microbatches}); plan the recipe again for others"
        )
    devices = plan.placement.devices
    if len(devices) != section.stages:
        devices = (devices[0],) * section.stages
    if speeds:
        devices = tuple(replace(device, speed=speed) for device, speed in zip(devices, speeds, strict=True))
    if "memory_mb" in given:
        devices = tuple(replace(device, memory_bytes=section.memory_bytes) for device in devices)
    link, asked = link_of(section), {"bandwidth_mbit", "latency_ms"} & set(given)
    if len(asked) == 1:  # the other half is as it was
        was = plan.links if isinstance(plan.links, Link) else plan.links[0]
        name = "latency_seconds" if "bandwidth_mbit" in asked else "bytes_per_second"
        link = replace(link, **{name: getattr(was, name)})
    return plan.revised(
        schedule=section.schedule,
        chunks=section.chunks or None,
        devices=devices,
        links=link if asked else _links(plan, section),
        states=states,
    )


def _links(plan: Plan, section: PipelineSection) -> Link | tuple[Link, ...]:
    """The plan's links, or the first of them for all where there are other stages now."""
    if isinstance(plan.links, Link) or section.stages == plan.stages:
        return plan.links
    return plan.links[0]


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """torch's threads while layers are measured."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
