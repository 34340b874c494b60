"""pruning-2, the paper's figure 2: the same samples behave otherwise in another training of the same network.

The paper shows two samples of trainings without pruning. The loss of data 1 falls in both trainings; that of data 2
rises in the first and falls in the second. It concludes that a sample may do otherwise in another training. One such
sample can be found in any two trainings, so all samples are counted, and held against chance:

    p, q       the share of the samples whose loss rises in the first training, and in the second
    differ     the share whose loss rises in one and falls in the other
    chance     p (1 - q) + q (1 - p), by two independent trainings in which as many rise

Where the sample alone decided whether its loss rises, differ would be 0; where the training alone did, it would be
chance. The claim is that differ is nearer to chance than to 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.core.claims import ahead, percent, within
from experiments.core.story import NAN, Job, Numbers, Size, Telling, experiment
from experiments.papers.pruning.setting import NO_FIGURE, SMALLER, trainings
from experiments.papers.pruning.training import PruningSize, make_loop, pruning_size
from paceline.data.pruning.sampler import FinePruning
from paceline.quantities import counted
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable

LABORATORY = {"images": 5_000, "epochs": 40}
WATCHED = 2_000
FALL, DIFFER, RISE = "falls in both", "rises in one, falls in the other", "rises in both"
PAPER = {FALL: "data 1", DIFFER: "data 2", RISE: "-"}
LEAST_OF_CHANCE = 0.5  # the middle between 0, where the sample decides, and chance, where the training does


def run_histories(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train without pruning, and return the loss of each watched sample in every epoch."""
    size, seed = PruningSize(**settings["size"]), settings["seed"]
    watch = range(min(settings["watched"], size.images))
    sampler = FinePruning(size.images, batch_size=size.batch, prune=0.0, watch=watch, seed=seed)
    loop = make_loop(size, settings["model"], seed, sampler, epochs=size.epochs)
    if any(math.isnan(loop.epoch(epoch)) for epoch in range(size.epochs)):
        return {"losses": [[NAN] * size.epochs for _ in watch]}
    return {"losses": [[round(loss, 4) for _, loss in sampler.loss_history[sample]] for sample in watch]}


def trend(losses: Sequence[float | None]) -> float:
    """Return by how much a sample's loss rises: the mean of the last fifth of the epochs minus that of the first.

    >>> trend([1.0, 2.0, 2.0, 2.0, 4.0]), trend([None] * 5)
    (3.0, nan)
    """
    known, part = [NAN if loss is None else loss for loss in losses], max(1, len(losses) // 5)
    return fmean(known[-part:]) - fmean(known[:part])


def direction_shares(trainings: Sequence[Sequence[bool]]) -> dict[str, tuple[float, float]]:
    """Return the share of the samples that fall, differ and rise in two trainings, each beside that of chance.

    A training says of each sample whether its loss rises. Of more than two trainings, every pair counts alike.

    >>> for kind, shares in direction_shares([[True, True, False, False], [True, False, False, False]]).items():
    ...     print(kind, shares)
    falls in both (0.5, 0.375)
    rises in one, falls in the other (0.25, 0.5)
    rises in both (0.25, 0.125)
    """
    found = []
    for first, second in itertools.combinations(trainings, 2):
        samples, p, q = list(zip(first, second, strict=True)), fmean(first), fmean(second)
        found.append(
            {
                FALL: (fmean(not any(rises) for rises in samples), (1 - p) * (1 - q)),
                DIFFER: (fmean(one != other for one, other in samples), p * (1 - q) + q * (1 - p)),
                RISE: (fmean(all(rises) for rises in samples), p * q),
            }
        )
    return {
        kind: (fmean(pair[kind][0] for pair in found), fmean(pair[kind][1] for pair in found))
        for kind in (FALL, DIFFER, RISE)
    }


@experiment(
    "pruning-2",
    source="Data fine-pruning, figure 2",
    question="the losses of the same samples in two trainings",
    minutes=0.7,
    full_hours=40,
    data=("cifar10",),
    seeds=2,
)
def figure_2(size: Size) -> Telling:
    settings = {"size": pruning_size(size, **LABORATORY).document, "model": size.pick("lenet", "lenet", "resnet18")}

    def job(later: int) -> Job:
        def of(seed: int) -> dict[str, Any]:
            return {**settings, "seed": seed + later, "watched": WATCHED}

        return Job(run_histories, of, size.pick(2.0, 25.0, 130_000.0))

    runs = yield {name: job(later) for name, later in trainings(size).items()}
    histories = [outcome["losses"] for outcomes in runs.values() for outcome in outcomes]
    trends = [[trend(losses) for losses in history] for history in histories]
    shares = dict.fromkeys((FALL, DIFFER, RISE), (NAN, NAN))
    samples: dict[str, int] = {}
    if not any(math.isnan(each) for training in trends for each in training):
        shares = direction_shares([[each > 0 for each in training] for training in trends])
        samples = clearest_samples(list(zip(trends[0], trends[1], strict=True)))
    (falling, _), (differing, chance) = shares[FALL], shares[DIFFER]

    yield PlainTable(
        title=f"Losses of the same {len(trends[0]):,} samples in {counted(len(histories), 'training')}",
        headings=("their loss", "paper", "ours:\nshare", "by\nchance"),
        rows=[(kind, PAPER[kind], percent(share), percent(by)) for kind, (share, by) in shares.items()],
        caption=f"Values of the paper: {NO_FIGURE}. A loss rises if its mean over the last fifth of the epochs "
        "is above that over the first. Chance is two independent trainings in which as many rise."
        + (" Shares are means over pairs of trainings." if len(histories) > 2 else ""),
    )
    yield within(
        "losses rise in one training and fall in the other at least half as often as by chance",
        differing / chance if chance else NAN,
        least=LEAST_OF_CHANCE,
        kind="shape",
        write=percent,
    )
    yield ahead(
        "the sample decides as well: fewer losses differ than by chance",
        {"ours": differing, "chance": chance},
        best="low",
        write=percent,
        judged=False,
    )
    yield within("most losses fall in both", falling, least=0.5, kind="shape", write=percent, judged=False)
    if samples:
        series = [
            Series(name=f"sample {sample}, training {number}", points=list(enumerate(history[sample], start=1)))
            for number, history in enumerate(histories[:2], start=1)
            for sample in samples.values()
        ]
        title = "The same samples in two trainings"
        yield line_chart("losses", title, chart_caption(samples), series, x="epoch", y="loss")
    if size.name != "full":
        yield (
            f"The paper does not say which network it was. {SMALLER.format(**LABORATORY)} "
            "Losses are those of training: each epoch's crop and mirroring of an image differ."
        )
    yield (
        "The paper shows two samples and gives no share. Half of chance is our bar: it is the middle between losses "
        "whose direction the sample decides, and losses whose direction the training decides."
    )
    yield Numbers({"samples": len(trends[0])})
    yield Numbers({"shares": {kind: share for kind, (share, _) in shares.items()}})
    yield Numbers({"chance": {kind: by for kind, (_, by) in shares.items()}})


def clearest_samples(trends: Sequence[tuple[float, float]]) -> dict[str, int]:
    """Return the clearest sample like data 1 and the clearest like data 2 of two trainings; a kind may have none.

    >>> clearest_samples([(-1.0, -2.0), (-3.0, -2.0), (0.5, -0.1), (-1.0, 1.0)])
    {'falls in both': 1, 'rises in one, falls in the other': 3}
    >>> clearest_samples([(-1.0, -2.0), (1.0, 2.0)])
    {'falls in both': 0}
    """
    falling = [sample for sample, both in enumerate(trends) if max(both) <= 0]
    differing = [sample for sample, both in enumerate(trends) if min(both) <= 0 < max(both)]
    found = {}
    if falling:
        found[FALL] = min(falling, key=lambda sample: max(trends[sample]))
    if differing:
        found[DIFFER] = max(differing, key=lambda sample: max(trends[sample]) - min(trends[sample]))
    return found


def chart_caption(samples: Mapping[str, int]) -> str:
    """Return which samples are shown, and of which kind there is none.

    >>> chart_caption({"falls in both": 7})
    'Sample 7 is the clearest whose loss falls in both. No loss rises in one, falls in the other.'
    """
    shown = [f"Sample {sample} is the clearest whose loss {kind}." for kind, sample in samples.items()]
    missing = [f"No loss {kind}." for kind in (FALL, DIFFER) if kind not in samples]
    return " ".join((*shown, *missing))
