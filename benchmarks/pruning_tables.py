"""The tables of `pruning`. Every policy is measured beside `none` over the seeds that both have run with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from rich import box
from rich.table import Table

from benchmarks.output import Bar, coloured, tables, titled
from benchmarks.pruning_cases import (
    FINE_PRUNING,
    MODELS,
    POLICIES,
    WHOLE,
    Ending,
    Endings,
    Size,
    Task,
    pruning_policies,
    seeds_of,
)
from paceline.reproduce.published import PRUNING_NETWORKS, PRUNING_TABLE_1, PRUNING_TABLE_2

# Li, He, Ren and Mao 2018, "Data Fine-Pruning: A Simple Way to Accelerate Neural Network Training", tables 1 and 2:
# time saved in per cent, accuracy of regular training, accuracy with pruning; CIFAR-10, 200 epochs.
PAPER = {
    name: (saved, regular, pruned)
    for name, saved, regular, pruned in zip(
        PRUNING_NETWORKS,
        PRUNING_TABLE_1["speedup"],
        PRUNING_TABLE_2["regular"],
        PRUNING_TABLE_2["pruned"],
        strict=True,
    )
}
IN_PAPER = {"lenet": "LeNet"}  # other networks are set beside the range of the other nine


@dataclass(frozen=True, kw_only=True)
class Goal:
    """So much is saved at so many points."""

    saved: Bar
    behind: Bar


FINE_GOAL = Goal(saved=Bar(sign=">=", limit=14.0, style=".1f"), behind=Bar(sign="<=", limit=0.4, style="+.2f"))
BEST_GOAL = Goal(saved=Bar(sign=">=", limit=30.0, style=".1f"), behind=Bar(sign="<=", limit=0.3, style="+.2f"))


# -- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A mean over seeds, and the standard deviation (None with one seed)."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value for each seed.

        >>> Spread.of([1.0, 3.0])
        Spread(mean=2.0, deviation=1.4142135623730951)
        """
        return cls(mean=fmean(values), deviation=stdev(values) if len(values) > 1 else None)

    def show(self, style: str = ".2f") -> str:
        """With the deviation behind it, if there is one.

        >>> Spread(mean=2, deviation=0.5).show("+.1f")
        '+2.0 ±0.50'
        """
        return f"{self.mean:{style}}" + ("" if self.deviation is None else f" ±{self.deviation:.2f}")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A policy beside `none`, over the seeds that both have; shares are per cent, differences points."""

    policy: str
    seeds: int
    samples_saved: float
    cpu_saved: float
    wall_saved: float
    sampling_ms: float  # CPU time per epoch of taking batches and making one loss of many
    accuracy: Spread
    behind: Spread
    best_three: Spread
    best_behind: Spread


def row_of(endings: Endings, model: str, policy: str) -> Row | None:
    """The figures of a policy; None where it has no seed in common with `none`."""
    seeds = seeds_of(endings, model, [WHOLE, policy])
    if not seeds:
        return None
    own = [endings[Task(model=model, policy=policy, seed=seed)] for seed in seeds]
    base = [endings[Task(model=model, policy=WHOLE, seed=seed)] for seed in seeds]

    def saved(what: Callable[[Ending], float]) -> float:
        return 100 * (1 - sum(map(what, own)) / sum(map(what, base)))

    def behind(what: Callable[[Ending], float]) -> Spread:
        return Spread.of([what(theirs) - what(ours) for ours, theirs in zip(own, base, strict=True)])

    return Row(
        policy=policy,
        seeds=len(seeds),
        samples_saved=saved(lambda ending: ending.samples),
        cpu_saved=saved(lambda ending: ending.cpu_seconds),
        wall_saved=saved(lambda ending: ending.wall_seconds),
        sampling_ms=1000 * fmean(ending.sampling_seconds / len(ending.accuracies) for ending in own),
        accuracy=Spread.of([ending.accuracy for ending in own]),
        behind=behind(lambda ending: ending.accuracy),
        best_three=Spread.of([ending.best_three for ending in own]),
        best_behind=behind(lambda ending: ending.best_three),
    )


def rows_of(endings: Endings, model: str) -> list[Row]:
    """Every policy that has run."""
    return [row for policy in POLICIES if (row := row_of(endings, model, policy)) is not None]


def best_of(rows: Sequence[Row]) -> Row | None:
    """Of the policies that prune and hold the accuracy, the one that saves most samples; else who loses least."""
    pruning = [row for row in rows if row.policy in pruning_policies()]
    holding = [row for row in pruning if BEST_GOAL.behind.verdict(row.behind.mean) == "PASS"]
    if holding:
        return max(holding, key=lambda row: row.samples_saved)
    return min(pruning, key=lambda row: row.behind.mean, default=None)


def verdicts(endings: Endings, model: str) -> list[tuple[str, Bar, float | None]]:
    """What is measured against the goals: samples and CPU time saved, and points behind `none`."""
    rows = rows_of(endings, model)
    fine = next((row for row in rows if row.policy == FINE_PRUNING), None)
    best = best_of(rows)
    found: list[tuple[str, Bar, float | None]] = []
    best_name = f"best ({POLICIES[best.policy].label if best else '-'})"
    named = ((FINE_PRUNING, fine, FINE_GOAL), (best_name, best, BEST_GOAL))
    for name, row, goal in named:
        found += [
            (f"{name}: samples saved, %", goal.saved, row.samples_saved if row else None),
            (f"{name}: CPU time saved, %", goal.saved, row.cpu_saved if row else None),
            (f"{name}: behind none, points", goal.behind, row.behind.mean if row else None),
        ]
    return found


def paper_row(model: str) -> tuple[str, str, str, str]:
    """What the paper has for the network, or for the nine that are not ours: name, time saved, accuracy, behind.

    >>> paper_row("lenet")
    ('the paper, LeNet', '11.80', '74.72', '+0.43')
    >>> paper_row("small-cnn")
    ('the paper, 9 others', '7.40-14.29', '91.16-94.71', '+0.01 to +0.37')
    """
    name = IN_PAPER.get(model)
    if name:
        saved, regular, pruned = PAPER[name]
        return f"the paper, {name}", f"{saved:.2f}", f"{pruned:.2f}", f"{regular - pruned:+.2f}"
    others = [figures for each, figures in PAPER.items() if each not in IN_PAPER.values()]
    behind = [regular - pruned for _, regular, pruned in others]
    return (
        f"the paper, {len(others)} others",
        f"{min(saved for saved, _, _ in others):.2f}-{max(saved for saved, _, _ in others):.2f}",
        f"{min(pruned for _, _, pruned in others):.2f}-{max(pruned for _, _, pruned in others):.2f}",
        f"{min(behind):+.2f} to {max(behind):+.2f}",
    )


# -- tables ----------------------------------------------------------------------------------------------------------


def show(size: Size, endings: Endings, *, quick: bool) -> None:
    """Two tables and the verdicts for each network that has run."""
    console = tables()
    for model in MODELS:
        if any(task.model == model for task in endings):
            console.print(_savings(size, endings, model, quick=quick))
            console.print(_accuracies(endings, model))
            console.print(_verdicts(endings, model))
    console.print("The paper: Li, He, Ren and Mao 2018, tables 1 and 2. CIFAR-10 at 32x32, 200 epochs.", soft_wrap=True)


def task_line(task: Task, ending: Ending) -> str:
    """One line about a run that is there."""
    return (
        f"{task.model:9}  {POLICIES[task.policy].label:18}  seed {task.seed}   {ending.accuracy:.2f} %   "
        f"{ending.samples:,} samples   {ending.cpu_seconds:.1f} s CPU   {ending.wall_seconds:.1f} s"
    )


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption or None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def _savings(size: Size, endings: Endings, model: str, *, quick: bool) -> Table:
    table = _table(
        titled(f"{model} on {size.data}, {size.epochs} epoch(s) of {size.images:,} images: saved", quick=quick),
        "Beside none, over the seeds that both have. Time is of training, not of tests.\n"
        "sampling: CPU time per epoch to take batches and make one loss of many.",
        ("policy", "seeds", "samples %", "CPU time %", "wall time %", "sampling, ms"),
    )
    for row in rows_of(endings, model):
        saved = [f"{each:.2f}" for each in (row.samples_saved, row.cpu_saved, row.wall_saved)]
        table.add_row(POLICIES[row.policy].label, str(row.seeds), *saved, f"{row.sampling_ms:.1f}")
    name, saved_time, _, _ = paper_row(model)
    table.add_row(name, "", "", "", saved_time, "")
    return table


def _accuracies(endings: Endings, model: str) -> Table:
    table = _table(
        f"{model}: test accuracy",
        "accuracy: mean of the last three epochs. best three: the paper's way.\n"
        "behind: none with the same seed, in points; below 0 is ahead.\n"
        "±: standard deviation over seeds.",
        ("policy", "accuracy", "behind none", "best three", "behind none"),
    )
    for row in rows_of(endings, model):
        own = row.policy != WHOLE
        table.add_row(
            POLICIES[row.policy].label,
            row.accuracy.show(),
            row.behind.show("+.2f") if own else "",
            row.best_three.show(),
            row.best_behind.show("+.2f") if own else "",
        )
    name, _, accuracy, behind = paper_row(model)
    table.add_row(name, "", "", accuracy, behind)
    return table


def _verdicts(endings: Endings, model: str) -> Table:
    table = _table("", "", (f"{model}: figure", "measured", "bar", "verdict"))
    for name, bar, found in verdicts(endings, model):
        table.add_row(name, bar.show(found), str(bar), coloured(bar.verdict(found)))
    return table
