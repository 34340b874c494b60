"""One plan for all ranks: rank 0 measures the model, the others wait and get what it found.

Ranks that measured for themselves, on one machine at the same time, would disturb each other and come to different
cuts. What travels is the profile as JSON; every rank traces the model and computes the cut itself, and both are the
same everywhere.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.distributed import RankGoneError, first_line
from paceline.drivers.ranks.launch import place_in
from paceline.drivers.ranks.rendezvous import joined
from paceline.pipeline import PipelineError
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.measuring import OnRound
from paceline.pipeline.plan import Plan
from paceline.pipeline.plan_file import MOST_BYTES, profile_document, profile_from
from paceline.pipeline.planning import Sample, make_plan
from paceline.pipeline.profile import Profile

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
    timeout_seconds: float = 600.0,
    on_round: OnRound = lambda done, of: None,
) -> Plan:
    """Measure a model, and cut it into stages so that the slowest is as fast as it can be.

    `sample` is one mini-batch of the model's inputs (a tensor or a tuple), which goes through in `microbatches` equal
    parts. `schedule` is gpipe, 1f1b, interleaved (with `chunks` pieces on each device) or zero-bubble. `devices` are
    one for each stage where they differ: a Device with its speed and memory, or only its speed; `memory_bytes` is what
    each of equal devices has for the model. `links` are what lies between them. `states` is how many numbers the
    optimiser keeps for each weight: 1 for SGD with momentum, 2 for Adam.

    Under torchrun, rank 0 measures and all ranks get the same plan.

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
        share=lambda measured: _shared(measured, timeout_seconds),
    )


def _shared(measured: Callable[[], Profile], timeout_seconds: float) -> Profile:
    """What rank 0 measures, on every rank; what this process measures, if it is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        place = place_in(os.environ)
        if place is None or place.world == 1:
            return measured()
        _STAYING.enter_context(joined(place, timeout_seconds=timeout_seconds))
    if dist.get_world_size() == 1:
        return measured()
    with _waiting(timeout_seconds):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    profile, refusal = None, None
    if dist.get_rank() == 0:
        try:
            profile = measured()
        except BaseException as error:  # the others must not wait for one that has failed
            refusal = error
    with _waiting(timeout_seconds):
        profile = _received(group) if dist.get_rank() else _sent(profile, group)
        dist.destroy_process_group(group)
    if refusal is not None:
        raise refusal
    if profile is None:
        raise PipelineError("rank 0 could not measure the model; its own error says why")
    return profile


@contextlib.contextmanager
def _waiting(timeout_seconds: float) -> Iterator[None]:
    """What goes wrong here is another rank's absence."""
    try:
        yield
    except RuntimeError as error:
        waited = "for the others" if dist.get_rank() == 0 else "for rank 0 to measure the model"
        raise RankGoneError(
            f"rank {dist.get_rank()} waited {waited} (for {timeout_seconds:g} s at most): {first_line(error)}"
        ) from error


def _sent(profile: Profile | None, group: dist.ProcessGroup) -> Profile | None:
    words = b"" if profile is None else json.dumps(profile_document(profile), allow_nan=False).encode()
    dist.broadcast(torch.tensor([len(words)]), 0, group=group)
    if words:
        dist.broadcast(torch.frombuffer(bytearray(words), dtype=torch.uint8), 0, group=group)
    return profile


def _received(group: dist.ProcessGroup) -> Profile | None:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, 0, group=group)
    size = int(length.item())
    if not 0 < size <= MOST_BYTES:
        return None
    words = torch.empty(size, dtype=torch.uint8)
    dist.broadcast(words, 0, group=group)
    return profile_from(json.loads(words.numpy().tobytes()))
