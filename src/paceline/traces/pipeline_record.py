"""A planned pipeline as plain values: what the report of `paceline plan` shows, and what `--json` prints.

    layers     what each costs, in the order of the model; a piece is a run of them
    pieces     where the model is cut, and what each piece costs on its device
    schedules  each with the best cut for it: the step, its idle shares, and the step's spans in time
    choices    what other numbers of micro-batches would come to

Seconds and bytes that are sent are of one micro-batch; a step is all of them. Reports read this and not the plan, so
that they need neither torch nor the code that plans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"


class SpanRecord(NamedTuple):
    """One thing that a device computes, in seconds from the begin of the step; kind is F, B, I or W.

    >>> SpanRecord(device=0, piece=0, kind="F", microbatch=1, begin=0.5, end=0.75).end
    0.75
    """

    device: int
    piece: int
    kind: str
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """A layer, as measured with one micro-batch on a device of speed 1.

    >>> LayerRecord(name="fc", forward_seconds=1.0, input_seconds=1.0, weight_seconds=0.5).seconds
    2.5
    """

    name: str
    kind: str = ""
    forward_seconds: float = 0.0
    input_seconds: float = 0.0
    weight_seconds: float = 0.0
    activation_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.input_seconds + self.weight_seconds


@dataclass(frozen=True, kw_only=True)
class PieceRecord:
    """Layers `first` to `last - 1` on a device; `seconds` is all that one micro-batch takes there, with its transfers.

    >>> PieceRecord(index=0, device=0, first=0, last=3, input_seconds=1.0, weight_seconds=0.5).backward_seconds
    1.5
    """

    index: int
    device: int
    first: int
    last: int
    forward_seconds: float = 0.0
    input_seconds: float = 0.0
    weight_seconds: float = 0.0
    send_seconds: float = 0.0
    return_seconds: float = 0.0
    seconds: float = 0.0
    sent_bytes: int = 0
    returned_bytes: int = 0
    memory_bytes: int = 0

    @property
    def backward_seconds(self) -> float:
        """Both parts of backward."""
        return self.input_seconds + self.weight_seconds


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """A device, what its pieces need of its memory, and its limit if it has one.

    >>> DeviceRecord(memory_bytes=100, limit_bytes=200).speed
    1.0
    """

    name: str = ""
    speed: float = 1.0
    memory_bytes: int = 0
    limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScheduleRecord:
    """What a step comes to under one schedule, with the best cut for it; or `why_not`.

    >>> ScheduleRecord(name="1f1b", why_not="too few micro-batches").step_seconds
    0.0
    """

    name: str
    step_seconds: float = 0.0
    idle: float = 0.0
    slots: float = 0.0
    lecture: float = 0.0
    most_bytes: int = 0
    chunks: int = 1
    why_not: str = ""
    idle_shares: tuple[float, ...] = ()
    spans: tuple[SpanRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ChoiceRecord:
    """One number of micro-batches, and what the step would be.

    >>> ChoiceRecord(microbatches=8, samples=16, step_seconds=1.1, idle=0.27).name
    '8 of 16'
    """

    microbatches: int
    samples: int
    step_seconds: float
    idle: float

    @property
    def name(self) -> str:
        """How many of how many samples."""
        return f"{self.microbatches} of {self.samples}"


@dataclass(frozen=True, kw_only=True)
class PipelineRecord:
    """A plan. `even` are the pieces with equal numbers of layers, empty where the model cannot be cut so.

    `said` are sentences on how good the cut is, `notes` what could not be taken apart or proven, `conditions` what was
    measured and how. `source` is the recipe's document, if there was one.

    >>> empty_record().slowest.seconds, empty_record().chosen.name
    (3.0, '1f1b')
    """

    model: str
    schedule: str
    stages: int
    chunks: int
    microbatches: int
    samples: int
    layers: tuple[LayerRecord, ...]
    pieces: tuple[PieceRecord, ...]
    devices: tuple[DeviceRecord, ...]
    schedules: tuple[ScheduleRecord, ...]
    choices: tuple[ChoiceRecord, ...] = ()
    recommended: int = 0
    even: tuple[PieceRecord, ...] = ()
    proven: bool = False
    bytes_per_second: float = math.inf
    latency_seconds: float = 0.0
    states: float = 1.0
    advice: str = ""
    said: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The layers before which the model is cut."""
        return tuple(piece.first for piece in self.pieces[1:])

    @property
    def microbatch(self) -> int:
        """Samples of a micro-batch."""
        return self.samples // self.microbatches

    @property
    def chosen(self) -> ScheduleRecord:
        """The schedule of the plan."""
        return next(each for each in self.schedules if each.name == self.schedule)

    @property
    def slowest(self) -> PieceRecord:
        """The piece that takes longest; the first of them."""
        return max(self.pieces, key=lambda piece: piece.seconds)

    @property
    def one_device_seconds(self) -> float:
        """What a step would take on one device of speed 1 that holds the whole model, micro-batch by micro-batch."""
        return self.microbatches * math.fsum(layer.seconds for layer in self.layers)

    @property
    def speedup(self) -> float:
        """How many times shorter the step is than on one device."""
        step = self.chosen.step_seconds
        return self.one_device_seconds / step if step > 0 else 1.0

    def document(self) -> dict[str, Any]:
        """All of it as nested plain values that JSON can hold, but for the spans; an infinite number is null.

        >>> empty_record().document()["cuts"]
        []
        """
        plain: dict[str, Any] = {
            each.name: _plain(getattr(self, each.name)) for each in dataclasses.fields(self) if each.name != "source"
        }
        return {**plain, "cuts": list(self.cuts), "speedup": self.speedup, "recipe": dict(self.source)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = (each.name for each in dataclasses.fields(value) if each.name != "spans")
        return {name: _plain(getattr(value, name)) for name in kept}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def empty_record() -> PipelineRecord:
    """The smallest plan there is: one layer on one device, one micro-batch of one sample.

    >>> empty_record().speedup
    1.0
    """
    costs: dict[str, Any] = {"forward_seconds": 1.0, "input_seconds": 1.0, "weight_seconds": 1.0}
    spans = (SpanRecord(0, 0, FORWARD, 0, 0.0, 1.0), SpanRecord(0, 0, BACKWARD, 0, 1.0, 3.0))
    return PipelineRecord(
        model="fc",
        schedule="1f1b",
        stages=1,
        chunks=1,
        microbatches=1,
        samples=1,
        layers=(LayerRecord(name="fc", **costs),),
        pieces=(PieceRecord(index=0, device=0, first=0, last=1, seconds=3.0, **costs),),
        devices=(DeviceRecord(),),
        schedules=(ScheduleRecord(name="1f1b", step_seconds=3.0, idle_shares=(0.0,), spans=spans),),
        choices=(ChoiceRecord(microbatches=1, samples=1, step_seconds=3.0, idle=0.0),),
        recommended=1,
    )
