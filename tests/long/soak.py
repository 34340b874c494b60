"""Random faults against one long training run of real processes, which must go on whatever happens.

    python -m tests.long.soak [--faults 1000] [--seed 0] [--only WORDS] [--seconds-per-fault 0] [--out runs/soak]

After every fault: rounds are done again within 30 s; the server holds no more memory, threads and files than after the
first faults and an allowance; nobody has ended who was not ended; no zombie is left. At the end the whole run, with all
its restarts, is replayed from its trace and must come out the same to the last bit. The first failure ends the soak:
exit code 1, the reason in one line, and the run stays beside the logs (soak.log, server.log, workers.log).

Every kind of fault comes once, and then at random by its weight; `--seed` decides. After each kind has come
once, the server is left alive until half-time, so that what it does not give back adds up. What processes do meanwhile
is not decided by a seed, so the same seed meets the run in another state.
"""

from __future__ import annotations

import argparse
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

from rich.console import Console

from paceline.cli.progress import step_bar
from paceline.reports.table import PlainTable
from tests.long.soak_cluster import WORKERS, Cluster, Failed, Reading, read_process, zombies_of
from tests.long.soak_faults import Faults, processes_beside

FAULTS = 1000
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


def main() -> int:
    """Soak a run in faults; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.long.soak")
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--seed", type=int, default=0, help="which faults, when and against whom")
    parser.add_argument("--only", default="", help="words in the names of faults, with commas between")
    parser.add_argument("--seconds-per-fault", type=float, default=0.0, help="least time from one fault to the next")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder for logs, and the run if it fails")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=asked.out))
    soak, began = Soak(), time.monotonic()
    with (folder / "soak.log").open("w", encoding="utf-8", buffering=1) as log:

        def note(text: str) -> None:
            log.write(f"{time.monotonic() - began:9.3f}  {text}\n")

        dice = random.Random(asked.seed)
        cluster = Cluster(folder.absolute(), dice, note)
        try:
            _hurt(cluster, Faults(cluster, dice, asked.only), soak, asked.faults, asked.seconds_per_fault, note)
            _stop_and_replay(cluster, soak)
        except (Failed, OSError) as failure:
            soak.failure = f"after {sum(soak.faults.values())} faults: {failure}"
            note(f"FAILED {soak.failure}")
        finally:
            soak.steps, soak.restarts, soak.refused = cluster.tail.steps, cluster.tail.resumed, cluster.tail.refused
            soak.ends = cluster.ended_well
            cluster.end()
    soak.seconds = time.monotonic() - began
    Console(width=100, highlight=False).print(_table(soak, asked.faults).rich())
    if soak.failure:
        print(f"soak failed {soak.failure}; logs, trace and checkpoints: {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder / "run")
    print(f"logs: {folder}", file=sys.stderr)
    return 0


def _hurt(
    cluster: Cluster, faults: Faults, soak: Soak, wanted: int, least_seconds: float, note: Callable[[str], None]
) -> None:
    cluster.open_server()
    cluster.until_nursery()
    for number in range(WORKERS):
        cluster.order_worker(number)
    cluster.until(lambda: cluster.tail.checkpoints > 0, "the first checkpoint", seconds=120)
    first = min(BASELINE_FAULTS, max(1, wanted // 2))
    with step_bar(Console(stderr=True), "soak", total=wanted) as update:
        for number in range(wanted):
            kind, began = faults.draw(number, wanted), time.monotonic()
            update(description=f"soak: {kind}")
            note(f"fault {number}: {kind}; crew {cluster.crew}, in {cluster.tail.members}")
            soak.faults[kind] = soak.faults.get(kind, 0) + 1
            faults.kinds[kind][1]()
            faults.keep_manned()
            cluster.until_steps(GOES_ON_ROUNDS, seconds=GOES_ON_SECONDS)
            soak.longest_seconds[kind] = max(soak.longest_seconds.get(kind, 0.0), time.monotonic() - began)
            _check(cluster, soak, note, first=number < first)
            enough = began + least_seconds
            cluster.until(lambda enough=enough: time.monotonic() >= enough, "a pause", seconds=3600)
            update(advance=1)


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
    with step_bar(Console(stderr=True), "soak: replay") as update:
        verdict = replay(cluster.run, on_step=lambda step, steps: update(completed=step, total=steps))
    soak.replay = verdict.difference or verdict.missing or f"identical, {verdict.steps} rounds"
    if not verdict.identical:
        raise Failed(f"the replay differs or is not of the whole run: {soak.replay}")


def _table(soak: Soak, wanted: int) -> PlainTable:
    kinds = sorted(soak.faults, key=lambda kind: -soak.faults[kind])
    longest = {kind: f"{soak.longest_seconds[kind]:.1f}" if kind in soak.longest_seconds else "-" for kind in kinds}
    limits, most = soak.limits(), soak.largest
    return PlainTable(
        title="Faults against one run",
        headings=("what", "measured", "longest s", "bar"),
        rows=[
            *((kind, str(soak.faults[kind]), longest[kind], "") for kind in kinds),
            ("faults", f"{sum(soak.faults.values())}", "", f"{wanted}"),
            ("rounds", f"{soak.steps}", "", ""),
            ("workers that left with 0", f"{soak.ends}", "", "all that were asked"),
            ("processes of runs beside", f"{processes_beside(soak.faults)}", "", "all end with 0"),
            ("restarts of the server", f"{soak.restarts}", "", ""),
            ("refused by the server", f"{soak.refused}", "", ""),
            ("largest memory", f"{most.rss_bytes / 2**20:.0f} MB", "", f"<= {limits['rss_bytes'] / 2**20:.0f} MB"),
            ("most threads", f"{most.threads}", "", f"<= {limits['threads']}"),
            ("most open files", f"{most.files}", "", f"<= {limits['files']}"),
            ("replay", soak.replay, "", "identical"),
            ("seconds", f"{soak.seconds:.0f}", "", ""),
            ("verdict", "MISS" if soak.failure else "PASS", "", ""),
        ],
        caption=f"longest s: from a fault, its own time included, until {GOES_ON_ROUNDS} more rounds are done. bar: "
        f"those within {GOES_ON_SECONDS:g} s once it is over, and no more held than after the first faults and an "
        "allowance.",
    )


if __name__ == "__main__":
    sys.exit(main())
