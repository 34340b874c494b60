"""Fewer bits a gradient cost more iterations to the same training loss, the lecture says; each codec has its best rate.

By the convergence theorem iterations are about in proportion to the bound on the second moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

from experiments.core.claims import ahead, falling, within
from experiments.core.story import NAN, Job, Numbers, Runs, Size, Telling, experiment
from experiments.papers.lecture.quantising import UNQUANTISED, moment_bound
from paceline.recipes import Recipe
from paceline.reports.figures import Series, point_chart
from paceline.reports.table import PlainTable

RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
TARGET_LOSS = 0.3
ELEMENTS = 26_122  # of a gradient of the small network


def run_to_loss(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train until the training loss is at the target; return the rounds, or None, and a gradient's mean bits."""
    from paceline.runs.simulation import make_run

    recipe = Recipe.from_document(settings["recipe"])
    run = make_run(recipe)
    rounds = None
    for progress in run:
        if progress.loss is not None and progress.loss <= settings["target"]:
            rounds = progress.round
            break
    trace = run.trace
    gradients = max(1, trace.used)
    return {"rounds": rounds, "bits": 8 * trace.received_bytes / gradients, "seen": trace.rounds_done}


@experiment(
    "lecture-tradeoff",
    source="lecture, iteration-communication trade-off",
    question="iterations against bits, each codec at its best rate",
    minutes=1,
    full_hours=0.2,
)
def tradeoff(size: Size) -> Telling:
    several = size.pick((1, UNQUANTISED), (1, 4, 16, 64, UNQUANTISED))  # the fewest bits first
    rates = size.pick((0.1, 0.5), RATES)
    base = Recipe(rounds=size.pick(6, 600, 3000), evaluate_every=1, evaluation_samples=1500, target_loss=None)
    base = base.with_settings(
        data={"split": "iid"},
        optimizer={"momentum": 0.0, "weight_decay": 0.0},
        cluster={"workers": 2},
        strategy={"name": "full"},
    )

    def job(levels: int, rate: float) -> Job:
        codec: dict[str, Any] = {"name": "identity"}
        if levels:
            codec = {"name": "qsgd", "levels": levels, "bucket": 0, "norm": "l2", "lossless": "elias"}
        recipe = base.with_settings(codec=codec, optimizer={"lr": rate})

        def settings(seed: int) -> dict[str, Any]:
            return {"recipe": recipe.with_seed(seed).to_document(), "target": TARGET_LOSS}

        return Job(run_to_loss, settings, size.pick(0.3, 2.0, 10.0))

    runs: Runs = yield {cell: job(*cell) for cell in product(several, rates)}
    rounds, bits = runs.mean("rounds"), runs.mean("bits")  # a rate with which one seed never gets there has no rounds
    names = ["none" if levels == UNQUANTISED else f"s = {levels}" for levels in several]
    rows, least, sizes, moments = [], list[float](), list[float](), list[float]()
    for levels, name in zip(several, names, strict=True):
        reached = {rate: rounds[levels, rate] for rate in rates if not math.isnan(rounds[levels, rate])}
        best = min(reached, key=reached.__getitem__, default=None)
        sizes.append(bits[levels, rates[0] if best is None else best])
        least.append(NAN if best is None else reached[best])
        moments.append(moment_bound(ELEMENTS, levels) if levels else 1.0)
        found = ("none", f"<= {moments[-1]:.1f}", "never", "-")
        if best is not None:
            found = (f"{best:g}", found[1], f"{least[-1]:.0f}", f"{sizes[-1] * least[-1] / 8e6:.2f}")
        rows.append((name, f"{sizes[-1]:,.0f}", *found))
    none = least[-1]
    yield PlainTable(
        title=f"Iterations to a training loss of {TARGET_LOSS}, each codec at its best rate",
        headings=("levels", "bits a\ngradient", "best\nrate", "moment:\npaper", "ours:\nrounds", "MB in\nall"),
        rows=rows,
        caption="MB in all: of one worker.",
    )
    yield falling("fewer bits, more iterations", least, slack=0.05 * none)
    text = "no free lunch: s = 1 needs more iterations than no quantisation"
    yield ahead(text, {"none": none, "s = 1": least[0]}, best="low")
    yield within(
        "iterations in proportion to the bound on the second moment, s = 1: to a factor of two",
        least[0] / none,
        least=moments[0] / 2,
        most=2 * moments[0],
        kind="shape",
    )
    yield point_chart(
        "tradeoff",
        "Iterations against bits",
        f"To a training loss of {TARGET_LOSS}, each codec at the best of {len(rates)} rates.",
        [Series(name="measured", points=list(zip(sizes, least, strict=True)), labels=names)],
        x="bits of a gradient",
        y="iterations",
        log_x=True,
        log_y=True,
    )
    yield (
        "Two workers train the small network on digits with plain SGD. At a rate that is too small for all of "
        "them, every s needs the same iterations, so each s has its own rate."
    )
    yield "The lecture's curve is not readable. Its proportion is one of upper bounds, on convex functions."
    found_of = zip(names, least, sizes, strict=True)
    yield Numbers({name: {"rounds": value, "bits": size_in_bits} for name, value, size_in_bits in found_of})
