"""pruning: what it saves and what it costs to train with fewer samples in some epochs, beside training with all.

The claims (Li, He, Ren and Mao 2018, tables 1 and 2): fine-pruning saves 7 to 14 % of the time of 200 epochs on
CIFAR-10, and loses 0.01 to 0.43 points. The bars here: fine-pruning saves 14 % at no more than 0.4 points; the best
policy saves 30 % at no more than 0.3.

Laboratory size: CIFAR-10, its images averaged to 16x16, varied by padding, cropping and mirroring, and two networks:
LeNet, which the paper has too, and a small CNN with batch normalisation. SGD with Nesterov momentum; the rate falls to
a fifth at 30, 60 and 80 % of the run, where the paper's does.

    none               torch's own random batches
    none, fewer epochs the same in 30 % fewer epochs, the falls of the rate moved along: saving without a method
    fine-pruning       the paper's schedule, scaled to the run; as little pruned as saves 15 % of the samples
    info-batch         Qin et al. 2024, ratio 0.5, delta 0.875
    take-turns         our own try (`papers/pruning/turns.py`), ratio 0.6, delta 0.875; not in the library

A policy that is not ahead of `none, fewer epochs` at the same saving is not worth its name. Every policy is compared
with `none` seed by seed. As many runs are made at once as there are cores, each with one thread: CPU time is then the
steadier figure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

from experiments.core.claims import within
from experiments.core.pages import seeds_text
from experiments.core.story import NAN, Claim, Job, Numbers, Runs, Size, Telling, chosen, deviation, experiment
from experiments.papers.pruning.setting import written
from experiments.papers.pruning.training import (
    FEWER_EPOCHS,
    FINE_PRUNING,
    POLICIES,
    TOY_SIZE,
    WHOLE,
    PruningSize,
    run_training,
)
from experiments.papers.published import PRUNING_NETWORKS, PRUNING_TABLE_1, PRUNING_TABLE_2
from paceline.reports.table import PlainTable

NETWORKS = {"lenet": 200.0, "pooled-cnn": 350.0}  # with the seconds of a run at laboratory size
IN_PAPER = {"lenet": "LeNet"}  # other networks are set beside the range of the other nine
PAPER = {
    name: (saved, regular, pruned)
    for name, saved, regular, pruned in zip(
        PRUNING_NETWORKS, PRUNING_TABLE_1["speedup"], *PRUNING_TABLE_2.values(), strict=True
    )
}
FINE_SAVES, FINE_BEHIND = 14.0, 0.4  # per cent, points
BEST_SAVES, BEST_BEHIND = 30.0, 0.3


@experiment(
    "pruning",
    question="samples and time that pruning saves, and at what accuracy",
    minutes=60,
    data=("cifar10",),
    seeds=3,
)
def pruning(
    size: Size,
    *,
    models: tuple[str, ...] = tuple(NETWORKS),
    policies: tuple[str, ...] = tuple(POLICIES),
    data: str = "cifar10",
    shrink: int = 2,
    images: int = 50_000,
    epochs: int = 50,
    rate: float = 0.05,
    fewer: float = 0.3,
) -> Telling:
    models = chosen("network", models, NETWORKS)
    policies = chosen("policy", (WHOLE, *(policies or POLICIES)), POLICIES)  # all are set beside none
    given: dict[str, Any] = {"data": data, "shrink": shrink, "images": images, "epochs": epochs}
    given |= {"rate": rate, "fewer": fewer}
    usual = dataclasses.asdict(PruningSize())
    changed = {name: value for name, value in given.items() if value != usual[name]}
    trained = dataclasses.replace(size.pick(TOY_SIZE, PruningSize()), **changed)

    def job(model: str, policy: str) -> Job:
        own = trained if policy == FEWER_EPOCHS else dataclasses.replace(trained, fewer=usual["fewer"])
        settings = {"size": own.document, "model": model, "policy": policy}  # `fewer` makes no other run of the others
        seconds = NETWORKS[model] * images * epochs / (50_000 * 50)
        return Job(run_training, lambda seed: {**settings, "seed": seed}, size.pick(0.1, seconds))

    runs = yield {cell: job(*cell) for cell in product(models, policies)}

    for model in models:
        rows = [row_of(runs, model, policy) for policy in policies]
        name, saved, accuracy, behind = paper_row(model)
        of = f"{trained.epochs} epoch(s) of {trained.images:,} images"
        yield PlainTable(
            title=f"{model} on {trained.data}, {of}, {seeds_text(size.seeds)}: saved",
            headings=("policy", "samples\n%", "CPU time\n%", "wall time\n%", "sampling\nms"),
            rows=[
                *(
                    (
                        POLICIES[row.policy].label,
                        *(written(share, ".2f") for share in (row.samples_saved, row.cpu_saved, row.wall_saved)),
                        written(row.sampling_ms, ".1f"),
                    )
                    for row in rows
                ),
                (name, "", "", saved, ""),
            ],
            caption="Beside none. Time is of training, not of tests. Sampling is CPU time per epoch to take batches "
            "and make one loss of many.",
        )
        yield PlainTable(
            title=f"{model}: test accuracy in per cent",
            headings=("policy", "accuracy", "behind\nnone", "best\nthree", "behind\nnone"),
            rows=[
                *(
                    (
                        POLICIES[row.policy].label,
                        spread_text(row.accuracy, ".2f"),
                        spread_text(row.behind, "+.2f") if row.policy != WHOLE else "",
                        spread_text(row.best_three, ".2f"),
                        spread_text(row.best_behind, "+.2f") if row.policy != WHOLE else "",
                    )
                    for row in rows
                ),
                (name, "", "", accuracy, behind),
            ],
            caption="Accuracy is the mean of the last three epochs, best three the paper's way. Behind is none with "
            "the same seed minus this, in points. ± is the standard deviation over seeds.",
        )
        yield from claims_of(model, rows)
    lost = [" ".join(cell) for cell, seconds in runs.mean("cpu_seconds").items() if math.isnan(seconds)]
    if lost:
        yield f"Diverged: {', '.join(lost)}. The rate of {trained.rate:g} is too high for them."
    yield "The paper: Li, He, Ren and Mao 2018, tables 1 and 2. CIFAR-10 at 32x32, 200 epochs."
    yield Numbers({"size": trained.document})
    yield Numbers(
        {
            "runs": [
                {"model": model, "policy": policy, "seed": seed, **outcome}
                for (model, policy), outcomes in runs.items()
                for seed, outcome in zip(size.seeds, outcomes, strict=True)
            ]
        }
    )


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """A policy beside `none`: shares of all seeds together in per cent, accuracies and points seed by seed."""

    policy: str
    samples_saved: float
    cpu_saved: float
    wall_saved: float
    sampling_ms: float  # CPU time per epoch of taking batches and making one loss of many
    accuracy: Sequence[float]
    behind: Sequence[float]
    best_three: Sequence[float]
    best_behind: Sequence[float]


def row_of(runs: Runs, model: str, policy: str) -> Row:
    """Return the figures of a policy."""
    own, base = (model, policy), (model, WHOLE)

    def saved(figure: str) -> float:
        each = runs.each(figure)
        return 100 * (1 - sum(each[own]) / sum(each[base]))

    def behind(figure: str) -> list[float]:
        each = runs.each(figure)
        return [theirs - ours for ours, theirs in zip(each[own], each[base], strict=True)]

    sampling = zip(runs.each("sampling_seconds")[own], runs[own], strict=True)
    return Row(
        policy=policy,
        samples_saved=saved("samples"),
        cpu_saved=saved("cpu_seconds"),
        wall_saved=saved("wall_seconds"),
        sampling_ms=1000 * fmean(seconds / max(1, len(run["accuracies"])) for seconds, run in sampling),
        accuracy=runs.each("last_three")[own],
        behind=behind("last_three"),
        best_three=runs.each("best_three")[own],
        best_behind=behind("best_three"),
    )


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return, of the policies that prune and hold the accuracy, which saves most samples; else which loses least."""
    pruning = [row for row in rows if POLICIES[row.policy].sampler and not math.isnan(fmean(row.behind))]
    holding = [row for row in pruning if fmean(row.behind) <= BEST_BEHIND]
    if holding:
        return max(holding, key=lambda row: row.samples_saved)
    return min(pruning, key=lambda row: fmean(row.behind), default=None)


def claims_of(model: str, rows: Sequence[Row]) -> list[Claim]:
    """Judge fine-pruning and the best policy; one that was not run misses its bars."""
    fine, best = next((row for row in rows if row.policy == FINE_PRUNING), None), best_of(rows)
    best_name = f"best ({POLICIES[best.policy].label if best else '-'})"
    found = []
    for name, row, least, most in (
        (FINE_PRUNING, fine, FINE_SAVES, FINE_BEHIND),
        (best_name, best, BEST_SAVES, BEST_BEHIND),
    ):
        bar = partial(within, kind="bar")
        share, points = partial(written, style=".1f", unit=" %"), partial(written, style="+.2f")
        text = f"{model}, {name}"
        found += [
            bar(f"{text}: samples saved", row.samples_saved if row else NAN, least=least, write=share),
            bar(f"{text}: CPU time saved", row.cpu_saved if row else NAN, least=least, write=share),
            bar(f"{text}: points behind none", fmean(row.behind) if row else NAN, most=most, write=points),
        ]
    return found


def spread_text(values: Sequence[float], style: str) -> str:
    """Write a mean over seeds, and the standard deviation where there are several.

    >>> spread_text([1.5, 2.5], "+.1f"), spread_text([2.0], ".2f")
    ('+2.0 ±0.71', '2.00')
    """
    spread = deviation(list(values))
    return written(fmean(values), style) + ("" if math.isnan(spread) else f" ±{spread:.2f}")


def paper_row(model: str) -> tuple[str, str, str, str]:
    """Return what the paper has for the network, or for the nine that are not ours: name, time saved, accuracy, behind.

    >>> paper_row("lenet")
    ('the paper, LeNet', '11.80', '74.72', '+0.43')
    >>> paper_row("pooled-cnn")
    ('the paper, 9 others', '7.40-14.29', '91.16-94.71', '+0.01 to +0.37')
    """
    name = IN_PAPER.get(model)
    if name:
        saved, regular, pruned = PAPER[name]
        return f"the paper, {name}", f"{saved:.2f}", f"{pruned:.2f}", f"{regular - pruned:+.2f}"
    others = [figures for each, figures in PAPER.items() if each not in IN_PAPER.values()]
    shares, accuracies = [saved for saved, _, _ in others], [pruned for _, _, pruned in others]
    behind = [regular - pruned for _, regular, pruned in others]
    return (
        f"the paper, {len(others)} others",
        f"{min(shares):.2f}-{max(shares):.2f}",
        f"{min(accuracies):.2f}-{max(accuracies):.2f}",
        f"{min(behind):+.2f} to {max(behind):+.2f}",
    )
