"""How a process comes to be a rank: joined to a launch that exists (torchrun, Slurm), or started here, on this machine.

    torchrun --nproc-per-node 4 -m paceline train ...   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT say who and where
    paceline train ...                                  this process starts the ranks, and is none itself

Either way the ranks of one life meet by a handshake (handshake.py), under a name that no life before has had. Ranks
that are started here end with whoever started them, however it ends.
"""

from __future__ import annotations

import datetime
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.stores import StoreGather
from paceline.drivers.collective.handshake import meet
from paceline.drivers.collective.place import STORE, Place
from paceline.processes import Processes

GRACE_SECONDS = 20.0  # how long ranks have to report a dead one by themselves


@contextmanager
def joined(place: Place, *, timeout_seconds: float) -> Iterator[StoreGather]:
    """Meet the other ranks, and part from them at the end; a rank that ends with an error leaves word of it."""
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = _store(os.environ, place, timeout)
        call = meet(store, place.rank, place.world, timeout_seconds=timeout_seconds)
        life = dist.PrefixStore(call.life, store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=life, rank=place.rank, world_size=place.world, timeout=timeout)
    except RankGoneError:
        raise
    except (dist.DistError, RuntimeError) as error:
        raise RankGoneError(
            f"rank {place.rank} waited {timeout_seconds:g} s for all {place.world} ranks to meet: {first_line(error)}"
        ) from error
    words = dist.PrefixStore("roll", life)  # type: ignore[attr-defined]
    roll = StoreGather(words, place.rank, place.world, timeout_seconds=timeout_seconds, launch=call.launch)
    try:
        yield roll
    except BaseException as error:
        with suppress(RuntimeError):  # the store may be lost, with whoever kept it
            roll.post_failure(f"{type(error).__name__}: {first_line(error)}")
        raise
    finally:
        with suppress(RuntimeError):  # after a death there is nobody to part from
            dist.destroy_process_group()


def _store(environment: Mapping[str, str], place: Place, timeout: datetime.timedelta) -> Any:
    """Where ranks leave word for each other. It waits for nobody: the handshake does, and names them."""
    if STORE in environment:
        return dist.FileStore(environment[STORE])  # type: ignore[attr-defined] # it stays: `LocalRanks` removes it
    try:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ValueError("MASTER_ADDR and MASTER_PORT must say where rank 0 is, as torchrun sets them") from None
    agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process keeps the store
    hosts = not agents and place.rank == 0
    store = dist.TCPStore(host, port, is_master=hosts, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    return dist.PrefixStore("paceline", store)  # type: ignore[attr-defined]


# -- on this machine ---------------------------------------------------------------------------------------------------


class LocalRanks:
    """So many ranks on this machine, forked from this process; rank 0 has the terminal, the others write to files.

    One that dies ends them all: the others have some seconds to report it themselves. Whoever forks must have no
    threads that hold anything: load torch before, but compute nothing. The ranks end with the thread that forks them.
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
        return run_rank(place)

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def wait(self) -> int:
        """Wait until all have ended. Return 0 if all went well, or rank 0's exit code if it has reported why itself.

        Else RankGoneError names a rank that ended badly, with the last line that it wrote.
        """
        try:
            codes = self.processes.wait(until_failure=True)
            if any(codes):
                codes = self.processes.wait(GRACE_SECONDS)
            bad = [rank for rank, code in enumerate(codes) if code]
            if bad and (bad[0] or any((codes[rank] or 0) < 0 for rank in bad)):
                raise RankGoneError(self._reason(bad))
            return codes[0] or 0
        finally:
            self.end()

    def _reason(self, bad: Sequence[int]) -> str:
        """Who ended first is not known for sure; but one that a signal ended did not end because of another."""
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
