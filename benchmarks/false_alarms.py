"""How often `paceline diagnose` names somebody in a balanced run, and whom it names in one that is not.

Runs are synthetic, written by the real writers: 2 to 16 ranks, 30 to 120 steps of 100 ms, noise of three kinds
(lognormal; heavy tails; bursts that last some steps) and of several sizes. Then the same with a delay of 200 ms in one
phase of one rank: in all steps, in half or in three of ten, from step 0 or 10 on. The thresholds were chosen on other
seeds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import progress_bar, save, tables, titled
from paceline.diagnosis import Diagnosis, diagnose
from paceline.traces.recorded_run import read_run
from tests.diagnosis.recordings import USUAL, Delay, watched

NAME = "false-alarms"
FIRST_SEED = 7_000_000
KINDS = ("lognormal", "pareto", "bursts")
NAMED = ("slow", "small", "harmless", "link")
BALANCED_RUNS, DELAYED_RUNS = 1_000, 250


def run(options: Options) -> None:
    """Diagnose balanced runs and runs with one delay, and count what was said."""
    balanced, delayed = (12, 4) if options.quick else (BALANCED_RUNS, DELAYED_RUNS)
    statuses: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    found = {"rank and phase": 0, "rank alone": 0, "cannot tell": 0, "another": 0}
    with progress_bar() as progress:
        task = progress.add_task("diagnosing", total=balanced + delayed)
        for seed in range(FIRST_SEED, FIRST_SEED + balanced):
            random = np.random.default_rng(seed)
            conditions = _conditions(random, seed, spreads=(0.02, 0.1, 0.3, 0.8))
            status = _diagnosed(conditions).status
            counts = statuses[conditions["kind"]]
            counts[status] = counts.get(status, 0) + 1
            progress.advance(task)
        for seed in range(FIRST_SEED, FIRST_SEED + delayed):
            random = np.random.default_rng(seed)
            conditions = _conditions(random, seed, spreads=(0.02, 0.1, 0.3))
            delay = Delay(
                rank=int(random.integers(conditions["ranks"])),
                phase=str(random.choice(list(USUAL))),
                first=int(random.choice([0, 10])),
                probability=float(random.choice([1, 1, 0.5, 0.3])),
            )
            found[_outcome(_diagnosed({**conditions, "delays": [delay]}), delay)] += 1
            progress.advance(task)
    save(options, NAME, {"balanced": statuses, "delayed": found})
    _print(statuses, found, quick=options.quick)


def _conditions(random: np.random.Generator, seed: int, *, spreads: tuple[float, ...]) -> dict[str, Any]:
    return {
        "ranks": int(random.choice([2, 3, 4, 8, 16])),
        "steps": int(random.choice([30, 60, 120])),
        "kind": str(random.choice(KINDS)),
        "spread": float(random.choice(spreads)),
        "seed": seed,
    }


def _diagnosed(conditions: dict[str, Any]) -> Diagnosis:
    with tempfile.TemporaryDirectory() as folder:
        return diagnose(read_run(watched(Path(folder), **conditions)))


def _outcome(found: Diagnosis, delay: Delay) -> str:
    slow = [each for each in found.suspects if each.matters and each.pattern != "once"]
    if found.status != "slow":
        return "cannot tell"
    if [each.members for each in slow] != [(delay.rank,)]:
        return "another"
    return "rank and phase" if slow[0].phases == (delay.phase,) else "rank alone"


def _print(statuses: dict[str, dict[str, int]], found: dict[str, int], *, quick: bool) -> None:
    title = titled("Balanced runs, by what was said", quick=quick)
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    columns = ("nobody", "cannot tell", "once", "small", "slow")
    for heading in ("noise", "runs", *columns):
        table.add_column(heading, justify="left" if heading == "noise" else "right")
    for kind, counts in statuses.items():
        table.add_row(kind, str(sum(counts.values())), *(str(counts.get(each, 0)) for each in columns))
    console = tables()
    console.print(table)
    named = sum(counts.get(each, 0) for counts in statuses.values() for each in NAMED)
    runs = sum(sum(counts.values()) for counts in statuses.values())
    console.print(f"Somebody was named in {named} of {runs} balanced runs.")
    words = ", ".join(f"{outcome} {count}" for outcome, count in found.items())
    console.print(f"Of {sum(found.values())} runs with one delay, named: {words}.")
