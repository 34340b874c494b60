"""How often `paceline diagnose` names a rank in a balanced run, and which it names in one that is not.

Runs are synthetic, written by the real writers: 2 to 16 ranks, 30 to 120 steps of 100 ms, noise of three kinds
(lognormal; heavy tails; bursts that last some steps) and of several sizes. Then the same with a delay of 200 ms in one
phase of one rank: in all steps, in half or in three of ten, from step 0 or 10 on. The thresholds were chosen on other
seeds.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.core.story import Job, Numbers, Runs, Size, Telling, experiment
from paceline.reports.table import PlainTable

FIRST = 7_000_000  # the seed of the first run of either kind
RUNS_OF_A_JOB = 50
KINDS = ("lognormal", "pareto", "bursts")
SPREADS = (0.02, 0.1, 0.3, 0.8)
STATUSES = ("nobody", "cannot tell", "once", "small", "slow")
NAMED = ("slow", "small", "harmless", "link")
OUTCOMES = ("rank and phase", "rank alone", "cannot tell", "another")


def run_balanced(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Diagnose runs in which all ranks are alike; return by the kind of noise how often each status was said.

    >>> run_balanced({"first": FIRST, "runs": 1})
    {'lognormal': {}, 'pareto': {}, 'bursts': {'cannot tell': 1}}
    """
    import numpy as np

    said: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for seed in range(settings["first"], settings["first"] + settings["runs"]):
        conditions = conditions_of(np.random.default_rng(seed), seed, SPREADS)
        said[conditions["kind"]][diagnosed(conditions).status] += 1
    return {kind: dict(counts) for kind, counts in said.items()}


def run_delayed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Diagnose runs with a delay in one phase of one rank; return how often that rank and phase were named."""
    import numpy as np

    from tests.diagnosis.recordings import USUAL, Delay

    outcomes: Counter[str] = Counter()
    for seed in range(settings["first"], settings["first"] + settings["runs"]):
        random = np.random.default_rng(seed)
        conditions = conditions_of(random, seed, SPREADS[:3])
        delay = Delay(
            rank=int(random.integers(conditions["ranks"])),
            phase=str(random.choice(list(USUAL))),
            first=int(random.choice([0, 10])),
            probability=float(random.choice([1, 1, 0.5, 0.3])),
        )
        found = diagnosed({**conditions, "delays": [delay]})
        slow = [each for each in found.suspects if each.matters and each.pattern != "once"]
        if found.status != "slow":
            outcomes["cannot tell"] += 1
        elif [each.members for each in slow] != [(delay.rank,)]:
            outcomes["another"] += 1
        else:
            outcomes["rank and phase" if slow[0].phases == (delay.phase,) else "rank alone"] += 1
    return dict(outcomes)


def conditions_of(random: Any, seed: int, spreads: tuple[float, ...]) -> dict[str, Any]:
    """Return what a run is written with, drawn from a generator of numpy."""
    return {
        "ranks": int(random.choice([2, 3, 4, 8, 16])),
        "steps": int(random.choice([30, 60, 120])),
        "kind": str(random.choice(KINDS)),
        "spread": float(random.choice(spreads)),
        "seed": seed,
    }


def diagnosed(conditions: Mapping[str, Any]) -> Any:
    from paceline.diagnosis import diagnose
    from paceline.traces.recorded_run import read_run
    from tests.diagnosis.recordings import watched

    with tempfile.TemporaryDirectory() as folder:
        return diagnose(read_run(watched(Path(folder), **conditions)))


@experiment("false-alarms", question="synthetic runs: whom diagnose names where no rank is slow", minutes=5)
def false_alarms(size: Size) -> Telling:
    functions = {"balanced": (run_balanced, size.pick(12, 1000)), "delayed": (run_delayed, size.pick(4, 250))}
    runs: Runs = yield {
        (name, first): Job(
            run, {"first": FIRST + first, "runs": min(RUNS_OF_A_JOB, count)}, seconds=0.5 * RUNS_OF_A_JOB
        )
        for name, (run, count) in functions.items()
        for first in range(0, count, RUNS_OF_A_JOB)
    }
    said: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    found: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
    for (name, _), (outcome, *_) in runs.items():
        if name == "delayed":
            found.update(outcome)
        else:
            for kind, counts in outcome.items():
                said[kind].update(counts)
    yield PlainTable(
        title="Balanced runs, by what was said",
        headings=("noise", "runs", *STATUSES),
        rows=[
            (kind, str(counts.total()), *(str(counts[status]) for status in STATUSES)) for kind, counts in said.items()
        ],
    )
    named = sum(counts[status] for counts in said.values() for status in NAMED)
    yield f"A rank was named in {named} of {sum(counts.total() for counts in said.values())} balanced runs."
    words = ", ".join(f"{outcome} {count}" for outcome, count in found.items())
    yield f"Of {found.total()} runs with one delay, named: {words}."
    yield Numbers({"balanced": said, "delayed": found})
