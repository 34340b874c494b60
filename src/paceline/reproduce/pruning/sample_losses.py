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
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from paceline.quantities import counted
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, percent, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.pruning.setting import NO_FIGURE, SMALLER, at_least_two_seeds, size_document, size_of

FIGURE_2_SIZE = {"images": 5_000, "epochs": 40}
WATCHED = 2_000
FALL, DIFFER, RISE = "falls in both", "rises in one, falls in the other", "rises in both"
PAPER = {FALL: "data 1", DIFFER: "data 2", RISE: "-"}
LEAST_OF_CHANCE = 0.5  # the middle between 0, where the sample decides, and chance, where the training does


def run_histories(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train without pruning, and return the loss of each watched sample in every epoch."""
    from paceline.data.pruning.sampler import FinePruning
    from paceline.randomness import torch_generator
    from paceline.reproduce.pruning_training import PruningTask, make_loop

    size, task = size_of(settings["size"]), PruningTask(model=settings["model"], policy="none", seed=settings["seed"])
    watch = range(min(settings["watched"], size.images))
    sampler = FinePruning(size.images, batch_size=size.batch, prune=0.0, watch=watch, seed=task.seed)
    loop = make_loop(size, task, sampler)
    for epoch in range(size.epochs):
        loop.epoch(epoch, size.epochs, torch_generator(task.seed, "augment", epoch))
    return {"losses": [[round(loss, 4) for _, loss in sampler.loss_history[sample]] for sample in watch]}


def jobs_of_figure_2(plan: ExperimentPlan) -> list[Job]:
    size = size_document(plan, laboratory=FIGURE_2_SIZE)
    model = plan.choose(toy="lenet", laboratory="lenet", full="resnet18")
    return [
        Job(
            name=f"seed {seed}",
            run=run_histories,
            settings={"size": size, "model": model, "seed": seed, "watched": WATCHED},
            seconds=plan.choose(toy=2.0, laboratory=25.0, full=130_000.0),
        )
        for seed in at_least_two_seeds(plan)
    ]


def trend(losses: Sequence[float]) -> float:
    """Return by how much a sample's loss rises: the mean of the last fifth of the epochs minus that of the first.

    >>> trend([1.0, 2.0, 2.0, 2.0, 4.0])
    3.0
    """
    part = max(1, len(losses) // 5)
    return fmean(losses[-part:]) - fmean(losses[:part])


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


def conclude_figure_2(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    runs = [outcomes[f"seed {seed}"]["losses"] for seed in at_least_two_seeds(plan)]
    trends = [[trend(losses) for losses in run] for run in runs]
    shares = direction_shares([[each > 0 for each in training] for training in trends])
    (falling, _), (differing, chance) = shares[FALL], shares[DIFFER]
    samples = clearest_samples(list(zip(trends[0], trends[1], strict=True)))
    series = [
        Series(name=f"sample {sample}, training {number}", points=list(enumerate(run[sample], start=1)))
        for number, run in enumerate(runs[:2], start=1)
        for sample in samples.values()
    ]
    return Findings(
        tables=(
            PlainTable(
                title=f"Losses of the same {len(trends[0]):,} samples in {counted(len(runs), 'training')}",
                headings=("their loss", "paper", "ours:\nshare", "by\nchance"),
                rows=[(kind, PAPER[kind], percent(share), percent(by)) for kind, (share, by) in shares.items()],
                caption=f"Values of the paper: {NO_FIGURE}. A loss rises if its mean over the last fifth of the epochs "
                "is above that over the first. Chance is two independent trainings in which as many rise."
                + (" Shares are means over pairs of trainings." if len(runs) > 2 else ""),
            ),
        ),
        claims=(
            within(
                "losses rise in one training and fall in the other at least half as often as by chance",
                differing / chance if chance else None,
                least=LEAST_OF_CHANCE,
                kind="shape",
                write=percent,
            ),
            ahead(
                "the sample decides as well: fewer losses differ than by chance",
                {"ours": differing, "chance": chance},
                best="low",
                write=percent,
                judged=False,
            ),
            within("most losses fall in both", falling, least=0.5, kind="shape", write=percent, judged=False),
        ),
        charts=(
            line_chart(
                "losses",
                "The same samples in two trainings",
                chart_caption(samples),
                series,
                x="epoch",
                y="loss",
            ),
        )
        if series
        else (),
        series=tuple(each.name for each in series),
        remarks=(
            *(() if plan.size == "full" else (
                f"The paper does not say which network it was. {SMALLER.format(**FIGURE_2_SIZE)} "
                "Losses are those of training: each epoch's crop and mirroring of an image differ.",
            )),
            "The paper shows two samples and gives no share. Half of chance is our bar: it is the middle between "
            "losses whose direction the sample decides, and losses whose direction the training decides.",
        ),
        numbers={
            "samples": len(trends[0]),
            "shares": {kind: share for kind, (share, _) in shares.items()},
            "chance": {kind: by for kind, (_, by) in shares.items()},
        },
    )  # fmt: skip


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
