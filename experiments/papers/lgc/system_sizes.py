"""lgc-sizes, of the paper's section III-C: full, fastest-k and lgc are compared on clusters of 5 to 40 workers.

The paper says in general that LGC is ahead of K-SGD, which is judged at each size, and gives no result.
"""

from __future__ import annotations

from itertools import product

from experiments.core.claims import ahead, percent, within
from experiments.core.recipes import recipe_job
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.papers.lgc.setting import LANES, base_recipe, ends_of, job_seconds, smaller_remarks
from experiments.papers.published import LGC_SETTING, LGC_SIZES
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable


@experiment(
    "lgc-sizes",
    source="LGC, section III-C",
    question="5 to 40 workers: full, fastest-k, lgc",
    minutes=3,
    full_hours=47,
    data=("cifar10",),
)
def system_sizes(size: Size) -> Telling:
    clusters = {workers: -(-7 * workers // 10) for workers in size.pick((5, 10), (5, 10, 20, 40))}  # -> K

    def job(lane: str, workers: int) -> Job:
        epoch = 50_000 // (workers * int(LGC_SETTING["batch"]))
        rounds = size.pick(8, 240, int(LGC_SETTING["epochs"]) * epoch)
        recipe = base_recipe(size, rounds=rounds).with_settings(
            data={"classes_per_worker": 3},
            delay={"persistence": 10},
            cluster={"workers": workers},
            strategy={
                "k": clusters[workers],
                "warmup_rounds": size.pick(1, 10, int(LGC_SETTING["warmup_epochs"]) * epoch),
            },
        )
        return recipe_job(recipe.with_strategy(lane), seconds=job_seconds(size, rounds) * workers / 10)

    runs = yield {cell: job(*cell) for cell in product(LANES, clusters)}

    ends = ends_of(runs)
    accuracy = {cell: found["accuracy"] for cell, found in ends.items()}
    saved = {n: 1 - ends["lgc", n]["seconds"] / ends["full", n]["seconds"] for n in clusters}
    yield PlainTable(
        title="Test accuracy by the number of workers, K = 0.7 N, c = 3, h = 10",
        headings=("cluster", *(f"ours:\n{lane}" for lane in LANES), "ours: time\nsaved by lgc", "paper"),
        rows=[
            (
                f"N = {n}, K = {k}",
                *(percent(accuracy[lane, n]) for lane in LANES),
                percent(saved[n]),
                "no result given",
            )
            for n, k in clusters.items()
        ],
        caption=f"The paper's {LGC_SIZES}.",
    )
    for n in clusters:
        both = {lane: accuracy[lane, n] for lane in ("lgc", "fastest-k")}
        yield ahead(f"LGC above K-SGD, N = {n}", both, best="high", write=percent)
        text, behind = f"LGC at most two points behind Full, N = {n}", accuracy["full", n] - accuracy["lgc", n]
        yield within(text, behind, most=0.02, kind="shape", write=percent, judged=False)
    yield bar_chart(
        "sizes",
        "Test accuracy by the number of workers",
        "K is seven tenths of the workers; each has batches of 32, so larger clusters see more samples.",
        [f"N = {n}" for n in clusters],
        {lane: [accuracy[lane, n] for n in clusters] for lane in LANES},
        y="test accuracy",
        percent=True,
    )
    yield from smaller_remarks(size)
    yield (
        "The paper names no sizes: 5 to 40 workers are ours. It says in general that LGC is ahead of K-SGD, which "
        "is judged; how far LGC is behind Full at each size is reported."
    )
    yield Numbers({f"{lane} N={n}": found for (lane, n), found in ends.items()})
