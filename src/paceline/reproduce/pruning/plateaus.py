"""pruning-1, the paper's figure 1: test loss and accuracy reach a plateau after each change of the learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.pruning.setting import SMALLER, size_document, size_of
from paceline.reproduce.published import PRUNING_EPOCHS, PRUNING_FIRST_INTERVAL, PRUNING_RATE_CHANGES

FIGURE_1_SIZE = {"shrink": 1, "padding": 4, "images": 20_000, "epochs": 40}


def run_curve(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train without pruning; return test loss and accuracy before the first epoch and after each."""
    from paceline.randomness import torch_generator
    from paceline.reproduce.pruning_training import PruningTask, make_loop, make_sampler, measured

    size, task = size_of(settings["size"]), PruningTask(model=settings["model"], policy="none", seed=settings["seed"])
    sampler, _ = make_sampler(size, task)
    loop = make_loop(size, task, sampler)
    found = [measured(loop.model, loop.parts.test)]
    for epoch in range(size.epochs):
        loop.epoch(epoch, size.epochs, torch_generator(task.seed, "augment", epoch))
        found.append(measured(loop.model, loop.parts.test))
    changes = [round(share * size.epochs) for share in size.falls_at]
    return {"losses": [each[0] for each in found], "accuracies": [each[1] for each in found], "changes": changes}


def jobs_of_figure_1(plan: ExperimentPlan) -> list[Job]:
    size = size_document(plan, laboratory=FIGURE_1_SIZE)
    model = plan.choose(toy="lenet", laboratory="lenet", full="resnet18")
    return [
        Job(
            name=f"seed {seed}",
            run=run_curve,
            settings={"size": size, "model": model, "seed": seed},
            seconds=plan.choose(toy=2.0, laboratory=140.0, full=130_000.0),
        )
        for seed in plan.seeds
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """The epochs of one learning rate, with the loss before them, in their middle and at their end.

    >>> Stretch(first=1, last=12, before=2.3, middle=1.4, end=1.3).early, 2.3 - 1.4
    (0.8999999999999999, 0.8999999999999999)
    """

    first: int
    last: int
    before: float
    middle: float
    end: float

    @property
    def early(self) -> float:
        """Return by how much the loss falls in the first half."""
        return self.before - self.middle

    @property
    def late(self) -> float:
        """Return by how much the loss falls in the second half."""
        return self.middle - self.end


def stretches_of(losses: Sequence[float], changes: Sequence[int]) -> list[Stretch]:
    """Cut a curve (before the first epoch, and after each) where the rate changes; each value is a mean of up to three.

    >>> [(each.first, each.last, each.late) for each in stretches_of([3, 2, 2, 2, 1, 1, 1], [3])]
    [(1, 3, 0.0), (4, 6, 0.0)]
    """
    found = []
    for first, last in zip((0, *changes), (*changes, len(losses) - 1), strict=True):
        middle, wide = (first + last + 1) // 2, min(3, max(1, (last - first) // 2))
        found.append(
            Stretch(
                first=first + 1,
                last=last,
                before=fmean(losses[max(first - wide + 1, 0) : first + 1]) if first else losses[0],
                middle=fmean(losses[middle - wide // 2 : middle - wide // 2 + wide]),
                end=fmean(losses[last - wide + 1 : last + 1]),
            )
        )
    return found


def conclude_figure_1(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    curves = [outcomes[f"seed {seed}"] for seed in plan.seeds]
    changes = curves[0]["changes"]
    losses = [fmean(values) for values in zip(*(curve["losses"] for curve in curves), strict=True)]
    accuracies = [fmean(values) / 100 for values in zip(*(curve["accuracies"] for curve in curves), strict=True)]
    stretches = stretches_of(losses, changes)
    falls = [each.before - each.end for each in stretches]
    first_fall = f"{PRUNING_FIRST_INTERVAL[0]} to {PRUNING_FIRST_INTERVAL[1]}"
    words = [first_fall, *["slower than before, then a plateau"] * (len(stretches) - 1)]
    claims = [
        within(
            f"a plateau in epochs {each.first} to {each.last}: the second half moves less than the first",
            abs(each.late) / abs(each.early) if each.early else None,
            most=1.0,
            kind="shape",
        )
        for each in stretches
    ]
    claims.append(
        within(
            "the loss falls most before the first change of the rate",
            falls[0] - max(falls[1:]),
            least=1e-9,
            kind="shape",
        )
    )
    claims.append(
        within("the accuracy rises as the loss falls", _agreement(losses, accuracies), least=0.9, kind="shape")
    )
    return Findings(
        tables=(
            PlainTable(
                title="Test loss in each stretch of the learning rate",
                headings=("epochs", "paper", "ours:\nbefore", "ours:\nmiddle", "ours:\nend"),
                rows=[
                    (f"{each.first}-{each.last}", word, f"{each.before:.3f}", f"{each.middle:.3f}", f"{each.end:.3f}")
                    for each, word in zip(stretches, words, strict=True)
                ],
                caption=f"The paper's rate changes at {', '.join(map(str, PRUNING_RATE_CHANGES))} of "
                f"{PRUNING_EPOCHS} epochs; ours at {', '.join(map(str, changes))} of {len(losses) - 1}.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            line_chart(
                "loss",
                "Test loss over the epochs",
                "Before the first epoch, and after each.",
                [Series(name="ours", points=list(enumerate(losses)))],
                x="epochs",
                y="test loss",
                wide=False,
            ),
            line_chart(
                "accuracy",
                "Test accuracy over the epochs",
                "",
                [Series(name="ours", points=list(enumerate(accuracies)))],
                x="epochs",
                y="test accuracy",
                percent=True,
                wide=False,
            ),
        ),
        series=("ours",),
        remarks=() if plan.size == "full" else (
            f"LeNet stands in for ResNet-18. {SMALLER.format(**FIGURE_1_SIZE)} "
            "The paper's 1.5 is after its first epochs, ours is before any.",
        ),
        numbers={"losses": losses, "accuracies": accuracies, "changes": list(changes)},
    )  # fmt: skip


def _agreement(losses: Sequence[float], accuracies: Sequence[float]) -> float:
    """Return the share of pairs of epochs, ten apart or the most there are, whose loss and accuracy move oppositely."""
    apart = min(10, len(losses) - 1)
    moves = [
        (losses[place + apart] - losses[place]) * (accuracies[place + apart] - accuracies[place]) <= 0
        for place in range(len(losses) - apart)
    ]
    return sum(moves) / len(moves)
