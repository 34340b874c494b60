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

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.recipes import Recipe
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, equals, mean, percent, within
from paceline.reproduce.experiment import Claim, Experiment, Findings, Job, Outcome, Plan
from paceline.reproduce.published import LGC_FIGURE_1, LGC_FIGURE_1_TOTALS, LGC_FIGURE_3, LGC_SETTING
from paceline.reproduce.recipe_runs import recipe_job, run_recipe

LANES = ("full", "fastest-k", "lgc")
ROUNDS_OF_AN_EPOCH = 156  # ten workers with batches of 32 on 50,000 images
LENET = "LeNet in place of VGG-11, and fewer epochs, without augmentation; the rate is 0.05, not tuned."


def base_recipe(plan: Plan, *, rounds: int | None = None) -> Recipe:
    """Return the paper's setting at the size of the plan, with the delays and the cluster of its section III.

    >>> base_recipe(Plan(size="full")).model.name, base_recipe(Plan(size="toy")).data.name
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


def job_seconds(plan: Plan, rounds: int) -> float:
    """Return about how long a run takes on one core."""
    return float(plan.choose(toy=0.5, laboratory=0.05 * rounds, full=3.0 * rounds))


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


def jobs_of_figure_1(plan: Plan) -> list[Job]:
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


def conclude_figure_1(plan: Plan, outcomes: Mapping[str, Outcome]) -> Findings:
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


def skews(plan: Plan) -> tuple[int, ...]:
    """The classes that a worker holds."""
    return (1, 3) if plan.toy else (1, 2, 3, 10)


def persistences(plan: Plan) -> tuple[int, ...]:
    """The rounds for which a straggler stays one."""
    return (1, 10) if plan.toy else (1, 10, 50)


def figure_3_job(c: int, h: int, lane: str, seed: int) -> str:
    """Return the name of a cell's job; what `full` learns does not depend on who is slow."""
    return f"{lane} c={c} seed {seed}" if lane == "full" else f"{lane} c={c} h={h} seed {seed}"


def jobs_of_figure_3(plan: Plan) -> list[Job]:
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


def conclude_figure_3(plan: Plan, outcomes: Mapping[str, Outcome]) -> Findings:
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
        return "all alike"
    return "K-SGD diverges" if c == 1 else "LGC = Full > K-SGD" if c < 10 else "-"


def _figure_3_claims(plan: Plan, cells: Mapping[tuple[int, int], Mapping[str, float | None]]) -> list[Claim]:
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
                    judged=c > 1,
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
    )
}
