"""lgc-6, the paper's figure 6: stragglers deliver r of their 4 blocks, with and without linear scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, figure, percent
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.lgc.setting import base_recipe, figures_of, job_seconds, smaller_remarks
from paceline.reproduce.published import LGC_FIGURE_6
from paceline.reproduce.recipe_runs import recipe_job

WEIGHTS: dict[str, bool | str] = {"scaled": True, "unscaled": False, "by samples": "samples"}  # -> scale_partial


def blocks_done(plan: ExperimentPlan) -> tuple[int | str, ...]:
    """Return the values of r: how many of its four blocks a straggler has done."""
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
            *smaller_remarks(plan),
            "Weights by samples are ours: a straggler counts for as many samples as it computed. With all four blocks "
            "the three weights are alike, and one run stands for them.",
        ),
        numbers={
            **{f"r={r} {weight}": each for (r, weight), each in found.items()},
            **beside,
        },
    )
