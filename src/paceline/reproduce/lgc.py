"""Live Gradient Compensation: its figures.

    lgc-1       three workers, three rounds: whose time is waited for
    lgc-3       accuracy by skew (c classes a worker) and persistence (h rounds): full, fastest-k, lgc
    lgc-4       loss over rounds and over time
    lgc-5       K = 5 to 10: the frontier of time and loss
    lgc-6       stragglers that do r of 4 blocks, with and without linear scaling
    lgc-sizes   5 to 40 workers

The laboratory has LeNet in place of VGG-11, a few epochs in place of 60, and the paper's cluster: ten workers, K = 7,
batches of 32 in 4 blocks, delays of 0.05 s plus an exponential of mean 0.02 s, held for h rounds. Digits are too easy:
there nearly every cell ends at the same accuracy. Late work is `complete`, as in the paper.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.recipes import Recipe
from paceline.reports.figures import Series, bar_chart, line_chart, point_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, equals, falling, figure, mean, percent, within
from paceline.reproduce.experiment import Claim, Experiment, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.published import (
    LGC_FIGURE_1,
    LGC_FIGURE_1_TOTALS,
    LGC_FIGURE_3,
    LGC_FIGURE_4,
    LGC_FIGURE_5,
    LGC_FIGURE_6,
    LGC_SETTING,
    LGC_SIZES,
    LGC_TIME_SAVED,
)
from paceline.reproduce.recipe_runs import recipe_job, run_recipe

LANES = ("full", "fastest-k", "lgc")
ROUNDS_OF_AN_EPOCH = 156  # ten workers with batches of 32 on 50,000 images
MEASURED = ("loss", "accuracy", "seconds")
WEIGHTS: dict[str, bool | str] = {"scaled": True, "unscaled": False, "by samples": "samples"}  # -> scale_partial
LOSS_SLACK = 0.03  # "nearly the same"
LENET = "LeNet in place of VGG-11, and fewer epochs, without augmentation; the rate is 0.05, not tuned."


def base_recipe(plan: ExperimentPlan, *, rounds: int | None = None) -> Recipe:
    """Return the paper's setting at the size of the plan, with the delays and the cluster of its section III.

    >>> base_recipe(ExperimentPlan(size="full")).model.name, base_recipe(ExperimentPlan(size="toy")).data.name
    ('vgg11', 'digits')
    """
    epochs = int(LGC_SETTING["epochs"])
    total = rounds or plan.choose(toy=8, laboratory=300, full=epochs * ROUNDS_OF_AN_EPOCH)
    return Recipe(rounds=total, evaluate_every=total, target_loss=None).with_settings(
        data={
            "name": plan.choose(toy="digits", laboratory="cifar10", full="cifar10"),
            "augment": plan.size == "full",
            "split": "non-iid",
        },
        model={"name": plan.choose(toy="mlp", laboratory="lenet", full="vgg11")},
        optimizer={"lr": 0.1 if plan.size == "full" else 0.05, "decay_at": [0.5]},
        strategy={"k": 7, "warmup_rounds": plan.choose(toy=1, laboratory=10, full=2 * ROUNDS_OF_AN_EPOCH)},
        cluster={"late_work": "complete"},
    )


def job_seconds(plan: ExperimentPlan, rounds: int) -> float:
    """Return about how long a run takes on one core."""
    return float(plan.choose(toy=0.5, laboratory=0.05 * rounds, full=3.0 * rounds))


def figures_of(outcomes: Mapping[str, Outcome], names: Sequence[str]) -> dict[str, float | None]:
    """Return the means of several runs: loss, accuracy and seconds at the end.

    >>> figures_of({"a": {"loss": 1.0, "accuracy": 0.5, "seconds": 2.0}}, ["a"])["loss"]
    1.0
    """
    return {name: mean([outcomes[each][name] for each in names]) for name in MEASURED}


# -- figure 1 ----------------------------------------------------------------------------------------------------------


def run_figure_1(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate three rounds of three workers whose seconds stand in the settings."""
    with tempfile.TemporaryDirectory(prefix="paceline-lgc-1-") as folder:
        table = Path(folder, "delays.csv")
        table.write_text("\n".join(",".join(map(str, row)) for row in settings["seconds"]) + "\n", encoding="utf-8")
        recipe = Recipe(rounds=len(settings["seconds"])).with_settings(
            cluster={"workers": 3, "late_work": settings["late_work"]},
            strategy={"name": settings["strategy"], "k": 2},
            delay={"name": "recorded", "file": str(table)},
        )
        return run_recipe({"recipe": recipe.to_document(), "timing_only": True})


def jobs_of_figure_1(plan: ExperimentPlan) -> list[Job]:
    # The figure names who is waited for: the slowest, and the second. The quickest is any that is quicker still.
    seconds = [
        [1.0, middle, slowest] for middle, slowest in zip(LGC_FIGURE_1["lgc"], LGC_FIGURE_1["full"], strict=True)
    ]
    return [
        Job(
            name=f"{lane}, {late_work}",
            run=run_figure_1,
            settings={"strategy": lane, "late_work": late_work, "seconds": seconds},
        )
        for lane, late_work in (("full", "complete"), ("lgc", "complete"), ("lgc", "partial"))
    ]


def conclude_figure_1(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    full, lgc, partial = (outcomes[name]["seconds"] for name in ("full, complete", "lgc, complete", "lgc, partial"))
    paper = [LGC_FIGURE_1_TOTALS[lane] for lane in ("full", "lgc")]
    return Findings(
        tables=(
            PlainTable(
                title="Seconds of three rounds, three workers, K = 2",
                headings=("strategy", "paper", "ours"),
                rows=[
                    ("full", f"{paper[0]}", f"{full:.1f}"),
                    ("lgc", f"{paper[1]}", f"{lgc:.1f}"),
                    ("lgc, late workers finish their block", "-", f"{partial:.1f}"),
                ],
            ),
        ),
        claims=(
            equals("full takes 6.5 s", full, LGC_FIGURE_1_TOTALS["full"]),
            equals("lgc takes 4.0 s", lgc, LGC_FIGURE_1_TOTALS["lgc"]),
            ahead("lgc before full", {"lgc": lgc, "full": full}, best="low"),
        ),
        charts=(
            bar_chart(
                "seconds",
                "Three rounds, three workers, K = 2",
                "Full waits for the slowest of each round, lgc for the second.",
                ["full", "lgc"],
                {"paper": paper, "ours": [full, lgc]},
                y="seconds",
            ),
        ),
        series=("paper", "ours"),
        remarks=("The quickest worker of each round is not readable in the figure: 1.0 s is ours.",),
        numbers={"full": full, "lgc": lgc, "lgc_partial": partial},
    )


# -- figure 3 ----------------------------------------------------------------------------------------------------------


def skews(plan: ExperimentPlan) -> tuple[int, ...]:
    """The classes that a worker holds."""
    return (1, 3) if plan.toy else (1, 2, 3, 10)


def persistences(plan: ExperimentPlan) -> tuple[int, ...]:
    """The rounds for which a straggler stays one."""
    return (1, 10) if plan.toy else (1, 10, 50)


def figure_3_job(c: int, h: int, lane: str, seed: int) -> str:
    """Return the name of a cell's job; what `full` learns does not depend on who is slow."""
    return f"{lane} c={c} seed {seed}" if lane == "full" else f"{lane} c={c} h={h} seed {seed}"


def jobs_of_figure_3(plan: ExperimentPlan) -> list[Job]:
    recipe, jobs = base_recipe(plan), dict[str, Job]()
    for seed in plan.seeds:
        for c in skews(plan):
            for h in persistences(plan):
                for lane in LANES:
                    name = figure_3_job(c, h, lane, seed)
                    if name not in jobs:
                        cell = recipe.with_strategy(lane).with_seed(seed)
                        cell = cell.with_settings(
                            data={"classes_per_worker": c}, delay={"persistence": 10 if lane == "full" else h}
                        )
                        jobs[name] = recipe_job(name, cell, seconds=job_seconds(plan, recipe.rounds))
    return list(jobs.values())


def conclude_figure_3(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    def accuracy(c: int, h: int, lane: str) -> float | None:
        return mean([outcomes[figure_3_job(c, h, lane, seed)]["accuracy"] or 0.0 for seed in plan.seeds])

    cells = {(c, h): {lane: accuracy(c, h, lane) for lane in LANES} for c in skews(plan) for h in persistences(plan)}
    rows = [
        (f"c = {c}, h = {h}", *(percent(found[lane]) for lane in LANES), _paper_word(c, h))
        for (c, h), found in cells.items()
    ]
    charts = tuple(
        bar_chart(
            f"h{h}",
            f"Test accuracy by classes a worker, h = {h}",
            "The paper's figure 3 has a panel for each h.",
            [f"c = {c}" for c in skews(plan)],
            {lane: [cells[c, h][lane] for c in skews(plan)] for lane in LANES},
            y="test accuracy",
            percent=True,
            wide=False,
        )
        for h in persistences(plan)
    )
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy at the end, ours beside the paper's words",
                headings=("cell", *(f"ours:\n{lane}" for lane in LANES), "paper"),
                rows=rows,
                caption=LGC_FIGURE_3,
            ),
        ),
        claims=tuple(_figure_3_claims(plan, cells)),
        charts=charts,
        series=LANES,
        remarks=(LENET,),
        numbers={f"c={c} h={h}": found for (c, h), found in cells.items()},
    )


def _paper_word(c: int, h: int) -> str:
    if h == 1:
        return "little affected" if c > 1 else "-"
    return "K-SGD diverges" if c == 1 else "LGC = Full > K-SGD" if c < 10 else "-"


def _figure_3_claims(plan: ExperimentPlan, cells: Mapping[tuple[int, int], Mapping[str, float | None]]) -> list[Claim]:
    claims = []
    for (c, h), found in cells.items():
        if c == 10:
            continue
        if h > 1:
            claims.append(
                ahead(
                    f"LGC above K-SGD, c = {c}, h = {h}",
                    {lane: found[lane] for lane in ("lgc", "fastest-k")},
                    best="high",
                    write=percent,
                )
            )
            behind = None if found["full"] is None or found["lgc"] is None else found["full"] - found["lgc"]
            claims.append(
                within(
                    f"LGC at most a point behind Full, c = {c}, h = {h}",
                    behind,
                    most=0.01,
                    kind="shape",
                    write=percent,
                )
            )
        if c == 1 and h > 1:
            claims.append(
                within(f"K-SGD at chance, c = 1, h = {h}", found["fastest-k"], most=0.15, kind="shape", write=percent)
            )
        if h == 1 and c > 1:
            lost = None if found["full"] is None or found["fastest-k"] is None else found["full"] - found["fastest-k"]
            claims.append(
                within(f"K-SGD little affected, c = {c}, h = 1", lost, most=0.05, kind="shape", write=percent)
            )
    return claims


# -- figure 4 ----------------------------------------------------------------------------------------------------------

Curve = list[dict[str, float]]


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
        remarks=(LENET, "Late work is complete: stragglers finish for nothing, as the paper assumes."),
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
    """The K of figure 5; the last is everybody."""
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
                caption=f"Expected is the K-th of ten times, by the paper's delays. Paper's {LGC_FIGURE_5}.",
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
        remarks=(LENET, "With K = 10 both are Full, which is run once."),
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


# -- figure 6 ----------------------------------------------------------------------------------------------------------


def blocks_done(plan: ExperimentPlan) -> tuple[int | str, ...]:
    """The blocks, of four, that a straggler has done."""
    return (1, 4, "random") if plan.toy else (1, 2, 3, 4, "random")


def figure_6_job(r: int | str, weight: str, seed: int) -> str:
    """Return the name of a job; with all blocks done, all weights are alike."""
    return f"r=4 seed {seed}" if r == 4 else f"r={r} {weight} seed {seed}"


def jobs_of_figure_6(plan: ExperimentPlan) -> list[Job]:
    recipe = base_recipe(plan).with_settings(data={"classes_per_worker": 3}, delay={"persistence": 10})
    jobs = dict[str, Job]()
    for seed in plan.seeds:
        run, seconds = recipe.with_seed(seed), job_seconds(plan, recipe.rounds)
        for lane in ("full", "fastest-k"):
            jobs[f"{lane} seed {seed}"] = recipe_job(f"{lane} seed {seed}", run.with_strategy(lane), seconds=seconds)
        for r in blocks_done(plan):
            for weight, setting in WEIGHTS.items():
                name = figure_6_job(r, weight, seed)
                if name not in jobs:
                    changes: Any = {"cluster": {"late_blocks": r}, "strategy": {"scale_partial": setting}}
                    jobs[name] = recipe_job(name, run.with_strategy("lgc").with_settings(**changes), seconds=seconds)
    return list(jobs.values())


def conclude_figure_6(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rs = blocks_done(plan)
    found = {
        (r, weight): figures_of(outcomes, [figure_6_job(r, weight, seed) for seed in plan.seeds])
        for r in rs
        for weight in WEIGHTS
    }
    beside = {
        lane: figures_of(outcomes, [f"{lane} seed {seed}" for seed in plan.seeds]) for lane in ("full", "fastest-k")
    }
    claims = [
        ahead(
            f"with scaling no worse than without, r = {r}",
            {weight: found[r, weight]["accuracy"] for weight in ("scaled", "unscaled")},
            best="high",
            strictly=False,
            write=percent,
        )
        for r in rs
        if r in (1, "random")
    ]
    claims += [
        ahead(
            f"LGC with scaling above K-SGD, r = {r}",
            {"lgc": found[r, "scaled"]["accuracy"], "fastest-k": beside["fastest-k"]["accuracy"]},
            best="high",
            write=percent,
        )
        for r in rs
    ]
    rows = [
        (
            f"r = {r}",
            *(percent(found[r, weight]["accuracy"]) for weight in WEIGHTS),
            *(figure(found[r, weight]["loss"]) for weight in WEIGHTS),
            "not readable",
        )
        for r in rs
    ]
    rows += [
        (
            {"full": "Full", "fastest-k": "K-SGD"}[lane],
            percent(each["accuracy"]),
            "-",
            "-",
            figure(each["loss"]),
            "-",
            "-",
            "not readable",
        )
        for lane, each in beside.items()
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Stragglers that have done r of 4 blocks, K = 7, c = 3, h = 10",
                headings=(
                    "",
                    "ours: acc.\nscaled",
                    "\nunscaled",
                    "by\nsamples",
                    "ours: loss\nscaled",
                    "\nunscaled",
                    "by\nsamples",
                    "paper",
                ),
                rows=rows,
                caption=f"The paper's {LGC_FIGURE_6}.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            bar_chart(
                "partial",
                "Test accuracy by the blocks that stragglers have done",
                "The paper's figure 6. Without their work, K-SGD comes to "
                f"{percent(beside['fastest-k']['accuracy'])}, and Full to {percent(beside['full']['accuracy'])}.",
                [f"r = {r}" for r in rs],
                {weight: [found[r, weight]["accuracy"] for r in rs] for weight in WEIGHTS},
                y="test accuracy",
                percent=True,
            ),
        ),
        series=tuple(WEIGHTS),
        remarks=(
            LENET,
            "Weights by samples are ours: a straggler counts as many samples as it computed. With all four blocks the "
            "three weights are the same run.",
        ),
        numbers={
            **{f"r={r} {weight}": each for (r, weight), each in found.items()},
            **beside,
        },
    )


# -- system sizes ------------------------------------------------------------------------------------------------------


def system_sizes(plan: ExperimentPlan) -> tuple[int, ...]:
    """The numbers of workers."""
    return (5, 10) if plan.toy else (5, 10, 20, 40)


def jobs_of_sizes(plan: ExperimentPlan) -> list[Job]:
    jobs = []
    for workers in system_sizes(plan):
        epoch = 50_000 // (workers * int(LGC_SETTING["batch"]))
        rounds = plan.choose(toy=8, laboratory=240, full=int(LGC_SETTING["epochs"]) * epoch)
        recipe = base_recipe(plan, rounds=rounds).with_settings(
            data={"classes_per_worker": 3},
            delay={"persistence": 10},
            cluster={"workers": workers},
            strategy={
                "k": -(-7 * workers // 10),
                "warmup_rounds": plan.choose(toy=1, laboratory=10, full=int(LGC_SETTING["warmup_epochs"]) * epoch),
            },
        )
        jobs += [
            recipe_job(
                f"{lane} N={workers} seed {seed}",
                recipe.with_strategy(lane).with_seed(seed),
                seconds=job_seconds(plan, rounds) * workers / 10,
            )
            for seed in plan.seeds
            for lane in LANES
        ]
    return jobs


def conclude_sizes(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    sizes = system_sizes(plan)

    found = {
        (lane, n): figures_of(outcomes, [f"{lane} N={n} seed {seed}" for seed in plan.seeds])
        for lane in LANES
        for n in sizes
    }
    claims = []
    for n in sizes:
        accuracy = {lane: found[lane, n]["accuracy"] for lane in LANES}
        claims.append(
            ahead(
                f"LGC above K-SGD, N = {n}",
                {lane: accuracy[lane] for lane in ("lgc", "fastest-k")},
                best="high",
                write=percent,
            )
        )
        known = accuracy["full"] is not None and accuracy["lgc"] is not None
        behind = (accuracy["full"] or 0.0) - (accuracy["lgc"] or 0.0) if known else None
        claims.append(
            within(
                f"LGC at most two points behind Full, N = {n}",
                behind,
                most=0.02,
                kind="shape",
                write=percent,
                judged=False,
            )
        )

    def saved(n: int) -> float | None:
        full, lgc = found["full", n]["seconds"], found["lgc", n]["seconds"]
        return None if not full or lgc is None else 1 - lgc / full

    rows = [
        (
            f"N = {n}, K = {-(-7 * n // 10)}",
            *(percent(found[lane, n]["accuracy"]) for lane in LANES),
            percent(saved(n)),
            "no result given",
        )
        for n in sizes
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy by the number of workers, K = 0.7 N, c = 3, h = 10",
                headings=("cluster", *(f"ours:\n{lane}" for lane in LANES), "ours: time\nsaved by lgc", "paper"),
                rows=rows,
                caption=f"The paper's {LGC_SIZES}.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            bar_chart(
                "sizes",
                "Test accuracy by the number of workers",
                "K is seven tenths of the workers; each has batches of 32, so larger clusters see more samples.",
                [f"N = {n}" for n in sizes],
                {lane: [found[lane, n]["accuracy"] for n in sizes] for lane in LANES},
                y="test accuracy",
                percent=True,
            ),
        ),
        series=LANES,
        remarks=(
            LENET,
            "The paper names no sizes: 5 to 40 workers are ours. That LGC is ahead of K-SGD is what it says at large; "
            "how far LGC is behind Full at each size is reported, not judged.",
        ),
        numbers={f"{lane} N={n}": each for (lane, n), each in found.items()},
    )


EXPERIMENTS: dict[str, Experiment] = {
    each.name: each
    for each in (
        Experiment(
            name="lgc-1",
            source="LGC, figure 1",
            question="three workers, three rounds: whose time is waited for",
            minutes=0.2,
            full_hours=0.01,
            jobs=jobs_of_figure_1,
            conclude=conclude_figure_1,
        ),
        Experiment(
            name="lgc-3",
            source="LGC, figure 3",
            question="accuracy by skew and persistence: full, fastest-k, lgc",
            minutes=5,
            full_hours=400,
            data=("cifar10",),
            jobs=jobs_of_figure_3,
            conclude=conclude_figure_3,
        ),
        Experiment(
            name="lgc-4",
            source="LGC, figure 4",
            question="loss over iterations and over time: full, fastest-k, lgc",
            minutes=2,
            full_hours=16,
            data=("cifar10",),
            jobs=jobs_of_figure_4,
            conclude=conclude_figure_4,
        ),
        Experiment(
            name="lgc-5",
            source="LGC, figure 5",
            question="K = 5 to 10: time against loss, fastest-k and lgc",
            minutes=2,
            full_hours=47,
            data=("cifar10",),
            jobs=jobs_of_figure_5,
            conclude=conclude_figure_5,
        ),
        Experiment(
            name="lgc-6",
            source="LGC, figure 6",
            question="stragglers that do r of 4 blocks: with and without linear scaling",
            minutes=3,
            full_hours=62,
            data=("cifar10",),
            jobs=jobs_of_figure_6,
            conclude=conclude_figure_6,
        ),
        Experiment(
            name="lgc-sizes",
            source="LGC, section III-C",
            question="5 to 40 workers: full, fastest-k, lgc",
            minutes=3,
            full_hours=47,
            data=("cifar10",),
            jobs=jobs_of_sizes,
            conclude=conclude_sizes,
        ),
    )
}
