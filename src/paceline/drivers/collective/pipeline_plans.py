"""The plan of a recipe's run: measured when it begins, or read from a file; kept in the run's folder.

    folder/plan.json      whoever goes on with the run goes on with its plan: another one would cut elsewhere

Every rank has a plan of its own, equal to the others'; `Pipeline` holds them against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.distributed.stores import StoreGather
from paceline.drivers.collective.planning import plan_pipeline
from paceline.pipeline import PipelineError
from paceline.pipeline.plan import Plan
from paceline.pipeline.settings import PipelineSettings

PLAN = "plan.json"


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
