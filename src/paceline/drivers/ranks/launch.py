"""How a process comes to be a rank: started by a launcher (torchrun, Slurm), or forked here, on this machine.

    torchrun --nproc-per-node 4 -m paceline train ...   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT say who and where
    paceline train ...                                  this process starts the ranks, and is none itself

Loads no torch.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paceline.distributed import RankGoneError
from paceline.processes import Processes, in_new_thread

STORE = "PACELINE_STORE"  # a file with the port where ranks of one machine meet; set by `LocalRanks`, never by users
INTERRUPTED = 130  # the exit code of a rank that SIGINT ended, as a shell gives it
GRACE_SECONDS = 20.0  # how long ranks have to report a dead one by themselves


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's rank, and the number of ranks (`world`), as torchrun's RANK and WORLD_SIZE give them.

    >>> place_in({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    Place(rank=1, world=4)
    >>> place_in({}) is None
    True
    """

    rank: int
    world: int


def place_in(environment: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher's variables give; None if no launcher started this process."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    if STORE not in environment and "MASTER_ADDR" not in environment:
        return None
    try:
        place = Place(rank=int(environment["RANK"]), world=int(environment["WORLD_SIZE"]))
    except ValueError:
        raise ValueError("RANK and WORLD_SIZE must be whole numbers, as torchrun sets them") from None
    if not 0 <= place.rank < place.world:
        raise ValueError(f"RANK must be between 0 and WORLD_SIZE - 1 (RANK={place.rank}, WORLD_SIZE={place.world})")
    return place


class LocalRanks:
    """The `world` ranks of a run on this machine, forked from this process, which is no rank itself.

    Rank 0 writes to the terminal, the others to log files. When a rank fails, the others get GRACE_SECONDS to end by
    themselves and report it; then they are ended. The ranks are killed when the thread that forked them ends.

    A rank runs in a thread of its own. The forking process may have computed, and then it has OpenMP's pool of threads,
    which no child inherits: the thread that forked would wait for the pool for ever at its first large product. The
    pool belongs to the thread that began it, so a new thread begins a new one.
    """

    def __init__(self, run_rank: Callable[[Place], int], world: int, *, logs: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
        self._logs, self.processes = logs, Processes()
        try:
            logs.mkdir(parents=True, exist_ok=True)
            for rank in range(world):
                run = partial(self._run, run_rank, Place(rank=rank, world=world))
                self.processes.fork(run, log=self._log(rank) if rank else None)
        except BaseException:
            self.end()
            raise

    def _run(self, run_rank: Callable[[Place], int], place: Place) -> int:
        os.environ[STORE] = str(Path(self._folder.name, "store"))
        try:
            return in_new_thread(lambda: run_rank(place))
        except KeyboardInterrupt:
            return INTERRUPTED

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def wait(self, *, pause: Callable[[float], object] = time.sleep) -> int:
        """Wait until all have ended. Return 0 if all went well, or rank 0's exit code if it has reported why itself.

        Else RankGoneError names a rank that ended badly, with the last line that it wrote. `pause` is called between
        two looks at the ranks, with the seconds that it may take.
        """
        try:
            codes = self.processes.wait(until_failure=True, pause=pause)
            if any(codes):
                codes = self.processes.wait(GRACE_SECONDS, pause=pause)
            bad = [rank for rank, code in enumerate(codes) if code]
            if bad and (bad[0] or any((codes[rank] or 0) < 0 for rank in bad)):
                raise RankGoneError(self._reason(bad))
            return codes[0] or 0
        finally:
            self.end()

    def _reason(self, bad: Sequence[int]) -> str:
        """Say which rank failed first: one that a signal ended, if there is one, as the others fail because of it."""
        codes = {rank: self.processes.codes[rank] or 0 for rank in bad}
        rank = next((rank for rank in bad if codes[rank] < 0), bad[0])
        if codes[rank] < 0:
            return f"rank {rank} was ended by {signal.Signals(-codes[rank]).name}"
        written = self._log(rank).read_text(encoding="utf-8", errors="replace").strip() if rank else ""
        return f"rank {rank} ended with code {codes[rank]}" + (f": {written.splitlines()[-1]}" if written else "")

    def end(self) -> None:
        """End those that have not ended."""
        self.processes.end()
        self._folder.cleanup()
