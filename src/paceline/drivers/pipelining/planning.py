"""One plan for all ranks: rank 0 measures the model, the others wait and get what it found.

Ranks that measured for themselves, on one machine at the same time, would disturb each other and come to different
cuts. What travels is the profile as JSON; every rank traces the model and computes the cut itself, and both are the
same everywhere.

The plan of a recipe's run is measured when it begins, or read from a file, and kept in the run's folder:

    folder/plan.json      whoever goes on with the run goes on with its plan: another one would cut elsewhere

Every rank has a plan of its own, equal to the others'; `Pipeline` holds them against each other.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.groups import close_group, make_group, shared_group
from paceline.distributed.stores import StoreGather, meet_ranks
from paceline.drivers.ranks.launch import place_in
from paceline.drivers.ranks.rendezvous import joined
from paceline.pipeline import PipelineError
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.measuring import OnRound
from paceline.pipeline.plan import Plan
from paceline.pipeline.plan_file import MOST_BYTES, profile_document, profile_from
from paceline.pipeline.planning import Sample, make_plan
from paceline.pipeline.profile import Profile
from paceline.pipeline.settings import PipelineSettings

PLAN = "plan.json"
_STAYING = contextlib.ExitStack()  # a launch that was joined here is left when the process ends
atexit.register(_STAYING.close)


def plan_pipeline(
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
    process_group: dist.ProcessGroup | None = None,
    timeout_seconds: float = 600.0,
    on_round: OnRound = lambda done, of: None,
) -> Plan:
    """Measure a model, and cut it into stages so that the slowest is as fast as it can be.

    `sample` is one mini-batch of the model's inputs (a tensor or a tuple), which goes through in `microbatches` equal
    parts. `schedule` is gpipe, 1f1b, interleaved (with `chunks` pieces on each device) or zero-bubble. `devices` are
    one for each stage where they differ: a Device with its speed and memory, or only its speed; `memory_bytes` is what
    each of equal devices has for the model. `links` are what lies between them. `states` is how many numbers the
    optimiser keeps for each weight: 1 for SGD with momentum, 2 for Adam.

    Under torchrun, the first rank of `process_group` (None: all ranks) measures, and all of them get the same plan.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    >>> plan = plan_pipeline(model, torch.ones(16, 8), stages=2, microbatches=4, schedule="gpipe", repeats=3)
    >>> plan.stages, plan.placement.proven
    (2, True)
    >>> plan_pipeline(model, torch.ones(16, 8), stages=2, microbatches=5)
    Traceback (most recent call last):
    paceline.pipeline.PipelineError: microbatches must divide the sample batch evenly (microbatches=5, ...
    """
    if not 0 < timeout_seconds < float("inf"):
        raise ValueError(f"timeout_seconds must be above 0 and finite (timeout_seconds={timeout_seconds})")
    return make_plan(
        model,
        sample,
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        devices=devices,
        memory_bytes=memory_bytes,
        links=links,
        states=states,
        repeats=repeats,
        seconds=seconds,
        on_round=on_round,
        share=lambda measured: _shared(measured, timeout_seconds, process_group),
    )


def _shared(
    measured: Callable[[], Profile], timeout_seconds: float, process_group: dist.ProcessGroup | None
) -> Profile:
    """Return on every rank what the first rank measures; or what this process measures, if it is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        place = place_in(os.environ)
        if place is None or place.world == 1:
            return measured()
        _STAYING.enter_context(joined(place, timeout_seconds=timeout_seconds))
    ranks = dist.get_process_group_ranks(process_group)
    if len(ranks) == 1:
        return measured()
    first, some = ranks[0], len(ranks) < dist.get_world_size()
    meet_ranks(ranks, "plan a pipeline", purpose="planning", timeout_seconds=timeout_seconds)
    group = (
        shared_group([ranks], ranks, "gloo", timeout_seconds, purpose="planning", local=True)
        if some
        else make_group(ranks, "gloo", timeout_seconds)
    )
    if group is None:
        raise PipelineError(f"rank {dist.get_rank()} is not in process_group (ranks={ranks})")
    profile, refusal = None, None
    if dist.get_rank() == first:
        try:
            profile = measured()
        except BaseException as error:  # the others must not wait for one that has failed
            refusal = error
    with _waiting(timeout_seconds, first):
        profile = _send(profile, group) if dist.get_rank() == first else _receive(group, first)
        if not some:
            close_group(group, pending=False)
    if refusal is not None:
        raise refusal
    if profile is None:
        raise PipelineError(f"rank {first} could not measure the model; its own error says why")
    return profile


@contextlib.contextmanager
def _waiting(timeout_seconds: float, first: int) -> Iterator[None]:
    """Name the ranks that were waited for in an error of a collective."""
    try:
        yield
    except RuntimeError as error:
        others = "for the others" if dist.get_rank() == first else f"for rank {first} to measure the model"
        raise RankGoneError(
            f"rank {dist.get_rank()} waited {others} (for {timeout_seconds:g} s at most): {first_line(error)}"
        ) from error


def _send(profile: Profile | None, group: dist.ProcessGroup) -> Profile | None:
    text = b"" if profile is None else json.dumps(profile_document(profile), allow_nan=False).encode()
    dist.broadcast(torch.tensor([len(text)]), dist.get_rank(), group=group)
    if text:
        dist.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), dist.get_rank(), group=group)
    return profile


def _receive(group: dist.ProcessGroup, first: int) -> Profile | None:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, first, group=group)
    size = int(length.item())
    if not 0 < size <= MOST_BYTES:
        return None
    text = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(text, first, group=group)
    return profile_from(json.loads(text.numpy().tobytes()))


# -- the plan of a recipe's run ----------------------------------------------------------------------------------------


def plan_of_run(
    settings: PipelineSettings,
    model: nn.Module,
    inputs: torch.Tensor,
    gather: StoreGather,
    *,
    batch_size: int,
    states: float,
    kept: Path | None,
) -> Plan:
    """Return the plan that all ranks use: the one that was `kept`, the settings' file, or one that rank 0 measures now.

    All ranks must call this.
    """
    source = kept if kept is not None else Path(settings.plan) if settings.plan else None
    if source is not None:
        return _read(source, settings, batch_size, gather)
    return plan_pipeline(
        model,
        inputs,
        stages=settings.stages,
        microbatches=settings.microbatches,
        schedule=settings.schedule,
        chunks=settings.pieces,
        memory_bytes=settings.memory_bytes,
        links=settings.link,
        states=states,
    )


def _read(path: Path, settings: PipelineSettings, batch_size: int, gather: StoreGather) -> Plan:
    """Read a plan from a file; where one rank has none, or another one, all refuse."""
    plan, refused = None, ""
    try:
        plan = Plan.load(path)
        refused = difference(plan, settings, batch_size, str(path))
    except (ValueError, OSError) as error:
        refused = str(error)
    for rank, other in enumerate(gather.gather("read its plan", refused)):
        if other:
            raise PipelineError(f"rank {rank}: {other}" if gather.world > 1 and not refused else other)
    if plan is None:
        raise PipelineError(f"{path} cannot be read")
    return plan


def difference(plan: Plan, settings: PipelineSettings, batch_size: int, name: str) -> str:
    """Return in one line what a plan is for that the settings do not ask for; "" if there is nothing."""
    asked: Mapping[str, Any] = {
        "stages": settings.stages,
        "microbatches": settings.microbatches,
        "schedule": settings.schedule,
        "chunks": settings.pieces,
        "batch_size": batch_size,
    }
    other = {key: getattr(plan, key) for key, value in asked.items() if getattr(plan, key) != value}
    if other:
        made = ", ".join(f"{key} = {value}" for key, value in other.items())
        wanted = ", ".join(f"{key} = {asked[key]}" for key in other)
        return f"the plan in {name} is for {made}, and the recipe says {wanted}: change one of them"
    most, limit = max(plan.placement.device_bytes), settings.memory_bytes
    if limit is not None and most > limit:
        return (
            f"the plan in {name} takes {most / 1e6:,.1f} MB of a device, and memory_mb is "
            f"{limit / 1e6:,.1f}: plan again with this limit"
        )
    return ""


def keep_plan(plan: Plan, folder: Path) -> None:
    """Write the plan into a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / PLAN)
