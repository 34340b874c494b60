"""Does `paceline diagnose` name the right one? One of four is slowed down on purpose, and the verdict is compared.

    +200 ms in the input, the forward or the backward pass of one of four, 5 times each; its link halved, 5 times
    nobody is slowed down, 10 times
    +50 ms in the same three places, 5 times each: the rate is reported

Under DistributedDataParallel, watched by `paceline.watch`, and under the parameter server, whose workers are scripts.
Four hosts are network namespaces of this machine on one switch, 200 Mbit/s each (`tc tbf`), and a server's has five
times as much, for the messages of all pass there. A step computes for some 60 ms, most of it asleep, with a jitter that
differs from rank to rank and from step to step. The processes stay; each case is a new model, a new watch or server,
and a folder of its own. Who is slowed down is drawn anew for every case.

Right is: the one, and the phase or the link, and nobody else. Needs root and iproute2.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.cable import Switch, why_not
from benchmarks.options import Options, chosen
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.ranks import ended_by_signals, measured
from paceline.randomness import seed_for

RANKS = 4
BITS_PER_SECOND = 200e6
PLACES = ("input", "forward", "backward")
DRIVERS = ("ddp", "server")
RIGHT = Bar(sign=">=", limit=19, style=".0f")
FALSE_ALARMS = Bar(sign="<=", limit=0, style=".0f")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: `place` of rank `slow` is `seconds` slower (or its link has half the rate); nobody's where it is -1."""

    name: str
    place: str
    slow: int
    seconds: float
    steps: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the processes do: all cases of one driver, one after the other, in this folder."""

    driver: str
    folder: str
    number: int  # of the switch
    bits_per_second: float
    cases: list[dict[str, Any]]


def hosts_of(driver: str) -> int:
    """Return how many hosts there are: the last is the server's, where there is one.

    >>> hosts_of("ddp"), hosts_of("server")
    (4, 5)
    """
    return RANKS + (driver == "server")


def cases_of(driver: str, first_seed: int, *, quick: bool) -> list[Case]:
    """Return all cases of a driver; who is slow is drawn from the seed.

    >>> [case.name for case in cases_of("ddp", 0, quick=True)]
    ['+200 ms, input', 'half a link', 'balanced']
    """
    times, balanced, steps = (1, 1, 12) if quick else (5, 10, 30)
    kinds = [(f"+200 ms, {place}", place, 0.2) for place in PLACES[: 1 if quick else None] for _ in range(times)]
    kinds += [("half a link", "link", 0.0)] * times + [("balanced", "", 0.0)] * balanced
    kinds += [(f"+50 ms, {place}", place, 0.05) for place in (() if quick else PLACES) for _ in range(times)]
    found = []
    for number, (name, place, seconds) in enumerate(kinds):
        seed = seed_for(first_seed, f"diagnosis of {driver}, case {number}") % 2**31
        slow = seed % RANKS if place else -1
        found.append(Case(name=name, place=place, slow=slow, seconds=seconds, steps=steps, seed=seed))
    return found


def run(options: Options) -> None:
    """`python -m benchmarks diagnosis`."""
    reason = why_not()
    if reason:
        tables().print(f"diagnosis: skipped, and no bar judged: {reason}")
        save(options, "diagnosis", {"skipped": reason})
        return
    console, results = tables(), dict[str, list[dict[str, Any]]]()
    for driver in chosen(options.only, DRIVERS, "driver"):
        cases = cases_of(driver, options.first_seed, quick=options.quick)
        results[driver] = _measured(driver, cases)
        console.print(_table(driver, results[driver], quick=options.quick))
        console.print(_bars(results[driver]))
        for row in results[driver]:
            if not row["right"]:
                console.print(f"  {row['name']}, slow: {row['slow']}: {row['words']}")
    save(options, "diagnosis", {"results": results})


def _measured(driver: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-diagnosis-"))
    try:
        with ended_by_signals(), Switch(hosts_of(driver)) as switch:
            switch.shape(BITS_PER_SECOND)
            job = Job(
                driver=driver,
                folder=str(folder),
                number=switch.number,
                bits_per_second=BITS_PER_SECOND,
                cases=[asdict(case) for case in cases],
            )
            labels = [case.name for case in cases]
            lines = measured(driver, "benchmarks.diagnosis_rank", json.dumps(asdict(job)), labels, switch, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [asdict(case) | line for case, line in zip(cases, lines, strict=True)]


# -- table and bars ----------------------------------------------------------------------------------------------------


def _table(driver: str, rows: Sequence[dict[str, Any]], *, quick: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=titled(f"Named by `paceline diagnose`: {driver}, 4 ranks", quick=quick))
    for name in ("case", "runs", "right", "right one, other place", "another one", "nobody, or cannot tell"):
        table.add_column(name, justify="left" if name == "case" else "right")
    for name in dict.fromkeys(row["name"] for row in rows):
        these = [row for row in rows if row["name"] == name]
        counts = Counter(row["outcome"] for row in these)
        table.add_row(name, str(len(these)), *(str(counts[each]) for each in ("right", "place", "other", "nobody")))
    return table


def _bars(rows: Sequence[dict[str, Any]]) -> str:
    judged = [row for row in rows if row["seconds"] == 0.2 or row["place"] == "link"]
    balanced = [row for row in rows if row["name"] == "balanced"]
    right, named = sum(row["right"] for row in judged), sum(not row["right"] for row in balanced)
    verdicts = (coloured(RIGHT.verdict(right)), coloured(FALSE_ALARMS.verdict(named)))
    small = [row for row in rows if row["seconds"] == 0.05]
    return (
        f"bars: right {right} of {len(judged)} ({RIGHT}): {verdicts[0]}; named in {named} of {len(balanced)} balanced "
        f"runs ({FALSE_ALARMS}): {verdicts[1]}; +50 ms: {sum(row['right'] for row in small)} of {len(small)}"
    )
