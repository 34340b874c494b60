"""pruning-2: the losses of the same samples in two trainings of the same network, without pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import percent, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.pruning.setting import NO_FIGURE, SMALLER, size_document, size_of, two_seeds

FIGURE_2_SIZE = {"images": 5_000, "epochs": 40}
WATCHED = 2_000


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
        for seed in two_seeds(plan)
    ]


def trend(losses: Sequence[float]) -> float:
    """Return by how much a sample's loss rises: the mean of the last fifth of the epochs minus that of the first.

    >>> trend([1.0, 2.0, 2.0, 2.0, 4.0])
    3.0
    """
    part = max(1, len(losses) // 5)
    return fmean(losses[-part:]) - fmean(losses[:part])


def conclude_figure_2(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    runs = [outcomes[f"seed {seed}"]["losses"] for seed in two_seeds(plan)][:2]
    trends = [[trend(losses) for losses in run] for run in runs]
    pairs = list(zip(*trends, strict=True))
    changed = [sample for sample, (first, second) in enumerate(pairs) if first * second < 0]
    both_fall = [sample for sample, pair in enumerate(pairs) if max(pair) < 0]
    both_rise = [sample for sample, pair in enumerate(pairs) if min(pair) > 0]
    steady = min(range(len(pairs)), key=lambda sample: max(pairs[sample]))
    turned = max(range(len(pairs)), key=lambda sample: abs(pairs[sample][0] - pairs[sample][1])
                 if sample in set(changed) else -1.0)  # fmt: skip
    shown = {f"sample {steady}": steady, f"sample {turned}": turned}
    series = [
        Series(name=f"{name}, training {number}", points=list(enumerate(runs[number - 1][sample], start=1)))
        for number in (1, 2)
        for name, sample in shown.items()
    ]
    return Findings(
        tables=(
            PlainTable(
                title=f"Losses of {len(pairs):,} samples in two trainings of the same network",
                headings=("their loss", "paper", "ours:\nsamples", "ours:\nshare"),
                rows=[
                    ("falls in both", "data 1", f"{len(both_fall):,}", percent(len(both_fall) / len(pairs))),
                    (
                        "rises in one, falls in the other",
                        "data 2",
                        f"{len(changed):,}",
                        percent(len(changed) / len(pairs)),
                    ),
                    ("rises in both", "-", f"{len(both_rise):,}", percent(len(both_rise) / len(pairs))),
                ],
                caption=f"Values of the paper: {NO_FIGURE}. Rises: the mean of the last fifth of the epochs is above "
                "that of the first.",
            ),
        ),
        claims=(
            within(
                "there are samples whose loss rises in one training and falls in the other",
                float(len(changed)),
                least=1.0,
                kind="shape",
            ),
            within(
                "there are samples whose loss falls in both", float(len(both_fall)), least=1.0, kind="shape"
            ),
        ),
        charts=(
            line_chart(
                "losses",
                "The same two samples in two trainings",
                "One whose loss falls in both, and the one of those that rise in one and fall in the other whose two "
                "trends differ most.",
                series,
                x="epoch",
                y="loss",
            ),
        ),
        series=tuple(each.name for each in series),
        remarks=() if plan.size == "full" else (
            f"The paper does not say which network it was. {SMALLER.format(**FIGURE_2_SIZE)} "
            "Losses are those of training: each epoch's crop and mirroring of an image differ.",
        ),
        numbers={"falls in both": len(both_fall), "changed": len(changed), "rises in both": len(both_rise),
                 "samples": len(pairs)},
    )  # fmt: skip
