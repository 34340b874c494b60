"""The plan of a recipe's model in a pipeline: measured or revised, and the JSON of `paceline plan pipeline --json`.

    recipe ──> model, worker.batch_size samples ──> traced and measured ──> cut for [pipeline] ──> plan

Layers are measured with one torch thread, as a rank has where several share a machine; `threads` says otherwise. What
the optimiser keeps for each weight is counted from a step that it takes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.pipeline.devices import Link
from paceline.pipeline.plan import Plan
from paceline.pipeline.settings import PipelineSettings
from paceline.pipeline.text import balance
from paceline.recipes.assembly import load_data, make_model
from paceline.recipes.recipe import Recipe

if TYPE_CHECKING:
    from paceline.pipeline.placement import Piece

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
    """Return the plan of a recipe's model under its [pipeline], measured on this machine.

    `speeds` are those of the devices, one for each stage, if they differ. `states` is how many numbers the optimiser
    keeps for each weight; None counts those of the recipe's.

    >>> recipe = Recipe().with_settings(pipeline={"stages": 2})
    >>> plan = plan_recipe(recipe, repeats=3)
    >>> plan.model, plan.stages, plan.batch.samples, plan.states
    ('mlp', 2, 32, 1.0)
    """
    settings = recipe.pipeline
    check_options(settings, speeds=speeds, states=states, repeats=repeats, threads=threads)
    from paceline.pipeline.planning import make_plan, optimizer_states
    from paceline.workers.threads import torch_threads

    dataset = load_data(recipe)
    samples, found = recipe.worker.batch_size, len(dataset.train)
    if samples > found:
        given = f"the training samples of {recipe.data.name} (batch_size={samples})"
        raise ValueError(f"batch_size must be between 1 and {found:,}, {given}")
    model = make_model(recipe, dataset)
    with torch_threads(threads):
        plan = make_plan(
            model,
            dataset.train.first(samples)[0],
            stages=settings.stages,
            microbatches=settings.microbatches,
            schedule=settings.schedule,
            chunks=settings.chunks or None,
            devices=settings.devices(speeds),
            links=settings.link,
            states=optimizer_states(recipe.optimizer) if states is None else states,
            repeats=repeats,
            on_round=on_round,
        )
    return replace(plan, model=recipe.model.name)


def check_options(
    settings: PipelineSettings, *, speeds: Sequence[float], states: float | None, repeats: int, threads: int
) -> None:
    """Refuse options that are out of range, before anything is loaded for them.

    >>> check_options(PipelineSettings(stages=2), speeds=(1.0,), states=None, repeats=5, threads=1)
    Traceback (most recent call last):
    ValueError: speeds must be one for each stage (speeds=1.0, stages=2)
    >>> check_options(PipelineSettings(), speeds=(), states=None, repeats=1, threads=1)
    Traceback (most recent call last):
    ValueError: repeats must be between 3 and 1,000 (repeats=1)
    """
    if speeds and len(speeds) != settings.stages:
        given = ",".join(map(str, speeds))
        raise ValueError(f"speeds must be one for each stage (speeds={given}, stages={settings.stages})")
    settings.devices(speeds)  # a speed that cannot be is refused
    for name, value, least, most in (
        ("repeats", repeats, 3, MOST_REPEATS),
        ("threads", threads, 1, MOST_THREADS),
        ("optimizer_states", states or 0, 0, MOST_STATES),
    ):
        if not least <= value <= most:
            raise ValueError(f"{name} must be between {least} and {most:,} ({name}={value})")


def revised_plan(
    plan: Plan,
    settings: PipelineSettings,
    *,
    given: Collection[str] = (),
    speeds: Sequence[float] = (),
    states: float | None = None,
) -> Plan:
    """Return a plan that was made before, placed anew for these settings; nothing is measured again.

    `given` names the settings that were asked for: devices and links are else as they were. So are micro-batches in any
    case, as the costs are of their size.
    """
    if settings.microbatches != plan.microbatches:
        raise ValueError(
            f"microbatches must be those of the plan, {plan.microbatches}, as it was measured with their size "
            f"(microbatches={settings.microbatches}); plan the recipe again for others"
        )
    devices = plan.placement.devices
    if len(devices) != settings.stages:
        devices = (devices[0],) * settings.stages
    if speeds:
        devices = tuple(replace(device, speed=speed) for device, speed in zip(devices, speeds, strict=True))
    if "memory_mb" in given:
        devices = tuple(replace(device, memory_bytes=settings.memory_bytes) for device in devices)
    links = plan.links if isinstance(plan.links, Link) or settings.stages == plan.stages else plan.links[0]
    asked = {"bandwidth_mbit", "latency_ms"} & set(given)
    if asked:
        links = settings.link
    if len(asked) == 1:  # the other half is as it was
        was = plan.links if isinstance(plan.links, Link) else plan.links[0]
        name = "latency_seconds" if "bandwidth_mbit" in asked else "bytes_per_second"
        links = replace(settings.link, **{name: getattr(was, name)})
    return plan.revised(
        schedule=settings.schedule, chunks=settings.chunks or None, devices=devices, links=links, states=states
    )


# -- a plan as JSON ----------------------------------------------------------------------------------------------------


def plan_conditions(plan: Plan, recipe: Recipe | None = None, *, threads: int = 1, source: str = "") -> tuple[str, ...]:
    """Return what a plan was made for, in a few words each; without a recipe its costs were read from `source`."""
    optimizer = "the optimiser" if recipe is None else recipe.optimizer.name
    keeps = f"{optimizer} keeps {plan.states:g} number{'s' * (plan.states != 1)} for each weight"
    speeds = [f"{device.speed:g}" for device in plan.placement.devices]
    differ = any(device.speed != 1.0 for device in plan.placement.devices)
    measured = [f"costs as saved in {source}"]
    if recipe is not None:
        how = f"measured here with {threads} thread{'s' * (threads > 1)}"
        measured = [f"{plan.batch.samples} samples of {recipe.data.name}", how]
    return (*measured, keeps, _link_text(plan.slowest_link), *([f"speeds {','.join(speeds)}"] if differ else ()))


def _link_text(link: Link) -> str:
    parts = [f"{link.bytes_per_second * 8 / 1e6:g} Mbit/s"] if math.isfinite(link.bytes_per_second) else []
    parts += [f"{link.latency_seconds * 1e3:g} ms"] if link.latency_seconds else []
    return f"links of {' and '.join(parts)}" if parts else "transfers not counted"


def plan_document(plan: Plan, *, conditions: Sequence[str] = (), recipe: Recipe | None = None) -> dict[str, Any]:
    """Return a plan as nested plain values that JSON can hold; an infinite number is null.

    Seconds and bytes that are sent are of one micro-batch; a step is all of them.

    >>> import torch
    >>> from paceline.pipeline.planning import make_plan
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> plan = make_plan(model, torch.ones(4, 4), stages=2, microbatches=2, repeats=3)
    >>> plan_document(plan)["cuts"] == list(plan.cuts)
    True
    """
    placement, link, even = plan.placement, plan.slowest_link, plan.even
    layers = [dataclasses.asdict(layer) for layer in plan.profile.layers]
    for layer in layers:
        del layer["fixed_seconds"]
    return {
        "model": plan.model,
        "schedule": plan.schedule,
        "stages": plan.stages,
        "chunks": plan.chunks,
        "microbatches": plan.microbatches,
        "samples": plan.batch.samples,
        "layers": layers,
        "pieces": _documents(placement.pieces),
        "devices": [
            {"name": device.name, "speed": device.speed, "memory_bytes": needed, "limit_bytes": device.memory_bytes}
            for device, needed in zip(placement.devices, placement.device_bytes, strict=True)
        ],
        "schedules": _schedules(plan),
        "choices": [dataclasses.asdict(choice) for choice in plan.advice.choices],
        "recommended": plan.advice.recommended.microbatches,
        "even": _documents(even.pieces) if even is not None else [],
        "proven": placement.proven,
        "bytes_per_second": link.bytes_per_second if math.isfinite(link.bytes_per_second) else None,
        "latency_seconds": link.latency_seconds,
        "states": plan.states,
        "advice": plan.advice.sentence,
        "said": [balance(plan)],
        "notes": list(plan.notes),
        "certainty": dataclasses.asdict(plan.certainty),
        "conditions": list(conditions),
        "cuts": list(plan.cuts),
        "speedup": plan.speedup,
        "recipe": {} if recipe is None else recipe.to_document(),
    }


def _documents(pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(piece) for piece in pieces]


def _schedules(plan: Plan) -> list[dict[str, Any]]:
    found = []
    for prediction in plan.predictions:
        figures = dataclasses.asdict(prediction)
        name, why_not = figures.pop("schedule"), figures.pop("why_not")
        other = plan.alternatives[name]
        chunks, idle = (other.chunks, list(other.timeline.idle_shares)) if isinstance(other, Plan) else (1, [])
        found.append({"name": name, **figures, "chunks": chunks, "why_not": why_not, "idle_shares": idle})
    return found
