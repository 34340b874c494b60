"""What a run will save, before it runs: which epochs are pruned, and how many samples and steps fall away.

Fine-pruning is known exactly: the schedule says which epochs are pruned, and in each as many samples sit out. (Except
that an epoch is not pruned if nobody has been counted in its window: no loss was above its batch's mean by the
tolerance.) The paper's own formulas stand beside it; `formulas.py` says where they differ.

InfoBatch is known as a limit: who sits out is drawn from those below the mean loss. All but one sample can be, so on
average over the lots at most ratio * (samples - 1) sit out. Losses spread evenly around their mean make it half that.

    epochs 1 ... 8              . . . # # . . #
    samples of each             9 9 9 6 6 9 9 6
    steps, batches of 4         3 3 3 2 2 3 3 2       saved: 9 of 72 samples, 3 of 24 steps
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.data.pruning.dealing import Dealing
from paceline.data.pruning.formulas import Times, n_prune, remarks
from paceline.data.pruning.info_policy import InfoPolicy
from paceline.data.pruning.picture import BEFORE, PRUNED, WHOLE, Row
from paceline.data.pruning.plan_text import describe
from paceline.data.pruning.policy import MOST_SAMPLES
from paceline.data.pruning.schedule import FineSchedule

MOST_EPOCHS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which epochs of a run are pruned, and what that saves.

    `times` are exact, or the most that can be saved if `exact` is false; `paper` are those of the paper's formulas (3)
    and (4), where there are any, and `remarks` say why they may differ. Samples of a last batch that is dropped count
    neither as trained on nor as saved.

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
    prune_num: int
    pruned_epochs: tuple[int, ...]
    rows: tuple[Row, ...]
    times: Times
    paper: Times | None = None
    remarks: tuple[str, ...] = ()

    @property
    def whole(self) -> tuple[int, int]:
        """Samples and batches of an epoch that is not pruned.

        >>> plan_info(100, epochs=8, ratio=0.5, delta=0.5, batch_size=16).whole
        (100, 7)
        """
        return _trained(self.samples, self.batch_size, drop_last=self.drop_last)

    @property
    def pruned(self) -> tuple[int, int]:
        """Samples and batches of a pruned epoch.

        >>> plan_info(101, epochs=8, ratio=0.5, delta=0.5, batch_size=16).pruned
        (51, 4)
        """
        return _trained(self.samples - self.prune_num, self.batch_size, drop_last=self.drop_last)

    @property
    def epoch_samples(self) -> list[int]:
        """Samples of every epoch, the first epoch first.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).epoch_samples
        [101, 51, 51, 101]
        """
        return self._of_every_epoch(self.whole[0], self.pruned[0])

    @property
    def epoch_batches(self) -> list[int]:
        """Batches of every epoch, the first epoch first.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).epoch_batches
        [7, 4, 4, 7]
        """
        return self._of_every_epoch(self.whole[1], self.pruned[1])

    @property
    def total_batches(self) -> int:
        """Batches of all epochs: the steps that a scheduler of the learning rate is to be told.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).total_batches
        22
        """
        return sum(self.epoch_batches)

    @property
    def samples_saved(self) -> int:
        """How many fewer samples are trained on.

        >>> plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).samples_saved
        100
        """
        return len(self.pruned_epochs) * (self.whole[0] - self.pruned[0])

    @property
    def steps_saved(self) -> int:
        """How many fewer steps there are.

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
        """The picture, the totals and the formulas.

        >>> print(plan_info(101, epochs=4, ratio=0.5, delta=0.75, batch_size=16).text(ascii_only=True))
        info-batch prunes 2 of 4 epochs (2 to 3): on average at most 24.8% of the
        samples are saved.
        ...
        """
        return describe(self, width=width, ascii_only=ascii_only)

    def __str__(self) -> str:
        return self.text()

    def document(self) -> dict[str, Any]:
        """Everything as plain values, for JSON.

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
            "times": _times(self.times),
            "paper": None if self.paper is None else _times(self.paper) | {"remarks": list(self.remarks)},
        }

    def _of_every_epoch(self, whole: int, pruned: int) -> list[int]:
        found = [whole] * self.epochs
        for epoch in self.pruned_epochs:
            found[epoch - 1] = pruned
        return found


def plan_fine(
    schedule: FineSchedule,
    samples: int,
    *,
    epochs: int,
    batch_size: int,
    drop_last: bool = False,
    overhead_seconds: float | None = None,
    batch_seconds: float | None = None,
) -> Plan:
    """The plan of fine-pruning. `overhead_seconds` is what pruning itself costs in a pruned epoch.

    >>> plan = plan_fine(FineSchedule(prune=0.3), 50_000, epochs=200, batch_size=128)
    >>> len(plan.pruned_epochs), plan.paper.n_prune, plan.whole, plan.pruned
    (71, 48, (50000, 391), (35000, 274))
    """
    _check(samples, epochs=epochs, batch_size=batch_size, drop_last=drop_last)
    _check_times(overhead_seconds, batch_seconds)
    prune_num = schedule.prune_num(samples)
    rows = tuple(_windows(schedule if prune_num else replace(schedule, count=0), epochs))
    pruned = _pruned_in(rows)

    def times(n_prune: int) -> Times:
        return Times.of(
            n=epochs,
            n_prune=n_prune,
            b=_trained(samples, batch_size, drop_last=drop_last)[1],
            b_of_pruned=_trained(samples - prune_num, batch_size, drop_last=drop_last)[1],
            T=batch_seconds,
            t_0=overhead_seconds or 0.0,
        )

    return Plan(
        policy="fine-pruning",
        exact=True,
        samples=samples,
        epochs=epochs,
        batch_size=batch_size,
        drop_last=drop_last,
        prune_num=prune_num,
        pruned_epochs=pruned,
        rows=rows,
        times=times(len(pruned)),
        paper=times(n_prune(schedule, epochs)),
        remarks=remarks(schedule, epochs),
    )


def plan_info(
    samples: int, *, epochs: int, ratio: float, delta: float, batch_size: int, drop_last: bool = False,
    batch_seconds: float | None = None,
) -> Plan:  # fmt: skip
    """The most that InfoBatch saves, on average over its lots.

    >>> plan = plan_info(50_000, epochs=200, ratio=0.5, delta=0.875, batch_size=128)
    >>> plan.pruned_epochs[0], plan.pruned_epochs[-1], plan.prune_num, plan.exact
    (2, 175, 24999, False)
    """
    _check(samples, epochs=epochs, batch_size=batch_size, drop_last=drop_last)
    _check_times(None, batch_seconds)
    InfoPolicy(1, ratio=ratio, delta=delta)  # refuses bad values in its own words
    prune_num = math.floor(ratio * (samples - 1))
    cells = [
        BEFORE if epoch == 1 else PRUNED if prune_num and (epoch - 1) / epochs < delta else WHOLE
        for epoch in range(1, epochs + 1)
    ]
    rows = (Row(first=1, cells="".join(cells), skipped=1),)
    pruned = _pruned_in(rows)
    return Plan(
        policy="info-batch",
        exact=False,
        samples=samples,
        epochs=epochs,
        batch_size=batch_size,
        drop_last=drop_last,
        prune_num=prune_num,
        pruned_epochs=pruned,
        rows=rows,
        times=Times.of(
            n=epochs,
            n_prune=len(pruned),
            b=_trained(samples, batch_size, drop_last=drop_last)[1],
            b_of_pruned=_trained(samples - prune_num, batch_size, drop_last=drop_last)[1],
            T=batch_seconds,
        ),
    )


def _windows(schedule: FineSchedule, epochs: int) -> list[Row]:
    """The rows of the picture. A window has one starting point, which need not be found again for each epoch."""
    rows = []
    for number in range(schedule.window_of(epochs) + 1):
        first, last = max(1, number * schedule.window), min(epochs, (number + 1) * schedule.window - 1)
        if first > last:  # a window of one epoch begins with epoch 0
            continue
        start = schedule.starts_at(first)
        here = replace(schedule, starting_point=start, attenuation=1)
        cells = [
            PRUNED if here.is_pruned(epoch) else BEFORE if epoch % schedule.window < start else WHOLE
            for epoch in range(first, last + 1)
        ]
        rows.append(Row(first=first, cells="".join(cells), start=start, skipped=first % schedule.window))
    return rows


def _pruned_in(rows: Sequence[Row]) -> tuple[int, ...]:
    return tuple(row.first + place for row in rows for place, mark in enumerate(row.cells) if mark == PRUNED)


def _trained(samples: int, batch_size: int, *, drop_last: bool) -> tuple[int, int]:
    """Samples that are trained on, and in how many batches."""
    steps = Dealing(batch_size=batch_size, drop_last=drop_last).steps(samples)
    return min(samples, steps * batch_size), steps


def _times(times: Times) -> dict[str, Any]:
    return {name: getattr(times, name) for name in ("n_prune", "b_prune", "t_regular", "t_prune", "t_save", "unit")}


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
