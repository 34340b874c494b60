"""Figures 4a and 4b show the accuracy over samples: of several networks, and of 4 to 16 workers.

The paper says that HPSGD ends where SSGD does and that its curve is smoother; its curves are not readable.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.reports.chart import Chart
from paceline.reports.figures import Series, bar_chart, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, mean, percent, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.hpsgd.lanes import (
    NAMES,
    PAPER,
    REBASE,
    REBASED,
    SHOWN,
    SMALL_NETWORK,
    TOY_SECONDS,
    WITHOUT_PSGD,
    Case,
    accuracy_of,
    full_case,
    jobs_of,
    setting_remarks,
)

# -- figure 4a ---------------------------------------------------------------------------------------------------------

SHORT = (
    "The laboratory's 600 rounds are 1.3 epochs: curves still rise where the paper's end after 100, and what "
    "is behind at the end may catch up. This length was chosen by a pilot, and it decides a claim: in a pilot, "
    "at 1,000 rounds, mlp would hold that HPSGD's accuracy at the end is SSGD's to half a point. So a longer "
    "run of the mlp narrows the gap."
)


def cases_of_figure_4a(plan: ExperimentPlan) -> list[Case]:
    if plan.size == "full":
        return [full_case(network) for network in ("resnet101", "densenet121", "mobilenetv2", "googlenet")]
    if plan.toy:
        return [Case(network="mlp", rate=0.01, rounds=16, evaluate_every=4, job_seconds=TOY_SECONDS)]
    return [
        Case(network=network, rate=0.01, rounds=600, data="fashion-mnist", evaluate_every=20, job_seconds=seconds)
        for network, seconds in (("mlp", 6.0), ("lenet", 22.0), (SMALL_NETWORK, 10.0))
    ]


def jobs_of_figure_4a(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_4a(plan), WITHOUT_PSGD, plan.seeds)


def curve_of(outcome: Outcome, case: Case) -> list[tuple[float, float | None]]:
    """Return the accuracy over epochs."""
    return [(point["round"] / case.rounds_of_an_epoch, point["accuracy"]) for point in outcome["curve"]]


def roughness(curve: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the standard deviation of the changes from one measurement to the next, over the second half of a curve.

    >>> roughness([(epoch, 0.5) for epoch in range(6)])
    0.0
    >>> roughness([(0, 0.1), (1, 0.5), (2, 0.5), (3, 0.7), (4, 0.5), (5, 0.7)]) > 0.1
    True
    """
    half = [value for at, value in curve if value is not None and at >= curve[-1][0] / 2]
    changes = [after - before for before, after in itertools.pairwise(half)]
    return statistics.pstdev(changes) if len(changes) > 1 else None


def conclude_figure_4a(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims, charts = [], list[Claim](), list[Chart]()
    numbers: dict[str, Any] = {}
    for case in cases_of_figure_4a(plan):
        ends = {lane: accuracy_of(plan, outcomes, case, lane) for lane in WITHOUT_PSGD}
        curves = {lane: curve_of(outcomes[case.job_name(lane, plan.seeds[0])], case) for lane in WITHOUT_PSGD}
        rough = {
            lane: mean([roughness(curve_of(outcomes[case.job_name(lane, seed)], case)) for seed in plan.seeds])
            for lane in WITHOUT_PSGD
        }
        rows.append((case.title, *(percent(ends[lane]) for lane in WITHOUT_PSGD), "hpsgd = ssgd"))
        rows.append(("  roughness, points", *(_points(rough[lane]) for lane in WITHOUT_PSGD), "hpsgd smoothest"))
        name = NAMES.get(case.network, case.network)
        claims.append(
            within(
                f"HPSGD's accuracy at the end is SSGD's to half a point, {name}",
                abs(ends[PAPER] - ends["ssgd"]),
                most=0.005,
                kind="shape",
                write=percent,
            )
        )
        for other in ("ssgd", "local-sgd"):
            claims.append(
                ahead(
                    f"HPSGD's curve is smoother than that of {other}, {name}",
                    {PAPER: rough[PAPER], other: rough[other]},
                    best="low",
                    write=_points,
                )
            )
        claims.append(
            within(
                f"hpsgd with rebase: its accuracy less SSGD's, {name}",
                ends[REBASED] - ends["ssgd"],
                least=-0.005,
                write=percent,
                judged=False,
            )
        )
        charts.append(
            line_chart(
                f"accuracy-{len(charts)}",
                f"Test accuracy, {case.title}",
                "The paper's figure 4a has a panel for each network.",
                [Series(name=lane, points=curve) for lane, curve in curves.items()],
                x="epochs",
                y="test accuracy",
                percent=True,
                wide=False,
            )
        )
        numbers[name] = {"accuracy": ends, "roughness": rough}
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy at the end, and how rough the curve is",
                headings=("network", *(f"ours:\n{SHOWN[lane]}" for lane in WITHOUT_PSGD), "paper"),
                rows=rows,
                caption="roughness: standard deviation of the change from one measurement to the next, in the second "
                "half.\nThe paper's curves are not readable.",
            ),
        ),
        claims=tuple(claims),
        charts=tuple(charts),
        series=WITHOUT_PSGD,
        remarks=(
            *setting_remarks(plan),
            REBASE,
            *(() if plan.size == "full" else (SHORT,)),
        ),
        numbers=numbers,
    )


def _points(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.2f}"


# -- figure 4b ---------------------------------------------------------------------------------------------------------


def cases_of_figure_4b(plan: ExperimentPlan) -> list[Case]:
    sizes = (4, 16) if plan.toy else (4, 8, 12, 16)
    if plan.size == "full":
        return [full_case("resnet101", workers=workers) for workers in sizes]
    steps = 64 if plan.toy else 1600  # of all workers
    return [
        Case(network="mlp", rate=0.01, rounds=round(steps / workers), evaluate_every=max(1, 40 // workers),
             workers=workers, job_seconds=TOY_SECONDS if plan.toy else 2.5)
        for workers in sizes
    ]  # fmt: skip


def jobs_of_figure_4b(plan: ExperimentPlan) -> list[Job]:
    return jobs_of(cases_of_figure_4b(plan), WITHOUT_PSGD, plan.seeds)


def conclude_figure_4b(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    cases = cases_of_figure_4b(plan)
    ends = {lane: {case.workers: accuracy_of(plan, outcomes, case, lane) for case in cases} for lane in WITHOUT_PSGD}
    claims = []
    for case in cases:
        claims.append(
            within(
                f"HPSGD at most a point behind SSGD, {case.workers} workers",
                ends["ssgd"][case.workers] - ends[PAPER][case.workers],
                most=0.01,
                kind="shape",
                write=percent,
                judged=False,
            )
        )
    first, last = cases[0].workers, cases[-1].workers
    lost = {lane: ends[lane][first] - ends[lane][last] for lane in WITHOUT_PSGD}
    claims.append(
        within(
            f"HPSGD loses at most a point more than SSGD from {first} to {last} workers",
            lost[PAPER] - lost["ssgd"],
            most=0.01,
            kind="shape",
            write=percent,
        )
    )
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy after equally many samples, by the number of workers",
                headings=("workers", *(f"ours:\n{SHOWN[lane]}" for lane in WITHOUT_PSGD), "paper"),
                rows=[
                    (str(case.workers), *(percent(ends[lane][case.workers]) for lane in WITHOUT_PSGD), "not readable")
                    for case in cases
                ],
                caption=f"{cases[0].title}. The text says nothing of figure 4b.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            bar_chart(
                "workers",
                "Test accuracy after equally many samples",
                "Every worker's batch is the same, so with more workers there are fewer, larger steps.",
                [str(case.workers) for case in cases],
                {lane: [ends[lane][case.workers] for case in cases] for lane in WITHOUT_PSGD},
                x="workers",
                y="test accuracy",
                percent=True,
            ),
        ),
        series=WITHOUT_PSGD,
        remarks=(
            *setting_remarks(plan),
            REBASE,
            "What counts as the same is ours: the paper prints no number of figure 4b.",
        ),
        numbers={lane: {str(workers): value for workers, value in found.items()} for lane, found in ends.items()},
    )
