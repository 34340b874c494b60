"""The new whole lines of a file that another process appends to, found by looking at its size now and then.

    looked at before           appended           torn: no line end yet
    |----------------------|-----|-------|--------|----
                           ^ offset                         the torn line waits until it is whole

The file may not be there yet, and may be gone for a while. It is read from its beginning again, and `begun_anew` says
so, when another file has its name, when it is shorter than what was read, or when the bytes before the offset have
changed. Nothing stays open between two looks, and no lock is taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.files import open_plain

BYTES_AT_ONCE = 2**20
_MARK_BYTES = 64  # before the offset, compared to tell a file that was rewritten in place


@dataclass(frozen=True, slots=True, kw_only=True)
class TailLines:
    """What one look at a file has found.

    `begun_anew` says that the lines are the file's first ones, though others had been read before. `more` says that
    the look ended at its bound and not at the file's end, so there is more to read at once. `left_bytes` is what is
    still unread, a torn line as well; `size_bytes` is all of the file, and `exists` says whether there is one.
    """

    lines: tuple[bytes, ...] = ()
    begun_anew: bool = False
    exists: bool = False
    more: bool = False
    left_bytes: int = 0
    size_bytes: int = 0


class FileTail:
    """Follows one file. A line longer than `longest_line_bytes`, or a file above `most_bytes`, is a ValueError.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "trace.jsonl")
    >>> tail = FileTail(path, most_bytes=1_000, longest_line_bytes=100)
    >>> tail.look().exists
    False
    >>> _ = path.write_bytes(b"one" + bytes([10]) + b"tw")
    >>> tail.look().lines, tail.look().lines
    ((b'one\\n',), ())
    """

    def __init__(self, path: Path, *, most_bytes: int, longest_line_bytes: int) -> None:
        self.path = path
        self._most_bytes, self._longest_line_bytes = most_bytes, longest_line_bytes
        self._offset, self._mark = 0, b""
        self._identity: tuple[int, int] | None = None
        self._seen: tuple[int, ...] = ()  # the file when all of it was read: there is no need to open it again

    def look(self, most_bytes: int = BYTES_AT_ONCE) -> TailLines:
        """Return the whole lines since the last look, of at most about `most_bytes`; OSError if it cannot be read."""
        try:
            if self._seen == (seen := _seen(os.stat(self.path))):
                return TailLines(exists=True, size_bytes=seen[2])
            file = open_plain(self.path, most_bytes=self._most_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return TailLines()
        with file:
            found = os.fstat(file.fileno())
            anew = self._identity is not None and self._is_another(file.fileno(), found)
            if anew:
                self._offset, self._mark = 0, b""
            self._identity = (found.st_dev, found.st_ino)
            lines, looked_until = self._whole_lines(file.fileno(), most_bytes)
            self._seen = _seen(found) if self._offset == found.st_size else ()
        more, left = bool(lines) and looked_until < found.st_size, max(0, found.st_size - self._offset)
        return TailLines(
            lines=lines, begun_anew=anew, exists=True, more=more, left_bytes=left, size_bytes=found.st_size
        )

    def _is_another(self, file: int, found: os.stat_result) -> bool:
        return (
            (found.st_dev, found.st_ino) != self._identity
            or found.st_size < self._offset
            or os.pread(file, len(self._mark), self._offset - len(self._mark)) != self._mark
        )

    def _whole_lines(self, file: int, most_bytes: int) -> tuple[tuple[bytes, ...], int]:
        """Return whole lines from the offset on, and how far into the file they were looked for."""
        data = os.pread(file, most_bytes, self._offset)
        if data and b"\n" not in data:
            data = os.pread(file, self._longest_line_bytes + 1, self._offset)
            data = data[: data.find(b"\n") + 1] or data  # the one line that is longer than `most_bytes`
        whole = data[: data.rfind(b"\n") + 1]
        lines = tuple(line + b"\n" for line in whole.split(b"\n")[:-1])
        if max(map(len, lines), default=len(data)) > self._longest_line_bytes:
            raise ValueError(f"a line is at most {self._longest_line_bytes:,} bytes")
        looked_until = self._offset + len(data)
        if whole:
            self._offset += len(whole)
            self._mark = whole[-_MARK_BYTES:]
        return lines, looked_until


def _seen(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
