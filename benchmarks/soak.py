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
from benchmarks.soak_cluster import WORKERS, Cluster, Failed, Reading, read_process, zombies_of
from benchmarks.soak_faults import Faults, processes_beside

FAULTS, QUICK_FAULTS = 1000, 4
QUICK_KINDS = "kill -9 a worker, a worker that lies, a run beside, a worker leaves"
GOES_ON_ROUNDS, GOES_ON_SECONDS = 2, 30.0
SETTLES_SECONDS = 20.0
BASELINE_FAULTS = 26
ALLOWANCE = Reading(rss_bytes=64 * 2**20, threads=16, files=40)
NOTHING = Reading(rss_bytes=0, threads=0, files=0)


@dataclass(kw_only=True)
class Soak:
    """What has been seen so far."""

    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    longest_seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # by kind: from the fault to two rounds
    ends: int = 0  # of workers that were asked to leave, all with 0
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
            _hurt(
                cluster,
                Faults(cluster, dice, options.only or (QUICK_KINDS if options.quick else "")),
                soak,
                wanted,
                options,
                note,
            )
            _stop_and_replay(cluster, soak)
        except (Failed, OSError) as failure:
            soak.failure = f"after {sum(soak.faults.values())} faults: {failure}"
            note(f"FAILED {soak.failure}")
        finally:
            soak.steps, soak.restarts, soak.refused = cluster.tail.steps, cluster.tail.resumed, cluster.tail.refused
            soak.ends = cluster.ended_well
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
            soak.longest_seconds[kind] = max(soak.longest_seconds.get(kind, 0.0), time.monotonic() - began)
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
    soak.replay = verdict.difference or verdict.missing or f"identical, {verdict.steps} rounds"
    if not verdict.identical:
        raise Failed(f"the replay differs or is not of the whole run: {soak.replay}")


def _table(soak: Soak, wanted: int, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("Faults against one run", quick=quick),
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption=f"longest s: from a fault, its own time included, until {GOES_ON_ROUNDS} more rounds are done.\n"
        f"bar: those within {GOES_ON_SECONDS:g} s once it is over, and no more held than after the first faults and an "
        "allowance.",
    )
    table.add_column("what")
    for name in ("measured", "longest s", "bar"):
        table.add_column(name, justify="right")
    for kind, count in sorted(soak.faults.items(), key=lambda each: -each[1]):
        longest = soak.longest_seconds.get(kind)
        table.add_row(kind, str(count), "-" if longest is None else f"{longest:.1f}", "")
    limits = soak.limits()
    for name, value, bar in (
        ("faults", f"{sum(soak.faults.values())}", f"{wanted}"),
        ("rounds", f"{soak.steps}", ""),
        ("workers that left with 0", f"{soak.ends}", "all that were asked"),
        ("processes of runs beside", f"{processes_beside(soak.faults)}", "all end with 0"),
        ("restarts of the server", f"{soak.restarts}", ""),
        ("refused by the server", f"{soak.refused}", ""),
        ("largest memory", f"{soak.largest.rss_bytes / 2**20:.0f} MB", f"<= {limits['rss_bytes'] / 2**20:.0f} MB"),
        ("most threads", f"{soak.largest.threads}", f"<= {limits['threads']}"),
        ("most open files", f"{soak.largest.files}", f"<= {limits['files']}"),
        ("replay", soak.replay, "identical"),
        ("seconds", f"{soak.seconds:.0f}", ""),
        ("verdict", coloured("MISS" if soak.failure else "PASS"), ""),
    ):
        table.add_row(name, value, "", bar, style="" if name != "verdict" else "bold")
    return table


def main() -> None:
    """`python benchmarks/soak.py`."""
    import tyro

    run(tyro.cli(Options, prog="python benchmarks/soak.py", config=(tyro.conf.FlagCreatePairsOff,)))


if __name__ == "__main__":
    main()
