"""One machine that is always slow, and others that are slow now and then: shares by speed, lgc, and both.

Four real ranks of a recipe on this machine, whose batches take as long as a table of delays says (by sleep): rank 0
takes three times as long as the others, and any rank takes four times as long for one batch in ten. Digits, dealt at
random, K = 3. The simulator plays the same recipe with the same table and a network that costs nothing.

    full         waits for rank 0 in every round
    full+speed   rank 0 has a small batch; a rank that hiccups is waited for
    lgc          rank 0 is the one that is not waited for; so any other that hiccups is
    lgc+speed    no rank is slow by itself, so K = 3 leaves out the one that hiccups

Seconds are those to the target loss. `round` is the mean of the second half of the rounds, when shares have settled;
`off` is how far the simulated one is from the real one. Lanes take turns, seed by seed. The settings of the table were
chosen in the simulator on seeds 100 to 102.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from experiments.core.claims import percent
from experiments.core.ranks import ended_by_signals
from experiments.core.running import ExperimentError
from experiments.core.story import NAN, Numbers, Size, Step, Telling, experiment
from experiments.core.turns import bar, cells, verdict
from paceline.recipes import Recipe
from paceline.reports.table import PlainTable
from paceline.runs import simulate
from paceline.runs.training import train_recipe
from paceline.traces import Trace

LANES = {
    "full": ("full", "equal"),
    "full+speed": ("full", "speed"),
    "lgc": ("lgc", "equal"),
    "lgc+speed": ("lgc", "speed"),
}
RANKS, K, DELAYS = 4, 3, 600
SLOWER, HICCUP, HICCUPS = 3.0, 4.0, 0.1
MOST_OF_BETTER, MOST_OFF = 1.0, 0.10
FIGURES = ("real_to_target", "simulated_to_target", "real_round", "simulated_round")
Row = dict[str, Any]


@experiment(
    "shares-lgc",
    question="one rank always slow, all now and then: shares by speed, lgc, and both",
    minutes=8,
    seeds=3,
)
def shares_lgc(size: Size, *, rounds: int = 0) -> Telling:
    """Tell it for so many rounds of each run; 0 is what the size has."""
    rounds, batch_seconds = rounds or size.pick(12, 130), size.pick(0.02, 0.1)
    runs, total = list[Row](), len(size.seeds) * len(LANES)
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="paceline-shares-lgc-") as folder:
        for seed, lane in product(size.seeds, LANES):
            yield Step(f"{lane}, seed {seed}", total)
            table = Path(folder, f"{seed}.csv")
            np.savetxt(table, delays(seed, DELAYS, seconds=batch_seconds), delimiter=",", fmt="%.6f")
            recipe = recipe_of(lane, seed, rounds, table)
            real = train_recipe(recipe, out=Path(folder, f"{lane}-{seed}")).result
            if real is None:
                raise ExperimentError(f"{lane}, seed {seed}: the ranks came to no result")
            runs.append({"lane": lane, "seed": seed, **compared(real.trace, simulate(recipe).trace)})
    rows = {lane: mean_of([run for run in runs if run["lane"] == lane]) for lane in LANES}
    off = {
        lane: bar(f"a round of {lane}: simulated off real", row["off"], most=MOST_OFF, write=percent)
        for lane, row in rows.items()
    }
    yield PlainTable(
        title="Seconds to the target loss: one rank slow, all of them now and then",
        headings=("\nstrategy", "\nreal", "\nsimulated", "round,\nreal", "\nsimulated", "\noff", "", "shares\nat last"),
        rows=[
            (lane, *cells(row, real_to_target=".1f", simulated_to_target=".1f", real_round=".3f", simulated_round=".3f",
                          off=".1%"), verdict(off[lane]), " ".join(map(str, row["shares"])) or "equal")
            for lane, row in rows.items()
        ],
    )  # fmt: skip
    for kind in ("real", "simulated"):
        both, *alone = (rows[lane][f"{kind}_to_target"] for lane in ("lgc+speed", "lgc", "full+speed"))
        ratio = both / min(alone) if not np.isnan(alone).any() else NAN
        yield bar(f"{kind}: time of both together, of the better one alone", ratio, most=MOST_OF_BETTER)
    yield from off.values()
    yield Numbers({"first_seed": size.seeds[0], "rounds": rounds, "lanes": rows, "runs": runs})


def delays(seed: int, rows: int, *, seconds: float) -> np.ndarray:
    """Return the seconds of a whole batch, a row for each of a rank's batches, a column for each rank.

    >>> table = delays(0, 1000, seconds=0.1)
    >>> table.shape, bool(2.5 < np.median(table[:, 0]) / np.median(table[:, 1]) < 3.5)
    ((1000, 4), True)
    """
    draw = np.random.default_rng(seed)
    times = seconds * (1 + 0.04 * draw.random((rows, RANKS)))
    times *= np.where(draw.random((rows, RANKS)) < HICCUPS, HICCUP, 1.0)
    times[:, 0] *= SLOWER
    return times


def recipe_of(lane: str, seed: int, rounds: int, table: Path) -> Recipe:
    """Return the recipe of a lane."""
    strategy, shares = LANES[lane]
    return Recipe(seed=seed, rounds=rounds, evaluate_every=2).with_settings(
        data={"split": "iid"},
        worker={"shares": shares},
        cluster={"workers": RANKS, "late_work": "partial"},
        strategy={"name": strategy, "k": K, "on": "ranks"},
        delay={"name": "recorded", "file": str(table), "inject": True},
    )


def compared(real: Trace, played: Trace) -> Row:
    """Return the figures of a real run beside those of the simulated one."""
    figures: Row = {}
    for name, trace in (("real", real), ("simulated", played)):
        target = float(trace.recipe.get("target_loss") or 0.05)
        figures[f"{name}_to_target"] = next((each.seconds for each in trace.evaluations if each.loss <= target), NAN)
        half = trace.rounds[len(trace.rounds) // 2 :]
        figures[f"{name}_round"] = (half[-1].closed_seconds - half[0].opened_seconds) / len(half)
    figures["shares"] = [] if real.shares is None else [each.samples for each in real.shares.workers]
    return figures


def mean_of(runs: Sequence[Mapping[str, Any]]) -> Row:
    """Return the means of a lane's runs; NaN where one of them did not come to the target.

    >>> runs = [{"real_round": 1.0, "real_to_target": 5.0}, {"real_round": 3.0, "real_to_target": NAN}]
    >>> row = mean_of([run | {"simulated_round": 2.0, "simulated_to_target": 1.0, "shares": []} for run in runs])
    >>> row["real_round"], row["real_to_target"], row["off"]
    (2.0, nan, 0.0)
    """
    row: Row = {name: fmean(run[name] for run in runs) for name in FIGURES}
    return row | {"shares": runs[-1]["shares"], "off": abs(row["simulated_round"] / row["real_round"] - 1)}
