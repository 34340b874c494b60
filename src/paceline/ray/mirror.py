"""A run's folder on the server's node, and its copy where the run was called.

    server's node                 caller's folder
    trace.jsonl       ──────────> trace.jsonl          whole lines, appended every few seconds
    checkpoint-50/    ──────────> .writing-.../        file by file, in pieces
                                  checkpoint-50/       renamed once the trace has come that far, too

So the copy can be resumed at any moment, as the folder of a server that was killed can: what its checkpoints say is in
its trace. A server whose node is lost is started again from the copy. Checkpoints that the server removes are removed
here as well. Where the server was lost before its first checkpoint was here, the run begins again and the copy is
emptied: the new trace has other rounds, and is not to follow the beginning of the old one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.files import WRITING, clear_leftovers, discard
from paceline.traces.journal import TRACE

PIECE_BYTES = 16 * 2**20
CHECKPOINT = re.compile(r"checkpoint-[0-9]{8,18}")
FILE = re.compile(r"[a-z]+\.[a-z]+")  # tensors.safetensors, state.json, manifest.json


class CopyError(PacelineError, OSError):
    """A run's folder that could not be copied whole to where the run was called."""


@dataclass(frozen=True, kw_only=True)
class FolderListing:
    """What a run's folder holds: the bytes of the trace's whole lines, and of each file of each checkpoint."""

    trace_bytes: int
    checkpoints: dict[str, dict[str, int]]


# -- on the server's node ----------------------------------------------------------------------------------------------


def listing_of(folder: Path) -> FolderListing:
    """Return what a run's folder holds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "trace.jsonl").write_bytes(b"whole\\ntorn")
    ...     listing_of(Path(folder))
    FolderListing(trace_bytes=6, checkpoints={})
    """
    checkpoints = {}
    for path in sorted(folder.glob("checkpoint-*")):
        with suppress(FileNotFoundError):  # it is being removed: there are newer ones
            if CHECKPOINT.fullmatch(path.name):
                checkpoints[path.name] = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
    return FolderListing(trace_bytes=_whole_lines(folder / TRACE), checkpoints=checkpoints)


def _whole_lines(path: Path) -> int:
    """Return where the last whole line of a file ends."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65_536)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def read_piece(folder: Path, name: str, start: int, length: int) -> bytes | None:
    """Return a piece of a file of a run; None where the file is gone, as that of an old checkpoint may be."""
    try:
        with (folder / name).open("rb") as file:
            file.seek(start)
            return file.read(length)
    except FileNotFoundError:
        return None


def receive_files(folder: Path, files: Mapping[str, list[Any]], get: Callable[[Any], bytes]) -> None:
    """Write the files of a run that goes on; each comes in pieces, which `get` fetches one by one."""
    for name, pieces in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for piece in pieces:
                file.write(get(piece))


# -- where the run was called ------------------------------------------------------------------------------------------


class FolderCopy:
    """The caller's copy of a run's folder, which follows the server's; one thread at a time copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._trace = -1
        if (folder / TRACE).exists():
            self._open_trace()
            clear_leftovers(folder)  # of a caller that was killed while it copied

    def _open_trace(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = os.open(self.folder / TRACE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(trace, fcntl.LOCK_EX | fcntl.LOCK_NB)  # another run of the same folder would ruin both
        except BlockingIOError:
            os.close(trace)
            raise CopyError(errno.EAGAIN, f"another process writes to {self.folder}; give another folder") from None
        self._trace = trace

    @property
    def trace_bytes(self) -> int:
        """The bytes of the trace's whole lines that are here."""
        return _whole_lines(self.folder / TRACE)

    @property
    def checkpoints(self) -> list[str]:
        """The names of the checkpoints that are here, the newest last."""
        return sorted(listing_of(self.folder).checkpoints)

    @property
    def resumable(self) -> bool:
        """Whether a server could go on from this copy."""
        return bool(self.trace_bytes and self.checkpoints)

    def empty(self) -> None:
        """Remove what was copied, for a run that begins again; nobody else can take the folder meanwhile.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "trace.jsonl").write_bytes(b"of the lost server\\n")
        ...     copy = FolderCopy(Path(folder))
        ...     copy.empty()
        ...     copy.trace_bytes
        0
        """
        for name in self.checkpoints:
            discard(self.folder / name)
        if self._trace >= 0:
            os.ftruncate(self._trace, 0)

    def pieces(self) -> Iterator[tuple[str, bytes]]:
        """Yield the files of the run, piece by piece, for a server that goes on with it."""
        held = listing_of(self.folder)
        sizes = {f"{name}/{file}": size for name, files in held.checkpoints.items() for file, size in files.items()}
        for name, size in {TRACE: held.trace_bytes, **sizes}.items():
            for start in range(0, max(size, 1), PIECE_BYTES):
                piece = read_piece(self.folder, name, start, min(PIECE_BYTES, size - start))
                if piece is None:
                    raise CopyError(errno.ENOENT, f"{self.folder / name} is gone")
                yield name, piece

    def follow(self, listing: Callable[[], FolderListing], read: Callable[[str, int, int], bytes | None]) -> None:
        """Copy what is new on the server's node; OSError says what the disk here does not take."""
        there = listing()
        here = listing_of(self.folder).checkpoints
        staged = [name for name, files in there.checkpoints.items() if here.get(name) != files]
        staged = [name for name in staged if self._fetch_checkpoint(name, there.checkpoints[name], read)]
        if staged:
            there = listing()
        self._fetch_trace(there.trace_bytes, read)
        for name in staged:
            if (self.folder / name).exists():
                discard(self.folder / name)
            self._staged(name).rename(self.folder / name)
        if there.checkpoints:
            for name in set(here) - set(there.checkpoints):
                discard(self.folder / name)

    def _staged(self, name: str) -> Path:
        return self.folder / f"{WRITING}{name}-{os.getpid()}"

    def _fetch_checkpoint(
        self, name: str, files: Mapping[str, int], read: Callable[[str, int, int], bytes | None]
    ) -> bool:
        """Fetch a checkpoint beside its place, and return whether it is whole: the server may have removed it."""
        if not CHECKPOINT.fullmatch(name) or not all(FILE.fullmatch(file) for file in files):
            raise CopyError(errno.EINVAL, f"the server's folder has a checkpoint {name!r} with {sorted(files)}")
        staged = self._staged(name)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        try:
            for file, size in files.items():
                with (staged / file).open("xb") as sink:
                    for start in range(0, size, PIECE_BYTES):
                        piece = read(f"{name}/{file}", start, min(PIECE_BYTES, size - start))
                        if piece is None or len(piece) != min(PIECE_BYTES, size - start):
                            shutil.rmtree(staged, ignore_errors=True)
                            return False
                        sink.write(piece)
                    sink.flush()
                    os.fsync(sink.fileno())
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return True

    def _fetch_trace(self, until: int, read: Callable[[str, int, int], bytes | None]) -> None:
        if not until:
            return
        if self._trace >= 0 and not (self.folder / TRACE).exists():
            self.close()  # somebody has removed the folder: all of the trace is fetched again
        if self._trace < 0:
            self._open_trace()
        have = self.trace_bytes
        if os.fstat(self._trace).st_size > have:
            os.ftruncate(self._trace, have)  # a line that a crash cut short
        while have < until:
            piece = read(TRACE, have, min(PIECE_BYTES, until - have))
            if not piece:
                raise CopyError(errno.EIO, f"{TRACE} on the server's node is shorter than it was")
            left = memoryview(piece)
            while left:
                left = left[os.write(self._trace, left) :]
            have += len(piece)

    def close(self) -> None:
        """Let others write to the folder."""
        if self._trace >= 0:
            os.close(self._trace)
            self._trace = -1
