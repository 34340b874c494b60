"""Random faults against one long training run of real processes, which must go on whatever happens.

    python -m benchmarks soak --faults 1000        or: python benchmarks/soak.py --faults 1000

After every fault: rounds are done again within 30 s; the server holds no more memory, threads and files than after the
first faults and an allowance; nobody has ended who was not ended; no zombie is left. At the end the whole run, with all
its restarts, is replayed from its trace and must come out the same to the last bit. The first failure ends the soak:
exit code 1, the reason in one line, and the run stays beside the logs (soak.log, server.log, workers.log).

Every kind of fault comes once, and then at random by its weight; `--seed` decides. After each kind has come
once, the server is left alive until half-time, so that what it does not give back adds up. What processes do meanwhile
is not decided by a seed, so the same seed meets the run in another state.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # python benchmarks/soak.py
    sys.path[0] = str(Path(__file__).parents[1])

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import coloured, progress_bar, save, tables, titled
from benchmarks.soak_cluster import SILENCE_SECONDS, WORKERS, Cluster, Failed, Reading, read_process, zombies_of

FAULTS, QUICK_FAULTS = 1000, 4
FEWEST_WORKERS, MOST_WORKERS = 4, 9
GOES_ON_ROUNDS, GOES_ON_SECONDS = 2, 30.0
SETTLES_SECONDS = 20.0
BASELINE_FAULTS = 26
ALLOWANCE = Reading(rss_bytes=64 * 2**20, threads=16, files=40)
NOTHING = Reading(rss_bytes=0, threads=0, files=0)
GUESTS_SECONDS = 25.0


class Faults:
    """What can be done to a cluster; each is done, not waited for, except where the server itself is down."""

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        self.cluster, self._dice = cluster, dice
        self.kinds: dict[str, tuple[float, Callable[[], None]]] = {
            "kill -9 a worker": (22, lambda: self._kill(1)),
            "kill -9 several workers": (8, lambda: self._kill(dice.randint(2, max(2, len(cluster.crew) - 1)))),
            "kill -9 all workers": (3, lambda: self._kill(len(cluster.crew))),
            "stop a worker, briefly": (13, lambda: self._stop(dice.uniform(0.2, 0.7) * SILENCE_SECONDS)),
            "stop a worker, for long": (9, lambda: self._stop(dice.uniform(1.4, 3.0) * SILENCE_SECONDS)),
            "a worker leaves": (12, self._leave),
            "a worker joins": (12, self._join),
            "garbage as messages": (7, lambda: self._guest("garbage")),
            "garbage as bytes": (6, lambda: self._guest("garbage-bytes")),
            "gradients not finite": (4, self._nan),
            "a flood of silence": (3, lambda: self._guest("flood")),
            "kill -9 the server": (2.0, lambda: self._restart(signal.SIGKILL, -signal.SIGKILL)),
            "SIGTERM to the server": (1.5, lambda: self._restart(signal.SIGTERM, 130)),
        }

    def draw(self, number: int, wanted: int) -> str:
        """The kind of a fault: each once, then at random; for half of the soak one server lives, so that leaks show."""
        names = list(self.kinds)
        if number < len(names):
            return names[number * 5 % len(names)]
        if number < wanted // 2:
            names = [name for name in names if "server" not in name]
        return self._dice.choices(names, [self.kinds[name][0] for name in names])[0]

    def keep_manned(self) -> None:
        """Order workers if there are too few, or will be."""
        if self.cluster.to_come < FEWEST_WORKERS:
            for _ in range(WORKERS - self.cluster.to_come):
                self.cluster.order_worker(self._wish(), after_seconds=self._dice.uniform(0.0, 1.0))

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
        self.cluster.until(lambda: len(self.cluster.tail.members) >= 3, "three workers are in", seconds=GOES_ON_SECONDS)
        self._guest("nan")

    def _guest(self, kind: str) -> None:
        """A bad guest comes, does its worst and goes."""
        cluster = self.cluster
        cluster.guest_codes.clear()
        cluster.order(kind)
        cluster.until(
            lambda: bool(cluster.guest_codes), f"the server is rid of a guest ({kind})", seconds=GUESTS_SECONDS
        )
        if cluster.guest_codes != [0]:
            raise Failed(f"a bad guest ({kind}) ended with {cluster.guest_codes[0]}, and not turned away")

    def _restart(self, signum: int, expected: int) -> None:
        cluster = self.cluster
        moment = time.monotonic() + self._dice.uniform(0.0, 1.0)  # at any point of a round, or of a checkpoint
        cluster.until(lambda: time.monotonic() >= moment, "the moment", seconds=60)
        code = cluster.close_server(signum)
        if code != expected:
            raise Failed(f"the server ended with {code} after signal {signum}, and not with {expected}")
        cluster.open_server(resume=True)


@dataclass(kw_only=True)
class Soak:
    """What has been seen so far."""

    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    baseline: Reading | None = None
    largest: Reading = NOTHING
    steps: int = 0
    restarts: int = 0
    refused: int = 0
    replay: str = "not replayed"
    failure: str = ""
    seconds: float = 0.0

    def bounded(self, reading: Reading, *, first: bool) -> bool:
        """Take note of what the server holds; whether it is little enough."""
        if first:
            self.largest = self.baseline = _larger(self.largest, reading)
            return True
        assert self.baseline is not None
        return all(getattr(reading, name) <= limit for name, limit in self.limits().items())

    def limits(self) -> dict[str, int]:
        """The most that the server may hold."""
        base = self.baseline or NOTHING
        return {
            each.name: getattr(base, each.name) + getattr(ALLOWANCE, each.name) for each in dataclasses.fields(Reading)
        }


def _larger(one: Reading, other: Reading) -> Reading:
    names = [each.name for each in dataclasses.fields(Reading)]
    return Reading(**{name: max(getattr(one, name), getattr(other, name)) for name in names})


def run(options: Options) -> None:
    """`python -m benchmarks soak`; exit code 1 if anything failed."""
    wanted = options.faults or (QUICK_FAULTS if options.quick else FAULTS)
    Path(options.out).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.out))
    soak, began = Soak(), time.monotonic()
    with (folder / "soak.log").open("w", encoding="utf-8", buffering=1) as log:

        def note(text: str) -> None:
            log.write(f"{time.monotonic() - began:9.3f}  {text}\n")

        dice = random.Random(options.seed)
        cluster = Cluster(folder.absolute(), dice, note)
        try:
            _hurt(cluster, Faults(cluster, dice), soak, wanted, options, note)
            _stop_and_replay(cluster, soak)
        except (Failed, OSError) as failure:
            soak.failure = f"after {sum(soak.faults.values())} faults: {failure}"
            note(f"FAILED {soak.failure}")
        finally:
            soak.steps, soak.restarts, soak.refused = cluster.tail.steps, cluster.tail.resumed, cluster.tail.refused
            cluster.end()
    soak.seconds = time.monotonic() - began
    tables().print(_table(soak, wanted, quick=options.quick))
    save(options, "soak", {"seed": options.seed, "wanted": wanted, **dataclasses.asdict(soak)})
    if soak.failure:
        print(f"soak failed {soak.failure}; logs, trace and checkpoints: {folder}", file=sys.stderr)
        raise SystemExit(1)
    shutil.rmtree(folder / "run")
    print(f"logs: {folder}", file=sys.stderr)


def _hurt(
    cluster: Cluster, faults: Faults, soak: Soak, wanted: int, options: Options, note: Callable[[str], None]
) -> None:
    cluster.open_server()
    cluster.until_nursery()
    for number in range(WORKERS):
        cluster.order_worker(number)
    cluster.until(lambda: cluster.tail.checkpoints > 0, "the first checkpoint", seconds=120)
    first = min(BASELINE_FAULTS, max(1, wanted // 2))
    with progress_bar() as progress:
        bar = progress.add_task("soak", total=wanted)
        for number in range(wanted):
            kind, began = faults.draw(number, wanted), time.monotonic()
            progress.update(bar, description=f"soak: {kind:23} {cluster.tail.steps:6} rounds")
            note(f"fault {number}: {kind}; crew {cluster.crew}, in {cluster.tail.members}")
            soak.faults[kind] = soak.faults.get(kind, 0) + 1
            faults.kinds[kind][1]()
            faults.keep_manned()
            cluster.until_steps(GOES_ON_ROUNDS, seconds=GOES_ON_SECONDS)
            _check(cluster, soak, note, first=number < first)
            enough = began + options.seconds_per_fault
            cluster.until(lambda enough=enough: time.monotonic() >= enough, "a pause", seconds=3600)
            progress.advance(bar)


def _check(cluster: Cluster, soak: Soak, note: Callable[[str], None], *, first: bool) -> None:
    """Nothing is left of the fault, at once or soon."""
    seen = read_process(cluster.server_pid)

    def settled() -> bool:
        nonlocal seen
        seen = read_process(cluster.server_pid)
        return soak.bounded(seen, first=first) and not zombies_of(cluster.parents)

    try:
        cluster.until(settled, "settles", seconds=SETTLES_SECONDS)
    except Failed as failure:
        left = f"zombies {zombies_of(cluster.parents)}, limits {soak.limits()}" if "settles" in str(failure) else ""
        raise Failed(f"{failure}: the server holds {dataclasses.asdict(seen)}; {left}") from None
    soak.largest = _larger(soak.largest, seen)
    note(f"rounds {cluster.tail.steps}, version {cluster.tail.version}, {dataclasses.asdict(seen)}")


def _stop_and_replay(cluster: Cluster, soak: Soak) -> None:
    from paceline.runs.replaying import replay

    code = cluster.close_server(signal.SIGTERM)
    if code != 130:
        raise Failed(f"the server ended with {code} when it was stopped at the end, and not with 130")
    with progress_bar() as progress:
        bar = progress.add_task("soak: replay", total=None)
        verdict = replay(cluster.run, on_step=lambda step, steps: progress.update(bar, completed=step, total=steps))
    soak.replay = verdict.difference or f"identical, {verdict.steps} rounds"
    if verdict.difference:
        raise Failed(f"the replay differs: {verdict.difference}")


def _table(soak: Soak, wanted: int, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("Faults against one run", quick=quick),
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption=f"bar: after each fault {GOES_ON_ROUNDS} rounds within {GOES_ON_SECONDS:g} s, and no more than after "
        "the first faults and the allowance.",
    )
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("bar", justify="right")
    for kind, count in sorted(soak.faults.items(), key=lambda each: -each[1]):
        table.add_row(kind, str(count), "")
    limits = soak.limits()
    for name, value, bar in (
        ("faults", f"{sum(soak.faults.values())}", f"{wanted}"),
        ("rounds", f"{soak.steps}", ""),
        ("restarts of the server", f"{soak.restarts}", ""),
        ("refused by the server", f"{soak.refused}", ""),
        ("largest memory", f"{soak.largest.rss_bytes / 2**20:.0f} MB", f"<= {limits['rss_bytes'] / 2**20:.0f} MB"),
        ("most threads", f"{soak.largest.threads}", f"<= {limits['threads']}"),
        ("most open files", f"{soak.largest.files}", f"<= {limits['files']}"),
        ("replay", soak.replay, "identical"),
        ("seconds", f"{soak.seconds:.0f}", ""),
        ("verdict", coloured("MISS" if soak.failure else "PASS"), ""),
    ):
        table.add_row(name, value, bar, style="" if name != "verdict" else "bold")
    return table


def main() -> None:
    """`python benchmarks/soak.py`."""
    import tyro

    run(tyro.cli(Options, prog="python benchmarks/soak.py", config=(tyro.conf.FlagCreatePairsOff,)))


if __name__ == "__main__":
    main()
