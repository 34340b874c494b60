"""lgc-3, the paper's figure 3: how accurate full, fastest-k and lgc are by skew (c classes a worker) and persistence.

A straggler stays one for h rounds. These claims are judged, by means over the seeds:

    LGC above K-SGD                     c = 1, 2, 3 and h = 10, 50
    LGC at most a point behind Full     c = 1, 2, 3 and h = 10, 50
    K-SGD at chance                     c = 1 and h = 10, 50
    K-SGD little affected               c = 2, 3 and h = 1

What Full learns does not depend on h, so it is trained once for each c.
"""

from __future__ import annotations

from itertools import product

from experiments.core.claims import ahead, percent, with_spread, within
from experiments.core.recipes import recipe_job
from experiments.core.story import NAN, Job, Numbers, Size, Telling, experiment
from experiments.papers.lgc.setting import LANES, base_recipe, job_seconds, smaller_remarks
from experiments.papers.published import LGC_FIGURE_3, LGC_SETTING
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable


@experiment(
    "lgc-3",
    source="LGC, figure 3",
    question="accuracy by skew and persistence: full, fastest-k, lgc",
    minutes=9.5,
    full_hours=220,
    data=("cifar10",),
    seeds=2,
)
def figure_3(size: Size) -> Telling:
    skews, persistences = size.pick((1, 3), (1, 2, 3, 10)), size.pick((1, 10), (1, 10, 50))
    base = base_recipe(size)

    def job(c: int, h: int, lane: str) -> Job:
        cell = base.with_strategy(lane).with_settings(
            data={"classes_per_worker": c}, delay={"persistence": 10 if lane == "full" else h}
        )
        return recipe_job(cell, seconds=job_seconds(size, base.rounds))

    runs = yield {cell: job(*cell) for cell in product(skews, persistences, LANES)}

    def lost(cell: tuple[int, int, str]) -> float:
        """K-SGD may diverge, as it does in the paper: then it has classified nothing, and LGC is ahead of it."""
        return 0.0 if cell[2] == "fastest-k" else NAN

    mean, spread = runs.mean("accuracy", lost=lost), runs.spread("accuracy", lost=lost)
    rows = []
    for c, h in product(skews, persistences):
        full, ksgd, lgc = (mean[c, h, lane] for lane in LANES)
        where = f"c = {c}, h = {h}"
        words = "little affected" if h == 1 and c > 1 else "-" if h == 1 or c == 10 else "LGC = Full > K-SGD"
        shown = [with_spread(mean[c, h, lane], spread[c, h, lane]) for lane in LANES]
        rows.append((where, *shown, "K-SGD diverges" if h > 1 and c == 1 else words))
        if h > 1 and c < 10:
            yield ahead(f"LGC above K-SGD, {where}", {"lgc": lgc, "fastest-k": ksgd}, best="high", write=percent)
            text = f"LGC at most a point behind Full, {where}"
            yield within(text, full - lgc, most=0.01, kind="shape", write=percent)
        if h > 1 and c == 1:
            yield within(f"K-SGD at chance, {where}", ksgd, most=0.15, kind="shape", write=percent)
        if h == 1 and 1 < c < 10:
            yield within(f"K-SGD little affected, {where}", full - ksgd, most=0.05, kind="shape", write=percent)

    note = f" ± is the standard deviation over {len(size.seeds)} seeds." if len(size.seeds) > 1 else ""
    yield PlainTable(
        title="Test accuracy at the end, ours beside the paper's words",
        headings=("cell", *(f"ours:\n{lane}" for lane in LANES), "paper"),
        rows=rows,
        caption=f"{LGC_FIGURE_3}.{note}",
    )
    for h in persistences:
        yield bar_chart(
            f"h{h}",
            f"Test accuracy by classes a worker, h = {h}",
            "The paper's figure 3 has a panel for each h.",
            [f"c = {c}" for c in skews],
            {lane: [mean[c, h, lane] for c in skews] for lane in LANES},
            y="test accuracy",
            percent=True,
            wide=False,
        )
    yield from smaller_remarks(size)
    repeats = int(LGC_SETTING["repeats"])
    if len(size.seeds) < repeats:
        yield f"The paper has the mean of {repeats} repeats; `--seeds {repeats}` gives as many."
    cells = list(product(skews, persistences))
    yield Numbers({f"c={c} h={h}": {lane: mean[c, h, lane] for lane in LANES} for c, h in cells})
    yield Numbers({"deviation": {f"c={c} h={h}": {lane: spread[c, h, lane] for lane in LANES} for c, h in cells}})
