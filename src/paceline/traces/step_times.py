r"""Where each rank or worker spent its time, step by step: one small file for each, in a run's folder.

    folder/times/rank-0.jsonl      a rank of a DDP script, of rounds without a server, of averaging
    folder/times/worker-3.jsonl    a worker of a parameter server, as it told its server
    folder/times/server.jsonl      the server's own time

A step, on the clock of the one who takes it; nobody compares clocks, for only durations are compared:

    |  input  | forward |   backward    | wait |optimiser|        what is left of `seconds` is unexplained
    started             ready 0   ready 1      |         |
                        bucket 0  bucket 1 ----|         seconds

`input` is all between two steps: batches that are loaded, and whatever else a loop does there. `forward` includes the
loss. `wait` begins when the rank's own backward pass is through, and ends when it may go on: the gradients of all are
there, the next model, the average. A bucket is `ready` when its gradients are, and `done` when their mean is there. A
bucket's time on the wire is the least of all ranks' (done - ready), for the last to come waits for nobody; the rest of
a rank's is its wait; and a rank's lateness is the largest wait minus its own.

The first line says whose file it is. A line is given to the operating system at once, so that a process that is killed
loses at most the line it was writing; `paceline.watch` collects lines first, and loses at most the last fifth of a
second. It times buckets in the first 50 steps, and then in every tenth. A file stays small: from step LINES_AT_A_STRIDE
on, a line is the sum of two steps, from twice that step on of four, then of eight, ... (`stride_at`). The step's number
alone says so: lines are of the same steps on every rank, whatever else a rank has written. Where lines are sums, a
process that is killed also loses the sum it was making.

    {"kind":"step_timed","times":[step, steps, version or null, started, seconds, input, forward, backward, wait,
                                  optimiser, processor or null, [[ready, done], ...], trip or null]}

Times are whole microseconds. Where a file was begun again (a launch that was restarted), or where more is known than at
first (how gradients come together), another such line follows: the last one counts.
"""

from __future__ import annotations

import bisect
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from paceline.decoding import (
    AS_ARRAY,
    Between,
    Count,
    DecodingError,
    Line,
    Words,
    WorkerNumber,
    decode,
    parse_object,
    printable_line,
)
from paceline.errors import PacelineError
from paceline.files import open_plain
from paceline.lookup import unknown
from paceline.traces.checked_lines import ALTERED, checked_line, has_checksum, with_checksum
from paceline.traces.journal import LATEST_MICROSECONDS, MICRO, Microseconds, Seconds

FORMAT = 1
TIMES = "times"  # in a run's folder
LINES_AT_A_STRIDE = 20_000  # even, so that no sum crosses from one stride to the next
MOST_BUCKETS = 10_000
MOST_BYTES = 2**30
LONGEST_LINE_BYTES = 2**20
NOUNS = ("rank", "worker", "server")
SYNCS = ("ddp", "fsdp", "rounds", "averaging", "server", "none")
Noun: TypeAlias = Literal["rank", "worker", "server"]
Sync: TypeAlias = Literal["ddp", "fsdp", "rounds", "averaging", "server", "none"]


class TimesFileError(PacelineError, ValueError):
    """A file of step times that cannot be read; the message names the file and the line.

    >>> raise TimesFileError("runs/watch/times/rank-0.jsonl:17: not JSON")
    Traceback (most recent call last):
    paceline.traces.step_times.TimesFileError: runs/watch/times/rank-0.jsonl:17: not JSON
    """


class NothingWrittenError(TimesFileError):
    """A file of step times without one whole line, as a kill right at the begin leaves it.

    >>> raise NothingWrittenError("times/rank-0.jsonl: there is no whole line in it")
    Traceback (most recent call last):
    paceline.traces.step_times.NothingWrittenError: times/rank-0.jsonl: there is no whole line in it
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesBegan:
    """Whose times follow, and what can be seen of them. `launch` is the same on all ranks of one launch.

    `sync` is how gradients come together. `seen_from` is from where the writer's lock is seen (`processes.seen_from`).
    `notes` are sentences for people: what cannot be seen here, and why.


    >>> TimesBegan(format=FORMAT, paceline="0.2.0", noun="rank", number=2, workers=4, host="node-7", launch="1a2b",
    ...            sync="ddp").number
    2
    """

    format: Annotated[int, Between(1)]
    paceline: Line
    noun: Annotated[Noun, Words(" or ".join(NOUNS))]
    number: WorkerNumber
    workers: Annotated[int, Between(1, 10_000_000)]
    host: Line
    launch: Line
    sync: Annotated[Sync, Words(" or ".join(SYNCS))]
    device: Line = "cpu"
    seen_from: Line = ""
    notes: tuple[Line, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """A model's way from a server to a worker, and its gradient's way back (`drivers/served/times.py` draws it).

    `held_seconds` is from the model being whole at the worker to the gradient leaving it. For `behind_seconds` of it
    the worker was busy with the batch before, or its last gradient was still leaving. `down_seconds` and `up_seconds`
    are from the first to the last byte of model and gradient; `down_bytes` and `up_bytes` are those on the connection,
    0 for what lay in shared memory. `decode_seconds` is from the gradient being whole to its being decoded.

    >>> RoundTrip(held_seconds=0.4, down_seconds=0.02, up_seconds=0.05, down_bytes=250_000, up_bytes=250_000).up_bytes
    250000
    """

    held_seconds: Microseconds
    behind_seconds: Microseconds = 0.0
    down_seconds: Microseconds = 0.0
    up_seconds: Microseconds = 0.0
    decode_seconds: Microseconds = 0.0
    down_bytes: Count = 0
    up_bytes: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The times of one step, or the sums of `steps` steps from `step` on.

    `step` counts the steps of this rank or worker (a worker's `draw`); `version` is the model's, where a server or
    rounds number it, and the number of the average to which the step was brought, where a recipe averages; of several
    steps, that of the first. `started_seconds` is on the clock of the file. `processor_seconds` is what the process
    computed in it, with all its threads; None where nobody looked. `trip` is how a worker's `wait_seconds` came about,
    where there is a server.

    >>> StepTimes(step=7, started_seconds=1.0, seconds=0.5, forward_seconds=0.2, backward_seconds=0.2).other_seconds
    0.1
    """

    step: Count
    steps: Annotated[int, Between(1, 2**40)] = 1
    version: Count | None = None
    started_seconds: Microseconds
    seconds: Microseconds
    input_seconds: Microseconds = 0.0
    forward_seconds: Microseconds = 0.0
    backward_seconds: Microseconds = 0.0
    wait_seconds: Microseconds = 0.0
    optimiser_seconds: Microseconds = 0.0
    processor_seconds: Microseconds | None = None
    buckets: tuple[tuple[Microseconds, Microseconds], ...] = ()
    trip: Annotated[RoundTrip, AS_ARRAY] | None = None

    @property
    def computing_seconds(self) -> float:
        """Input, forward, backward and optimiser: what this rank did itself."""
        return self.input_seconds + self.forward_seconds + self.backward_seconds + self.optimiser_seconds

    @property
    def other_seconds(self) -> float:
        """What is in none of the phases."""
        return max(0.0, round(self.seconds - self.computing_seconds - self.wait_seconds, 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketsMade:
    """From step `step` on, the buckets hold so many bytes each, in the order in which they are sent.

    >>> BucketsMade(step=1, bytes=(26_214_400, 1_048_576)).bytes[0]
    26214400
    """

    step: Count
    bytes: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimed:
    """A message of so many bytes went from this rank to another one and was there after `seconds`.

    `latency_seconds` is what one of a few bytes takes, one way.

    >>> LinkTimed(at_seconds=0.5, to=1, bytes=500_000, seconds=0.021, latency_seconds=0.001).bits_per_second
    200000000.0
    """

    at_seconds: Seconds
    to: WorkerNumber
    bytes: Count
    seconds: Seconds
    latency_seconds: Seconds

    @property
    def bits_per_second(self) -> float:
        """The rate of the link."""
        return round(8 * self.bytes / max(self.seconds - self.latency_seconds, 1e-9), 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimes:
    """What the server itself did for one step of the model, on the run's clock, or for `steps` from `version` on.

    The round of `version` closed at `closed_seconds`; then came the step (`step_seconds`: the shares added up, the
    optimiser, the journal), and the model was handed to all who get it (`send_seconds`). Before the first byte of it
    was written, an evaluation or a checkpoint may have been begun (`beside_seconds`). `decode_seconds` is what the
    gradients that came since the step before took to decode, beside all this.

    >>> ServerTimes(version=3, closed_seconds=1.0, step_seconds=0.002, send_seconds=0.001, decode_seconds=0.001).version
    3
    """

    version: Count
    closed_seconds: Seconds
    step_seconds: Seconds
    send_seconds: Seconds
    decode_seconds: Seconds
    beside_seconds: Seconds = 0.0
    steps: Annotated[int, Between(1, 2**40)] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesEnded:
    """The last line of one who was not killed.

    >>> TimesEnded(at_seconds=60.0, reason="the script ended").reason
    'the script ended'
    """

    at_seconds: Seconds
    reason: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepLine:
    times: Annotated[StepTimes, AS_ARRAY]


_Timed = TypeVar("_Timed", StepTimes, ServerTimes)
TimesRecord: TypeAlias = TimesBegan | StepTimes | BucketsMade | LinkTimed | ServerTimes | TimesEnded
_KINDS: dict[str, Any] = {
    "times_began": TimesBegan,
    "step_timed": _StepLine,
    "buckets_made": BucketsMade,
    "link_timed": LinkTimed,
    "server_timed": ServerTimes,
    "times_ended": TimesEnded,
}
_BEGAN_LINE = b'{"kind":"times_began",'
_KIND_OF = {record: kind for kind, record in _KINDS.items()}
_SUMMED = tuple(each.name for each in fields(StepTimes) if each.name.endswith("_seconds") or each.name == "seconds")
_SUMMED_OF_SERVER = ("step_seconds", "send_seconds", "decode_seconds", "beside_seconds", "steps")


# -- lines -------------------------------------------------------------------------------------------------------------


def times_line(record: TimesRecord) -> bytes:
    """Return the line of a record, with its line end. Texts are made printable, so that they can be read back.

    >>> times_line(TimesEnded(at_seconds=1.5, reason="the script ended"))
    b'{"kind":"times_ended","at_seconds":1.5,"reason":"the script ended","crc":"c21d6c5b"}\\n'
    """
    if isinstance(record, StepTimes):
        return _step_line(record)
    values = {each.name: getattr(record, each.name) for each in fields(record)}
    return checked_line({"kind": _KIND_OF[type(record)], **{name: _written(value) for name, value in values.items()}})


def _written(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, str):
        return printable_line(value)
    return [_written(each) for each in value] if isinstance(value, tuple) else value


def _step_line(times: StepTimes) -> bytes:
    """Return the line of a step as JSON, written by hand: a run has more of these lines than of all others."""
    version, processor = times.version, times.processor_seconds
    trip = "null" if times.trip is None else f"[{','.join(map(str, _packed_trip(times.trip)))}]"
    buckets = ",".join([f"[{_microseconds(ready)},{_microseconds(done)}]" for ready, done in times.buckets])
    return with_checksum(
        f'{{"kind":"step_timed","times":[{times.step},{times.steps},{"null" if version is None else version},'
        f"{_microseconds(times.started_seconds)},{_microseconds(times.seconds)},"
        f"{_microseconds(times.input_seconds)},{_microseconds(times.forward_seconds)},"
        f"{_microseconds(times.backward_seconds)},{_microseconds(times.wait_seconds)},"
        f"{_microseconds(times.optimiser_seconds)},"
        f"{'null' if processor is None else _microseconds(processor)},[{buckets}],{trip}]".encode("ascii")
    )


def _packed_trip(trip: RoundTrip) -> list[int]:
    values = ((each.name, getattr(trip, each.name)) for each in fields(trip))
    return [_microseconds(value) if name.endswith("_seconds") else value for name, value in values]


def _microseconds(seconds: float) -> int:
    whole = round(seconds * MICRO)
    return whole if 0 <= whole <= LATEST_MICROSECONDS else min(max(0, whole), LATEST_MICROSECONDS)


def times_record(line: bytes) -> TimesRecord:
    """Return the record of a line; ValueError says in one sentence what is wrong with the line.

    >>> times_record(times_line(BucketsMade(step=1, bytes=(4, 8))))
    BucketsMade(step=1, bytes=(4, 8))
    """
    if not has_checksum(line):
        raise DecodingError(ALTERED)
    found = parse_object(line)
    del found["crc"]
    kind = found.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise unknown("kind of record", str(kind), _KINDS)
    if kind == "times_began" and found.get("format", FORMAT) != FORMAT:
        raise DecodingError(f"format {found['format']!r:.40} is not known (known: {FORMAT})")
    record: Any = decode(_KINDS[kind], found, kind)
    if isinstance(record, _StepLine):
        if len(record.times.buckets) > MOST_BUCKETS:
            raise DecodingError(f"a step has at most {MOST_BUCKETS:,} buckets, not {len(record.times.buckets):,}")
        return record.times
    timed: TimesRecord = record
    return timed


# -- files -------------------------------------------------------------------------------------------------------------


def times_path(folder: Path, noun: Noun, number: int = 0) -> Path:
    """Return the file of a rank, a worker or the server in a run's folder.

    >>> times_path(Path("runs/watch"), "rank", 3).as_posix()
    'runs/watch/times/rank-3.jsonl'
    """
    return folder / TIMES / (f"{noun}.jsonl" if noun == "server" else f"{noun}-{number}.jsonl")


def stride_at(step: int) -> int:
    """Return how many steps the line sums in which this step is.

    >>> stride_at(19_999), stride_at(20_000), stride_at(40_000), stride_at(1_000_000)
    (1, 2, 4, 64)
    """
    return 1 << (step // LINES_AT_A_STRIDE).bit_length()


class TimesWriter:
    """Writes one file of step times, by one thread at a time; a full disk is noted, and never ends a run.

    `error` is the first thing that went wrong on the disk, `lost` how many lines the disk did not take. A file that is
    there is gone on with, after its last whole line. `copy` gets every line too, also one that the disk did not take.
    Without its TimesBegan line a file cannot be read: if the disk did not take that line, it comes before the next one
    that the disk takes.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "times", "rank-0.jsonl")
    >>> writer = TimesWriter(file)
    >>> writer.write(TimesBegan(format=FORMAT, paceline="0.2.0", noun="rank", number=0, workers=1, host="node-7",
    ...                         launch="1a2b", sync="none"))
    >>> writer.write(StepTimes(step=0, started_seconds=0.0, seconds=0.5, forward_seconds=0.5))
    >>> writer.close()
    >>> read_times(file).steps[0].forward_seconds
    0.5
    """

    def __init__(self, path: Path, *, copy: Callable[[bytes], None] | None = None) -> None:
        self.path, self.error, self.lost, self._copy = path, "", 0, copy
        self._file, self._closed = -1, False
        self._opened: tuple[int, int] | None = None  # device and inode of the file
        self._began, self._needs_began = b"", False  # the last TimesBegan line, and whether the file lacks it
        self._sum: StepTimes | ServerTimes | None = None
        try:
            self._open()
        except OSError as error:
            self._note(error)

    def _open(self) -> None:
        """Open the file; one that was open before must still be there: the folder may be another run's by now."""
        how = os.O_RDWR | os.O_APPEND
        if self._opened is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            how |= os.O_CREAT
        file = os.open(self.path, how, 0o666)
        about = os.fstat(file)
        if self._opened not in (None, (about.st_dev, about.st_ino)):
            os.close(file)
            raise OSError(errno.ESTALE, "another file is there now")
        self._file, self._opened = file, (about.st_dev, about.st_ino)
        self._cut_torn_line()
        self._needs_began = self._needs_began or os.fstat(self._file).st_size == 0

    def _cut_torn_line(self) -> None:
        """Cut off what a killed process has left of its last line; a line is short, so its beginning is near."""
        size = os.fstat(self._file).st_size
        start = max(0, size - LONGEST_LINE_BYTES)
        tail = os.pread(self._file, size - start, start)
        whole = tail.rfind(b"\n") + 1
        if whole < len(tail):
            os.ftruncate(self._file, start + whole)

    def write(self, record: TimesRecord) -> None:
        """Hand a record to the operating system; steps may be summed first, where there are many."""
        if isinstance(record, StepTimes | ServerTimes):
            self._write_step(record)
            return
        if isinstance(record, TimesEnded):
            self._flush()
        self._put(times_line(record))

    def _write_step(self, times: StepTimes | ServerTimes) -> None:
        before, number = self._sum, _number(times)
        stride = stride_at(number)
        goes_on = before is not None and _number(before) + before.steps <= number
        if before is not None and not (goes_on and _number(before) // stride == number // stride):
            self._flush()
            before = None
        if isinstance(before, StepTimes) and isinstance(times, StepTimes):
            self._sum = summed([before, times])
        elif isinstance(before, ServerTimes) and isinstance(times, ServerTimes):
            self._sum = summed_of_server([before, times])
        else:
            self._flush()
            self._sum = times
        if (number + 1) % stride == 0:
            self._flush()

    def _flush(self) -> None:
        """Write the sum that is being made."""
        if self._sum is not None:
            line, self._sum = times_line(self._sum), None
            self._put(line)

    def _put(self, line: bytes) -> None:
        if self._copy is not None:
            self._copy(line)
        self.put_lines(line)

    def put_lines(self, lines: bytes) -> None:
        """Append whole lines as they are, all or none of them."""
        if self._closed:
            self.lost += lines.count(b"\n")
            return
        missing = self._began if self._needs_began and not lines.startswith(_BEGAN_LINE) else b""
        begins = _BEGAN_LINE in lines
        if begins:
            self._began = [line for line in lines.splitlines(keepends=True) if line.startswith(_BEGAN_LINE)][-1]
        try:
            if self._file < 0:
                self._open()
            self._append(missing + lines)
            self._needs_began = False
        except OSError as error:
            self._note(error)
            self.lost += lines.count(b"\n")
            self._needs_began = self._needs_began or begins

    def _append(self, lines: bytes) -> None:
        if (written := os.write(self._file, lines)) != len(lines):  # the disk is full
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _note(self, error: OSError) -> None:
        self.error = self.error or f"cannot write {self.path}: {error.strerror or error}"

    def release(self) -> None:
        """Close the file until the next line comes; a sum that is being made goes on."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def close(self) -> None:
        """Write what is left, and close the file for good; once more does no harm."""
        self._flush()
        self.release()
        self._closed = True


def _number(times: StepTimes | ServerTimes) -> int:
    return times.step if isinstance(times, StepTimes) else times.version


def summed(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the sums of several steps in a row; buckets are summed where all steps have as many, else left out.

    >>> both = summed([StepTimes(step=4, started_seconds=1.0, seconds=0.5), StepTimes(step=5, started_seconds=1.5,
    ...                                                                               seconds=0.25)])
    >>> both.step, both.steps, both.started_seconds, both.seconds
    (4, 2, 1.0, 0.75)
    """
    first = steps[0]
    sums: dict[str, Any] = {name: sum(getattr(each, name) or 0.0 for each in steps) for name in _SUMMED}
    sums["started_seconds"] = first.started_seconds
    if any(each.processor_seconds is None for each in steps):
        sums["processor_seconds"] = None
    alike = len({len(each.buckets) for each in steps}) == 1
    pairs = zip(*(each.buckets for each in steps), strict=True) if alike else ()
    buckets = tuple((sum(ready for ready, _ in pair), sum(done for _, done in pair)) for pair in pairs)
    trip = _summed_trip([each.trip for each in steps])
    return replace(first, steps=sum(each.steps for each in steps), buckets=buckets, trip=trip, **sums)


def _summed_trip(trips: Sequence[RoundTrip | None]) -> RoundTrip | None:
    """Return the sums of all trips; None where one is not known."""
    known = [trip for trip in trips if trip is not None]
    if len(known) < len(trips):
        return None
    return RoundTrip(**{each.name: sum(getattr(trip, each.name) for trip in known) for each in fields(RoundTrip)})


def summed_of_server(steps: Sequence[ServerTimes]) -> ServerTimes:
    """Return the sums of what a server did for several steps in a row.

    >>> one = ServerTimes(version=4, closed_seconds=1.0, step_seconds=0.25, send_seconds=0.5, decode_seconds=0.0)
    >>> both = summed_of_server([one, replace(one, version=5, closed_seconds=2.0)])
    >>> both.version, both.steps, both.closed_seconds, both.step_seconds
    (4, 2, 1.0, 0.5)
    """
    return replace(steps[0], **{name: sum(getattr(each, name) for each in steps) for name in _SUMMED_OF_SERVER})


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """A file of step times: all of its records by kind. Of a step that was taken twice, the last counts: a line that
    holds it in a sum is left out as a whole.

    `torn` says that the last line was cut short, as a kill leaves it. `restarts` are the steps that are first after
    another TimesBegan: there the clock may have begun again.
    """

    began: TimesBegan
    steps: tuple[StepTimes, ...] = ()
    buckets: tuple[BucketsMade, ...] = ()
    links: tuple[LinkTimed, ...] = ()
    server: tuple[ServerTimes, ...] = ()
    ended: TimesEnded | None = None
    torn: bool = False
    restarts: tuple[int, ...] = ()


def read_times(path: Path) -> WorkerTimes:
    """Read a file of step times; TimesFileError names the line that is wrong."""
    began: TimesBegan | None = None
    steps: list[StepTimes] = []
    server: list[ServerTimes] = []
    found: dict[type[Any], list[Any]] = {BucketsMade: [], LinkTimed: [], TimesEnded: []}
    restarts: list[int] = []
    number, line, restarted = 0, b"\n", False
    try:
        with open_plain(path, most_bytes=MOST_BYTES) as lines:
            while line.endswith(b"\n") and (following := lines.readline(LONGEST_LINE_BYTES + 1)):
                line, number = following, number + 1
                if len(line) > LONGEST_LINE_BYTES:
                    raise ValueError(f"a line is at most {LONGEST_LINE_BYTES:,} bytes")
                if not line.endswith(b"\n"):
                    break
                record = times_record(line)
                if isinstance(record, TimesBegan):
                    began, restarted = record, bool(steps)
                elif began is None:
                    raise ValueError("a file of step times begins with times_began")
                elif isinstance(record, StepTimes):
                    steps.append(record)
                    if restarted:
                        restarts.append(record.step)
                        restarted = False
                elif isinstance(record, ServerTimes):
                    server.append(record)
                else:
                    found[type(record)].append(record)
    except OSError as error:
        raise TimesFileError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TimesFileError(f"{path}:{number}: {error}") from None
    if began is None:
        raise NothingWrittenError(f"{path}: not a file of step times: there is no whole line in it")
    return WorkerTimes(
        began=began,
        steps=_last_of_each(steps),
        buckets=tuple(found[BucketsMade]),
        links=tuple(found[LinkTimed]),
        server=_last_of_each(server),
        ended=found[TimesEnded][-1] if found[TimesEnded] else None,
        torn=not line.endswith(b"\n"),
        restarts=tuple(restarts),
    )


def _last_of_each(lines: Sequence[_Timed]) -> tuple[_Timed, ...]:
    """Return the lines without those of whose steps a later line has one: the steps were taken again."""
    kept: list[_Timed] = []
    begins: list[int] = []  # of the steps of the kept lines, negative: from the last line back they ascend
    ends: list[int] = []
    for line in reversed(lines):
        first, end = _number(line), _number(line) + line.steps
        place = bisect.bisect_left(begins, -first)  # the kept lines before it begin later than this one
        overlaps = (place > 0 and -begins[place - 1] < end) or (place < len(begins) and ends[place] > first)
        if not overlaps:
            begins.insert(place, -first)
            ends.insert(place, end)
            kept.append(line)
    return tuple(reversed(kept))


def read_all_times(folder: Path, left_out: list[str] | None = None) -> dict[Noun, dict[int, WorkerTimes]]:
    """Read all files of step times in a run's folder, by noun and number; empty where there are none.

    A file without one whole line says nothing yet: the rank that writes it is missing here. So is the rank of a file
    that cannot be read, where `left_out` is a list: why is added to it. Without a list that is a TimesFileError.

    >>> import tempfile
    >>> read_all_times(Path(tempfile.mkdtemp()))
    {}
    """
    found: dict[Noun, dict[int, WorkerTimes]] = {}
    for path in sorted((folder / TIMES).glob("*.jsonl")):
        try:
            times = read_times(path)
        except NothingWrittenError:
            continue
        except TimesFileError as error:
            if left_out is None:
                raise
            left_out.append(f"{path.name} is left out: {error}")
            continue
        found.setdefault(times.began.noun, {})[times.began.number] = times
    return {noun: dict(sorted(each.items())) for noun, each in found.items()}
