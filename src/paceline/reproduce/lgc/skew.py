"""lgc-3, the paper's figure 3: how accurate full, fastest-k and lgc are by skew (c classes a worker) and persistence.

A straggler stays one for h rounds. These claims are judged, by means over the seeds:

    LGC above K-SGD                     c = 1, 2, 3 and h = 10, 50
    LGC at most a point behind Full     c = 1, 2, 3 and h = 10, 50
    K-SGD at chance                     c = 1 and h = 10, 50
    K-SGD little affected               c = 2, 3 and h = 1

What Full learns does not depend on h, so it is trained once for each c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import stdev

from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, mean, percent, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.lgc.setting import LANES, base_recipe, job_seconds, smaller_remarks
from paceline.reproduce.published import LGC_FIGURE_3, LGC_SETTING
from paceline.reproduce.recipe_runs import recipe_job


def skews(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the values of c: how many classes a worker holds."""
    return (1, 3) if plan.toy else (1, 2, 3, 10)


def persistences(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the values of h: for how many rounds a straggler stays one."""
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
    seeds = {
        (c, h): {lane: _accuracies(plan, outcomes, c, h, lane) for lane in LANES}
        for c in skews(plan)
        for h in persistences(plan)
    }
    means = {cell: {lane: mean(found[lane]) for lane in LANES} for cell, found in seeds.items()}
    repeats = int(LGC_SETTING["repeats"])
    return Findings(
        tables=(
            PlainTable(
                title="Test accuracy at the end, ours beside the paper's words",
                headings=("cell", *(f"ours:\n{lane}" for lane in LANES), "paper"),
                rows=[
                    (f"c = {c}, h = {h}", *(with_spread(found[lane]) for lane in LANES), _paper_word(c, h))
                    for (c, h), found in seeds.items()
                ],
                caption=f"{LGC_FIGURE_3}."
                + (f" ± is the standard deviation over {len(plan.seeds)} seeds." if len(plan.seeds) > 1 else ""),
            ),
        ),
        claims=tuple(_figure_3_claims(means)),
        charts=tuple(
            bar_chart(
                f"h{h}",
                f"Test accuracy by classes a worker, h = {h}",
                "The paper's figure 3 has a panel for each h.",
                [f"c = {c}" for c in skews(plan)],
                {lane: [means[c, h][lane] for c in skews(plan)] for lane in LANES},
                y="test accuracy",
                percent=True,
                wide=False,
            )
            for h in persistences(plan)
        ),
        series=LANES,
        remarks=(
            *smaller_remarks(plan),
            *(
                (f"The paper has the mean of {repeats} repeats; `--seeds {repeats}` gives as many.",)
                if len(plan.seeds) < repeats
                else ()
            ),
        ),
        numbers={
            **{f"c={c} h={h}": found for (c, h), found in means.items()},
            "deviation": {
                f"c={c} h={h}": {lane: deviation(found[lane]) for lane in LANES} for (c, h), found in seeds.items()
            },
        },
    )


def _accuracies(plan: ExperimentPlan, outcomes: Mapping[str, Outcome], c: int, h: int, lane: str) -> list[float | None]:
    """Return a cell's accuracy with each seed; a run that diverged has none, and wins nothing.

    K-SGD may diverge, as it does in the paper: then it has classified nothing, and LGC is ahead of it.
    """
    found = [outcomes[figure_3_job(c, h, lane, seed)]["accuracy"] for seed in plan.seeds]
    return [0.0 if each is None and lane == "fastest-k" else each for each in found]


def deviation(values: Sequence[float | None]) -> float | None:
    """Return the standard deviation over seeds; None for a single seed, or where one has no figure.

    >>> round(deviation([0.47, 0.49]), 4), deviation([0.47]), deviation([0.47, None])
    (0.0141, None, None)
    """
    known = [value for value in values if value is not None]
    return stdev(known) if len(known) == len(values) > 1 else None


def with_spread(values: Sequence[float | None]) -> str:
    """Write the mean of accuracies, with their standard deviation where there are several seeds.

    >>> with_spread([0.47, 0.49]), with_spread([0.47]), with_spread([0.47, None])
    ('48.0 ± 1.4 %', '47.0 %', 'none')
    """
    middle, spread = mean(values), deviation(values)
    return percent(middle) if middle is None or spread is None else f"{100 * middle:.1f} ± {percent(spread)}"


def _paper_word(c: int, h: int) -> str:
    if h == 1:
        return "little affected" if c > 1 else "-"
    return "K-SGD diverges" if c == 1 else "LGC = Full > K-SGD" if c < 10 else "-"


def _figure_3_claims(cells: Mapping[tuple[int, int], Mapping[str, float | None]]) -> list[Claim]:
    claims = []
    for (c, h), found in cells.items():
        if h > 1 and c < 10:
            claims += [
                ahead(
                    f"LGC above K-SGD, c = {c}, h = {h}",
                    {lane: found[lane] for lane in ("lgc", "fastest-k")},
                    best="high",
                    write=percent,
                ),
                within(
                    f"LGC at most a point behind Full, c = {c}, h = {h}",
                    _lost(found, "lgc"),
                    most=0.01,
                    kind="shape",
                    write=percent,
                ),
            ]
        if h > 1 and c == 1:
            text, value, most = f"K-SGD at chance, c = 1, h = {h}", found["fastest-k"], 0.15
            claims.append(within(text, value, most=most, kind="shape", write=percent))
        if h == 1 and 1 < c < 10:
            text, value, most = f"K-SGD little affected, c = {c}, h = 1", _lost(found, "fastest-k"), 0.05
            claims.append(within(text, value, most=most, kind="shape", write=percent))
    return claims


def _lost(found: Mapping[str, float | None], lane: str) -> float | None:
    """Return how far a lane is behind Full; None where one of the two has no figure."""
    full, other = found["full"], found[lane]
    return None if full is None or other is None else full - other
