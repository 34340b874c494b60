"""How long a worker computes on a batch: delay models.

A model answers for any (worker, draw) without a state: `draw` counts the batches a worker has begun. A time
is held for `persistence` draws before it is drawn again, so that a straggler can stay one for a while:

    persistence 3:   draw  0 1 2 | 3 4 5 | 6 7 8
                     time  a a a | b b b | c c c
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.files import open_plain
from paceline.randomness import exponential, pareto, seed_for

MOST_RECORDED = 5_000_000  # numbers in a file
MOST_RECORDED_BYTES = 20 * MOST_RECORDED
LONGEST_LINE_BYTES = 2**24
LONGEST_SECONDS = 1e9

Indices = NDArray[np.int64]
Seconds = NDArray[np.float64]


class Delays(Protocol):
    """What the simulator asks of a delay model."""

    def seconds(self, workers: Indices, draws: Indices) -> Seconds:
        """Compute time of each (worker, draw); the two arrays broadcast."""


@dataclass(frozen=True, kw_only=True)
class ShiftedExponential:
    """`shift + Exp(mean)`: a fixed cost and an exponential rest; the LGC paper's is 0.05 + Exp(0.02).

    >>> delays = ShiftedExponential(seed=0, persistence=10)
    >>> bool(delays.seconds(np.arange(3), np.array(0)).min() >= 0.05)
    True
    """

    shift_seconds: float = 0.05
    mean_seconds: float = 0.02
    persistence: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_not_negative("shift_seconds", self.shift_seconds)
        check_not_negative("mean_seconds", self.mean_seconds)
        check_persistence(self.persistence)
        if self.shift_seconds + self.mean_seconds <= 0:
            raise ValueError("shift_seconds and mean_seconds must not both be 0: no time would ever pass")

    def seconds(self, workers: Indices, draws: Indices) -> Seconds:
        """Compute time of each (worker, draw)."""
        drawn = exponential(seed_for(self.seed, "delay"), workers, draws // self.persistence)
        return self.shift_seconds + self.mean_seconds * drawn


@dataclass(frozen=True, kw_only=True)
class Pareto:
    """Never less than `scale`, with a tail that falls like x^-shape: rare, very long delays.

    >>> delays = Pareto(scale_seconds=0.05, shape=2.5)
    >>> bool(delays.seconds(np.arange(3), np.array(0)).min() >= 0.05)
    True
    """

    scale_seconds: float = 0.05
    shape: float = 2.5
    persistence: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale_seconds) and self.scale_seconds > 0):
            raise ValueError(f"scale_seconds must be more than 0 (scale_seconds={self.scale_seconds})")
        if not (math.isfinite(self.shape) and self.shape > 1):
            raise ValueError(f"shape must be more than 1, else the mean delay is infinite (shape={self.shape})")
        check_persistence(self.persistence)

    def seconds(self, workers: Indices, draws: Indices) -> Seconds:
        """Compute time of each (worker, draw)."""
        drawn = pareto(seed_for(self.seed, "delay"), workers, draws // self.persistence, shape=self.shape)
        return self.scale_seconds * drawn


@dataclass(frozen=True, kw_only=True)
class SlowWorkers:
    """Another model's times, with the first `slow` workers `factor` times slower for ever.

    >>> delays = SlowWorkers(base=ShiftedExponential(mean_seconds=0.0), slow=1, factor=5.0)
    >>> delays.seconds(np.arange(3), np.array(0)).tolist()
    [0.25, 0.05, 0.05]
    """

    base: Delays
    slow: int = 1
    factor: float = 5.0

    def __post_init__(self) -> None:
        if self.slow < 0:
            raise ValueError(f"slow must be 0 or more (slow={self.slow})")
        if not (math.isfinite(self.factor) and self.factor > 0):
            raise ValueError(f"factor must be more than 0 (factor={self.factor})")

    def seconds(self, workers: Indices, draws: Indices) -> Seconds:
        """Compute time of each (worker, draw)."""
        return self.base.seconds(workers, draws) * np.where(np.asarray(workers) < self.slow, self.factor, 1.0)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Measured times: a row per draw, a column per worker. Begins again at the top when the rows run out.

    >>> delays = Recorded(rows=((1.0, 1.2, 2.0), (1.1, 1.5, 2.0)))
    >>> delays.seconds(np.arange(3), np.array(1)).tolist()
    [1.1, 1.5, 2.0]
    """

    rows: tuple[tuple[float, ...], ...]
    _table: Seconds = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.rows or not self.rows[0]:
            raise ValueError("recorded delays need at least one row with one time per worker")
        for number, row in enumerate(self.rows, start=1):
            if len(row) != len(self.rows[0]):
                raise ValueError(
                    f"recorded delays need equally many times in every row "
                    f"(row 1 has {len(self.rows[0])}, row {number} has {len(row)})"
                )
            if not all(0 < time <= LONGEST_SECONDS for time in row):
                raise ValueError(
                    f"recorded delays must be between 0 and 1e9 seconds, and more than 0 (row {number}: {row!s:.80})"
                )
        object.__setattr__(self, "_table", np.array(self.rows, dtype=np.float64))

    @property
    def workers(self) -> int:
        """How many workers were recorded."""
        return len(self.rows[0])

    @property
    def mean_seconds(self) -> float:
        """The mean of all times."""
        return float(self._table.mean())

    def seconds(self, workers: Indices, draws: Indices) -> Seconds:
        """Compute time of each (worker, draw)."""
        return np.asarray(self._table[np.asarray(draws) % len(self.rows), workers])


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Each worker's own times in order, as many as there are of each; a worker begins again at its own top.

    A worker that was slow for a while stays slow for as long. Unlike `Recorded`, a time may be 0.

    >>> delays = Sequences(columns=((1.0, 1.5), (2.0,)))
    >>> delays.seconds(np.arange(2), np.array(3)).tolist()
    [1.5, 2.0]
    """

    columns: tuple[tuple[float, ...], ...]
    _times: Seconds = field(init=False, repr=False, compare=False)
    _first: Indices = field(init=False, repr=False, compare=False)
    _length: Indices = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for worker, column in enumerate(self.columns):
            if not column:
                raise ValueError(f"worker {worker} needs at least one time")
            if not all(0 <= time <= LONGEST_SECONDS for time in column):
                raise ValueError(f"times must be between 0 and 1e9 seconds (worker {worker}: {column!s:.80})")
        lengths = [len(column) for column in self.columns]
        object.__setattr__(self, "_times", np.array([time for column in self.columns for time in column]))
        object.__setattr__(self, "_first", np.cumsum([0, *lengths[:-1]], dtype=np.int64))
        object.__setattr__(self, "_length", np.array(lengths, dtype=np.int64))

    @property
    def workers(self) -> int:
        """How many workers have times."""
        return len(self.columns)

    def seconds(self, workers: Indices, draws: Indices) -> Seconds:
        """Compute time of each (worker, draw)."""
        return np.asarray(self._times[self._first[workers] + np.asarray(draws) % self._length[workers]])


def read_recorded(path: Path) -> Recorded:
    """Read delays from a CSV file: a line per draw, a column of seconds per worker, no heading.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "delays.csv")
    >>> _ = file.write_text("1.0,1.2,2.0\\n")
    >>> read_recorded(file).workers
    3
    """
    rows: list[tuple[float, ...]] = []
    values = 0
    try:
        with open_plain(path, most_bytes=MOST_RECORDED_BYTES) as file:
            for number, line in enumerate(csv.reader(_lines(file, path)), start=1):
                if line:
                    rows.append(tuple(_seconds_from(text, path, number) for text in line))
                    values += len(line)
                if values > MOST_RECORDED:
                    raise ValueError(f"{path}: recorded delays are at most {MOST_RECORDED:,} numbers")
    except OSError as error:
        raise ValueError(f"cannot read recorded delays from {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read recorded delays from {path}: not UTF-8 text") from error
    except csv.Error as error:
        raise ValueError(f"cannot read recorded delays from {path}: {error}") from error
    try:
        return Recorded(rows=tuple(rows))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _lines(file: BinaryIO, path: Path) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE_BYTES + 1):
        if len(line) > LONGEST_LINE_BYTES:
            raise ValueError(f"{path}: a line of recorded delays is at most {LONGEST_LINE_BYTES:,} bytes")
        yield line.decode("utf-8")


def _seconds_from(text: str, path: Path, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{path}:{line}: not a number of seconds: {text[:40]!r} (no heading line is needed)") from None


def check_columns(delays: Delays, workers: int) -> None:
    """Refuse recorded delays that have fewer columns than there are workers.

    >>> check_columns(Recorded(rows=((1.0, 2.0),)), workers=3)
    Traceback (most recent call last):
    ValueError: recorded delays need a column for every worker (workers=3, columns=2)
    """
    if isinstance(delays, Recorded | Sequences) and delays.workers < workers:
        raise ValueError(
            f"recorded delays need a column for every worker (workers={workers}, columns={delays.workers})"
        )


def check_not_negative(name: str, value: float) -> None:
    """Refuse a negative or infinite time.

    >>> check_not_negative("shift_seconds", -1.0)
    Traceback (most recent call last):
    ValueError: shift_seconds must be 0 or more (shift_seconds=-1.0)
    """
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be 0 or more ({name}={value})")


def check_persistence(persistence: int) -> None:
    """Refuse to hold a delay for less than one draw.

    >>> check_persistence(0)
    Traceback (most recent call last):
    ValueError: persistence must be 1 or more (persistence=0)
    """
    if persistence < 1:
        raise ValueError(f"persistence must be 1 or more (persistence={persistence})")
