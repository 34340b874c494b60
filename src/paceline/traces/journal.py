"""The journal of a real run: one record for each thing that happened, in the order it happened, a line of JSON each.

All times are seconds since the run began, on the server's clock. A gradient is known by its worker and the version of
the model it was computed at. Its arrival is part of the next `StepRecord`; where somebody joins or leaves before that
step, an `Arrived` record comes first, so that the order of records is the order of events:

    RunBegan  WorkerJoined  WorkerJoined  StepRecord  Arrived  WorkerLeft  StepRecord  Checkpointed  ...  RunEnded

A journal is events: it says what the strategy was told, not only what it decided. So a replay checks the decisions as
well as the numbers.

A line holds all of its record and a checksum that goes on from that of the line before (`traces.checked_lines`), and
is read back as the same record; a line that was altered, taken out, doubled or moved is found:

    {"kind":"worker_left","at_seconds":9.5,"worker":2,"reason":"no sign of life for 5 s","crc":"31f7e729"}

What a full disk did not take is no such change: the chain goes on from the last line that is there, and `RecordsLost`
stands where the records are missing, as soon as the disk takes lines again.

Arrivals are by far the most numerous, so each is an array instead of an object, with times in whole microseconds:

    [worker, version, draw, blocks_done, blocks, at, work or null, transfer, loss_mean, loss_variance, samples]

Where workers have batches by their speed two more numbers follow: the samples of the whole batch, and its place in the
worker's order, [..., batch_samples, first_sample]. Where batches are equal both follow from the recipe.

A dropped gradient is [worker, version, reason], any other [worker, version]. Times are rounded to microseconds; all
other numbers survive to the last bit. JSON has no NaN: a loss that is not finite is null. A duration below zero or not
finite is an error of a clock and no event; it is written as 0, an unknown `work_seconds` as null.

`traces.journal_files` writes and reads the file, `traces.history` makes a `Trace` of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

from paceline.decoding import (
    AS_ARRAY,
    MOST_WHOLE,
    Between,
    Blocks,
    Count,
    DecodingError,
    ReadBy,
    Words,
    WorkerNumber,
    decode,
    must_be,
    parse_object,
    reader_of,
)
from paceline.errors import PacelineError
from paceline.lookup import unknown
from paceline.traces.checked_lines import ALTERED, checked_line, checksum_of, has_checksum

FORMAT = 3
TRACE = "trace.jsonl"  # in a run's folder
MICRO = 1_000_000
LATEST_MICROSECONDS = 2**53  # up to here a float tells microseconds apart
LATEST_SECONDS = LATEST_MICROSECONDS / MICRO
MOST_WORKERS = 10_000_000  # as in a recipe
MOST_LOSS = 3.5e38  # what a float32 can be
MOST_THREADS = 1_024  # of a worker; a replay starts as many


class JournalError(PacelineError, ValueError):
    """A journal that cannot be read, or not be opened for writing; the message names the file and the line.

    >>> raise JournalError("trace.jsonl:17: not JSON")
    Traceback (most recent call last):
    paceline.traces.journal.JournalError: trace.jsonl:17: not JSON
    """


def _from_microseconds(value: Any) -> float:
    """Read a time of an arrival."""
    if type(value) is int and 0 <= value <= LATEST_MICROSECONDS:
        return value / MICRO
    raise must_be("microseconds of 0 or more", value)


Seconds: TypeAlias = Annotated[float, Between(0, LATEST_SECONDS)]
Microseconds: TypeAlias = Annotated[float, ReadBy(_from_microseconds)]
Loss: TypeAlias = Annotated[float, Between(-MOST_LOSS, MOST_LOSS)]
LossVariance: TypeAlias = Annotated[float, Between(0, MOST_LOSS)]
Threads: TypeAlias = Annotated[int, Between(1, MOST_THREADS)]
GradientKey: TypeAlias = tuple[WorkerNumber, Count]  # who computed it, and at which version
AnyWhole: TypeAlias = Annotated[int, Between(-MOST_WHOLE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegan:
    """The first record, and the only one of its kind: the run. `format` is the version of the journal's format.

    `on` says who added up the gradients of a step: a "server", in the order of the workers, or the "ranks", in that of
    their all-reduce, which is the affair of a version of `torch`. A journal leaves both out where a server did it.

    >>> RunBegan(format=FORMAT, paceline="0.1.0", strategy="lgc", seed=0, workers=3, blocks=4, recipe={},
    ...          signature="mlp/1a2b", codec="none").workers
    3
    """

    format: Annotated[int, Between(1)]
    paceline: str
    strategy: str
    seed: AnyWhole
    workers: Annotated[int, Between(1, MOST_WORKERS)]
    blocks: Blocks
    recipe: Mapping[str, Any]
    signature: str
    codec: str
    on: Annotated[Literal["server", "ranks"], Words("server or ranks")] = "server"
    torch: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker takes part from now on; it takes over a shard of the data, from batch number `first_draw` on.

    `first_sample` is where that batch begins in the order of the worker's samples, which a journal says where workers
    have batches by their speed; None: there are `batch_size` samples in each batch before it.

    >>> WorkerJoined(at_seconds=0.5, worker=2, shard=2, first_draw=0, threads=4, host="node-7").host
    'node-7'
    """

    at_seconds: Seconds
    worker: WorkerNumber
    shard: WorkerNumber
    first_draw: Count
    threads: Threads
    host: str
    first_sample: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    """A worker takes part no more, whether it said so or not.

    >>> WorkerLeft(at_seconds=9.5, worker=2, reason="no sign of life for 5 s").worker
    2
    """

    at_seconds: Seconds
    worker: WorkerNumber
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A gradient that arrived. Not a record of its own: `StepRecord` and `Arrived` hold arrivals.

    `work_seconds` is how long the worker computed, `transfer_seconds` how long model and gradient were on the wire.
    What was not measured is None. `samples` is how many losses are in `loss_mean`.

    `batch_samples` is the size of the whole batch, by which its gradient is weighed, and `first_sample` where the batch
    begins in the order of its worker's samples; both are 0 where batches are equal.

    >>> Arrival(worker=0, version=4, draw=4, blocks_done=4, blocks=4, at_seconds=2.5, work_seconds=0.4,
    ...         transfer_seconds=0.01, loss_mean=0.7, loss_variance=0.2, samples=32).samples
    32
    """

    worker: WorkerNumber
    version: Count
    draw: Count
    blocks_done: Blocks
    blocks: Blocks
    at_seconds: Microseconds
    work_seconds: Microseconds | None
    transfer_seconds: Microseconds
    loss_mean: Loss | None
    loss_variance: LossVariance | None
    samples: Count
    batch_samples: Count = 0
    first_sample: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A gradient that is in no update, and why. Not a record of its own either.

    >>> Dropped(worker=1, version=3, reason="its round had closed").reason
    'its round had closed'
    """

    worker: WorkerNumber
    version: Count
    reason: str


_PLACED = len(fields(Arrival))  # values of an arrival that says the place of its batch
_UNPLACED = _PLACED - 2
_read_arrival = reader_of(Annotated[Arrival, AS_ARRAY])


def _whole_arrival(value: Any) -> Arrival:
    if not isinstance(value, list | tuple) or len(value) not in (_UNPLACED, _PLACED):
        raise must_be(f"a list of {_UNPLACED} values or of {_PLACED}", value)
    arrival: Arrival = _read_arrival(value if len(value) == _PLACED else [*value, 0, 0])
    if 1 <= arrival.blocks_done <= arrival.blocks:
        return arrival
    raise DecodingError(f" must have between 1 and all blocks done, not {arrival.blocks_done} of {arrival.blocks}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The model went from `version` to `version + 1`, with these gradients, each as (worker, version).

    `arrivals` are all since the record before, in order, also of gradients that wait for a later step. Bytes are those
    since the step before. `fingerprint` tells the parameters after the step from any others.

    >>> StepRecord(at_seconds=2.5, version=4, opened_seconds=2.0, fresh=((0, 4), (2, 4)), late=((1, 3),), dropped=(),
    ...         arrivals=(), fingerprint=0x5EED, sent_bytes=800, received_bytes=1200).fresh[1]
    (2, 4)
    """

    at_seconds: Seconds
    version: Count
    opened_seconds: Seconds
    fresh: tuple[GradientKey, ...]
    late: tuple[GradientKey, ...]
    dropped: tuple[Annotated[Dropped, AS_ARRAY], ...]
    arrivals: tuple[Annotated[Arrival, ReadBy(_whole_arrival)], ...]
    fingerprint: AnyWhole
    sent_bytes: Count
    received_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """Gradients that arrived before a join, a departure or the end, and were in no `StepRecord` yet.

    >>> Arrived(arrivals=(), dropped=(Dropped(worker=1, version=3, reason="it came twice"),)).arrivals
    ()
    """

    arrivals: tuple[Annotated[Arrival, ReadBy(_whole_arrival)], ...]
    dropped: tuple[Annotated[Dropped, AS_ARRAY], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A peer or a gradient was refused; `worker` is None where the peer had no number yet.

    >>> Refused(at_seconds=1.0, worker=None, peer="10.0.0.9:51514", reason="wrong token").peer
    '10.0.0.9:51514'
    """

    at_seconds: Seconds
    worker: WorkerNumber | None
    peer: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The model was measured after some rounds. None is a number that was not finite, or was not measured.

    >>> Evaluated(at_seconds=5.0, round=10, loss=0.7, accuracy=0.9).round
    10
    """

    at_seconds: Seconds
    round: Count
    loss: float | None
    accuracy: float | None
    test_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """The state after `version` steps is on the disk.

    >>> Checkpointed(at_seconds=5.0, version=100).version
    100
    """

    at_seconds: Seconds
    version: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A server went on from checkpoint `version`: what was recorded after that checkpoint is void, and nobody is in.

    >>> Resumed(at_seconds=8.0, version=100, reason="restarted").version
    100
    """

    at_seconds: Seconds
    version: Count
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended:
    """The run that went on from checkpoint `version` has `rounds` in all now, which that checkpoint did not know.

    `changes` are the recipe's settings that depend on the total and were given again, by section.

    >>> Extended(at_seconds=60.0, version=300, rounds=640, changes={"optimizer": {"schedule": "poly"}}).rounds
    640
    """

    at_seconds: Seconds
    version: Count
    rounds: Count
    changes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsLost:
    """So many records between the line before and the next one are not in the file, since the disk did not take them.

    >>> RecordsLost(records=114, reason="No space left on device").records
    114
    """

    records: Annotated[int, Between(1)]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last record of a run that was not killed.

    >>> RunEnded(at_seconds=60.0, reason="all rounds done", rounds_done=200, diverged=False).diverged
    False
    """

    at_seconds: Seconds
    reason: str
    rounds_done: Count
    diverged: bool


JournalRecord: TypeAlias = (
    RunBegan
    | WorkerJoined
    | WorkerLeft
    | StepRecord
    | Arrived
    | Refused
    | Evaluated
    | Checkpointed
    | Resumed
    | Extended
    | RecordsLost
    | RunEnded
)
KINDS: dict[str, type[JournalRecord]] = {
    "run_began": RunBegan,
    "worker_joined": WorkerJoined,
    "worker_left": WorkerLeft,
    "stepped": StepRecord,
    "arrived": Arrived,
    "refused": Refused,
    "evaluated": Evaluated,
    "checkpointed": Checkpointed,
    "resumed": Resumed,
    "extended": Extended,
    "records_lost": RecordsLost,
    "run_ended": RunEnded,
}
_LEFT_OUT: dict[type[JournalRecord], dict[str, Any]] = {  # fields that a line leaves out where they are these
    RunBegan: {"on": "server", "torch": ""},
    WorkerJoined: {"first_sample": None},
    Evaluated: {"test_loss": None},
}
_text = reader_of(str)
_KIND_OF = {record: kind for kind, record in KINDS.items()}


# -- lines --------------------------------------------------------------------------------------------------------


def line_of(record: JournalRecord, before: int = 0) -> bytes:
    """Return the line of a record, with its line end; ValueError for a record that could not be read back.

    `before` is the checksum of the line before; the first line has none.

    >>> line_of(Checkpointed(at_seconds=1.23456789, version=7))
    b'{"kind":"checkpointed","at_seconds":1.234568,"version":7,"crc":"1ca0b30e"}\\n'
    >>> line_of(Checkpointed(at_seconds=1.5, version=-7))
    Traceback (most recent call last):
    paceline.decoding.DecodingError: checkpointed: version must be a whole number between 0 and 9007199254740992, not -7
    """
    kind = _KIND_OF[type(record)]
    written, left_out = {}, _LEFT_OUT.get(type(record), {})
    for name in (each.name for each in fields(record)):
        if name in left_out and getattr(record, name) == left_out[name]:
            continue
        try:
            written[name] = _written(name, getattr(record, name))
        except DecodingError as error:
            raise DecodingError(f"{kind}: {name}{error}") from None
        except (ValueError, TypeError, OverflowError, AttributeError) as error:
            raise DecodingError(
                f"{kind}: {name} cannot be written: {error} ({name}={getattr(record, name)!r:.60})"
            ) from None
    _record(kind, written)
    return checked_line({"kind": kind, **written}, before)


def lines_of(records: Iterable[JournalRecord], before: int = 0) -> bytes:
    """Return the lines of records that follow each other.

    >>> saved = Checkpointed(at_seconds=1.5, version=7)
    >>> lines_of([saved, saved]) == line_of(saved) + line_of(saved, before=checksum_of(line_of(saved)))
    True
    """
    lines = []
    for record in records:
        lines.append(line_of(record, before))
        before = checksum_of(lines[-1])
    return b"".join(lines)


def record_from(line: bytes, before: int = 0) -> JournalRecord:
    """Return the record of a line; ValueError says in one sentence what is wrong with the line.

    `before` is the checksum of the line before (`checksum_of`). The line's own is compared before anything is read.

    >>> line = line_of(Checkpointed(at_seconds=1.5, version=7), before=0x31F7E729)
    >>> record_from(line, before=0x31F7E729)
    Checkpointed(at_seconds=1.5, version=7)
    >>> record_from(line)
    Traceback (most recent call last):
    paceline.decoding.DecodingError: the line is not as it was written, or a line before it is missing, stands twice ...
    """
    if not has_checksum(line, before):
        try:
            other = _other_format(parse_object(line))
        except DecodingError:
            other = ""
        raise DecodingError(other or ALTERED)
    found = parse_object(line)
    del found["crc"]
    if "kind" not in found:
        raise DecodingError("field 'kind' is missing")
    kind = found.pop("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise unknown("kind of record", kind if isinstance(kind, str) else type(kind).__name__, KINDS)
    return _record(kind, found)


def _record(kind: str, values: dict[str, Any]) -> JournalRecord:
    if other := _other_format({"kind": kind, **values}):
        raise DecodingError(other)
    record: JournalRecord = decode(KINDS[kind], values, kind)
    return record


def _other_format(values: Mapping[str, Any]) -> str:
    """Return why a first line of another format cannot be read: its fields, and how it was sealed, are unknown."""
    if values.get("kind") != "run_began" or values.get("format", FORMAT) == FORMAT:
        return ""
    return f"format {values['format']!r:.40} is not known (known: {FORMAT}); read it with the paceline that wrote it"


def _written(name: str, value: Any) -> Any:
    """Return a field's value as JSON holds it."""
    if name in ("at_seconds", "opened_seconds"):
        return round(float(value), 6) + 0.0  # adding 0.0 turns -0.0 into 0.0
    return _finite(value) if name in ("loss", "accuracy", "test_loss") else _plain(value)


def _plain(value: Any) -> Any:
    match value:
        case Arrival():
            return _packed(value)
        case Dropped():
            return [operator.index(value.worker), operator.index(value.version), value.reason]
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case None | bool() | int() | str():
            return value
        case float():
            return _finite(value)
        case Mapping():
            return {_text(name): _plain(inner) for name, inner in value.items()}
    try:
        return operator.index(value)  # numpy's whole numbers
    except TypeError:
        raise must_be("of plain values", value) from None


def _packed(arrival: Arrival) -> list[Any]:
    whole = (arrival.worker, arrival.version, arrival.draw, arrival.blocks_done, arrival.blocks)
    at = arrival.at_seconds
    place = (arrival.batch_samples, arrival.first_sample)
    return [
        *map(operator.index, whole),
        round(round(at, 6) * MICRO) if math.isfinite(at) else None,  # as other times: no arrival after its own step
        _duration(arrival.work_seconds),
        _duration(arrival.transfer_seconds) or 0,
        _finite(arrival.loss_mean),
        _finite(arrival.loss_variance),
        operator.index(arrival.samples),
        *(map(operator.index, place) if any(place) else ()),
    ]


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def _duration(seconds: float | None) -> int | None:
    if seconds is None or not math.isfinite(seconds):
        return None
    return min(max(0, round(seconds * MICRO)), LATEST_MICROSECONDS)
