"""How a process comes to be a rank: joined to a launch that exists (torchrun, Slurm), or started here, on this machine.

    torchrun --nproc-per-node 4 -m paceline train ...   RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT say who and where
    paceline train ...                                  this process starts the ranks, and is none itself

Either way the ranks of one life meet by a handshake (handshake.py), under a name that no life before has had. Ranks
that are started here end with whoever started them, however it ends.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from paceline.distributed import RankGoneError, first_line
from paceline.distributed.stores import StoreGather
from paceline.drivers.collective.handshake import meet
from paceline.drivers.collective.place import STORE, Place

GRACE_SECONDS = 20.0  # how long ranks have to tell of a dead one by themselves
END_SECONDS = 3.0
POLL_SECONDS = 0.05
ENDING = (signal.SIGINT, signal.SIGTERM)
PR_SET_PDEATHSIG = 1


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
        return dist.FileStore(environment[STORE])  # type: ignore[attr-defined] # it stays: `Ranks` removes it
    try:
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError):
        raise ValueError("MASTER_ADDR and MASTER_PORT must say where rank 0 is, as torchrun sets them") from None
    agents = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process keeps the store
    hosts = not agents and place.rank == 0
    store = dist.TCPStore(host, port, is_master=hosts, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    return dist.PrefixStore("paceline", store)  # type: ignore[attr-defined]


# -- on this machine ---------------------------------------------------------------------------------------------------


class Ranks:
    """So many ranks on this machine, forked from this process; rank 0 has the terminal, the others write to files.

    One that dies ends them all: the others have some seconds to tell of it themselves. Whoever forks must have no
    threads that hold anything: load torch before, but compute nothing. The ranks end with the thread that forks them.
    """

    def __init__(self, be_rank: Callable[[Place], int], world: int, *, logs: Path) -> None:
        self._meeting = tempfile.TemporaryDirectory(prefix="paceline-")
        self._logs, self._codes = logs, dict[int, int | None]()
        self._pids: list[int] = []
        try:
            logs.mkdir(parents=True, exist_ok=True)
            for rank in range(world):
                self._fork(be_rank, Place(rank=rank, world=world))
        except BaseException:
            self.end()
            raise

    def _fork(self, be_rank: Callable[[Place], int], place: Place) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # A signal must not strike where the child is not yet a rank, or is not yet in the books.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        try:
            pid = os.fork()
            if not pid:
                self._be(be_rank, place, parent, before)
            self._pids.append(pid)
            self._codes[place.rank] = None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _be(self, be_rank: Callable[[Place], int], place: Place, parent: int, signals: set[Any]) -> NoReturn:
        """Be a rank, and nothing else: whatever comes, this process must not go on as if it were the one that forks."""
        code = 1
        try:
            _end_with(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            os.environ[STORE] = str(Path(self._meeting.name, "store"))
            if place.rank:
                _write_to(self._log(place.rank))
            code = be_rank(place)
        except BaseException:
            with suppress(Exception):
                traceback.print_exc()
        finally:
            try:
                for stream in (sys.stdout, sys.stderr):
                    with suppress(Exception):  # a broken pipe, or closed already: there is nobody to tell
                        stream.flush()
            finally:
                os._exit(code)

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def wait(self) -> int:
        """Until all have ended. 0 if all went well; what rank 0 ended with if it told why itself; else RankGoneError
        names a rank that ended badly, and says what it said last.
        """
        try:
            while self._running():
                if any(self._codes.values()):
                    self._wait_for_the_others()
                    break
                time.sleep(POLL_SECONDS)
            bad = [rank for rank, code in self._codes.items() if code]
            if bad and (bad[0] or any((self._codes[rank] or 0) < 0 for rank in bad)):
                raise RankGoneError(self._told(bad))
            return self._codes[0] or 0
        finally:
            self.end()

    def _running(self) -> list[int]:
        """The ranks that have not ended."""
        for rank, pid in enumerate(self._pids):
            if self._codes[rank] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._codes[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank, code in self._codes.items() if code is None]

    def _wait_for_the_others(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and self._running():
            time.sleep(POLL_SECONDS)

    def _told(self, bad: Sequence[int]) -> str:
        """Who ended first is not known for sure; one that a signal ended did not tell of another."""
        killed = [rank for rank in bad if (self._codes[rank] or 0) < 0]
        rank = (killed or bad)[0]
        code = self._codes[rank] or 0
        if code < 0:
            return f"rank {rank} was ended by {signal.Signals(-code).name}"
        said = self._log(rank).read_text(encoding="utf-8", errors="replace").strip() if rank else ""
        return f"rank {rank} ended with code {code}" + (f": {said.splitlines()[-1]}" if said else "")

    def end(self) -> None:
        """End those that have not ended."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self._running():
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], number)
            deadline = time.monotonic() + END_SECONDS
            while self._running() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        self._meeting.cleanup()


def _write_to(path: Path) -> None:
    """Let all that this process says go to a file, and let it read nothing."""
    with path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)


def _end_with(parent: int) -> None:
    """Let the kernel end this process when the one that forked it is gone; where it cannot, nothing is done."""
    with suppress(OSError, AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before it was asked for
        os._exit(1)
