"""late-weights: what partial late work should count: the paper's linear scaling, nothing, or its samples.

Ten simulated workers, K = 7, delays of 0.05 s + Exp(0.02 s), and late work as it really is: who is late stops at the
next block and sends the r of 4 blocks that it has done (`late_work = "partial"`). `lgc` weighs them in three ways:

    scaled     r/s of a whole gradient (`scale_partial = true`, the paper's)
    unscaled   as a whole gradient (`false`)
    samples    by the samples done among all that were computed ("samples")

Digits with the default recipe, and CIFAR-10 with LeNet (rate 0.05, a tenth of it from the middle on, ten rounds of
warm-up, 300 rounds, less than two epochs). A figure is the final training loss against that of `full` on the same seed
and data: the geometric mean over seeds. What `full` learns does not depend on who is slow, so it runs once for each c.

The bar is that of `claims` for whole late work: over all settings, a loss at most 3 % above that of `full`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from experiments.core.claims import percent, ratio_text, within
from experiments.core.pages import seeds_text
from experiments.core.recipes import recipe_job
from experiments.core.story import NAN, Job, Numbers, Size, Telling, chosen, deviation, experiment
from paceline.recipes import Recipe
from paceline.reports.table import PlainTable

WEIGHTS: dict[str, bool | str] = {"scaled": True, "unscaled": False, "samples": "samples"}
LANES = ("full", *WEIGHTS)
NETWORKS, SECONDS = {"digits": "mlp", "cifar10": "lenet"}, {"digits": 1.5, "cifar10": 20.0}
WARMUP, MOST = 10, 1.03


@experiment(
    "late-weights",
    question="partial late work: scaled, unscaled or by samples, by loss and accuracy",
    minutes=30,
    data=("cifar10",),
    seeds=5,
)
def late_weights(size: Size, *, data: tuple[str, ...] = tuple(NETWORKS)) -> Telling:
    data = size.pick(("digits",), chosen("data set", data, tuple(NETWORKS)))
    rounds = size.pick(8, 300)
    skews, persistences = size.pick((3,), (1, 2, 3)), size.pick((10,), (1, 10, 50))
    settings = list(product(skews, persistences))

    def job(name: str, c: int, h: int, lane: str) -> Job:
        recipe = recipe_of(name, c, persistences[0] if lane == "full" else h, lane, rounds)
        return recipe_job(recipe, seconds=size.pick(0.2, SECONDS[name]))

    runs = yield {(name, c, h, lane): job(name, c, h, lane) for name, (c, h), lane in product(data, settings, LANES)}

    losses, accuracy, numbers = runs.each("loss"), runs.mean("accuracy"), list[dict[str, Any]]()
    for name in data:
        ratios = {
            (*setting, weight): list(map(ratio, losses[name, *setting, weight], losses[name, *setting, "full"]))
            for setting, weight in product(settings, WEIGHTS)
        }
        by_seed = {
            weight: [geometric_mean(one) for one in zip(*(ratios[c, h, weight] for c, h in settings), strict=True)]
            for weight in WEIGHTS
        }
        rows = {
            f"c = {c}, h = {h}": {
                **{f"loss {weight}": geometric_mean(ratios[c, h, weight]) for weight in WEIGHTS},
                **{f"accuracy {lane}": accuracy[name, c, h, lane] for lane in LANES},
            }
            for c, h in settings
        }
        rows["all"] = {
            **{f"loss {weight}": geometric_mean(by_seed[weight]) for weight in WEIGHTS},
            **{f"accuracy {lane}": fmean(row[f"accuracy {lane}"] for row in rows.values()) for lane in LANES},
        }
        errors = {weight: deviation(by_seed[weight]) / math.sqrt(len(size.seeds)) for weight in WEIGHTS}
        yield _table(name, rows, errors, f"{rounds} rounds, {seeds_text(size.seeds)}")
        for weight in WEIGHTS:
            text = f"final loss / that of full, over all settings: {weight}, {name}"
            yield within(text, rows["all"][f"loss {weight}"], most=MOST, kind="bar", write=ratio_text)
        numbers += [{"data": name, "setting": setting, **row} for setting, row in rows.items()]
        numbers[-1] |= {f"error {weight}": error for weight, error in errors.items()}
    yield Numbers({"rows": numbers})


def recipe_of(data: str, c: int, h: int, lane: str, rounds: int) -> Recipe:
    """Return the recipe of a run: the data, the classes of a worker, the batches for which delays last, and the lane.

    >>> recipe = recipe_of("digits", 3, 10, "samples", 300)
    >>> recipe.strategy.scale_partial, recipe.k
    ('samples', 7)
    """
    weight = {"name": "lgc", "k": 7, "scale_partial": WEIGHTS[lane]} if lane != "full" else {"name": "full"}
    recipe = Recipe(rounds=rounds, evaluate_every=rounds, target_loss=None).with_settings(
        data={"name": data, "split": "non-iid", "classes_per_worker": c},
        model={"name": NETWORKS[data]},
        cluster={"workers": 10, "late_work": "partial"},
        delay={"persistence": h},
        strategy=weight,
    )
    if data == "digits":
        return recipe
    return recipe.with_settings(optimizer={"lr": 0.05, "decay_at": [0.5]}, strategy={"warmup_rounds": WARMUP})


def _table(data: str, rows: Mapping[str, Mapping[str, float]], errors: Mapping[str, float], runs: str) -> PlainTable:
    """Return a table with the lowest loss of each row marked."""
    texts, marked = [], set()
    for at, (setting, row) in enumerate(rows.items()):
        losses = [row[f"loss {weight}"] for weight in WEIGHTS]
        least = min((loss for loss in losses if not math.isnan(loss)), default=NAN)
        marked |= {(at, place) for place, loss in enumerate(losses, 1) if loss == least}
        texts.append((setting, *map(ratio_text, losses), *(percent(row[f"accuracy {lane}"]) for lane in LANES)))
    if not any(map(math.isnan, errors.values())):
        texts.append(("± over seeds", *map(ratio_text, errors.values()), "", "", "", ""))
    return PlainTable(
        title=f"Weights of partial late work, {data}, {NETWORKS[data]}: final loss / that of full",
        headings=(
            "\nclasses, delay",
            *(f"loss\n{weight}" for weight in WEIGHTS),
            *(f"test acc.\n{lane}" for lane in LANES),
        ),
        rows=texts,
        caption=f"10 workers, K = 7, {runs}; bar over all: <= {ratio_text(MOST)}. Marked: the lowest loss of a row.",
        marked=frozenset(marked),
    )


def ratio(loss: float, full: float) -> float:
    """Return a loss against that of full; NaN where one of them diverged.

    >>> ratio(1.5, 1.0), ratio(math.nan, 1.0)
    (1.5, nan)
    """
    return loss / full if full else NAN


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean; NaN where a value is missing.

    >>> geometric_mean([0.5, 2.0]), geometric_mean([1.0, math.nan])
    (1.0, nan)
    """
    return math.exp(fmean(map(math.log, values))) if values and all(value > 0 for value in values) else NAN
