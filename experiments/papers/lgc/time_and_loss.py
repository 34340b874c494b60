"""lgc-4 and lgc-5, the paper's figures 4 and 5: what does the time that LGC saves cost in loss, for each K?

Of figure 4 it is judged whether LGC saves 30 to 38 % of the time of Full and ends nearly as low, before K-SGD, and
whether its loss is below that of Full at the same time. Of figure 5, for each K: LGC ends below K-SGD in the same time,
its accuracy degrades less as K falls, and a round is the shorter the fewer workers are waited for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from experiments.core.claims import ahead, falling, figure, percent, within
from experiments.core.recipes import recipe_job
from experiments.core.story import NAN, Job, Numbers, Size, Telling, experiment
from experiments.papers.lgc.setting import (
    LANES,
    ROUNDS_OF_AN_EPOCH,
    base_recipe,
    ends_of,
    job_seconds,
    smaller_remarks,
)
from experiments.papers.published import LGC_FIGURE_4, LGC_FIGURE_5, LGC_SETTING, LGC_TIME_SAVED
from paceline.reports.figures import Series, line_chart, point_chart
from paceline.reports.table import PlainTable

LOSS_SLACK = 0.03  # "nearly the same"

Curve = list[dict[str, float]]


# -- figure 4 ----------------------------------------------------------------------------------------------------------


@experiment(
    "lgc-4",
    source="LGC, figure 4",
    question="loss over iterations and over time: full, fastest-k, lgc",
    minutes=2,
    full_hours=16,
    data=("cifar10",),
)
def figure_4(size: Size) -> Telling:
    epochs = int(LGC_SETTING["epochs"])
    rounds = size.pick(8, 6 * ROUNDS_OF_AN_EPOCH, epochs * ROUNDS_OF_AN_EPOCH)
    recipe = base_recipe(size, rounds=rounds).with_settings(
        evaluate_every=size.pick(2, ROUNDS_OF_AN_EPOCH // 4, ROUNDS_OF_AN_EPOCH),
        data={"classes_per_worker": 3},
        delay={"persistence": 10},
        strategy={"warmup_rounds": rounds * int(LGC_SETTING["warmup_epochs"]) // epochs},
    )
    seconds = job_seconds(size, rounds)
    runs = yield {lane: recipe_job(recipe.with_strategy(lane), seconds=seconds) for lane in LANES}

    ends = ends_of(runs)
    curves = {lane: mean_curve([run["curve"] for run in runs[lane]]) for lane in LANES}
    loss = {lane: ends[lane]["loss"] for lane in LANES}
    saved = {lane: 1 - ends[lane]["seconds"] / ends["full"]["seconds"] for lane in LANES}
    below = share_below(curves["lgc"], curves["full"])
    yield PlainTable(
        title="Loss at the end and time, c = 3, h = 10",
        headings=("strategy", "ours:\nloss", "ours:\naccuracy", "ours:\nseconds", "ours:\nsaved", "paper"),
        rows=[
            (
                lane,
                figure(loss[lane]),
                percent(ends[lane]["accuracy"]),
                figure(ends[lane]["seconds"]),
                "-" if lane == "full" else percent(saved[lane]),
                LGC_FIGURE_4[lane] + (f",\nup to {percent(LGC_TIME_SAVED)} less time" if lane == "lgc" else ""),
            )
            for lane in LANES
        ],
        caption="Seconds are those of the simulated cluster.",
    )
    yield within("LGC saves 30 to 38 % of the time of Full", saved["lgc"], least=0.30, most=0.38, write=percent)
    yield ahead(
        "Full ends no higher than LGC, but for 3 %",
        {lane: loss[lane] for lane in ("full", "lgc")},
        best="low",
        by=LOSS_SLACK * loss["full"],
        strictly=False,
    )
    yield ahead("LGC ends below K-SGD", {lane: loss[lane] for lane in ("lgc", "fastest-k")}, best="low")
    yield within("LGC below Full at the same time, 9 times of 10", below, least=0.9, kind="winner", write=percent)
    for x, title, panel in (("round", "iterations", "(a)"), ("seconds", "seconds of the cluster", "(b)")):
        yield line_chart(
            f"loss-{x}",
            f"Training loss over {title}",
            f"The paper's figure 4{panel}.",
            [Series(name=lane, points=[(point[x], point["loss"]) for point in curves[lane]]) for lane in LANES],
            x=title,
            y="training loss",
            wide=False,
        )
    yield from smaller_remarks(size)
    yield "Late work is complete: stragglers finish before the next round, as the paper assumes."
    yield Numbers({**ends, "saved": saved["lgc"], "below": below})


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of the curves of several seeds, as far as all of them go.

    >>> one, other = ([{"round": 1, "seconds": seconds, "loss": loss}] for seconds, loss in ((1.0, 0.5), (2.0, 0.7)))
    >>> mean_curve([one, other])
    [{'round': 1, 'seconds': 1.5, 'loss': 0.6}]
    """
    return [
        {
            "round": points[0]["round"],
            "seconds": sum(point["seconds"] for point in points) / len(points),
            "loss": round(sum(point["loss"] for point in points) / len(points), 6),
        }
        for points in zip(*curves, strict=False)
        if all(point["loss"] is not None for point in points)
    ]


def share_below(curve: Curve, other: Curve) -> float:
    """Return at which share of its points a curve lies below another, which is read between its points.

    Points outside the other's times are left out, and so is a point that lies on it, as both do at the beginning.

    >>> falls = [{"seconds": 1.0, "loss": 2.0}, {"seconds": 2.0, "loss": 1.0}]
    >>> slowly = [{"seconds": 1.0, "loss": 2.0}, {"seconds": 3.0, "loss": 1.0}]
    >>> share_below(falls, slowly), share_below(slowly, falls)
    (1.0, nan)
    """
    beside = [(point["loss"], loss_at(other, point["seconds"])) for point in curve]
    judged = [loss < there for loss, there in beside if there is not None and there != loss]
    return sum(judged) / len(judged) if judged else NAN


def loss_at(curve: Curve, seconds: float) -> float | None:
    """Return the loss of a curve at a time, between two of its points; None outside of them.

    >>> loss_at([{"seconds": 1.0, "loss": 2.0}, {"seconds": 3.0, "loss": 1.0}], 2.0)
    1.5
    """
    for before, after in itertools.pairwise(curve):
        if before["seconds"] <= seconds <= after["seconds"]:
            part = (seconds - before["seconds"]) / max(after["seconds"] - before["seconds"], 1e-12)
            return before["loss"] + part * (after["loss"] - before["loss"])
    return None


# -- figure 5 ----------------------------------------------------------------------------------------------------------


@experiment(
    "lgc-5",
    source="LGC, figure 5",
    question="K = 5 to 10: time against loss, fastest-k and lgc",
    minutes=2,
    full_hours=47,
    data=("cifar10",),
)
def figure_5(size: Size) -> Telling:
    lanes, ks = ("fastest-k", "lgc"), size.pick((5, 7, 10), (5, 6, 7, 8, 9, 10))
    base = base_recipe(size).with_settings(data={"classes_per_worker": 3}, delay={"persistence": 10})

    def job(lane: str, k: int) -> Job:
        cell = base.with_strategy("full") if k == 10 else base.with_strategy(lane).with_settings(strategy={"k": k})
        return recipe_job(cell, seconds=job_seconds(size, base.rounds))

    runs = yield {cell: job(*cell) for cell in itertools.product(lanes, ks)}

    ends, rounds = ends_of(runs), runs["lgc", ks[-1]][0]["rounds"] or 1
    seconds = [ends["lgc", k]["seconds"] for k in ks]
    spread = {lane: spread_of([ends[lane, k]["accuracy"] for k in ks]) for lane in lanes}
    yield PlainTable(
        title="Seconds of a round, loss and test accuracy by K, c = 3, h = 10",
        headings=(
            "",
            "ours:\ns a round",
            "\nexpected",
            "ours: loss\nK-SGD",
            "\nlgc",
            "ours: acc.\nK-SGD",
            "\nlgc",
            "paper",
        ),
        rows=[
            (
                f"K = {k}",
                f"{at / rounds:.4f}",
                f"{expected_seconds(k):.4f}",
                *(figure(ends[lane, k]["loss"]) for lane in lanes),
                *(percent(ends[lane, k]["accuracy"]) for lane in lanes),
                "not readable",
            )
            for k, at in zip(ks, seconds, strict=True)
        ],
        caption=f"Expected is the K-th of ten times, by the paper's delays. The paper's {LGC_FIGURE_5}.",
    )
    for k in ks[:-1]:
        loss = {lane: ends[lane, k]["loss"] for lane in ("lgc", "fastest-k")}
        yield ahead(f"LGC below K-SGD in the same time, K = {k}", loss, best="low")
    yield ahead(
        "accuracy degrades less with K for LGC than for K-SGD",
        {lane: spread[lane] for lane in ("lgc", "fastest-k")},
        best="low",
        write=percent,
    )
    yield falling("time falls with K", seconds, rising=True)
    yield point_chart(
        "frontier",
        "Time and loss by K",
        "The paper's figure 5. Labels are K and the test accuracy; both lines end in Full.",
        [
            Series(
                name=lane,
                points=[(at, ends[lane, k]["loss"]) for k, at in zip(ks, seconds, strict=True)],
                labels=[f"K={k}, {percent(ends[lane, k]['accuracy'])}" for k in ks],
            )
            for lane in lanes
        ],
        x="seconds of the cluster",
        y="training loss at the end",
    )
    yield from smaller_remarks(size)
    yield "With K = 10 both are Full, which is run once."
    yield Numbers({**{f"{lane} K={k}": found for (lane, k), found in ends.items()}, "spread": spread})


def expected_seconds(k: int, workers: int = 10) -> float:
    """Return the mean of the K-th of so many times, each a shift and an exponential: the seconds of a round.

    >>> round(expected_seconds(5), 4), round(expected_seconds(10), 4)
    (0.0629, 0.1086)
    """
    harmonic = sum(1 / number for number in range(workers - k + 1, workers + 1))
    return float(LGC_SETTING["shift_seconds"]) + float(LGC_SETTING["mean_seconds"]) * harmonic


def spread_of(values: Sequence[float]) -> float:
    """Return the largest less the smallest; NaN where one is missing.

    >>> spread_of([0.25, 0.5]), spread_of([0.5, math.nan])
    (0.25, nan)
    """
    return NAN if any(map(math.isnan, values)) else max(values) - min(values)
