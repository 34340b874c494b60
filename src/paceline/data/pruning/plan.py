"""What a run will save, before it runs: which epochs are pruned, and how many samples and steps fall away.

Fine-pruning is known exactly: the schedule says which epochs are pruned, and in each as many samples sit out. (Except
that an epoch is not pruned if nobody has been counted in its window: no loss was above its batch's mean by the
tolerance.) The paper's own formulas stand beside it; `estimated_n_prune` says where they differ.

InfoBatch is known as a limit: who sits out is drawn from those below the mean loss. All but one sample can be, so on
average over the lots at most ratio * (samples - 1) sit out. Losses spread evenly around their mean make it half that.

    epochs 1 ... 8              . . . # # . . #
    samples of each             9 9 9 6 6 9 9 6
    steps, batches of 4         3 3 3 2 2 3 3 2       saved: 9 of 72 samples, 3 of 24 steps

A run is drawn as a row for every window, a cell for every epoch (the paper's figure 3, in plain text):

    epochs  start  0         10
      1-11      6   ░░░░░··██··              ░ whole, before the starting point of its window
     12-23      3  ░░░·██··██··              · whole, after it        █ pruned

Rows too long for a line go on in the next ones. Windows of more than four lines are scaled to one: a cell is then
several epochs, and is drawn as pruned if one of them is. Of many windows the first ones and the last are drawn.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.data.pruning import PruningSettings, make_policy
from paceline.data.pruning.fine_pruning import (
    SECONDS,
    FinePolicy,
    FineSchedule,
    PruningTimes,
    estimate_remarks,
    estimated_n_prune,
)
from paceline.data.pruning.info_batch import InfoPolicy
from paceline.data.pruning.policy import MOST_SAMPLES, count_steps
from paceline.quantities import calendar_text, exact_count_text
from paceline.terminal import paragraphs, ruler, text_table

MOST_EPOCHS = 1_000_000
BEFORE, WHOLE, PRUNED = "-", ".", "#"  # as they are drawn where there is only ASCII
IN_BLOCKS = str.maketrans({BEFORE: "░", WHOLE: "·", PRUNED: "█"})
MOST_WRAPPED = 4
MOST_LINES = 24
LEAST_WIDTH = 40
TICK = 10
ONE_LENGTH = "The paper's formulas know windows of one length only."
BEFORE_THE_START, NO_LOSS_YET = "before the starting point of its window", "before any loss is known"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRow:
    """A window of the picture: a mark for every epoch from `first` on. `skipped` are the cells before its first epoch.

    >>> row = WindowRow(first=1, cells="----##", start=5, skipped=1)
    >>> row.last, row.epochs, WindowRow(first=3, cells=".").epochs
    (6, '1-6', '3')
    """

    first: int
    cells: str
    start: int | None = None
    skipped: int = 0

    @property
    def last(self) -> int:
        """The last epoch of the row."""
        return self.first + len(self.cells) - 1

    @property
    def epochs(self) -> str:
        """The first and the last epoch as text."""
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class PruningPlan:
    """The epochs of a run that are pruned, and what that saves.

    `times` are exact, or the most that can be saved if `exact` is false; `paper` are those of the paper's formulas (3)
    and (4), where there are any, and `remarks` say why they may differ. Samples of a last batch that is dropped count
    neither as trained on nor as saved. A last batch of `joined` samples or fewer is part of the one before it.

    >>> schedule = FineSchedule(window=12, starting_point=6, attenuation=2, block=4, count=2, prune=0.3)
    >>> plan = plan_fine(schedule, 1000, epochs=24, batch_size=100)
    >>> plan.pruned_epochs, plan.samples_saved, plan.steps_saved, plan.share_saved
    ((8, 9, 16, 17, 20, 21), 1800, 18, 0.075)
    >>> plan.times.t_save, plan.paper.t_save
    (18.0, 24.0)
    """

    policy: str
    exact: bool
    samples: int
    epochs: int
    batch_size: int
    drop_last: bool
    joined: int
    prune_num: int
    pruned_epochs: tuple[int, ...]
    rows: tuple[WindowRow, ...]
    times: PruningTimes
    paper: PruningTimes | None = None
    remarks: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[int, int]:
        """The samples and batches of an epoch that is not pruned.

        >>> plan_info(100, epochs=8, ratio=0.5, delta=0.5, batch_size=16).whole
        (100, 7)
        """
        return _trained(self.samples, self.batch_size, drop_last=self.drop_last, joined=self.joined)

    @property
    def pruned(self) -> tuple[int, int]:
        """The samples and batches of a pruned epoch.

        >>> plan_info(101, epochs=8, ratio=0.5, delta=0.5, batch_size=16).pruned
        (51, 4)
        """
        return _trained(self.samples - self.prune_num, self.batch_size, drop_last=self.drop_last, joined=self.joined)

    @property
    def epoch_samples(self) -> list[int]:
        """The samples of every epoch, the first epoch first.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).epoch_samples
        [101, 51, 51, 101]
        """
        return self._of_every_epoch(self.whole[0], self.pruned[0])

    @property
    def epoch_batches(self) -> list[int]:
        """The batches of every epoch, the first epoch first.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).epoch_batches
        [7, 4, 4, 7]
        """
        return self._of_every_epoch(self.whole[1], self.pruned[1])

    @property
    def most_batches(self) -> int:
        """The most batches that all epochs can have: the number of steps for a scheduler of the learning rate.

        It is exact for fine-pruning. Nobody knows beforehand how many samples InfoBatch leaves out, if any.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).most_batches
        28
        """
        return sum(self.epoch_batches) if self.exact else self.epochs * self.whole[1]

    @property
    def least_batches(self) -> int:
        """The fewest batches to expect of all epochs; a scheduler that is given so many may end early.

        It is exact for fine-pruning, and for InfoBatch the mean over its lots where every sample but one is easy.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).least_batches
        22
        """
        return sum(self.epoch_batches)

    @property
    def total_batches(self) -> int:
        """The old name of `least_batches`."""
        warnings.warn(
            "total_batches is called least_batches now, and a scheduler wants most_batches; the old name goes with the "
            "next release",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.least_batches

    @property
    def samples_saved(self) -> int:
        """The number of samples by which less is trained.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).samples_saved
        100
        """
        return len(self.pruned_epochs) * (self.whole[0] - self.pruned[0])

    @property
    def steps_saved(self) -> int:
        """The number of steps that are saved.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).steps_saved
        6
        """
        return len(self.pruned_epochs) * (self.whole[1] - self.pruned[1])

    @property
    def share_saved(self) -> float:
        """The samples saved as a share of all.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).share_saved == 100 / 404
        True
        """
        return self.samples_saved / (self.epochs * self.whole[0])

    def text(self, *, width: int = 80, ascii_only: bool = False) -> str:
        """Return the picture, the totals and the formulas as text for a terminal.

        >>> print(plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).text(ascii_only=True))
        info-batch prunes 2 of 4 epochs (2 to 3): on average at most 24.8% of the
        samples are saved.
        ...
        """
        before = NO_LOSS_YET if self.rows[0].start is None else BEFORE_THE_START
        return paragraphs(
            [
                textwrap.wrap(_headline(self), width),
                draw_windows(self.rows, width=width, ascii_only=ascii_only, before=before),
                textwrap.wrap(_epochs(self), width),
                _table(self),
                [line for remark in self.remarks for line in textwrap.wrap(remark, width)],
            ]
        )

    def __str__(self) -> str:
        return self.text()

    def document(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).document()["pruned_epochs"]
        [2, 3]
        """
        named = ("samples", "batches")
        return {
            "policy": self.policy,
            "exact": self.exact,
            "samples": self.samples,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "prune_num": self.prune_num,
            "pruned_epochs": list(self.pruned_epochs),
            "whole_epoch": dict(zip(named, self.whole, strict=True)),
            "pruned_epoch": dict(zip(named, self.pruned, strict=True)),
            "saved": {"samples": self.samples_saved, "steps": self.steps_saved, "share": self.share_saved},
            "windows": [{"first": row.first, "last": row.last, "starting_point": row.start} for row in self.rows],
            "times": asdict(self.times),
            "paper": None if self.paper is None else asdict(self.paper) | {"remarks": list(self.remarks)},
        }

    def _of_every_epoch(self, whole: int, pruned: int) -> list[int]:
        values = [whole] * self.epochs
        for epoch in self.pruned_epochs:
            values[epoch - 1] = pruned
        return values


def plan_fine(
    schedule: FineSchedule,
    samples: int,
    *,
    epochs: int,
    batch_size: int,
    drop_last: bool = False,
    joined: int | None = None,
    overhead_seconds: float | None = None,
    batch_seconds: float | None = None,
) -> PruningPlan:
    """Return the plan of fine-pruning. `overhead_seconds` is what pruning itself costs in a pruned epoch.

    >>> plan = plan_fine(FineSchedule(prune=0.3), 50_000, epochs=200, batch_size=128)
    >>> len(plan.pruned_epochs), plan.paper.n_prune, plan.whole, plan.pruned
    (71, 48, (50000, 391), (35000, 274))
    """
    _check(samples, epochs=epochs, batch_size=batch_size, drop_last=drop_last)
    joined = min(1, batch_size - 1) if joined is None else joined
    _check_times(overhead_seconds, batch_seconds)
    prune_num = schedule.prune_num(samples)
    rows = tuple(_windows(schedule if prune_num else replace(schedule, count=0), epochs))

    def times(n_prune: int) -> PruningTimes:
        return PruningTimes.of(
            n=epochs,
            n_prune=n_prune,
            b=_trained(samples, batch_size, drop_last=drop_last, joined=joined)[1],
            b_of_pruned=_trained(samples - prune_num, batch_size, drop_last=drop_last, joined=joined)[1],
            T=batch_seconds,
            t_0=overhead_seconds or 0.0,
        )

    return PruningPlan(
        policy="fine-pruning",
        exact=True,
        samples=samples,
        epochs=epochs,
        batch_size=batch_size,
        drop_last=drop_last,
        joined=joined,
        prune_num=prune_num,
        pruned_epochs=_pruned_in(rows),
        rows=rows,
        times=times(len(_pruned_in(rows))),
        paper=None if schedule.window_at else times(estimated_n_prune(schedule, epochs)),
        remarks=(ONE_LENGTH,) if schedule.window_at else estimate_remarks(schedule, epochs),
    )


def plan_info(
    samples: int, *, epochs: int, ratio: float, delta: float, batch_size: int, drop_last: bool = False,
    joined: int | None = None, batch_seconds: float | None = None,
) -> PruningPlan:  # fmt: skip
    """Return the plan of InfoBatch: the most that it saves, on average over its lots.

    >>> plan = plan_info(50_000, epochs=200, ratio=0.5, delta=0.875, batch_size=128)
    >>> plan.pruned_epochs[0], plan.pruned_epochs[-1], plan.prune_num, plan.exact
    (2, 175, 24999, False)
    """
    _check(samples, epochs=epochs, batch_size=batch_size, drop_last=drop_last)
    joined = min(1, batch_size - 1) if joined is None else joined
    _check_times(None, batch_seconds)
    InfoPolicy(1, ratio=ratio, delta=delta)  # refuses bad values
    prune_num = math.floor(ratio * (samples - 1))
    cells = [
        BEFORE if epoch == 1 else PRUNED if prune_num and (epoch - 1) / epochs < delta else WHOLE
        for epoch in range(1, epochs + 1)
    ]
    rows = (WindowRow(first=1, cells="".join(cells), skipped=1),)
    pruned = _pruned_in(rows)
    return PruningPlan(
        policy="info-batch",
        exact=False,
        samples=samples,
        epochs=epochs,
        batch_size=batch_size,
        drop_last=drop_last,
        joined=joined,
        prune_num=prune_num,
        pruned_epochs=pruned,
        rows=rows,
        times=PruningTimes.of(
            n=epochs,
            n_prune=len(pruned),
            b=_trained(samples, batch_size, drop_last=drop_last, joined=joined)[1],
            b_of_pruned=_trained(samples - prune_num, batch_size, drop_last=drop_last, joined=joined)[1],
            T=batch_seconds,
        ),
    )


def most_samples(settings: PruningSettings, shards: Sequence[int], *, passes: int) -> list[int]:
    """Return how many samples so many passes over each shard meet at most.

    It is exact for fine-pruning, unless a pass is whole because nobody was counted. Nobody knows beforehand how many
    samples InfoBatch leaves out.

    >>> settings = PruningSettings(name="fine-pruning", window=12, starting_point=6, prune=0.3)
    >>> most_samples(settings, [1000, 10], passes=24)  # 6 of 24 passes are pruned
    [22200, 222]
    """
    if settings.name != FinePolicy.name:
        return [passes * samples for samples in shards]
    policy = make_policy(settings, 1, seed=0)
    schedule = policy.schedule if isinstance(policy, FinePolicy) else FineSchedule()
    pruned = sum(map(schedule.is_pruned, range(1, passes + 1)))
    return [passes * samples - pruned * schedule.prune_num(samples) for samples in shards]


def _windows(schedule: FineSchedule, epochs: int) -> list[WindowRow]:
    """Return the rows of the picture. A window has one starting point, found once and not for each epoch."""
    rows = []
    for number in range(schedule.window_of(epochs) + 1):
        begins = schedule.window_start(number)
        first, last = max(1, begins), int(min(epochs, begins + schedule.window_length(number) - 1))
        if first > last:  # a window of one epoch begins with epoch 0
            continue
        start = schedule.starts_at(first)
        here = replace(schedule, starting_point=start, attenuation=1)
        cells = [
            PRUNED if here.is_pruned(epoch) else BEFORE if epoch - begins < start else WHOLE
            for epoch in range(first, last + 1)
        ]
        rows.append(WindowRow(first=first, cells="".join(cells), start=start, skipped=first - begins))
    return rows


def _pruned_in(rows: Sequence[WindowRow]) -> tuple[int, ...]:
    return tuple(row.first + place for row in rows for place, mark in enumerate(row.cells) if mark == PRUNED)


def _trained(samples: int, batch_size: int, *, drop_last: bool, joined: int) -> tuple[int, int]:
    """Return how many samples are trained on, and in how many batches."""
    steps = count_steps(samples, batch_size, drop_last=drop_last, joined=joined)
    return steps * batch_size if drop_last else samples, steps


def _check(samples: int, *, epochs: int, batch_size: int, drop_last: bool) -> None:
    if not 1 <= samples <= MOST_SAMPLES:
        raise ValueError(f"samples must be between 1 and {MOST_SAMPLES:,} (samples={samples})")
    if not 1 <= epochs <= MOST_EPOCHS:
        raise ValueError(f"epochs must be between 1 and {MOST_EPOCHS:,} (epochs={epochs})")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1 (batch_size={batch_size})")
    if drop_last and batch_size > samples:
        raise ValueError(
            f"batch_size must be at most samples if the last batch is dropped (batch_size={batch_size}, "
            f"samples={samples})"
        )


def _check_times(overhead_seconds: float | None, batch_seconds: float | None) -> None:
    if batch_seconds is not None and not 0 < batch_seconds < math.inf:
        raise ValueError(f"batch_seconds must be above 0 and finite (batch_seconds={batch_seconds})")
    if overhead_seconds is None:
        return
    if not 0 <= overhead_seconds < math.inf:
        raise ValueError(f"overhead_seconds must be at least 0 and finite (overhead_seconds={overhead_seconds})")
    if batch_seconds is None:
        raise ValueError(f"overhead_seconds needs batch_seconds beside it (overhead_seconds={overhead_seconds})")


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_windows(
    rows: Sequence[WindowRow], *, width: int = 80, ascii_only: bool = False, before: str = BEFORE_THE_START
) -> list[str]:
    """Return the lines of the picture: a ruler, the rows and a legend, in which `before` describes the first mark.

    >>> rows = [WindowRow(first=1, cells="-----..##..", start=6, skipped=1)]
    >>> rows.append(WindowRow(first=12, cells="---.##..##..", start=3))
    >>> print("\\n".join(draw_windows(rows, ascii_only=True)))
      epochs  start  0         10
        1-11      6   -----..##..
       12-23      3  ---.##..##..
    <BLANKLINE>
      # pruned   . whole   - whole, before the starting point of its window
    """
    if width < LEAST_WIDTH:
        raise ValueError(f"width must be at least {LEAST_WIDTH} columns (width={width})")
    label = max(len("epochs"), *(len(row.epochs) for row in rows))
    starts = any(row.start is not None for row in rows)
    prefix = 2 + label + (7 if starts else 0) + 2
    longest, room = max(row.skipped + len(row.cells) for row in rows), width - prefix
    per_line = longest if longest <= room else room // TICK * TICK
    lines_of_a_row = math.ceil(longest / per_line)
    scale = 1 if lines_of_a_row <= MOST_WRAPPED else math.ceil(longest / per_line)
    numbers = ruler(min(longest, per_line), step=TICK, scale=scale)
    lines = [f"  {'epochs':>{label}}{'  start' if starts else ''}  {numbers}".rstrip()]
    shown = _shown(rows, 1 if scale > 1 else lines_of_a_row)
    for row in shown:
        lines += _lines(row, label, starts=starts, per_line=per_line, scale=scale)
    if len(shown) < len(rows):
        lines.insert(-1, f"  {'...':>{label}}".ljust(prefix) + f"{len(rows) - len(shown):,} more windows")
    if not ascii_only:
        lines = [line[:prefix] + line[prefix:].translate(IN_BLOCKS) for line in lines]  # not the - of "12-23"
    return [*lines, "", *_legend(scale, before, ascii_only=ascii_only)]


def _shown(rows: Sequence[WindowRow], lines_of_a_row: int) -> Sequence[WindowRow]:
    """Return all rows, or the first ones and the last."""
    most = max(3, MOST_LINES // lines_of_a_row)
    return rows if len(rows) <= most else [*rows[: most - 1], rows[-1]]


def _lines(row: WindowRow, label: int, *, starts: bool, per_line: int, scale: int) -> list[str]:
    cells = " " * row.skipped + row.cells
    if scale > 1:
        cells = "".join(_common_mark(cells[place : place + scale]) for place in range(0, len(cells), scale))
    lines = []
    for place in range(0, len(cells), per_line):
        name = f"+{place}" if place else row.epochs
        start = f"  {'' if place or row.start is None else row.start:>5}" if starts else ""
        lines.append(f"  {name:>{label}}{start}  {cells[place : place + per_line]}")
    return lines


def _common_mark(cells: str) -> str:
    """Return the mark for several epochs.

    >>> _common_mark(" -.."), _common_mark("-.#.")
    ('.', '#')
    """
    return next(mark for mark in (PRUNED, WHOLE, BEFORE, " ") if mark in cells)


def _legend(scale: int, before: str, *, ascii_only: bool) -> list[str]:
    pruned, whole, early = (mark if ascii_only else mark.translate(IN_BLOCKS) for mark in (PRUNED, WHOLE, BEFORE))
    if scale == 1:
        return [f"  {pruned} pruned   {whole} whole   {early} whole, {before}"]
    cell = f"  A cell is {scale:,} epochs: "
    return [f"{cell}{pruned} some pruned   {whole} whole   {early} whole,", f"{'':{len(cell)}}{before}"]


# -- the words ---------------------------------------------------------------------------------------------------------


def _headline(plan: PruningPlan) -> str:
    pruned = len(plan.pruned_epochs)
    which = f"{pruned:,} of {plan.epochs:,} epochs"
    if pruned and pruned == plan.pruned_epochs[-1] - plan.pruned_epochs[0] + 1:
        which += f" ({plan.pruned_epochs[0]:,} to {plan.pruned_epochs[-1]:,})"
    most = "" if plan.exact else "on average at most "
    saved = f"{most}{plan.share_saved:.1%} of the samples are saved" if pruned else "nothing is saved"
    return f"{plan.policy} prunes {which}: {saved}."


def _epochs(plan: PruningPlan) -> str:
    samples, batches = plan.whole
    whole = f"A whole epoch has {samples:,} samples in {batches:,} {'batch' if batches == 1 else 'batches'}"
    if not plan.pruned_epochs:
        return f"{whole}."
    fewer, in_batches = plan.pruned
    if plan.exact:
        return f"{whole}, a pruned one {fewer:,} in {in_batches:,}."
    return (
        f"{whole}, a pruned one on average at least {fewer:,} in {in_batches:,}. How many it really has depends on the "
        "losses: the fewer of them are below their mean, the more."
    )


def _table(plan: PruningPlan) -> list[str]:
    """Return the figures with the paper's symbols; those of the formulas in a second column, where there are any."""
    columns = [plan.times] if plan.paper is None else [plan.times, plan.paper]
    heads = ["exact" if plan.exact else "at best", "formulas"][: len(columns)]
    total, saved = plan.epochs * plan.whole[0], plan.whole[0] - plan.pruned[0]
    unit, time = ("time", calendar_text) if plan.times.unit == SECONDS else ("batches", exact_count_text)
    figures: list[tuple[str, str, Callable[[PruningTimes], str]]] = [
        ("pruned epochs", "n_prune", lambda times: exact_count_text(times.n_prune)),
        ("samples in all", "", lambda times: exact_count_text(total - times.n_prune * saved)),
        ("  share saved", "", lambda times: f"{times.n_prune * saved / total:.2%}"),
        ("batches per epoch", "b_prune", lambda times: f"{times.b_prune:,.1f}"),
        (f"{unit} without pruning", "t_regular", lambda times: time(times.t_regular)),
        (f"{unit} with pruning", "t_prune", lambda times: time(times.t_prune)),
        (f"{unit} saved", "t_save", lambda times: time(times.t_save)),
        ("  share saved", "", lambda times: f"{times.t_save / times.t_regular:.2%}"),
    ]
    rows = [(name, symbol if plan.paper else "", *map(text, columns)) for name, symbol, text in figures]
    wide = max(12, *(len(cell) for row in rows for cell in row[2:]))
    least = (23, 9, *[wide] * len(columns))
    return text_table([("", "", *heads), *rows], align="<<" + ">" * len(columns), least=least, indent=2)
