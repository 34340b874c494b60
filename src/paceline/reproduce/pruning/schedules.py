"""pruning-3 and pruning-formulas: which epochs does the schedule prune, and how many by the paper's formulas?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.data.pruning.fine_pruning import FineSchedule, estimated_n_prune
from paceline.data.pruning.plan import plan_fine
from paceline.reports.figures import Series, bar_chart, line_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import falling, percent, within
from paceline.reproduce.experiment import Claim, ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.pruning.setting import CIFAR_SAMPLES, NO_FIGURE, NOT_STATED, PAPER_BATCH
from paceline.reproduce.published import PRUNING_EPOCHS, PRUNING_RATE_CHANGES, PRUNING_TABLE_1

SCHEDULES: dict[str, tuple[dict[str, Any], int]] = {
    "the defaults of paceline": ({}, PRUNING_EPOCHS),
    "window 30": ({"window": 30, "starting_point": 15}, PRUNING_EPOCHS),
    "attenuation 1": ({"attenuation": 1}, PRUNING_EPOCHS),
    "attenuation 1, whole blocks": ({"attenuation": 1, "starting_point": 28}, 180),
}
BEST_SAVED, LEAST_SAVED = max(PRUNING_TABLE_1["speedup"]) / 100, min(PRUNING_TABLE_1["speedup"]) / 100


def run_plan(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Lay out a schedule, and count its pruned epochs by the paper's formulas too.

    >>> run_plan({"schedule": {}, "epochs": 200})["formula"]
    48
    """
    given = settings["schedule"]
    schedule = FineSchedule(**{**given, "window_at": tuple(given.get("window_at", ()))})
    plan = plan_fine(schedule, CIFAR_SAMPLES, epochs=settings["epochs"], batch_size=PAPER_BATCH)
    return {
        "pruned": list(plan.pruned_epochs),
        "samples": plan.epoch_samples,
        "share_saved": plan.share_saved,
        "windows": [{"first": row.first, "last": row.last, "start": row.start or 0} for row in plan.rows],
        "formula": estimated_n_prune(schedule, settings["epochs"]),
        "epochs": settings["epochs"],
    }


def jobs_of_figure_3(plan: ExperimentPlan) -> list[Job]:
    schedule = {"window_at": list(PRUNING_RATE_CHANGES)}
    return [Job(name="schedule", run=run_plan, settings={"schedule": schedule, "epochs": PRUNING_EPOCHS}, seconds=0.1)]


def conclude_figure_3(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    found = outcomes["schedule"]
    rows, early = [], 0
    for window in found["windows"]:
        pruned = [epoch for epoch in found["pruned"] if window["first"] <= epoch <= window["last"]]
        begins = 0 if window is found["windows"][0] else window["first"]
        early += sum(epoch - begins < window["start"] for epoch in pruned)
        length = window["last"] - window["first"] + 1
        rows.append((f"{window['first']}-{window['last']}", NO_FIGURE.split(":")[0], str(window["start"]),
                     f"{len(pruned)} of {length}"))  # fmt: skip
    return Findings(
        tables=(
            PlainTable(
                title=f"A schedule over {found['epochs']} epochs",
                headings=("window", "paper", "ours: starting\npoint", "ours: pruned\nepochs"),
                rows=rows,
                caption="Windows begin where the paper's learning rate changes. The picture of figure 3 is not in the "
                "text that we have.",
            ),
        ),
        claims=(
            within(
                "pruned epochs lie in the later part of a window, from its starting point on",
                float(early),
                most=0.0,
                kind="shape",
            ),
            falling(
                "pruning begins earlier from window to window", [float(each["start"]) for each in found["windows"]]
            ),
        ),
        charts=(
            line_chart(
                "schedule",
                "Samples of each epoch",
                "Pruned epochs have 30 % fewer.",
                [Series(name="ours", points=list(enumerate(found["samples"], start=1)))],
                x="epoch",
                y="samples",
            ),
        ),
        series=("ours",),
        remarks=(NOT_STATED,),
        numbers={"pruned": found["pruned"], "share_saved": found["share_saved"]},
    )


def jobs_of_formulas(plan: ExperimentPlan) -> list[Job]:
    return [
        Job(name=name, run=run_plan, settings={"schedule": dict(schedule), "epochs": epochs}, seconds=0.1)
        for name, (schedule, epochs) in SCHEDULES.items()
    ]


def conclude_formulas(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    rows = [
        (name, str(found["epochs"]), str(found["formula"]), str(len(found["pruned"])), percent(found["share_saved"]))
        for name, found in outcomes.items()
    ]
    whole, usual = outcomes["attenuation 1, whole blocks"], outcomes["the defaults of paceline"]
    pruned_share = len(usual["pruned"]) / usual["epochs"]
    needed = {saved: saved / pruned_share for saved in (BEST_SAVED, LEAST_SAVED)}
    return Findings(
        tables=(
            PlainTable(
                title="Pruned epochs",
                headings=("schedule", "epochs", "paper:\n(3) or (4)", "ours:\nexact", "ours: samples\nsaved"),
                rows=rows,
                caption="Where nothing else is said, the window is 60, the starting point 30, the attenuation 2, the "
                "block 4 and the count 2; 30 % sit out. The paper prints no values.",
            ),
        ),
        claims=(
            _counts("the formula counts the pruned epochs: every window starts at one point, blocks are whole", whole),
            _counts("the formula counts the pruned epochs: attenuation 2, as the text wants it", usual),
            *(
                Claim(
                    kind="value",
                    text=f"to save {percent(saved)}, as the paper's table 1 does, so many must sit out",
                    holds=True,
                    because=f"{share:.1%} of the samples",
                    judged=False,
                )
                for saved, share in needed.items()
            ),
        ),
        charts=(
            bar_chart(
                "epochs",
                "Pruned epochs",
                "By the paper's formulas, and by its listing.",
                list(outcomes),
                {
                    "formula": [float(found["formula"]) for found in outcomes.values()],
                    "exact": [float(len(found["pruned"])) for found in outcomes.values()],
                },
                y="pruned epochs",
            ),
        ),
        series=("formula", "exact"),
        remarks=(
            "The formulas know no attenuation, and take all epochs after a window's last whole block as pruned.",
            NOT_STATED,
        ),
        numbers={name: {"formula": found["formula"], "exact": len(found["pruned"])} for name, found in outcomes.items()}
        | {"prune needed": {f"{saved:.4f}": share for saved, share in needed.items()}},
    )


def _counts(text: str, found: Outcome) -> Claim:
    formula, exact = found["formula"], len(found["pruned"])
    return Claim(kind="value", text=text, holds=formula == exact, because=f"{formula} by the formula, {exact} exactly")
