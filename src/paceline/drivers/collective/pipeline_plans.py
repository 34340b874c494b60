"""The plan of a recipe's run: measured when it begins, or read from a file; kept in the run's folder.

    folder/plan.json      whoever goes on with the run goes on with its plan: another one would cut elsewhere

Every rank has a plan of its own, equal to the others'; `Pipeline` holds them against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.distributed.stores import StoreGather
from paceline.drivers.collective.planning import plan_pipeline
from paceline.pipeline.devices import Link
from paceline.pipeline.errors import PipelineError
from paceline.pipeline.plan import Plan
from paceline.pipeline.schedules import find

PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a plan must be for; `file` is where one was saved, empty if it is to be measured.

    >>> Wanted(stages=2, microbatches=4, batch_size=32).pieces
    1
    """

    stages: int
    microbatches: int
    batch_size: int
    schedule: str = "1f1b"
    chunks: int = 0
    memory_bytes: int | None = None
    links: Link = field(default_factory=Link)
    states: float = 1.0
    file: str = ""

    @property
    def pieces(self) -> int:
        """Pieces of each device."""
        return self.chunks or find(self.schedule).chunks


def plan_of_run(
    wanted: Wanted, model: nn.Module, inputs: torch.Tensor, roll: StoreGather, *, kept: Path | None
) -> Plan:
    """The plan that all ranks use: the one that was `kept`, the wanted file's, or one that rank 0 measures now.

    All ranks must come here.
    """
    source = kept if kept is not None else Path(wanted.file) if wanted.file else None
    if source is not None:
        return _read(source, wanted, roll)
    return plan_pipeline(
        model,
        inputs,
        stages=wanted.stages,
        microbatches=wanted.microbatches,
        schedule=wanted.schedule,
        chunks=wanted.pieces,
        memory_bytes=wanted.memory_bytes,
        links=wanted.links,
        states=wanted.states,
    )


def _read(path: Path, wanted: Wanted, roll: StoreGather) -> Plan:
    """A plan from a file; where one rank has none, or another one, all refuse."""
    plan, refused = None, ""
    try:
        plan = Plan.load(path)
        refused = difference(plan, wanted, str(path))
    except (ValueError, OSError) as error:
        refused = str(error)
    for rank, said in enumerate(roll.gather("read its plan", refused)):
        if said:
            raise PipelineError(f"rank {rank}: {said}" if roll.world > 1 and not refused else said)
    if plan is None:
        raise PipelineError(f"{path} cannot be read")
    return plan


def difference(plan: Plan, wanted: Wanted, name: str) -> str:
    """What a plan is for that is not what is wanted, in one line; "" if there is nothing."""
    asked: Mapping[str, Any] = {
        "stages": wanted.stages,
        "microbatches": wanted.microbatches,
        "schedule": wanted.schedule,
        "chunks": wanted.pieces,
        "batch_size": wanted.batch_size,
    }
    other = {key: getattr(plan, key) for key, value in asked.items() if getattr(plan, key) != value}
    if other:
        made = ", ".join(f"{key} = {value}" for key, value in other.items())
        said = ", ".join(f"{key} = {asked[key]}" for key in other)
        return f"the plan in {name} is for {made}, and the recipe says {said}: change one of them"
    most = max(plan.placement.device_bytes)
    if wanted.memory_bytes is not None and most > wanted.memory_bytes:
        return (
            f"the plan in {name} takes {most / 1e6:,.1f} MB of a device, and memory_mb is "
            f"{wanted.memory_bytes / 1e6:,.1f}: plan again with this limit"
        )
    return ""


def keep_plan(plan: Plan, folder: Path) -> None:
    """Write the plan into a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / PLAN)
