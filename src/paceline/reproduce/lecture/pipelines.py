"""The lecture has two parts on pipelines: the idle share of equal stages, and layers onto devices.

    lecture's idle share of k stages and m micro-batches    (1/2) (1 - m / (k-1+m))
    counted slots of gpipe                                  (k-1) / (k-1+m), twice as much

Its figure on placement is not readable; the exact cut is compared with what people do by hand instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.reports.figures import Series, bar_chart, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, falling, percent, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome

# -- idle share --------------------------------------------------------------------------------------------------------


def run_idle(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a model of equal stages; return for each number of micro-batches gpipe's idle share as predicted."""
    from paceline.pipeline.schedules import orders
    from paceline.pipeline.timing import timeline
    from paceline.reproduce.lecture.cut_models import ALIKE, Subject, measured

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


def microbatches_of(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of micro-batches; with one there is no pipelining."""
    return (1, 4) if plan.toy else (1, 2, 4, 8, 16)


def measured_stages(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of stages whose layers are measured."""
    return (2,) if plan.toy else (2, 4)


def counted_stages(plan: ExperimentPlan) -> tuple[int, ...]:
    """Return the numbers of stages whose idle slots are counted."""
    return (2, 4) if plan.toy else (2, 4, 8, 64)


def jobs_of_idle(plan: ExperimentPlan) -> list[Job]:
    size = plan.choose(
        toy={"samples": 8, "wide": 16, "depth": 1, "repeats": 3},
        laboratory={"samples": 64, "wide": 256, "depth": 8, "repeats": 5},
        full={"samples": 256, "wide": 512, "depth": 40, "repeats": 5},
    )
    return [
        Job(
            name=f"{stages} stages",
            run=run_idle,
            settings={"stages": stages, "microbatches": list(microbatches_of(plan)), **size},
            seconds=plan.choose(toy=0.5, laboratory=5.0, full=60.0),
        )
        for stages in measured_stages(plan)
    ]


def conclude_idle(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    from paceline.pipeline.schedules import lecture_idle
    from paceline.pipeline.timing import slot_timeline

    rows, claims = [], list[Claim]()
    lines: dict[str, list[tuple[float, float | None]]] = {}
    ratios, worst_off = list[float](), list[float]()
    for stages in counted_stages(plan):
        idle = outcomes[f"{stages} stages"]["idle"] if stages in measured_stages(plan) else {}
        for m in microbatches_of(plan):
            formula, count = lecture_idle(stages, m), slot_timeline("gpipe", stages, m).idle
            predicted = idle.get(str(m))
            shown = "-" if predicted is None else percent(predicted)
            rows.append((f"{stages} devices, {m} micro-batches", percent(formula), percent(count), shown))
            ratios.append(count / formula)
            if predicted is not None:
                worst_off.append(abs(predicted - count))
            if stages == measured_stages(plan)[-1]:
                for name, value in (("formula", formula), ("count", count), ("predicted", predicted)):
                    lines.setdefault(name, []).append((m, value))
    shares = [slot_timeline("gpipe", measured_stages(plan)[-1], m).idle for m in microbatches_of(plan)]
    last = counted_stages(plan)[-1]
    worst_ratio = max(ratios, key=lambda ratio: abs(ratio - 1))
    claims += [
        within("idle slots are as many as the formula says: count / formula", worst_ratio, least=0.99, most=1.01),
        within(
            f"about 50 % is lost with many machines: {last} devices, no pipelining",
            slot_timeline("gpipe", last, 1).idle,
            least=0.4,
            most=0.55,
            write=percent,
        ),
        falling("more micro-batches, less idle time", shares, write=percent, judged=False),
        within(
            "predicted from measured layers within 5 points of the count",
            max(worst_off),
            most=0.05,
            write=percent,
            judged=False,
        ),
    ]
    return Findings(
        tables=(
            PlainTable(
                title="Idle share of a pipeline of equal stages",
                headings=("", "paper:\nformula", "ours:\ncounted", "ours:\npredicted"),
                rows=rows,
                caption="formula: (1/2) (1 - m/(k-1+m)). predicted: gpipe's timeline with measured layers.",
            ),
        ),
        claims=tuple(claims),
        charts=(
            line_chart(
                "idle",
                f"Idle share, {measured_stages(plan)[-1]} devices",
                "",
                [Series(name=name, points=points, dashed=name == "formula") for name, points in lines.items()],
                x="micro-batches",
                y="idle share",
                log_x=True,
                percent=True,
            ),
        ),
        series=tuple(lines),
        remarks=(
            "The lecture counts the idle slots before a device's work in each half of a step, and not those after it: "
            "counting both gives twice as much, (k-1)/(k-1+m), which is GPipe's known figure.",
            "No step is run here: layers are measured one by one in one process, and links cost nothing.",
        ),
        numbers={name: dict(found) for name, found in outcomes.items()},
    )


# -- placement ---------------------------------------------------------------------------------------------------------


def run_placement(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a model's layers, cut it in three ways, and time the pieces; seconds are those of the slowest stage."""
    from paceline.reproduce.lecture.cut_models import Subject, measured, prepared, run_in_turns, three_cuts

    subject = Subject(model=settings["model"], microbatch=settings["samples"], side=settings["side"])
    found = measured(subject, repeats=settings["repeats"])
    where = three_cuts(found, settings["stages"], microbatches=4)
    cuts = [prepared(found, method, places) for method, places in where.items()]
    run_in_turns(cuts, settings["turns"])
    return {
        "layers": len(found.profile.layers),
        "cuts": {
            cut.method: {"at": list(cut.cuts), "predicted": cut.predicted_seconds, "measured": cut.best} for cut in cuts
        },
    }


def placements_of(plan: ExperimentPlan) -> tuple[tuple[str, int], ...]:
    """Return networks, and the devices that each is cut for."""
    return (("lenet", 2),) if plan.toy else (("googlenet", 2), ("googlenet", 4))


def jobs_of_placement(plan: ExperimentPlan) -> list[Job]:
    size = plan.choose(
        toy={"samples": 2, "side": 16, "repeats": 3, "turns": 1},
        laboratory={"samples": 2, "side": 32, "repeats": 3, "turns": 3},
        full={"samples": 8, "side": 32, "repeats": 9, "turns": 5},
    )
    return [
        Job(
            name=f"{model}, {stages} stages",
            run=run_placement,
            settings={"model": model, "stages": stages, **size},
            seconds=plan.choose(toy=1.0, laboratory=25.0, full=120.0),
        )
        for model, stages in placements_of(plan)
    ]


def conclude_placement(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows, claims = [], list[Claim]()
    bars: dict[str, list[float | None]] = {"predicted": [], "measured": []}
    groups: list[str] = []
    for name, found in outcomes.items():
        cuts = found["cuts"]
        ours = cuts["ours"]
        for method, cut in cuts.items():
            rows.append(
                (
                    f"{name.removesuffix(' stages')}: {method}",
                    ", ".join(map(str, cut["at"])),
                    f"{1000 * cut['predicted']:.1f}",
                    f"{1000 * cut['measured']:.1f}",
                    f"{cut['measured'] / ours['measured']:.2f}",
                    "-",
                )
            )
            groups.append(f"{name}: {method}")
            for side in bars:
                bars[side].append(1000 * cut[side])
        for side in bars:
            claims.append(
                ahead(
                    f"the exact cut before equal counts, ms of the slowest stage, {side}, {name}",
                    {method: 1000 * cuts[method][side] for method in ("ours", "equal counts")},
                    best="low",
                    by=0.02 * 1000 * ours[side],
                    strictly=False,
                    judged=side == "measured",  # by the costs that it was cut by, the exact cut cannot lose
                )
            )
    return Findings(
        tables=(
            PlainTable(
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
            ),
        ),
        claims=tuple(claims),
        charts=(bar_chart("slowest", "The slowest stage", "", groups, bars, y="ms for a micro-batch"),),
        series=tuple(bars),
        remarks=(
            "The lecture calls placement a hard problem and points to reinforcement learning; its figure is not "
            "readable, so nothing of it is compared. Layers in a row are cut exactly here, by dynamic programming; "
            "the comparison is with what people do by hand, and with torchgpipe's block partition.",
            "Pieces are timed one by one in one process, in CPU seconds; 2 % more than another counts as the same.",
        ),
        numbers={name: dict(found) for name, found in outcomes.items()},
    )
