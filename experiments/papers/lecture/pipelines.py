"""The lecture has two parts on pipelines: the idle share of equal stages, and layers onto devices.

    lecture's idle share of k stages and m micro-batches    (1/2) (1 - m / (k-1+m))
    counted slots of gpipe                                  (k-1) / (k-1+m), twice as much

Its figure on placement is not readable; the exact cut is compared with what people do by hand instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np

from experiments.core.claims import ahead, falling, percent, within
from experiments.core.story import Job, Numbers, Runs, Size, Telling, experiment
from paceline.reports.figures import Series, bar_chart, line_chart
from paceline.reports.table import PlainTable

METHODS = ("equal counts", "torchgpipe", "ours")
SAME = 0.02  # so much more than another counts as the same


def run_idle(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a model of equal stages; return for each number of micro-batches gpipe's idle share as predicted."""
    from experiments.core.cut_models import ALIKE, Subject, measured
    from paceline.pipeline.schedules import orders
    from paceline.pipeline.timing import timeline

    stages = settings["stages"]
    subject = Subject(
        model=ALIKE, microbatch=settings["samples"], stages=stages, wide=settings["wide"], depth=settings["depth"]
    )
    found = measured(subject, repeats=settings["repeats"])
    costs = found.plan(subject.cuts(), stages=stages, microbatches=4 * stages, schedule="1f1b").costs
    return {
        "stage_seconds": [cost.seconds for cost in costs],
        "idle": {str(m): timeline(orders("gpipe", stages, m), costs).idle for m in settings["microbatches"]},
    }


@experiment(
    "lecture-idle",
    source="lecture, loss factor",
    question="idle share of a pipeline: formula, count, prediction",
    minutes=0.3,
    full_hours=0.1,
    timed=True,
)
def idle(size: Size) -> Telling:
    from paceline.pipeline.schedules import lecture_idle
    from paceline.pipeline.timing import slot_timeline

    microbatches = size.pick((1, 4), (1, 2, 4, 8, 16))  # with one there is no pipelining
    measured_stages, counted_stages = size.pick((2,), (2, 4)), size.pick((2, 4), (2, 4, 8, 64))
    model = size.pick(
        {"samples": 8, "wide": 16, "depth": 1, "repeats": 3},
        {"samples": 64, "wide": 256, "depth": 8, "repeats": 5},
        {"samples": 256, "wide": 512, "depth": 40, "repeats": 5},
    )
    runs: Runs = yield {
        stages: Job(
            run_idle, {"stages": stages, "microbatches": list(microbatches), **model}, size.pick(0.5, 5.0, 60.0)
        )
        for stages in measured_stages
    }
    formula = {cell: lecture_idle(*cell) for cell in product(counted_stages, microbatches)}
    count = {(stages, m): slot_timeline("gpipe", stages, m).idle for stages, m in formula}
    predicted = {(stages, m): mean for m in microbatches for stages, mean in runs.mean("idle", str(m)).items()}
    rows = [
        (
            f"{stages} devices, {m} micro-batches",
            percent(formula[stages, m]),
            percent(count[stages, m]),
            percent(predicted[stages, m]) if stages in measured_stages else "-",
        )
        for stages, m in formula
    ]
    yield PlainTable(
        title="Idle share of a pipeline of equal stages",
        headings=("", "paper:\nformula", "ours:\ncounted", "ours:\npredicted"),
        rows=rows,
        caption="formula: (1/2) (1 - m/(k-1+m)). predicted: gpipe's timeline with measured layers.",
    )
    ratio = max((count[cell] / formula[cell] for cell in formula), key=lambda ratio: abs(ratio - 1))
    yield within("idle slots are as many as the formula says: count / formula", ratio, least=0.99, most=1.01)
    last = counted_stages[-1]
    text = f"about 50 % is lost with many machines: {last} devices, no pipelining"
    yield within(text, count[last, 1], least=0.4, most=0.55, write=percent)
    shown = measured_stages[-1]
    shares = [count[shown, m] for m in microbatches]
    yield falling("more micro-batches, less idle time", shares, write=percent, judged=False)
    off = float(np.max([abs(predicted[cell] - count[cell]) for cell in predicted]))
    text = "predicted from measured layers within 5 points of the count"
    yield within(text, off, most=0.05, write=percent, judged=False)
    yield line_chart(
        "idle",
        f"Idle share, {shown} devices",
        "",
        [
            Series(name=name, points=[(m, shares[shown, m]) for m in microbatches], dashed=name == "formula")
            for name, shares in (("formula", formula), ("count", count), ("predicted", predicted))
        ],
        x="micro-batches",
        y="idle share",
        log_x=True,
        percent=True,
    )
    yield (
        "The lecture counts the idle slots before a device's work in each half of a step, and not those after it: "
        "counting both gives twice as much, (k-1)/(k-1+m), which is GPipe's known figure."
    )
    yield "No step is run here: layers are measured one by one in one process, and links cost nothing."
    yield Numbers({f"{stages} stages": outcomes[0] for stages, outcomes in runs.items()})


def run_placement(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a model's layers, cut it in three ways, and time the pieces; seconds are those of the slowest stage."""
    from experiments.core.cut_models import Subject, measured, prepared, three_cuts
    from experiments.core.turns import take_turns

    subject = Subject(model=settings["model"], microbatch=settings["samples"], side=settings["side"])
    found = measured(subject, repeats=settings["repeats"])
    where = three_cuts(found, settings["stages"], microbatches=4)
    cuts = [prepared(found, method, places) for method, places in where.items()]
    for _ in take_turns({cut.method: cut.run for cut in cuts}, settings["turns"]):
        pass
    return {
        "layers": len(found.profile.layers),
        "cuts": {
            cut.method: {"at": list(cut.cuts), "predicted": cut.predicted_seconds, "measured": cut.best} for cut in cuts
        },
    }


@experiment(
    "lecture-placement",
    source="lecture, device placement",
    question="the slowest stage: equal counts, torchgpipe, the exact cut",
    minutes=1,
    full_hours=0.2,
    timed=True,
)
def placement(size: Size) -> Telling:
    effort = size.pick(
        {"samples": 2, "side": 16, "repeats": 3, "turns": 1},
        {"samples": 2, "side": 32, "repeats": 3, "turns": 3},
        {"samples": 8, "side": 32, "repeats": 9, "turns": 5},
    )
    runs: Runs = yield {
        (model, stages): Job(run_placement, {"model": model, "stages": stages, **effort}, size.pick(1.0, 25.0, 120.0))
        for model, stages in size.pick((("lenet", 2),), (("googlenet", 2), ("googlenet", 4)))
    }
    ms = {
        (side, method): {cell: 1000 * seconds for cell, seconds in runs.mean("cuts", method, side).items()}
        for side, method in product(("predicted", "measured"), METHODS)
    }
    rows, groups = [], list[str]()
    bars: dict[str, list[float]] = {"predicted": [], "measured": []}
    for cell, (found, *_) in runs.items():
        model, stages = cell
        for method in METHODS:
            at = ", ".join(map(str, found["cuts"][method]["at"]))
            over = ms["measured", method][cell] / ms["measured", "ours"][cell]
            figures = (f"{ms[side, method][cell]:.1f}" for side in bars)
            rows.append((f"{model}, {stages}: {method}", at, *figures, f"{over:.2f}", "-"))
            groups.append(f"{model}, {stages} stages: {method}")
            for side, values in bars.items():
                values.append(ms[side, method][cell])
        for side in bars:
            yield ahead(
                f"the exact cut before equal counts, ms of the slowest stage, {side}, {model}, {stages} stages",
                {method: ms[side, method][cell] for method in ("ours", "equal counts")},
                best="low",
                by=SAME * ms[side, "ours"][cell],
                strictly=False,
                judged=side == "measured",  # by the costs that it was cut by, the exact cut cannot lose
            )
    yield PlainTable(
        title="The slowest stage, ms for a micro-batch",
        headings=(
            "network, stages",
            "at\nlayer",
            "ours:\npredicted",
            "ours:\nmeasured",
            "over the\nexact cut",
            "paper",
        ),
        rows=rows,
        caption="ours (a row): the exact cut. paper: its figure is not readable.",
    )
    yield bar_chart("slowest", "The slowest stage", "", groups, bars, y="ms for a micro-batch")
    yield (
        "The lecture calls placement a hard problem and points to reinforcement learning; its figure is not "
        "readable, so nothing of it is compared. Layers in a row are cut exactly here, by dynamic programming; "
        "the comparison is with what people do by hand, and with torchgpipe's block partition."
    )
    yield "Pieces are timed one by one in one process, in CPU seconds; 2 % more than another counts as the same."
    yield Numbers({f"{model}, {stages} stages": outcomes[0] for (model, stages), outcomes in runs.items()})
