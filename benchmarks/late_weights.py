"""What partial late work should count: the paper's linear scaling, nothing, or its samples.

Ten simulated workers, K = 7, delays of 0.05 s + Exp(0.02 s), and late work as it really is: who is late stops at the
next block and sends the r of 4 blocks that it has done (`late_work = "partial"`). `lgc` weighs them in three ways:

    scaled     r/s of a whole gradient (`scale_partial = true`, the paper's)
    unscaled   as a whole gradient (`false`)
    samples    by the samples done among all that were computed ("samples")

Digits with the default recipe, and CIFAR-10 with LeNet (rate 0.05, a tenth of it from the middle on, ten rounds of
warm-up, 300 rounds, less than two epochs). A figure is the final training loss against that of `full` on the same seed
and data: the geometric mean over seeds. What `full` learns does not depend on who is slow, so it runs once for each c.

The bar is that of `claims` for whole late work: over all settings, a loss at most 3 % above that of `full`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.pool import run_all
from paceline.recipes import Recipe
from paceline.runs import simulate

WEIGHTS: dict[str, bool | str] = {"scaled": True, "unscaled": False, "samples": "samples"}
DATA = {"digits": "mlp", "cifar10": "lenet"}
SKEWS, PERSISTENCES = (1, 2, 3), (1, 10, 50)
FIRST_SEED, SEEDS = 200, 5  # constants were chosen on seeds from 100 on
ROUNDS, QUICK_ROUNDS, WARMUP = 300, 8, 10
LOSS = Bar(sign="<=", limit=1.03, style=".3f")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training: the data, the classes of a worker, the batches for which delays last, and who runs."""

    data: str
    classes: int
    persistence: int
    lane: str  # full, or a weight
    seed: int
    rounds: int

    def recipe(self) -> Recipe:
        """The recipe of the run.

        >>> run = Run(data="digits", classes=3, persistence=10, lane="samples", seed=100, rounds=300)
        >>> run.recipe().strategy.scale_partial, run.recipe().k
        ('samples', 7)
        """
        strategy: dict[str, Any] = {"name": "full"}
        if self.lane != "full":
            strategy = {"name": "lgc", "k": 7, "scale_partial": WEIGHTS[self.lane]}
        recipe = Recipe(seed=self.seed, rounds=self.rounds, evaluate_every=self.rounds, target_loss=None)
        recipe = recipe.with_settings(
            data={"name": self.data, "split": "non-iid", "classes_per_worker": self.classes},
            model={"name": DATA[self.data]},
            cluster={"workers": 10, "late_work": "partial"},
            delay={"persistence": self.persistence},
            strategy=strategy,  # type: ignore[arg-type]
        )
        if self.data == "digits":
            return recipe
        warmup = min(WARMUP, self.rounds)
        return recipe.with_settings(optimizer={"lr": 0.05, "decay_at": [0.5]}, strategy={"warmup_rounds": warmup})


def train(run: Run) -> dict[str, float | None]:
    """Simulate one run; return its final loss and accuracy, and the cluster's seconds."""
    result = simulate(run.recipe())
    return {"loss": result.loss, "accuracy": result.accuracy, "seconds": result.seconds}


def runs_of(data: Sequence[str], seeds: Sequence[int], *, quick: bool) -> list[Run]:
    """Return all runs, `full` once for each data set, skew and seed.

    >>> len(runs_of(["digits"], [100], quick=False))
    30
    """
    rounds = QUICK_ROUNDS if quick else ROUNDS
    skews, persistences = ((3,), (10,)) if quick else (SKEWS, PERSISTENCES)
    return [
        Run(data=name, classes=c, persistence=h, lane=lane, seed=seed, rounds=rounds)
        for name in data
        for seed in seeds
        for c in skews
        for h in persistences
        for lane in ("full", *WEIGHTS)
        if lane != "full" or h == persistences[0]
    ]


def run(options: Options) -> None:
    """`python -m benchmarks late-weights`."""
    chosen = [name.strip() for name in options.only.split(",") if name.strip()] or list(DATA)
    for name in chosen:
        if name not in DATA:
            raise ValueError(f"--only: unknown data set {name!r}; choose from {', '.join(DATA)}")
    data = ["digits"] if options.quick else chosen
    first = options.first_seed or FIRST_SEED
    seeds = range(first, first + (options.seeds or (1 if options.quick else SEEDS)))
    todo = runs_of(data, seeds, quick=options.quick)
    outcomes = run_all(train, todo, label="late-weights: runs", processes=options.jobs)
    found = dict(zip(todo, outcomes, strict=True))
    rows = [row for name in data for row in rows_of(name, found)]
    console = tables()
    for name in data:
        here = [row for row in rows if row["data"] == name]
        console.print(_table(name, here, seeds, rounds=todo[0].rounds, quick=options.quick))
    kept = [dataclasses.asdict(each) | end for each, end in found.items()]
    save(options, "late-weights", {"first_seed": first, "seeds": len(seeds), "rows": rows, "runs": kept})


def rows_of(data: str, found: Mapping[Run, Mapping[str, float | None]]) -> list[dict[str, Any]]:
    """Return a row for each setting of a data set, and one for all of them together."""
    runs = [run for run in found if run.data == data]
    full = {(run.classes, run.seed): found[run] for run in runs if run.lane == "full"}
    settings = sorted({(run.classes, run.persistence) for run in runs if run.lane != "full"})
    rows: list[dict[str, Any]] = []
    ratios: dict[tuple[str, int], list[float | None]] = {}  # by weight and seed, over all settings
    for c, h in settings:
        row: dict[str, Any] = {"data": data, "classes": c, "persistence": h}
        row["accuracy full"] = _mean([full[key]["accuracy"] for key in full if key[0] == c])
        for weight in WEIGHTS:
            same = [run for run in runs if (run.classes, run.persistence, run.lane) == (c, h, weight)]
            each = [ratio(found[run]["loss"], full[c, run.seed]["loss"]) for run in same]
            for run, value in zip(same, each, strict=True):
                ratios.setdefault((weight, run.seed), []).append(value)
            row[f"loss {weight}"] = geometric_mean(each)
            row[f"accuracy {weight}"] = _mean([found[run]["accuracy"] for run in same])
        rows.append(row)
    together: dict[str, Any] = {"data": data, "classes": None, "persistence": None}
    together["accuracy full"] = _mean([row["accuracy full"] for row in rows])
    for weight in WEIGHTS:
        by_seed = [geometric_mean(values) for (name, _), values in ratios.items() if name == weight]
        together[f"loss {weight}"] = geometric_mean(by_seed)
        together[f"error {weight}"] = standard_error(by_seed)
        together[f"accuracy {weight}"] = _mean([row[f"accuracy {weight}"] for row in rows])
    return [*rows, together]


def ratio(loss: float | None, full: float | None) -> float | None:
    """Return a loss against that of full; None where one of them diverged.

    >>> ratio(1.5, 1.0), ratio(None, 1.0)
    (1.5, None)
    """
    return None if loss is None or not full else loss / full


def geometric_mean(values: Sequence[float | None]) -> float | None:
    """Return the geometric mean; None where a value is missing.

    >>> geometric_mean([0.5, 2.0]), geometric_mean([1.0, None])
    (1.0, None)
    """
    known = [value for value in values if value]
    return math.exp(fmean(math.log(value) for value in known)) if known and len(known) == len(values) else None


def standard_error(values: Sequence[float | None]) -> float | None:
    """Return the standard error of a mean over seeds; None for a single seed.

    >>> standard_error([1.0, 1.0]), standard_error([1.0])
    (0.0, None)
    """
    known = [value for value in values if value is not None]
    return stdev(known) / math.sqrt(len(known)) if len(known) > 1 and len(known) == len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _table(data: str, rows: Sequence[Mapping[str, Any]], seeds: range, *, rounds: int, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled(f"Weights of partial late work, {data}, {DATA[data]}: final loss / that of full", quick=quick),
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption=f"10 workers, K=7, {rounds} rounds, seeds {seeds[0]} to {seeds[-1]}, bar {LOSS} over all; "
        "bold: the lowest of a row.",
    )
    table.add_column("classes, delay", no_wrap=True)
    for weight in WEIGHTS:
        table.add_column(f"loss\n{weight}", justify="right")
    for lane in ("full", *WEIGHTS):
        table.add_column(f"test acc.\n{lane}", justify="right")
    for row in rows:
        losses = {weight: row[f"loss {weight}"] for weight in WEIGHTS}
        least = min((value for value in losses.values() if value is not None), default=None)
        shown = [
            f"[bold]{LOSS.show(value)}[/]" if value is not None and value == least else LOSS.show(value)
            for value in losses.values()
        ]
        if row["classes"] is None:
            shown = [f"{text} {coloured(LOSS.verdict(losses[name]))}" for text, name in zip(shown, losses, strict=True)]
        accuracies = [row[f"accuracy {lane}"] for lane in ("full", *WEIGHTS)]
        name = "all" if row["classes"] is None else f"c = {row['classes']}, h = {row['persistence']}"
        table.add_row(name, *shown, *("-" if each is None else f"{100 * each:.1f} %" for each in accuracies))
    errors = [rows[-1].get(f"error {weight}") for weight in WEIGHTS]
    if all(error is not None for error in errors):
        table.add_row("± over seeds", *(f"{error:.3f}" for error in errors), "", "", "", "")
    return table
