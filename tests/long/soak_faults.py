"""What is done to the cluster that is soaked: each kind of fault, how often it comes, and what must follow."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.long.soak_cluster import SILENCE_SECONDS, WORKERS, Cluster, Failed
from tests.slow_proxy import SlowLink

FEWEST_WORKERS, MOST_WORKERS = 4, 9
ALL_IN_SECONDS = 30.0
GUESTS_SECONDS = 25.0
BESIDE_SECONDS = 120.0
BODY_BYTES = 4 * 26_122  # of the recipe's model
NOTICED_SECONDS = 30.0
BESIDE, EXTENDED = "a run beside, start to end", "a finished run is extended"


def processes_beside(faults: Mapping[str, int]) -> int:
    """How many processes of runs beside the soaked one have started and ended with 0: three in each run.

    >>> processes_beside({"a run beside, start to end": 2, "a finished run is extended": 1})
    12
    """
    return 3 * faults.get(BESIDE, 0) + 6 * faults.get(EXTENDED, 0)


class Faults:
    """What can be done to a cluster; each is done, not waited for, except where the server itself is down."""

    def __init__(self, cluster: Cluster, dice: random.Random, only: str = "") -> None:
        self.cluster, self._dice = cluster, dice
        self.kinds: dict[str, tuple[float, Callable[[], None]]] = {
            "kill -9 a worker": (20, lambda: self._kill(1)),
            "kill -9 several workers": (7, lambda: self._kill(dice.randint(2, max(2, len(cluster.crew) - 1)))),
            "kill -9 all workers": (3, lambda: self._kill(len(cluster.crew))),
            "stop a worker, briefly": (11, lambda: self._stop(dice.uniform(0.2, 0.7) * SILENCE_SECONDS)),
            "stop a worker, for long": (8, lambda: self._stop(dice.uniform(1.4, 3.0) * SILENCE_SECONDS)),
            "a worker leaves": (12, self._leave),
            "a worker joins": (11, self._join),
            "a worker that lies": (6, lambda: self._guest("liar")),
            "a worker with a slow link": (2, self._slow_link),
            "garbage as messages": (6, lambda: self._guest("garbage")),
            "garbage as bytes": (5, lambda: self._guest("garbage-bytes")),
            "gradients not finite": (4, self._nan),
            "a flood of silence": (3, lambda: self._guest("flood")),
            BESIDE: (7, lambda: self._guest("start-and-end", seconds=BESIDE_SECONDS)),
            EXTENDED: (1.5, lambda: self._guest("extended", seconds=BESIDE_SECONDS)),
            "a full disk at the start": (1.5, lambda: self._guest("full-disk", seconds=BESIDE_SECONDS)),
            "kill -9 the server": (2.0, lambda: self._restart(signal.SIGKILL, -signal.SIGKILL)),
            "SIGTERM to the server": (1.5, lambda: self._restart(signal.SIGTERM, 130)),
            "bits of the journal flipped": (1.2, self._flip_journal),
            "bits of a checkpoint flipped": (0.8, self._flip_checkpoint),
            "the run's folder is deleted": (1.0, self._delete_folder),
        }
        self._restarting = list(self.kinds)[-5:]
        words = [word.strip() for word in only.split(",") if word.strip()]
        if words:
            self.kinds = {name: kind for name, kind in self.kinds.items() if any(word in name for word in words)}
        if not self.kinds:
            raise ValueError(f"no kind of fault has any of these words in its name: {only}")
        self._first = dice.sample(list(self.kinds), len(self.kinds))

    def draw(self, number: int, wanted: int) -> str:
        """The kind of a fault: each once, then at random; for half of the soak one server lives, so that leaks show."""
        names = list(self.kinds)
        if number < len(names):
            return self._first[number]
        if number < wanted // 2:
            names = [name for name in names if name not in self._restarting] or names
        return self._dice.choices(names, [self.kinds[name][0] for name in names])[0]

    def keep_manned(self) -> None:
        """Order workers if there are too few, or will be."""
        if self.cluster.to_come < FEWEST_WORKERS:
            for _ in range(WORKERS - self.cluster.to_come):
                self.cluster.order_worker(self._wish(), after_seconds=self._dice.uniform(0.0, 1.0))

    # -- workers and guests --------------------------------------------------------------------------------------

    def _wish(self) -> int | None:
        return self._dice.choice([None, self._dice.randrange(WORKERS)])

    def _victims(self, count: int) -> list[int]:
        crew = self.cluster.crew
        return self._dice.sample(crew, min(count, len(crew)))

    def _kill(self, count: int) -> None:
        for pid in self._victims(count):
            self.cluster.signal_worker(pid, signal.SIGKILL)
            if self.cluster.to_come < WORKERS:
                self.cluster.order_worker(self._wish(), after_seconds=self._dice.uniform(0.0, 1.5))

    def _stop(self, seconds: float) -> None:
        for pid in self._victims(1):
            self.cluster.signal_worker(pid, signal.SIGSTOP)
            self.cluster.later(seconds, lambda pid=pid: self.cluster.wake(pid))

    def _leave(self) -> None:
        for pid in self._victims(1):
            self.cluster.signal_worker(pid, signal.SIGTERM)

    def _join(self) -> None:
        if self.cluster.to_come >= MOST_WORKERS:
            self._leave()
        self.cluster.order_worker(self._wish())

    def _nan(self) -> None:
        # If nobody but the bad one were there, the server would rightly say that training has diverged.
        self.cluster.until(lambda: len(self.cluster.tail.members) >= 3, "three workers are in", seconds=ALL_IN_SECONDS)
        self._guest("nan")

    def _guest(self, kind: str, *, address: str = "", seconds: float = GUESTS_SECONDS) -> None:
        """A guest comes, does what it is there for, and goes."""
        cluster = self.cluster
        cluster.guest_codes.clear()
        cluster.order(kind, address=address)
        cluster.until(lambda: bool(cluster.guest_codes), f"the end of a guest ({kind})", seconds=seconds)
        if cluster.guest_codes != [0]:
            raise Failed(f"a guest ({kind}) ended with {cluster.guest_codes[0]}, and not with 0 (see workers.log)")

    def _slow_link(self) -> None:
        """A worker for whom a model takes two to four times the silence limit works, and nobody gives it up."""
        body_seconds = self._dice.uniform(2.0, 4.0) * SILENCE_SECONDS
        with SlowLink(self.cluster.address, bytes_per_second=BODY_BYTES / body_seconds) as link:
            self._guest("slow", address=link.address)
            if link.connections != 1:
                raise Failed(f"a worker with a slow link connected {link.connections} times, and not once")

    # -- the server and its folder -------------------------------------------------------------------------------

    def _restart(self, signum: int, expected: int) -> None:
        self._end_server(signum, expected)
        self.cluster.open_server(resume=True)

    def _end_server(self, signum: int, expected: int) -> None:
        cluster = self.cluster
        moment = time.monotonic() + self._dice.uniform(0.0, 1.0)  # at any point of a round, or of a checkpoint
        cluster.until(lambda: time.monotonic() >= moment, "the moment", seconds=60)
        code = cluster.close_server(signum)
        if code != expected:
            raise Failed(f"the server ended with {code} after signal {signum}, and not with {expected}")

    def _flip_journal(self) -> None:
        """A bit of the journal flips while nobody writes it: resuming is refused, and goes on with the copy."""
        self._end_server(signal.SIGKILL, -signal.SIGKILL)
        trace, copy = self.cluster.run / "trace.jsonl", self.cluster.folder / "trace-copy"
        shutil.copyfile(trace, copy)
        place = self._flip(trace)
        if self.cluster.refuses_to_resume():
            shutil.copyfile(copy, trace)
            self.cluster.open_server(resume=True)
            return
        whole = copy.read_bytes()
        untouched = whole[: whole[: whole.rfind(b"\n")].rfind(b"\n") + 1]  # a last line without its end is cut off
        if not trace.read_bytes().startswith(untouched):
            raise Failed(f"the server resumed with a journal whose byte {place} was altered")

    def _flip_checkpoint(self) -> None:
        """A bit of the newest checkpoint flips: the server goes on from the one before."""
        run = self.cluster.run
        self.cluster.until(
            lambda: len(list(run.glob("checkpoint-*"))) > 1, "there are two checkpoints", seconds=ALL_IN_SECONDS
        )
        self._end_server(signal.SIGKILL, -signal.SIGKILL)
        newest = max(run.glob("checkpoint-*"))
        self._flip(self._dice.choice(sorted(newest.iterdir())))
        self.cluster.open_server(resume=True)

    def _flip(self, file: Path) -> int:
        data = bytearray(file.read_bytes())
        place = self._dice.randrange(len(data))
        data[place] ^= 1 << self._dice.randrange(8)
        file.write_bytes(data)
        return place

    def _delete_folder(self) -> None:
        """The run's folder goes while the server writes there: it writes all of it anew, and can be killed again."""
        cluster, gone = self.cluster, self.cluster.folder / "run-gone"
        cluster.run.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)  # the server may be writing there
        cluster.until(
            lambda: cluster.tail.there and any(cluster.run.glob("checkpoint-*")),
            "the server writes its deleted folder anew",
            seconds=NOTICED_SECONDS,
        )
        shutil.rmtree(gone, ignore_errors=True)
        self._restart(signal.SIGKILL, -signal.SIGKILL)
