"""One machine that is always slow, and others that are slow now and then: shares by speed, lgc, and both.

Four real ranks of a recipe on this machine, whose batches take as long as a table of delays says (by sleep): rank 0
takes three times as long as the others, and any rank takes four times as long for one batch in ten. Digits, dealt at
random, K = 3. The simulator plays the same recipe with the same table and a network that costs nothing.

    full         waits for rank 0 in every round
    full+speed   rank 0 has a small batch; whoever hiccups is waited for
    lgc          rank 0 is the one that is not waited for; so whoever else hiccups is
    lgc+speed    nobody is slow by itself, so K = 3 leaves out whoever hiccups

Seconds are those to the target loss. `round` is the mean of the second half of the rounds, when shares have settled;
`off` is how far the simulated one is from the real one. Lanes take turns, seed by seed. The settings of the table were
chosen in the simulator on seeds 100 to 102.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from paceline.recipes import Recipe
from paceline.runs import simulate
from paceline.runs.training import train_recipe
from paceline.traces import Trace

LANES = {
    "full": ("full", "equal"),
    "full+speed": ("full", "speed"),
    "lgc": ("lgc", "equal"),
    "lgc+speed": ("lgc", "speed"),
}
FIRST_SEED, SEEDS = 200, 3
RANKS, K, ROUNDS, QUICK_ROUNDS = 4, 3, 130, 12
BATCH_SECONDS, SLOWER, HICCUP, HICCUPS = 0.1, 3.0, 4.0, 0.1
FASTER = Bar(sign="<=", limit=1.0)  # than the better of the two alone
OFF = Bar(sign="<=", limit=0.10, style=".1%")
Row = dict[str, Any]


def delays(seed: int, rows: int, *, seconds: float = BATCH_SECONDS) -> np.ndarray:
    """Return the seconds of a whole batch, a row for each of a rank's batches, a column for each rank.

    >>> table = delays(0, 1000)
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


def run(options: Options) -> None:
    """`python -m benchmarks shares-lgc`."""
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    first = options.first_seed or FIRST_SEED
    seeds = range(first, first + (options.seeds or (1 if options.quick else SEEDS)))
    folder, found = Path(tempfile.mkdtemp(prefix="paceline-shares-lgc-")), list[Row]()
    try:
        with progress_bar() as bar:
            task = bar.add_task("real runs", total=len(seeds) * len(LANES))
            for seed in seeds:
                seconds = 0.02 if options.quick else BATCH_SECONDS
                np.savetxt(
                    table := folder / f"{seed}.csv", delays(seed, 600, seconds=seconds), delimiter=",", fmt="%.6f"
                )
                for lane in LANES:
                    recipe = recipe_of(lane, seed, rounds, table)
                    real = train_recipe(recipe, out=folder / f"{lane}-{seed}").result
                    if real is None:
                        raise RuntimeError(f"{lane}, seed {seed}: the ranks came to no result")
                    found.append({"lane": lane, "seed": seed, **compared(real.trace, simulate(recipe).trace)})
                    bar.advance(task)
    finally:
        shutil.rmtree(folder)
    rows = [mean_of(lane, [each for each in found if each["lane"] == lane]) for lane in LANES]
    console = tables()
    console.print(_table(rows, quick=options.quick))
    console.print(_verdicts(rows))
    save(options, "shares-lgc", {"first_seed": first, "rounds": rounds, "lanes": rows, "runs": found})


def compared(real: Trace, played: Trace) -> Row:
    """Return the figures of a real run beside those of the simulated one."""
    figures: Row = {}
    for name, trace in (("real", real), ("simulated", played)):
        target = next((each.seconds for each in trace.evaluations if each.loss <= _target(trace)), None)
        half = trace.rounds[len(trace.rounds) // 2 :]
        figures[f"{name}_to_target"] = target
        figures[f"{name}_round"] = (half[-1].closed_seconds - half[0].opened_seconds) / len(half)
    figures["shares"] = [] if real.shares is None else [each.samples for each in real.shares.workers]
    return figures


def _target(trace: Trace) -> float:
    return float(trace.recipe.get("target_loss") or 0.05)


def mean_of(lane: str, runs: Sequence[Row]) -> Row:
    """Return the means of a lane's runs; None where one of them did not come to the target.

    >>> runs = [{"real_round": 1.0, "real_to_target": 5.0}, {"real_round": 3.0, "real_to_target": None}]
    >>> row = mean_of("lgc", [run | {"simulated_round": 2.0, "simulated_to_target": 1.0, "shares": []} for run in runs])
    >>> row["real_round"], row["real_to_target"], row["off"]
    (2.0, None, 0.0)
    """
    row: Row = {"lane": lane, "shares": runs[-1]["shares"]}
    for name in ("real_to_target", "simulated_to_target", "real_round", "simulated_round"):
        values = [run[name] for run in runs]
        row[name] = None if None in values else fmean(values)
    row["off"] = abs(row["simulated_round"] / row["real_round"] - 1)
    return row


def _table(rows: Sequence[Row], *, quick: bool) -> Table:
    title = titled("Seconds to the target loss: one rank slow, all of them now and then", quick=quick)
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("strategy")
    for name in ("real", "simulated", "round", "simulated", "off", "shares at the end"):
        table.add_column(name, justify="right")
    for row in rows:
        to_target = [row["real_to_target"], row["simulated_to_target"]]
        table.add_row(
            row["lane"],
            *("-" if each is None else f"{each:.1f}" for each in to_target),
            *(f"{1e3 * row[name]:.0f} ms" for name in ("real_round", "simulated_round")),
            f"{OFF.show(row['off'])} {coloured(OFF.verdict(row['off']))}",
            " ".join(map(str, row["shares"])) or "equal",
        )
    return table


def _verdicts(rows: Sequence[Row]) -> str:
    lines = []
    for kind in ("real", "simulated"):
        both, *alone = (next(row for row in rows if row["lane"] == lane) for lane in ("lgc+speed", "lgc", "full+speed"))
        seconds = [row[f"{kind}_to_target"] for row in (both, *alone)]
        ratio = None if None in seconds else seconds[0] / min(seconds[1:])
        lines.append(
            f"{kind}: shares and lgc take {FASTER.show(ratio)} of the time of the better one alone (bar {FASTER}): "
            f"{coloured(FASTER.verdict(ratio))}"
        )
    return "\n".join(lines) + "\n"
