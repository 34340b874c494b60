"""lgc-3: accuracy by skew (c classes a worker) and persistence (h rounds): full, fastest-k, lgc."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, mean, percent, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.lgc.setting import LANES, LENET, base_recipe, job_seconds
from paceline.reproduce.published import LGC_FIGURE_3
from paceline.reproduce.recipe_runs import recipe_job


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
