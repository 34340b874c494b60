"""claims: figures 3 and 4 of the LGC paper on digits, at paceline's default recipe.

    c = 3, h = 10    lgc needs at least 30 % less time than full for the same rounds, and ends within 3 % of its loss
    c = 1, h = 50    fastest-k never hears of some classes: it ends at 1.5 times the loss of full; lgc within 5 %

c is the classes of a worker, and h the batches for which a delay lasts. A loss is the mean over seeds against the mean
over seeds of full's. The bars are for late work that comes whole, as in the paper. Under `partial` a late worker stops
at the next block, as a real one does, and its work weighs by its samples; there the same figures are reported.

The results that are printed in the docs are those of seeds 0 to 2: `--first-seed 0`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from experiments.core.claims import percent, ratio_text, within
from experiments.core.recipes import recipe_job
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.papers.lgc.setting import LANES
from paceline.recipes import Recipe
from paceline.reports.table import PlainTable

COMMON, HARD = (3, 10), (1, 50)  # c and h


@experiment(
    "claims",
    source="LGC, figures 3 and 4",
    question="the paper's claims on digits: time saved by lgc, and at what loss",
    minutes=0.5,
    seeds=3,
)
def claims(size: Size) -> Telling:
    base = Recipe().with_settings(rounds=size.pick(10, Recipe().rounds))

    def job(late_work: str, setting: tuple[int, int], lane: str) -> Job:
        c, h = setting
        recipe = base.with_settings(
            data={"classes_per_worker": c}, delay={"persistence": h}, cluster={"late_work": late_work}
        )
        return recipe_job(recipe.with_strategy(lane), seconds=size.pick(0.2, 1.5))

    cells = list(product(("complete", "partial"), (COMMON, HARD), LANES))
    runs = yield {(late_work, *setting, lane): job(late_work, setting, lane) for late_work, setting, lane in cells}

    seconds: dict[Any, float] = runs.mean("seconds")
    loss: dict[Any, float] = runs.mean("loss")

    def of_full(late_work: str, setting: tuple[int, int], lane: str) -> float:
        return loss[late_work, *setting, lane] / loss[late_work, *setting, "full"]

    rows, numbers = [], []
    for late_work in ("complete", "partial"):
        saved = 1 - seconds[late_work, *COMMON, "lgc"] / seconds[late_work, *COMMON, "full"]
        for setting, figure, value, limits, write in (
            (COMMON, "time saved by lgc", saved, {"least": 0.30}, percent),
            (COMMON, "loss, lgc / full", of_full(late_work, COMMON, "lgc"), {"most": 1.03}, ratio_text),
            (HARD, "loss, fastest-k / full", of_full(late_work, HARD, "fastest-k"), {"least": 1.5}, ratio_text),
            (HARD, "loss, lgc / full", of_full(late_work, HARD, "lgc"), {"most": 1.05}, ratio_text),
        ):
            where = f"c = {setting[0]}, h = {setting[1]}"
            bar = " ".join(f"{'>=' if name == 'least' else '<='} {write(limit)}" for name, limit in limits.items())
            rows.append((late_work, where, figure, write(value), bar))
            numbers.append({"late_work": late_work, "setting": where, "figure": figure, "value": value, "bar": bar})
            text, judged = f"{late_work} late work, {where}: {figure}", late_work == "complete"
            yield within(text, value, **limits, kind="bar", write=write, judged=judged)
    yield PlainTable(
        title="The paper's claims (loss: at the end)",
        headings=("late work", "setting", "figure", "measured", "bar"),
        rows=rows,
        caption=f"{base.data.name}, {base.model.name}, {base.cluster.workers} workers, K = {base.k}, {base.rounds} "
        f"rounds; means over {len(size.seeds)} seed(s). With partial work the figures are for information.",
    )
    each = {name: runs.each(name) for name in ("seconds", "loss")}
    ends = {" ".join(map(str, key)): {name: found[key] for name, found in each.items()} for key in runs}
    yield Numbers({"rows": numbers, "runs": ends})
