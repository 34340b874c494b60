"""A plan as the plain values that reports show."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.traces.pipeline_record import (
    ChoiceRecord,
    DeviceRecord,
    LayerRecord,
    PieceRecord,
    PipelineRecord,
    ScheduleRecord,
    SpanRecord,
)

if TYPE_CHECKING:
    from paceline.pipeline.placement import Piece
    from paceline.pipeline.plan import Plan, Prediction


def record_of_plan(
    plan: Plan, *, conditions: Sequence[str] = (), source: Mapping[str, Any] | None = None
) -> PipelineRecord:
    """The record of a plan; `conditions` say how it was measured, `source` is the recipe's document.

    >>> import torch
    >>> from paceline.pipeline.planning import make_plan
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    >>> plan = make_plan(model, torch.ones(4, 4), stages=2, microbatches=2, repeats=3)
    >>> record_of_plan(plan).cuts == plan.cuts
    True
    """
    from paceline.pipeline.devices import Link
    from paceline.pipeline.text import balance

    links = (plan.links,) if isinstance(plan.links, Link) else plan.links
    even, advice = plan.even, plan.advice
    return PipelineRecord(
        model=plan.model,
        schedule=plan.schedule,
        stages=plan.stages,
        chunks=plan.chunks,
        microbatches=plan.microbatches,
        samples=plan.batch.samples,
        layers=tuple(
            LayerRecord(**{each.name: getattr(layer, each.name) for each in dataclasses.fields(LayerRecord)})
            for layer in plan.profile.layers
        ),
        pieces=_pieces(plan.placement.pieces),
        devices=tuple(
            DeviceRecord(name=device.name, speed=device.speed, memory_bytes=needed, limit_bytes=device.memory_bytes)
            for device, needed in zip(plan.placement.devices, plan.placement.device_bytes, strict=True)
        ),
        schedules=tuple(_schedule(plan, prediction) for prediction in plan.predictions),
        choices=tuple(ChoiceRecord(**dataclasses.asdict(choice)) for choice in advice.choices),
        recommended=advice.recommended.microbatches,
        even=_pieces(even.pieces) if even is not None else (),
        proven=plan.placement.proven,
        bytes_per_second=min((link.bytes_per_second for link in links), default=float("inf")),
        latency_seconds=max((link.latency_seconds for link in links), default=0.0),
        states=plan.states,
        advice=advice.sentence,
        said=(balance(plan),),
        notes=(*plan.placement.notes, *plan.profile.notes),
        conditions=tuple(conditions),
        source=dict(source or {}),
    )


def _pieces(pieces: Sequence[Piece]) -> tuple[PieceRecord, ...]:
    return tuple(PieceRecord(**dataclasses.asdict(piece)) for piece in pieces)


def _schedule(plan: Plan, prediction: Prediction) -> ScheduleRecord:
    figures = {each.name: getattr(prediction, each.name) for each in dataclasses.fields(prediction)}
    name = figures.pop("schedule")
    if prediction.why_not:
        return ScheduleRecord(name=name, **figures)
    its = plan if name == plan.schedule else plan.revised(schedule=name)
    return ScheduleRecord(
        name=name,
        chunks=its.chunks,
        idle_shares=its.timeline.idle_shares,
        spans=tuple(SpanRecord(*span) for span in its.timeline.spans),
        **figures,
    )


def link_words(plan: Plan) -> str:
    """What lies between the devices of a plan, in words; of several links, the slowest."""
    from paceline.pipeline.devices import Link

    links = (plan.links,) if isinstance(plan.links, Link) else plan.links
    rate = min((link.bytes_per_second for link in links), default=math.inf)
    latency = max((link.latency_seconds for link in links), default=0.0)
    if math.isinf(rate) and not latency:
        return "transfers not counted"
    told = [f"{rate * 8 / 1e6:g} Mbit/s"] if math.isfinite(rate) else []
    return f"links of {' and '.join([*told, *([f'{latency * 1e3:g} ms'] if latency else [])])}"
