"""lgc-6, the paper's figure 6: stragglers deliver r of their 4 blocks, with and without linear scaling.

With scaling must be no worse than without, for r = 1 and for a random r, and LGC with scaling above K-SGD for every r.
With all four blocks the weights are alike, and one run stands for them.
"""

from __future__ import annotations

from itertools import product

from experiments.core.claims import ahead, figure, percent
from experiments.core.recipes import recipe_job
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.papers.lgc.setting import base_recipe, ends_of, job_seconds, smaller_remarks
from experiments.papers.published import LGC_FIGURE_6
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable

WEIGHTS: dict[str, bool | str] = {"scaled": True, "unscaled": False, "by samples": "samples"}  # -> scale_partial
BESIDE = {"full": "Full", "fastest-k": "K-SGD"}


@experiment(
    "lgc-6",
    source="LGC, figure 6",
    question="stragglers that do r of 4 blocks: with and without linear scaling",
    minutes=3,
    full_hours=62,
    data=("cifar10",),
)
def figure_6(size: Size) -> Telling:
    rs: tuple[int | str, ...] = size.pick((1, 4, "random"), (1, 2, 3, 4, "random"))
    base = base_recipe(size).with_settings(data={"classes_per_worker": 3}, delay={"persistence": 10})
    seconds = job_seconds(size, base.rounds)

    def job(r: int | str, weight: str) -> Job:
        scale = True if r == 4 else WEIGHTS[weight]
        cell = base.with_strategy("lgc").with_settings(cluster={"late_blocks": r}, strategy={"scale_partial": scale})
        return recipe_job(cell, seconds=seconds)

    runs = yield {
        **{lane: recipe_job(base.with_strategy(lane), seconds=seconds) for lane in BESIDE},
        **{(f"r={r}", weight): job(r, weight) for r, weight in product(rs, WEIGHTS)},
    }

    ends = ends_of(runs)
    accuracy = {key: found["accuracy"] for key, found in ends.items()}
    rows = [
        (
            f"r = {r}",
            *(percent(accuracy[f"r={r}", weight]) for weight in WEIGHTS),
            *(figure(ends[f"r={r}", weight]["loss"]) for weight in WEIGHTS),
            "not readable",
        )
        for r in rs
    ]
    rows += [
        (shown, percent(accuracy[lane]), "-", "-", figure(ends[lane]["loss"]), "-", "-", "not readable")
        for lane, shown in BESIDE.items()
    ]
    yield PlainTable(
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
    )
    for r in (r for r in rs if r in (1, "random")):
        both = {weight: accuracy[f"r={r}", weight] for weight in ("scaled", "unscaled")}
        text = f"with scaling no worse than without, r = {r}"
        yield ahead(text, both, best="high", strictly=False, write=percent)
    for r in rs:
        both = {"lgc": accuracy[f"r={r}", "scaled"], "fastest-k": accuracy["fastest-k"]}
        yield ahead(f"LGC with scaling above K-SGD, r = {r}", both, best="high", write=percent)
    yield bar_chart(
        "partial",
        "Test accuracy by the blocks that stragglers have done",
        "The paper's figure 6. Without their work, K-SGD comes to "
        f"{percent(accuracy['fastest-k'])}, and Full to {percent(accuracy['full'])}.",
        [f"r = {r}" for r in rs],
        {weight: [accuracy[f"r={r}", weight] for r in rs] for weight in WEIGHTS},
        y="test accuracy",
        percent=True,
    )
    yield from smaller_remarks(size)
    yield (
        "Weights by samples are ours: a straggler counts for as many samples as it computed. With all four blocks "
        "the three weights are alike, and one run stands for them."
    )
    names = {(f"r={r}", weight): f"r={r} {weight}" for r, weight in product(rs, WEIGHTS)}
    yield Numbers({names.get(key, key): found for key, found in ends.items()})
