"""Fewer bits a gradient cost more iterations to the same training loss, the lecture says; each codec has its best rate.

By the convergence theorem iterations are about in proportion to the bound on the second moment.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from paceline.recipes import Recipe
from paceline.reports.figures import Series, point_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.lecture.quantising import UNQUANTISED, moment_bound

RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TARGET_LOSS = 0.3


def run_to_loss(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train until the training loss is at the target; return the rounds, or None, and a gradient's mean bits."""
    from paceline.runs.simulation import make_run

    recipe = Recipe.from_document(settings["recipe"])
    run = make_run(recipe)
    rounds = None
    for progress in run:
        if progress.loss is not None and progress.loss <= settings["target"]:
            rounds = progress.round
            break
    trace = run.trace
    gradients = max(1, trace.used)
    return {"rounds": rounds, "bits": 8 * trace.received_bytes / gradients, "seen": trace.rounds_done}


def tradeoff_levels(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the levels that are compared, the fewest bits first."""
    return (1, UNQUANTISED) if plan.toy else (1, 4, 16, 64, UNQUANTISED)


def tradeoff_rates(plan: ExperimentPlan) -> tuple[float, ...]:
    """Return the rates among which each codec has its best."""
    return (0.1, 0.5) if plan.toy else RATES


def jobs_of_tradeoff(plan: ExperimentPlan) -> list[Job]:
    rounds = plan.choose(toy=6, laboratory=600, full=3000)
    base = Recipe(rounds=rounds, evaluate_every=1, evaluation_samples=1500, target_loss=None).with_settings(
        data={"split": "iid"},
        optimizer={"momentum": 0.0, "weight_decay": 0.0},
        cluster={"workers": 2},
        strategy={"name": "full"},
    )
    jobs = []
    for seed in plan.seeds:
        for levels in tradeoff_levels(plan):
            codec = {"name": "identity"}
            if levels:
                codec = {"name": "qsgd", "levels": levels, "bucket": 0, "norm": "l2", "lossless": "elias"}  # type: ignore[dict-item]
            for rate in tradeoff_rates(plan):
                recipe = base.with_seed(seed).with_settings(codec=codec, optimizer={"lr": rate})
                jobs.append(
                    Job(
                        name=f"s = {levels}, rate {rate:g}, seed {seed}",
                        run=run_to_loss,
                        settings={"recipe": recipe.to_document(), "target": TARGET_LOSS},
                        seconds=plan.choose(toy=0.3, laboratory=2.0, full=10.0),
                    )
                )
    return jobs


def conclude_tradeoff(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, least, sizes, moments = [], list[float | None](), list[float](), list[float]()
    names = ["none" if not levels else f"s = {levels}" for levels in tradeoff_levels(plan)]
    for levels, name in zip(tradeoff_levels(plan), names, strict=True):
        by_rate: dict[float, float | None] = {}
        for rate in tradeoff_rates(plan):
            found = [outcomes[f"s = {levels}, rate {rate:g}, seed {seed}"]["rounds"] for seed in plan.seeds]
            by_rate[rate] = None if None in found else statistics.mean(found)
        reached = {rate: rounds for rate, rounds in by_rate.items() if rounds is not None}
        best = min(reached, key=lambda rate: reached[rate]) if reached else None
        size = statistics.mean(
            outcomes[f"s = {levels}, rate {best or tradeoff_rates(plan)[0]:g}, seed {seed}"]["bits"]
            for seed in plan.seeds
        )
        least.append(None if best is None else reached[best])
        sizes.append(size)
        moments.append(moment_bound(26_122, levels) if levels else 1.0)
        rows.append(
            (
                name,
                f"{size:,.0f}",
                "none" if best is None else f"{best:g}",
                f"<= {moments[-1]:.1f}",
                "never" if best is None else f"{reached[best]:.0f}",
                "-" if best is None else f"{size * reached[best] / 8e6:.2f}",
            )
        )
    none = least[-1]
    ratios = [None if value is None or not none else value / none for value in least]
    return Findings(
        tables=(
            PlainTable(
                title=f"Iterations to a training loss of {TARGET_LOSS}, each codec at its best rate",
                headings=("levels", "bits a\ngradient", "best\nrate", "moment:\npaper", "ours:\nrounds", "MB in\nall"),
                rows=rows,
                caption="MB in all: of one worker.",
            ),
        ),
        claims=(
            falling("fewer bits, more iterations", least, slack=0.05 * (none or 0.0)),
            ahead(
                "no free lunch: s = 1 needs more iterations than no quantisation",
                {"none": none, "s = 1": least[0]},
                best="low",
            ),
            within(
                "iterations in proportion to the bound on the second moment, s = 1: to a factor of two",
                ratios[0],
                least=moments[0] / 2,
                most=2 * moments[0],
                kind="shape",
            ),
        ),
        charts=(
            point_chart(
                "tradeoff",
                "Iterations against bits",
                f"To a training loss of {TARGET_LOSS}, each codec at the best of {len(tradeoff_rates(plan))} rates.",
                [Series(name="measured", points=list(zip(sizes, least, strict=True)), labels=names)],
                x="bits of a gradient",
                y="iterations",
                log_x=True,
                log_y=True,
            ),
        ),
        series=("measured",),
        remarks=(
            "Two workers train the small network on digits with plain SGD. At a rate that is too small for all of "
            "them, every s needs the same iterations, so each s has its own rate.",
            "The lecture's curve is not readable. Its proportion is one of upper bounds, on convex functions.",
        ),
        numbers={name: {"rounds": value, "bits": size} for name, value, size in zip(names, least, sizes, strict=True)},
    )
