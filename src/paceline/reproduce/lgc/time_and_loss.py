"""lgc-4 and lgc-5, the paper's figures 4 and 5: what does the time that LGC saves cost in loss, for each K?"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from paceline.reports.figures import Series, line_chart, point_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, figure, percent, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.lgc.setting import (
    LANES,
    ROUNDS_OF_AN_EPOCH,
    base_recipe,
    figures_of,
    job_seconds,
    smaller_remarks,
)
from paceline.reproduce.published import LGC_FIGURE_4, LGC_FIGURE_5, LGC_SETTING, LGC_TIME_SAVED
from paceline.reproduce.recipe_runs import recipe_job

LOSS_SLACK = 0.03  # "nearly the same"

Curve = list[dict[str, float]]


# -- figure 4 ----------------------------------------------------------------------------------------------------------


def jobs_of_figure_4(plan: ExperimentPlan) -> list[Job]:
    rounds = plan.choose(toy=8, laboratory=6 * ROUNDS_OF_AN_EPOCH, full=None)
    recipe = base_recipe(plan, rounds=rounds)
    warmup = recipe.rounds * int(LGC_SETTING["warmup_epochs"]) // int(LGC_SETTING["epochs"])
    recipe = recipe.with_settings(
        evaluate_every=plan.choose(toy=2, laboratory=ROUNDS_OF_AN_EPOCH // 4, full=ROUNDS_OF_AN_EPOCH),
        data={"classes_per_worker": 3},
        delay={"persistence": 10},
        strategy={"warmup_rounds": warmup},
    )
    return [
        recipe_job(
            f"{lane} seed {seed}",
            recipe.with_strategy(lane).with_seed(seed),
            seconds=job_seconds(plan, recipe.rounds),
        )
        for seed in plan.seeds
        for lane in LANES
    ]


def conclude_figure_4(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    names = {lane: [f"{lane} seed {seed}" for seed in plan.seeds] for lane in LANES}
    curves = {lane: mean_curve([outcomes[name]["curve"] for name in names[lane]]) for lane in LANES}
    found = {lane: figures_of(outcomes, names[lane]) for lane in LANES}
    seconds, losses = ({lane: found[lane][name] for lane in LANES} for name in ("seconds", "loss"))
    saved = {lane: None if not seconds["full"] else 1 - (seconds[lane] or 0.0) / seconds["full"] for lane in LANES}
    below = share_below(curves["lgc"], curves["full"])
    rows = [
        (
            lane,
            figure(losses[lane]),
            percent(found[lane]["accuracy"]),
            figure(seconds[lane]),
            "-" if lane == "full" else percent(saved[lane]),
            LGC_FIGURE_4[lane] + (f",\nup to {percent(LGC_TIME_SAVED)} less time" if lane == "lgc" else ""),
        )
        for lane in LANES
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Loss at the end and time, c = 3, h = 10",
                headings=("strategy", "ours:\nloss", "ours:\naccuracy", "ours:\nseconds", "ours:\nsaved", "paper"),
                rows=rows,
                caption="Seconds are those of the simulated cluster.",
            ),
        ),
        claims=(
            within("LGC saves 30 to 38 % of the time of Full", saved["lgc"], least=0.30, most=0.38, write=percent),
            ahead(
                "Full ends no higher than LGC, but for 3 %",
                {lane: losses[lane] for lane in ("full", "lgc")},
                best="low",
                by=LOSS_SLACK * (losses["full"] or 0.0),
                strictly=False,
            ),
            ahead("LGC ends below K-SGD", {lane: losses[lane] for lane in ("lgc", "fastest-k")}, best="low"),
            within("LGC below Full at the same time, 9 times of 10", below, least=0.9, kind="winner", write=percent),
        ),
        charts=tuple(
            line_chart(
                f"loss-{x}",
                f"Training loss over {title}",
                f"The paper's figure 4{panel}.",
                [Series(name=lane, points=[(point[x], point["loss"]) for point in curves[lane]]) for lane in LANES],
                x=title,
                y="training loss",
                wide=False,
            )
            for x, title, panel in (("round", "iterations", "(a)"), ("seconds", "seconds of the cluster", "(b)"))
        ),
        series=LANES,
        remarks=(
            *smaller_remarks(plan),
            "Late work is complete: stragglers finish before the next round, as the paper assumes.",
        ),
        numbers={**found, "saved": saved["lgc"], "below": below},
    )


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


def share_below(curve: Curve, other: Curve) -> float | None:
    """Return at which share of its points a curve lies below another, which is read between its points.

    Points outside the other's times are left out, and so is a point that lies on it, as both do at the beginning.

    >>> falls = [{"seconds": 1.0, "loss": 2.0}, {"seconds": 2.0, "loss": 1.0}]
    >>> slowly = [{"seconds": 1.0, "loss": 2.0}, {"seconds": 3.0, "loss": 1.0}]
    >>> share_below(falls, slowly), share_below(slowly, falls)
    (1.0, None)
    """
    judged = []
    for point in curve:
        there = loss_at(other, point["seconds"])
        if there is not None and there != point["loss"]:
            judged.append(point["loss"] < there)
    return sum(judged) / len(judged) if judged else None


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


def values_of_k(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the values of K; the last is the number of workers."""
    return (5, 7, 10) if plan.toy else (5, 6, 7, 8, 9, 10)


def figure_5_job(lane: str, k: int, seed: int) -> str:
    """Return the name of a job; with K = 10 every lane is full."""
    return f"full seed {seed}" if k == 10 else f"{lane} K={k} seed {seed}"


def jobs_of_figure_5(plan: ExperimentPlan) -> list[Job]:
    recipe, jobs = base_recipe(plan).with_settings(data={"classes_per_worker": 3}), dict[str, Job]()
    for seed in plan.seeds:
        for k in values_of_k(plan):
            for lane in ("fastest-k", "lgc"):
                name = figure_5_job(lane, k, seed)
                if name not in jobs:
                    run = recipe.with_strategy("full" if k == 10 else lane).with_seed(seed)
                    run = run.with_settings(strategy={"k": 7 if k == 10 else k}, delay={"persistence": 10})
                    jobs[name] = recipe_job(name, run, seconds=job_seconds(plan, recipe.rounds))
    return list(jobs.values())


def expected_seconds(k: int, workers: int = 10) -> float:
    """Return the mean of the K-th of so many times, each a shift and an exponential: the seconds of a round.

    >>> round(expected_seconds(5), 4), round(expected_seconds(10), 4)
    (0.0629, 0.1086)
    """
    harmonic = sum(1 / number for number in range(workers - k + 1, workers + 1))
    return float(LGC_SETTING["shift_seconds"]) + float(LGC_SETTING["mean_seconds"]) * harmonic


def conclude_figure_5(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    lanes, ks = ("fastest-k", "lgc"), values_of_k(plan)

    found = {
        (lane, k): figures_of(outcomes, [figure_5_job(lane, k, seed) for seed in plan.seeds])
        for lane in lanes
        for k in ks
    }
    rounds = outcomes[figure_5_job("lgc", ks[-1], plan.seeds[0])]["rounds"] or 1
    seconds = [found["lgc", k]["seconds"] for k in ks]
    spread = {lane: spread_of([found[lane, k]["accuracy"] for k in ks]) for lane in lanes}
    claims = [
        ahead(
            f"LGC below K-SGD in the same time, K = {k}",
            {lane: found[lane, k]["loss"] for lane in ("lgc", "fastest-k")},
            best="low",
        )
        for k in ks[:-1]
    ]
    claims.append(
        ahead(
            "accuracy degrades less with K for LGC than for K-SGD",
            {lane: spread[lane] for lane in ("lgc", "fastest-k")},
            best="low",
            write=percent,
        )
    )
    claims.append(falling("time falls with K", seconds, rising=True))
    rows = [
        (
            f"K = {k}",
            "-" if at is None else f"{at / rounds:.4f}",
            f"{expected_seconds(k):.4f}",
            *(figure(found[lane, k]["loss"]) for lane in lanes),
            *(percent(found[lane, k]["accuracy"]) for lane in lanes),
            "not readable",
        )
        for k, at in zip(ks, seconds, strict=True)
    ]
    return Findings(
        tables=(
            PlainTable(
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
                rows=rows,
                caption=f"Expected is the K-th of ten times, by the paper's delays. The paper's {LGC_FIGURE_5}.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            point_chart(
                "frontier",
                "Time and loss by K",
                "The paper's figure 5. Labels are K and the test accuracy; both lines end in Full.",
                [
                    Series(
                        name=lane,
                        points=[(at or 0.0, found[lane, k]["loss"]) for k, at in zip(ks, seconds, strict=True)],
                        labels=[f"K={k}, {percent(found[lane, k]['accuracy'])}" for k in ks],
                    )
                    for lane in lanes
                ],
                x="seconds of the cluster",
                y="training loss at the end",
            ),
        ),
        series=lanes,
        remarks=(*smaller_remarks(plan), "With K = 10 both are Full, which is run once."),
        numbers={
            **{f"{lane} K={k}": each for (lane, k), each in found.items()},
            "spread": spread,
        },
    )


def spread_of(values: Sequence[float | None]) -> float | None:
    """Return the largest less the smallest; None where one is missing.

    >>> spread_of([0.25, 0.5]), spread_of([0.5, None])
    (0.25, None)
    """
    known = [value for value in values if value is not None]
    return max(known) - min(known) if known and len(known) == len(values) else None
