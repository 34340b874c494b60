"""lgc-sizes, of the paper's section III-C: full, fastest-k and lgc are compared on clusters of 5 to 40 workers."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, percent, within
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.lgc.setting import LANES, base_recipe, figures_of, job_seconds, smaller_remarks
from paceline.reproduce.published import LGC_SETTING, LGC_SIZES
from paceline.reproduce.recipe_runs import recipe_job


def system_sizes(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of workers."""
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
            *smaller_remarks(plan),
            "The paper names no sizes: 5 to 40 workers are ours. It says in general that LGC is ahead of K-SGD, which "
            "is judged; how far LGC is behind Full at each size is reported.",
        ),
        numbers={f"{lane} N={n}": each for (lane, n), each in found.items()},
    )
