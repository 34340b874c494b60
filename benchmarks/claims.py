"""The paper's claims about late gradients, at paceline's default recipe.

(a) Three classes per worker: lgc needs much less time than full for the same rounds, and ends at the same loss.
(b) One class per worker, delays that last: fastest-k never hears of some classes and ends at a much worse loss;
    lgc does not.

A loss is compared as the mean over seeds against the mean over seeds of full's. The bars are for late work that
comes whole, as in the paper. Under `partial` a late worker stops at the next block, and its work weighs by its samples.
Those rows are shown for information, their verdicts in brackets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.pool import run_all
from paceline.recipes import Recipe
from paceline.runs import Race

LateWork: TypeAlias = Literal["complete", "partial"]

STRATEGIES = ("full", "fastest-k", "lgc")
SEEDS = 3
QUICK_ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How unequal the workers' data is, and for how long a slow worker stays slow."""

    classes_per_worker: int
    persistence: int

    def __str__(self) -> str:
        return f"non-IID({self.classes_per_worker}), persistence {self.persistence}"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One race: a setting, what becomes of late work, and a seed."""

    setting: Setting
    late_work: LateWork
    seed: int
    rounds: int | None

    def recipe(self) -> Recipe:
        """The default recipe with what the task changes."""
        base = Recipe(seed=self.seed)
        return dataclasses.replace(
            base,
            rounds=self.rounds or base.rounds,
            data=dataclasses.replace(base.data, classes_per_worker=self.setting.classes_per_worker),
            delay=dataclasses.replace(base.delay, persistence=self.setting.persistence),
            cluster=dataclasses.replace(base.cluster, late_work=self.late_work),
        )


@dataclass(frozen=True, kw_only=True)
class Finish:
    """How a strategy ended, over the seeds; a loss is None where one of them diverged."""

    seconds: float
    loss: float | None


Finishes: TypeAlias = dict[str, Finish]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A figure made of the finishes of all strategies, and what it must come to."""

    setting: Setting
    figure: str
    bar: Bar
    value: Callable[[Finishes], float | None]


def time_saved(finishes: Finishes) -> float | None:
    """The share of full's time that lgc does not need."""
    return 1 - finishes["lgc"].seconds / finishes["full"].seconds


def loss_ratio(strategy: str) -> Callable[[Finishes], float | None]:
    """A strategy's final loss against full's."""

    def value(finishes: Finishes) -> float | None:
        loss, full = finishes[strategy].loss, finishes["full"].loss
        return None if loss is None or full is None else loss / full

    return value


COMMON = Setting(classes_per_worker=3, persistence=10)
HARD = Setting(classes_per_worker=1, persistence=50)
CLAIMS = (
    Claim(setting=COMMON, figure="time saved by lgc", bar=Bar(sign=">=", limit=0.30, style=".1%"), value=time_saved),
    Claim(
        setting=COMMON,
        figure="loss, lgc / full",
        bar=Bar(sign="<=", limit=1.03, style=".3f"),
        value=loss_ratio("lgc"),
    ),
    Claim(
        setting=HARD,
        figure="loss, fastest-k / full",
        bar=Bar(sign=">=", limit=1.5, style=".3f"),
        value=loss_ratio("fastest-k"),
    ),
    Claim(
        setting=HARD,
        figure="loss, lgc / full",
        bar=Bar(sign="<=", limit=1.05, style=".3f"),
        value=loss_ratio("lgc"),
    ),
)


def race(task: Task) -> dict[str, dict[str, float | None]]:
    """Run all strategies on one task; the time and final loss of each."""
    contest = Race(task.recipe(), strategies=STRATEGIES)
    for _ in contest:
        pass
    return {result.strategy: {"seconds": result.seconds, "loss": result.loss} for result in contest.results}


def run(options: Options) -> None:
    """`python -m benchmarks claims`."""
    seeds = options.seeds or (1 if options.quick else SEEDS)
    tasks = [
        Task(setting=setting, late_work=late_work, seed=seed, rounds=QUICK_ROUNDS if options.quick else None)
        for late_work in ("complete", "partial")
        for setting in (COMMON, HARD)
        for seed in range(seeds)
    ]
    outcomes = run_all(race, tasks, label="claims: races")
    rows = _rows(tasks, outcomes)
    tables().print(_table(rows, seeds, tasks[0].recipe(), quick=options.quick))
    runs = [dataclasses.asdict(task) | {"ends": ends} for task, ends in zip(tasks, outcomes, strict=True)]
    save(options, "claims", {"rows": rows, "runs": runs})


def _rows(
    tasks: Sequence[Task], outcomes: Sequence[dict[str, dict[str, float | None]]]
) -> list[dict[str, str | float | None]]:
    rows: list[dict[str, str | float | None]] = []
    for late_work in ("complete", "partial"):
        for claim in CLAIMS:
            same = [
                ends
                for task, ends in zip(tasks, outcomes, strict=True)
                if task.late_work == late_work and task.setting == claim.setting
            ]
            finishes = {name: _finish([ends[name] for ends in same]) for name in STRATEGIES}
            value = claim.value(finishes)
            verdict = claim.bar.verdict(value)
            rows.append(
                {
                    "late_work": late_work,
                    "setting": str(claim.setting),
                    "figure": claim.figure,
                    "value": value,
                    "shown": claim.bar.show(value),
                    "bar": str(claim.bar),
                    "verdict": verdict if late_work == "complete" else f"({verdict})",
                }
            )
    return rows


def _finish(ends: Sequence[dict[str, float | None]]) -> Finish:
    losses = [end["loss"] for end in ends if end["loss"] is not None]
    whole = len(losses) == len(ends)
    return Finish(
        seconds=sum(end["seconds"] or 0.0 for end in ends) / len(ends),
        loss=sum(losses) / len(losses) if whole else None,
    )


def _table(rows: Sequence[dict[str, str | float | None]], seeds: int, recipe: Recipe, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("The paper's claims (loss: at the end)", quick=quick),
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption=f"{recipe.data.name}, {recipe.model.name}, {recipe.cluster.workers} workers, K={recipe.k}, "
        f"{recipe.rounds} rounds; means over {seeds} seed(s). In brackets: for information.",
    )
    for name in ("late work", "setting", "figure"):
        table.add_column(name)
    for name in ("measured", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            *(str(row[name]) for name in ("late_work", "setting", "figure", "shown", "bar")),
            coloured(str(row["verdict"])),
        )
    return table
