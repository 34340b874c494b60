"""Lines of step times from ranks that do not see rank 0's folder, through the launch's store, into that folder.

    a rank's thread       every SECONDS: what was written since  ──>  store: key RANK/NUMBER, one chunk
    rank 0's thread       every SECONDS: the next chunk of each  ──>  folder/times/rank-RANK.jsonl; the key is deleted

At most CHUNKS of a rank are in the store at a time, each of at most CHUNK_BYTES; what a rank has beyond HELD_BYTES is
lost to rank 0, and in the rank's own file all the same. A rank that is killed has sent all but the last seconds.

The threads are stopped before the interpreter ends: a thread in a call of the store's would otherwise be ended inside
C++, and abort the process. No call of the store's waits: keys are asked for before they are read.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.traces.checked_lines import has_checksum
from paceline.traces.step_times import TimesWriter, times_path

SECONDS = 1.0
CHUNKS, CHUNK_BYTES, HELD_BYTES = 32, 2**17, 2**24
CLOSE_SECONDS = 5.0
END = b"end"


class RelayThread:
    """A thread that takes a turn every SECONDS until it is closed; the store's errors end it quietly."""

    def __init__(self) -> None:
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-watch-relay", daemon=True)
        self._pid = os.getpid()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and so is whoever would read
            while not self._closing.wait(SECONDS):
                self._take_turn()
            self._take_last_turns()

    def _take_turn(self) -> None:
        raise NotImplementedError

    def _take_last_turns(self) -> None:
        self._take_turn()

    def close(self) -> None:
        """Take the last turns, and end the thread."""
        if self._pid != os.getpid():  # a forked process, which has no such thread
            return
        self._closing.set()
        self._thread.join(3 * CLOSE_SECONDS)


class LineSender(RelayThread):
    """Sends this rank's lines."""

    def __init__(self, store: Any, rank: int) -> None:
        super().__init__()
        self._store, self._rank = store, rank
        self._lines: deque[bytes] = deque()
        self._held_bytes = self._sent = 0
        self.lost = 0
        self._thread.start()

    def send(self, line: bytes) -> None:
        """Let a line go with the next turn."""
        if self._held_bytes > HELD_BYTES:
            self.lost += 1
            return
        self._held_bytes += len(line)
        self._lines.append(line)

    def _take_turn(self) -> None:
        while self._lines and self._has_room():
            chunk: list[bytes] = []
            size = 0
            while self._lines and (not chunk or size + len(self._lines[0]) <= CHUNK_BYTES):
                chunk.append(self._lines.popleft())
                size += len(chunk[-1])
            self._held_bytes -= size
            self._put(b"".join(chunk))

    def _has_room(self) -> bool:
        """Whether rank 0 has taken the chunk that is CHUNKS before the next one."""
        oldest = self._sent - CHUNKS
        return oldest < 0 or not self._store.check([f"{self._rank}/{oldest}"])

    def _put(self, chunk: bytes) -> None:
        self._store.set(f"{self._rank}/{self._sent}", chunk)
        self._sent += 1

    def _take_last_turns(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        self._take_turn()
        while self._lines and time.monotonic() < deadline:
            time.sleep(0.05)
            self._take_turn()
        self._put(END)


class LineReceiver(RelayThread):
    """Writes other ranks' lines into rank 0's folder."""

    def __init__(self, store: Any, ranks: Sequence[int], folder: Path) -> None:
        super().__init__()
        self._store, self._folder = store, folder
        self._next = dict.fromkeys(ranks, 0)  # of those that have not ended
        self._writers: dict[int, TimesWriter] = {}
        self._thread.start()

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            for rank in list(self._writers):
                self._close_file(rank)

    def _take_turn(self) -> None:
        for rank in list(self._next):
            while rank in self._next and self._store.check([key := f"{rank}/{self._next[rank]}"]):
                chunk = self._store.get(key)
                self._store.delete_key(key)
                self._next[rank] += 1
                if chunk == END:
                    del self._next[rank]
                    self._close_file(rank)
                else:
                    self._write(rank, chunk)

    def _write(self, rank: int, chunk: bytes) -> None:
        lines = [line for line in chunk.splitlines(keepends=True) if line.endswith(b"\n") and has_checksum(line)]
        if rank not in self._writers:
            self._writers[rank] = TimesWriter(times_path(self._folder, "rank", rank))
        self._writers[rank].put_lines(
            b"".join(lines)
        )  # all of them are lost on a full disk, and never a part of a line

    def _close_file(self, rank: int) -> None:
        if (writer := self._writers.pop(rank, None)) is not None:
            writer.close()

    def _take_last_turns(self) -> None:
        deadline = time.monotonic() + CLOSE_SECONDS
        self._take_turn()
        while self._next and time.monotonic() < deadline:
            time.sleep(0.05)
            self._take_turn()
