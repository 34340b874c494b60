"""choice-of-k: k = auto against every fixed K, over delays, their persistence, and the skew of the data.

A figure is the cluster's seconds until the training loss first reaches the target, the mean over seeds, for K = 1 to 10
and for auto. A run stops at the target; where one seed does not get there within the rounds, its mean is missing.

    auto / best K    the mean of auto against the smallest of the fixed Ks' means; ± is its standard error
    held out         auto against the K that was best on the other seeds, measured on the seed left out
    saved            the share of the time of all workers (K = 10) that a K does not need

The best fixed K is a hard peer, and a flattered one: the minimum of ten noisy means, picked after the fact. Held out is
what a user who tuned K beforehand would have got. The bar for lgc is 1.05; fastest-k has none. Where no fixed K reached
the target, nothing is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import fmean
from typing import Any, Literal, TypeAlias

from experiments.core.claims import ratio_text, within
from experiments.core.pages import seeds_text
from experiments.core.story import NAN, Job, Numbers, Size, Telling, chosen, experiment
from experiments.questions.late_weights import geometric_mean
from paceline.data import Dataset
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data
from paceline.reports.table import PlainTable
from paceline.runs.simulation import make_run
from paceline.traces.records import seconds_to_target

K: TypeAlias = int | Literal["auto"]
Setting: TypeAlias = tuple[str, str, int, int]  # the strategy, the delay model, its persistence, a worker's classes
Times: TypeAlias = Mapping[K, Sequence[float]]  # seed by seed

DELAYS = ("shifted-exponential", "pareto", "slow-worker")
STRATEGIES = ("fastest-k", "lgc")
CLASSES = 10  # of digits: a worker that may hold all ten is dealt alike data
MOST = 1.05


@experiment(
    "choice-of-k",
    question="k=auto against every fixed K, by time to target",
    minutes=30,
    seeds=5,
)
def choice_of_k(size: Size, *, delays: tuple[str, ...] = DELAYS, strategies: tuple[str, ...] = STRATEGIES) -> Telling:
    delays, strategies = chosen("delay model", delays, DELAYS), chosen("strategy", strategies, STRATEGIES)
    delays = size.pick(delays[:1], delays)
    ks: tuple[K, ...] = size.pick((7, 10, "auto"), (*range(1, 11), "auto"))
    where = list(product(size.pick((10,), (1, 10, 50)), size.pick((3,), (1, 3, CLASSES))))  # persistence, classes
    target = size.pick(1.0, 0.05)
    base = Recipe(rounds=size.pick(20, 250), target_loss=target, evaluate_every=2).with_settings(
        cluster={"workers": 10, "late_work": "partial"}, delay={"slow_factor": 5.0}
    )

    def job(setting: Setting, k: K) -> Job:
        strategy, delay, persistence, classes = setting
        recipe = base.with_settings(
            data={"split": "iid" if classes == CLASSES else "non-iid", "classes_per_worker": classes},
            delay={"name": delay, "persistence": persistence},
            strategy={"name": strategy, "k": k},
        )
        document = recipe.to_document()
        return Job(run_to_target, lambda seed: {"recipe": {**document, "seed": seed}}, size.pick(0.2, 1.2))

    settings = [(strategy, delay, *setting) for strategy, delay, setting in product(strategies, delays, where)]
    runs = yield {(*setting, k): job(setting, k) for setting, k in product(settings, ks)}

    seconds = runs.each("seconds")
    found = {setting: figures({k: seconds[(*setting, k)] for k in ks}) for setting in settings}
    for strategy in strategies:
        for delay in delays:
            here = {setting: found[strategy, delay, *setting] for setting in where}
            title = f"{strategy}, {delay}: seconds to loss {target}"
            yield _table_of_times(f"{title}, mean over {seeds_text(size.seeds)}", here, ks)
            yield _table_of_ratios(f"{title}, auto against the best fixed K", here, judged=strategy == "lgc")
        mine = {setting: each for setting, each in found.items() if setting[0] == strategy}
        if strategy == "lgc":
            for (_, delay, persistence, classes), each in mine.items():
                yield within(
                    f"auto / best K, {delay}, p = {persistence}, c = {classes}",
                    each.ratio,
                    most=MOST,
                    kind="bar",
                    write=ratio_text,
                    judged=each.best_k is not None,
                )
        yield from noise_remarks(strategy, list(mine.values()))
    names = ("strategy", "delay", "persistence", "classes_per_worker")
    rows = [dict(zip(names, setting, strict=True)) | each.as_numbers() for setting, each in found.items()]
    yield Numbers({"target_loss": target, "rounds": base.rounds, "rows": rows})


def run_to_target(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate a recipe until the target loss; return the cluster's seconds, or None where it is not reached."""
    recipe = Recipe.from_document(settings["recipe"])
    run = make_run(recipe, dataset=_digits())
    for progress in run:
        if progress.loss is not None and recipe.target_loss is not None and progress.loss <= recipe.target_loss:
            break
    return {"seconds": seconds_to_target(run.trace)}


@cache
def _digits() -> Dataset:
    return load_data(Recipe())


# -- the figures of a setting ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Mean times by K, and auto against the best of them; NaN is what cannot be said.

    `standard_error` is that of `ratio`. `held_out` is auto against the K that was best on the other seeds.
    """

    times: Times
    means: Mapping[K, float]
    best_k: int | None
    ratio: float
    standard_error: float
    held_out: float

    def saved(self, k: int | None) -> float:
        """Return the share of the time of all workers, the largest K, that a K does not need."""
        full = self.means[max(each for each in self.means if isinstance(each, int))]
        return NAN if k is None else 1 - self.means.get(k, NAN) / full

    def as_numbers(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "seconds": self.times,
            "best_k": self.best_k,
            "auto_over_best": self.ratio,
            "standard_error": self.standard_error,
            "auto_over_held_out": self.held_out,
            "best_saves": self.saved(self.best_k),
            "k7_saves": self.saved(7),
        }


def figures(times: Times) -> Figures:
    """Return the figures of a setting from its times, seed by seed.

    >>> found = figures({1: [4.0, 6.0], 2: [3.0, 3.0], "auto": [3.0, 3.3]})
    >>> found.best_k, round(found.ratio, 3), round(found.standard_error, 3), round(found.held_out, 3)
    (2, 1.05, 0.05, 1.05)
    """
    seeds, auto = range(len(times["auto"])), times["auto"]
    best_k = _best(times, seeds)
    best = times[best_k] if best_k is not None else [NAN for _ in seeds]
    others = [_best(times, [seed for seed in seeds if seed != out]) for out in seeds]
    held_out = [NAN if k is None else times[k][out] for out, k in enumerate(others)]
    return Figures(
        times=times,
        means={k: fmean(values) for k, values in times.items()},
        best_k=best_k,
        ratio=fmean(auto) / fmean(best),
        standard_error=_standard_error(auto, best),
        held_out=fmean(auto) / fmean(held_out),
    )


def _best(times: Times, seeds: Sequence[int]) -> int | None:
    """Return the fixed K that is the quickest on these seeds; None where none reached the target with all of them."""
    means = {k: fmean(each[seed] for seed in seeds) for k, each in times.items() if isinstance(k, int) and seeds}
    reached = {k: mean for k, mean in means.items() if not math.isnan(mean)}
    return min(reached, key=reached.__getitem__) if reached else None


def _standard_error(auto: Sequence[float], best: Sequence[float]) -> float:
    """Return that of a ratio of means over paired seeds, to first order: the spread of auto - ratio * best."""
    if len(auto) < 2:
        return NAN
    ratio = fmean(auto) / fmean(best)
    rests = [a - ratio * b for a, b in zip(auto, best, strict=True)]
    spread = math.sqrt(sum(rest * rest for rest in rests) / (len(rests) - 1))
    return spread / math.sqrt(len(rests)) / fmean(best)


# -- how they are shown ------------------------------------------------------------------------------------------------


def _table_of_times(title: str, rows: Mapping[tuple[int, int], Figures], ks: Sequence[K]) -> PlainTable:
    """Return a row per (persistence, classes per worker), in which the best fixed K is marked."""
    return PlainTable(
        title=title,
        headings=(" p  c", *(k if k == "auto" else f"K={k}" for k in ks)),
        rows=[
            (f"{p:>2} {c:>2}", *(_text(found.means[k], ".2f" if found.means[k] < 10 else ".1f") for k in ks))
            for (p, c), found in rows.items()
        ],
        caption="p: batches a delay lasts; c: classes per worker (10: dealt alike). Marked: the best fixed K.",
        marked=frozenset(
            (at, 1 + ks.index(found.best_k)) for at, found in enumerate(rows.values()) if found.best_k is not None
        ),
    )


def _table_of_ratios(title: str, rows: Mapping[tuple[int, int], Figures], *, judged: bool) -> PlainTable:
    """Return a row per (persistence, classes per worker): auto against the best fixed K, and what the best saves."""
    bar = {True: "met", False: "MISSED"}
    return PlainTable(
        title=title,
        headings=(" p  c", "best K", "auto / best K", "held out", "saved, best", "saved, K=7", f"bar <= {MOST}"),
        rows=[
            (
                f"{persistence:>2} {classes:>2}",
                "-" if found.best_k is None else str(found.best_k),
                _text(found.ratio) + ("" if math.isnan(found.standard_error) else f"±{found.standard_error:.2f}"),
                _text(found.held_out),
                _text(found.saved(found.best_k), ".0%"),
                _text(found.saved(7), ".0%"),
                "-" if not judged or found.best_k is None else bar[found.ratio <= MOST],
            )
            for (persistence, classes), found in rows.items()
        ],
        caption="Held out: against the K that was best on the other seeds. Saved: against all workers.",
    )


def _text(value: float, form: str = ".2f") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


def noise_remarks(strategy: str, found: Sequence[Figures]) -> list[str]:
    """Return what can be said over all settings of a strategy, and what cannot."""
    judged = [each for each in found if each.best_k is not None]
    passed = sum(each.ratio <= MOST for each in judged)
    errors = [each.standard_error for each in judged if not math.isnan(each.standard_error)]
    error = f"±{fmean(errors):.3f}" if errors else "unknown (one seed)"
    ratio = geometric_mean([each.ratio for each in judged if not math.isnan(each.ratio)])
    held_out = geometric_mean([each.held_out for each in judged if not math.isnan(each.held_out)])
    return [
        f"{strategy}: auto / best K <= {MOST} in {passed} of {len(judged)} settings ({len(found) - len(judged)} where "
        f"no K reached the target); geometric mean {_text(ratio, '.3f')}, held out {_text(held_out, '.3f')}.",
        f"Noise, {strategy}: the standard error of a row's ratio is {error} on average. The best fixed K is the "
        f"minimum of {len(judged[0].means) - 1 if judged else 'all'} noisy means, picked after the fact, so its time "
        "is too low and the ratio too high; 'held out' picks it by the other seeds.",
    ]
