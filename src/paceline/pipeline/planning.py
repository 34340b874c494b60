"""From a model and a sample batch to a plan: trace, measure, place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.optim import OptimizerSettings, make_optimizer
from paceline.pipeline import PipelineError
from paceline.pipeline.devices import Device, Link, whole_number
from paceline.pipeline.graph import ModelGraph
from paceline.pipeline.measuring import OnRound, measure_two_sizes
from paceline.pipeline.placement import Placement
from paceline.pipeline.plan import Batch, Plan
from paceline.pipeline.profile import Profile
from paceline.pipeline.schedules import find, why_not
from paceline.pipeline.settings import MOST_STAGES

Sample = torch.Tensor | Sequence[torch.Tensor]
SharedProfile = Callable[[Callable[[], Profile]], Profile]


def make_plan(
    model: nn.Module,
    sample: Sample,
    *,
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    chunks: int | None = None,
    devices: Sequence[Device | float] | None = None,
    memory_bytes: int | None = None,
    links: Link | Sequence[Link] = Link(),  # noqa: B008 - frozen
    states: float = 1.0,
    repeats: int = 5,
    seconds: float = 30.0,
    on_round: OnRound = lambda done, of: None,
    share: SharedProfile = lambda measured: measured(),
) -> Plan:
    """Return the plan of a model, measured here; `plan_pipeline` is this and lets ranks share one measurement.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    >>> plan = make_plan(model, torch.ones(16, 8), stages=2, microbatches=4, repeats=3)
    >>> len(plan.cuts), plan.batch.microbatch
    (1, 4)
    """
    inputs = sample_inputs(sample)
    chunks = find(schedule).chunks if chunks is None else whole_number("chunks", chunks)
    placed_on = _devices(stages, devices, memory_bytes)
    microbatches = whole_number("microbatches", microbatches)
    refused = why_not(schedule, len(placed_on), microbatches, chunks)
    if refused:
        raise PipelineError(refused)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module ({type(model).__name__})")
    whole_number("repeats", repeats, least=3)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"seconds must be at least 0 and finite (seconds={seconds})")
    samples = len(inputs[0])
    if samples % microbatches:
        possible = [number for number in range(1, samples + 1) if samples % number == 0]
        raise PipelineError(
            f"microbatches must divide the sample batch evenly (microbatches={microbatches}, samples={samples}); "
            f"take one of {', '.join(map(str, possible[:20]))}"
        )
    micro = tuple(each[: samples // microbatches] for each in inputs)
    graph = ModelGraph(model, micro)
    profile = share(
        lambda: measure_two_sizes(model, micro, graph=graph, repeats=repeats, seconds=seconds, on_round=on_round)
    )
    plan = Plan(
        model=type(model).__name__,
        profile=profile,
        placement=Placement(cuts=(), pieces=(), devices=placed_on),
        batch=Batch(
            samples=samples,
            shapes=tuple(tuple(each.shape) for each in micro),
            dtypes=tuple(str(each.dtype).removeprefix("torch.") for each in micro),
        ),
        microbatches=microbatches,
        schedule=schedule,
        links=links if isinstance(links, Link) else tuple(links),
        states=float(states),
        fingerprint=graph.fingerprint,
    )
    return plan.placed(placed_on, chunks=chunks)


def sample_inputs(sample: Any) -> tuple[torch.Tensor, ...]:
    """Return a sample batch as the tuple of a model's inputs.

    >>> [tuple(each.shape) for each in sample_inputs(torch.ones(4, 2))]
    [(4, 2)]
    >>> sample_inputs([1, 2])
    Traceback (most recent call last):
    TypeError: sample must be a tensor, or a tuple of tensors: the model's inputs for one mini-batch (found int)
    """
    inputs = tuple(sample) if isinstance(sample, tuple | list) else (sample,)
    for each in inputs:
        if not isinstance(each, torch.Tensor):
            raise TypeError(
                f"sample must be a tensor, or a tuple of tensors: the model's inputs for one mini-batch "
                f"(found {type(each).__name__})"
            )
    sizes = {len(each) if each.dim() else 0 for each in inputs}
    if len(sizes) != 1 or 0 in sizes:
        shapes = [tuple(each.shape) for each in inputs]
        raise PipelineError(f"the sample's tensors must have the same number of samples, at least 1 (shapes={shapes})")
    return inputs


def _devices(stages: int, devices: Sequence[Device | float] | None, memory_bytes: int | None) -> tuple[Device, ...]:
    stages = whole_number("stages", stages, most=MOST_STAGES)
    if devices is None:
        return (Device(memory_bytes=memory_bytes),) * stages
    if memory_bytes is not None:
        raise ValueError("give memory_bytes for all devices alike, or devices with their own, not both")
    if len(devices) != stages:
        raise ValueError(f"devices must be one for each stage (stages={stages}, devices={len(devices)})")
    return tuple(each if isinstance(each, Device) else Device(speed=each) for each in devices)


def optimizer_states(settings: OptimizerSettings) -> float:
    """Return how many numbers an optimiser keeps for each weight: counted after a step with one of 64 weights.

    >>> [optimizer_states(OptimizerSettings(**each)) for each in (
    ...     {"name": "sgd", "momentum": 0.9}, {"name": "sgd", "momentum": 0.0}, {"name": "adamw"})]
    [1.0, 0.0, 2.0]
    """
    weight = nn.Parameter(torch.ones(8, 8))
    weight.grad = torch.ones(8, 8)
    optimizer, _ = make_optimizer(settings, [weight], total_steps=1)
    optimizer.step()
    kept = (value for state in optimizer.state.values() for value in state.values())
    return float(sum(value.numel() for value in kept if isinstance(value, torch.Tensor)) // weight.numel())
