"""The journal's file: a line per record, each given to the operating system before the run goes on.

A server that is killed loses at most the line it was writing; that torn line is known by its missing line end, and is
left out by the reader and cut off by the next writer. A full disk loses records, but never ends a run and never leaves
half a line between whole ones; what was lost is counted, and said by a `RecordsLost` when the disk takes lines again.
Each line's checksum goes on from that of the line before, also across restarts, so an altered file is refused.

Where the file is gone from its path, deleted or moved with its folder, the next record writes it anew, whole: the file
that is open still has every line.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline.files import open_plain
from paceline.traces.checked_lines import ALTERED, checksum_of, has_checksum
from paceline.traces.journal import (
    Checkpointed,
    Evaluated,
    Extended,
    JournalError,
    JournalRecord,
    RecordsLost,
    Resumed,
    RunBegan,
    StepRecord,
    lines_of,
    record_from,
)

MOST_BYTES = 16 * 2**30  # of ten million rounds, the most that a recipe asks for, 1.6 kB each
LONGEST_LINE_BYTES = 8 * 2**20  # some 100,000 arrivals; reading one takes fifty times as much memory
_BYTES_AT_ONCE = 65_536


class JournalWriter:
    """Writes records to a file, one thread at a time; `append` goes on after the last whole line of an earlier run.

    `error` is the first thing that went wrong on the disk, `lost` how many records are not in the file because of it,
    `rewritten` how often the file was gone and is written anew. Without `append` a file that holds something is
    refused. `empty` says whether there is nothing in the file yet: then the first record must be `RunBegan`.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "trace.jsonl")
    >>> with JournalWriter(file) as journal:
    ...     journal.write(Checkpointed(at_seconds=1.5, version=7))
    >>> file.read_text()
    '{"kind":"checkpointed","at_seconds":1.5,"version":7,"crc":"77ed96a3"}\\n'
    >>> journal.error, journal.lost
    (None, 0)
    """

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self.error: str | None = None
        self.lost = self.rewritten = 0
        self._path = Path(path)
        self._owed: list[JournalRecord] = []
        self._unsaid, self._why = 0, ""  # records that are missing where the next line will be
        self._torn = False
        self._file = -1
        how = os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, how, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two servers on one run would ruin both
            if not append and os.fstat(self._file).st_size:
                raise FileExistsError(errno.EEXIST, "it holds a run")
            self._checksum = 0
            self._end_bytes = _end_of_last_line(self._file)
            if self._end_bytes != os.fstat(self._file).st_size:
                os.ftruncate(self._file, self._end_bytes)
            self._checksum = _checksum_before(self._file, self._end_bytes)
        except OSError as error:
            self.close()
            why = "another process writes it" if isinstance(error, BlockingIOError) else error.strerror or error
            raise JournalError(f"cannot write the journal {path}: {why}") from error
        except ValueError as error:
            self.close()
            raise JournalError(f"cannot write the journal {path} after its last line: {error}") from None

    @property
    def empty(self) -> bool:
        """Whether no whole line is in the file."""
        return self._end_bytes == 0

    def write(self, record: JournalRecord) -> None:
        """Hand a record to the operating system. A full disk is noted, and the next record tries again.

        A record that no reader would take (a negative worker) is a ValueError: that is a mistake, not bad luck.
        """
        if self._file < 0:
            raise ValueError(f"the journal {self._path} is closed")
        try:
            self._write_all([record])
        except OSError as error:
            self._note(error)
            self.lost += 1
            # Without these the rest of the file would say something else, so they go before the next record.
            if isinstance(record, RunBegan | Resumed | Extended):
                self._owed.append(record)
            else:
                self._unsaid += 1
                self._why = str(error.strerror or error)
            with suppress(OSError):
                self._mend()
        self.stay()

    def _write_all(self, records: Sequence[JournalRecord]) -> None:
        """Write what is owed, what is to be said of a hole, and these records: all of it or nothing."""
        hole = [RecordsLost(records=self._unsaid, reason=self._why)] if self._unsaid else []
        lines = lines_of([*self._owed, *hole, *records], self._checksum)
        self._mend()
        self._put(lines)
        self.lost -= len(self._owed)
        self._owed, self._unsaid, self._checksum = [], 0, checksum_of(lines)

    def stay(self) -> None:
        """Write the journal anew if its file is gone from its path; JournalError if another file is there."""
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            try:
                self._rewrite()
            except OSError as error:
                self._note(error)
        except OSError as error:
            self._note(error)
        else:
            if not os.path.samestat(found, os.fstat(self._file)):
                raise JournalError(f"{self._path} is another run's now: nothing more of this run is written there")

    def _rewrite(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for start in range(0, self._end_bytes, _BYTES_AT_ONCE):
                left = memoryview(os.pread(self._file, min(_BYTES_AT_ONCE, self._end_bytes - start), start))
                while left:
                    left = left[os.write(file, left) :]
        except OSError:
            os.close(file)
            with suppress(OSError):
                self._path.unlink()
            raise
        os.close(self._file)
        self._file = file
        self.rewritten += 1

    def _put(self, data: bytes) -> None:
        if len(data) > LONGEST_LINE_BYTES:
            raise OSError(errno.EFBIG, f"a record of {len(data):,} bytes (at most {LONGEST_LINE_BYTES:,})")
        left = memoryview(data)
        while left:
            self._torn = True
            left = left[os.write(self._file, left) :]
        self._end_bytes += len(data)
        self._torn = False

    def _mend(self) -> None:
        """Cut off what an error left of a line, so that the next one begins on a line of its own."""
        if self._torn:
            os.ftruncate(self._file, self._end_bytes)
            self._torn = False

    def _note(self, error: OSError) -> None:
        self.error = self.error or f"cannot write the journal {self._path}: {error.strerror or error}"

    def close(self) -> None:
        """Close the file, with what is to be said of a hole, if the disk takes it; once more does no harm."""
        if self._file >= 0:
            if self._unsaid:
                with suppress(OSError):
                    self._write_all([])
            file, self._file = self._file, -1
            try:
                os.close(file)
            except OSError as error:
                self._note(error)

    def remove(self) -> None:
        """Close the file and remove it: the run that it is of has not begun."""
        self.close()
        with suppress(OSError):
            self._path.unlink()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _end_of_last_line(file: int) -> int:
    """Return where the last whole line ends, looking from the end of the file backwards."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - _BYTES_AT_ONCE)
        found = os.pread(file, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _checksum_before(file: int, end: int) -> int:
    """Return the checksum that the line which ends there has, 0 before the first; ValueError if it has none."""
    return checksum_of(os.pread(file, min(end, 64), max(0, end - 64))) if end else 0


@dataclass(frozen=True, slots=True)
class Journal:
    """The whole records of a file; `torn` says that the last line was cut short and is not among them.

    >>> Journal(records=(Checkpointed(at_seconds=1.5, version=7),), torn=False).began
    Traceback (most recent call last):
    paceline.traces.journal.JournalError: a journal begins with run_began
    """

    records: tuple[JournalRecord, ...]
    torn: bool

    @property
    def began(self) -> RunBegan:
        """The first record: what was run."""
        if self.records and isinstance(self.records[0], RunBegan):
            return self.records[0]
        raise JournalError("a journal begins with run_began")

    @property
    def extended(self) -> Extended | None:
        """The last record of another total, if there is one: it is the run's total now."""
        return next((record for record in reversed(self.records) if isinstance(record, Extended)), None)


def read_journal(path: str | Path) -> Journal:
    """Read all records of a journal; JournalError names the line that is wrong.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "trace.jsonl")
    >>> with JournalWriter(file) as writer:
    ...     writer.write(RunBegan(format=3, paceline="0.1.0", strategy="full", seed=0, workers=1, blocks=1, recipe={},
    ...                           signature="", codec="none"))
    >>> _ = file.write_bytes(file.read_bytes() + b'{"kind":"step')
    >>> journal = read_journal(file)
    >>> len(journal.records), journal.torn
    (1, True)
    """
    records: list[JournalRecord] = []
    line, checksum, version = b"\n", 0, 0
    try:
        with open_plain(path, most_bytes=MOST_BYTES) as lines:
            while line.endswith(b"\n") and (following := lines.readline(LONGEST_LINE_BYTES + 1)):
                line = following
                if len(line) > LONGEST_LINE_BYTES:
                    raise ValueError(f"a line is at most {LONGEST_LINE_BYTES:,} bytes")
                if line.endswith(b"\n"):
                    first = not records
                    record = record_from(line, checksum)
                    checksum = checksum_of(line)
                    if isinstance(record, RunBegan) != first:
                        words = "a journal begins with run_began" if first else "run_began is only for the first line"
                        raise ValueError(words)
                    if isinstance(record, Resumed):
                        version = record.version
                    elif isinstance(record, StepRecord):
                        if record.version < version:
                            raise ValueError(f"step {record.version} comes after step {version - 1}")
                        version = record.version + 1
                    records.append(record)
                elif has_checksum(line[:-1], checksum):  # a line that a crash cut short has no byte after its checksum
                    raise ValueError(ALTERED)
    except OSError as error:
        raise JournalError(f"cannot read the journal {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise JournalError(f"{path}:{len(records) + 1}: {error}") from None
    if not records:
        raise JournalError(f"{path}: not a journal: there is no whole line in it")
    return Journal(records=tuple(records), torn=not line.endswith(b"\n"))


def effective(records: Sequence[JournalRecord]) -> tuple[JournalRecord, ...]:
    """Return the records that count: those that a `Resumed` makes void are left out, the `Resumed` itself stays.

    >>> stay, void = Checkpointed(at_seconds=1.0, version=5), Checkpointed(at_seconds=2.0, version=9)
    >>> again = Resumed(at_seconds=3.0, version=5, reason="restarted")
    >>> effective([stay, void, again]) == (stay, again)
    True
    """
    kept: list[JournalRecord] = []
    for record in records:
        if isinstance(record, Resumed):
            kept = valid_at(kept, record.version)
        kept.append(record)
    return tuple(kept)


def valid_at(kept: Sequence[JournalRecord], version: int) -> list[JournalRecord]:
    """Return the records that are valid after going back to a version.

    Checkpoints and evaluations are made beside the rounds, so they may be noted after steps that are void now.
    """
    valid = kept[: _valid_until(kept, version)]
    void = ((place, r) for place, r in enumerate(valid) if isinstance(r, StepRecord) and r.version >= version)
    first, step = next(void, (len(valid), None))
    if step is None:
        return list(valid)
    noted = [
        record
        for record in valid[first:]
        if (isinstance(record, Checkpointed) and record.version <= version)
        or (isinstance(record, Evaluated) and record.at_seconds < step.at_seconds)
    ]
    return [*valid[:first], *noted]


def _valid_until(kept: Sequence[JournalRecord], version: int) -> int:
    """Return where the records of a checkpoint end."""
    for place in range(len(kept) - 1, -1, -1):
        record = kept[place]
        if isinstance(record, Checkpointed) and record.version == version:
            return place + 1
    # A server killed between saving a checkpoint and noting it leaves no such record: its last step tells the place.
    end = 0
    for place, record in enumerate(kept):
        if isinstance(record, RunBegan) or (isinstance(record, StepRecord) and record.version < version):
            end = place + 1
    while end < len(kept) and isinstance(kept[end], Evaluated):
        end += 1
    return end
