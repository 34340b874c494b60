"""pruning-1, the paper's figure 1: test loss and accuracy reach a plateau after each change of the learning rate.

Between two changes of the rate the loss must move less in the second half than in the first; it must fall most before
the first change; and the accuracy must rise as the loss falls. The network is trained without pruning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from experiments.core.claims import within
from experiments.core.story import NAN, Job, Numbers, Outcome, Size, Telling, experiment
from experiments.core.training import loss_and_accuracy
from experiments.papers.pruning.setting import SMALLER, written
from experiments.papers.pruning.training import WHOLE, PruningSize, make_loop, make_sampler, pruning_size
from experiments.papers.published import PRUNING_EPOCHS, PRUNING_FIRST_INTERVAL, PRUNING_RATE_CHANGES
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable

LABORATORY = {"shrink": 1, "padding": 4, "images": 20_000, "epochs": 40}


def run_curve(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train without pruning; return test loss and accuracy before the first epoch and after each."""
    size, seed = PruningSize(**settings["size"]), settings["seed"]
    loop = make_loop(size, settings["model"], seed, make_sampler(size, WHOLE, seed), epochs=size.epochs)
    test, diverged = size.load_images().test, False
    found = [loss_and_accuracy(loop.model, test)]
    for epoch in range(size.epochs):
        diverged = diverged or math.isnan(loop.epoch(epoch))
        found.append((NAN, NAN) if diverged else loss_and_accuracy(loop.model, test))
    losses, accuracies = zip(*found, strict=True)
    changes = [round(share * size.epochs) for share in size.falls_at]
    return {"losses": list(losses), "accuracies": list(accuracies), "changes": changes}


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The epochs of one learning rate, with the loss before them, in their middle and at their end.

    >>> round(Stretch(first=1, last=12, before=2.3, middle=1.4, end=1.3).early, 2)
    0.9
    """

    first: int
    last: int
    before: float
    middle: float
    end: float

    @property
    def early(self) -> float:
        """By how much the loss falls in the first half."""
        return self.before - self.middle

    @property
    def late(self) -> float:
        """By how much the loss falls in the second half."""
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


@experiment(
    "pruning-1",
    source="Data fine-pruning, figure 1",
    question="test loss and accuracy over the epochs: plateaus between changes of the rate",
    minutes=2.5,
    full_hours=40,
    data=("cifar10",),
)
def figure_1(size: Size) -> Telling:
    settings = {"size": pruning_size(size, **LABORATORY).document, "model": size.pick("lenet", "lenet", "resnet18")}
    seconds = size.pick(2.0, 140.0, 130_000.0)
    runs = yield {"curve": Job(run_curve, lambda seed: {**settings, "seed": seed}, seconds)}
    changes = runs["curve"][0]["changes"]
    losses = mean_curve(runs["curve"], "losses")
    accuracies = [each / 100 for each in mean_curve(runs["curve"], "accuracies")]
    stretches = stretches_of(losses, changes)

    first_fall = f"{PRUNING_FIRST_INTERVAL[0]} to {PRUNING_FIRST_INTERVAL[1]}"
    words = [first_fall, *["slower than before, then a plateau"] * (len(stretches) - 1)]
    yield PlainTable(
        title="Test loss in each stretch of the learning rate",
        headings=("epochs", "paper", "ours:\nbefore", "ours:\nmiddle", "ours:\nend"),
        rows=[
            (
                f"{each.first}-{each.last}",
                word,
                *(written(loss, ".3f") for loss in (each.before, each.middle, each.end)),
            )
            for each, word in zip(stretches, words, strict=True)
        ],
        caption=f"The paper's rate changes at {', '.join(map(str, PRUNING_RATE_CHANGES))} of {PRUNING_EPOCHS} epochs; "
        f"ours at {', '.join(map(str, changes))} of {len(losses) - 1}.",
    )
    for each in stretches:
        text = f"a plateau in epochs {each.first} to {each.last}: the second half moves less than the first"
        moves = abs(each.late) / abs(each.early) if each.early else NAN
        yield within(text, moves, most=1.0, kind="shape")
    falls = [each.before - each.end for each in stretches]
    ahead = falls[0] - float(np.max(falls[1:]))  # np.max, since a missing fall must not be passed over
    yield within("the loss falls most before the first change of the rate", ahead, least=1e-9, kind="shape")
    yield within("the accuracy rises as the loss falls", agreement(losses, accuracies), least=0.9, kind="shape")
    for name, caption, values in (
        ("loss", "Before the first epoch, and after each.", losses),
        ("accuracy", "", accuracies),
    ):
        yield line_chart(
            name,
            f"Test {name} over the epochs",
            caption,
            [Series(name="ours", points=list(enumerate(values)))],
            x="epochs",
            y=f"test {name}",
            percent=name == "accuracy",
            wide=False,
        )
    if size.name != "full":
        smaller = SMALLER.format(**LABORATORY)
        yield (
            f"LeNet stands in for ResNet-18. {smaller} The paper's 1.5 is after its first epochs, ours is before any."
        )
    yield Numbers({"losses": losses, "accuracies": accuracies, "changes": changes})


def mean_curve(curves: Sequence[Outcome], name: str) -> list[float]:
    """Return the means of curves, point by point; NaN where one has no value.

    >>> mean_curve([{"losses": [2.0, 1.0]}, {"losses": [4.0, None]}], "losses")
    [3.0, nan]
    """
    points = zip(*(curve[name] for curve in curves), strict=True)
    return [fmean(NAN if value is None else value for value in values) for values in points]


def agreement(losses: Sequence[float], accuracies: Sequence[float]) -> float:
    """Return the share of pairs of epochs, ten apart or the most there are, whose loss and accuracy move oppositely.

    >>> agreement([3.0, 2.0, 1.0], [0.1, 0.5, 0.9]), agreement([3.0, 2.0], [0.5, 0.1])
    (1.0, 0.0)
    """
    apart = min(10, len(losses) - 1)
    return fmean(
        (losses[place + apart] - losses[place]) * (accuracies[place + apart] - accuracies[place]) <= 0
        for place in range(len(losses) - apart)
    )
