"""pruning-3 and pruning-formulas: which epochs does the schedule prune, and how many by the paper's formulas?

The picture of figure 3 is not in the text that we have. What is judged of it: pruned epochs lie in the later part of
a window, from its starting point on, and from window to window pruning begins earlier. Formulas (3) and (4) are held
against the schedule that the paper's listing makes, epoch by epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.core.claims import falling, percent, within
from experiments.core.story import Claim, Job, Numbers, Size, Telling, experiment
from experiments.papers.pruning.setting import CIFAR_SAMPLES, NO_FIGURE, NOT_STATED, PAPER_BATCH
from experiments.papers.published import PRUNING_EPOCHS, PRUNING_RATE_CHANGES, PRUNING_TABLE_1
from paceline.data.pruning.fine_pruning import FineSchedule, estimated_n_prune
from paceline.data.pruning.plan import plan_fine
from paceline.reports.figures import Series, bar_chart, line_chart
from paceline.reports.table import PlainTable

USUAL, WHOLE_BLOCKS = "the defaults of paceline", "attenuation 1, whole blocks"
SCHEDULES: dict[str, tuple[dict[str, Any], int]] = {
    USUAL: ({}, PRUNING_EPOCHS),
    "window 30": ({"window": 30, "starting_point": 15}, PRUNING_EPOCHS),
    "attenuation 1": ({"attenuation": 1}, PRUNING_EPOCHS),
    WHOLE_BLOCKS: ({"attenuation": 1, "starting_point": 28}, 180),
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


@experiment(
    "pruning-3",
    source="Data fine-pruning, figure 3",
    question="an example of a schedule",
    minutes=0.2,
    full_hours=0.01,
)
def figure_3(size: Size) -> Telling:
    schedule = {"window_at": list(PRUNING_RATE_CHANGES)}
    runs = yield {"schedule": Job(run_plan, {"schedule": schedule, "epochs": PRUNING_EPOCHS}, 0.1)}
    found = runs["schedule"][0]
    rows, early = [], 0
    for place, window in enumerate(found["windows"]):
        first, last, start = window["first"], window["last"], window["start"]
        pruned = [epoch for epoch in found["pruned"] if first <= epoch <= last]
        begins = first if place else 0
        early += sum(epoch - begins < start for epoch in pruned)
        rows.append((f"{first}-{last}", NO_FIGURE.split(":")[0], str(start), f"{len(pruned)} of {last - first + 1}"))

    yield PlainTable(
        title=f"A schedule over {found['epochs']} epochs",
        headings=("window", "paper", "ours: starting\npoint", "ours: pruned\nepochs"),
        rows=rows,
        caption="Windows begin where the paper's learning rate changes. The picture of figure 3 is not in the text "
        "that we have.",
    )
    text = "pruned epochs lie in the later part of a window, from its starting point on"
    yield within(text, float(early), most=0.0, kind="shape")
    starts = [float(window["start"]) for window in found["windows"]]
    yield falling("pruning begins earlier from window to window", starts)
    yield line_chart(
        "schedule",
        "Samples of each epoch",
        "Pruned epochs have 30 % fewer.",
        [Series(name="ours", points=list(enumerate(found["samples"], start=1)))],
        x="epoch",
        y="samples",
    )
    yield NOT_STATED
    yield Numbers({"pruned": found["pruned"], "share_saved": found["share_saved"]})


@experiment(
    "pruning-formulas",
    source="Data fine-pruning, formulas (2) to (7)",
    question="how many epochs are pruned: the formulas, and the schedule itself",
    minutes=0.2,
    full_hours=0.01,
)
def formulas(size: Size) -> Telling:
    runs = yield {
        name: Job(run_plan, {"schedule": dict(schedule), "epochs": epochs}, 0.1)
        for name, (schedule, epochs) in SCHEDULES.items()
    }
    saved = runs.mean("share_saved")
    formula = {name: outcomes[0]["formula"] for name, outcomes in runs.items()}
    exact = {name: len(outcomes[0]["pruned"]) for name, outcomes in runs.items()}
    pruned_share = exact[USUAL] / SCHEDULES[USUAL][1]
    needed = {share: share / pruned_share for share in (BEST_SAVED, LEAST_SAVED)}

    yield PlainTable(
        title="Pruned epochs",
        headings=("schedule", "epochs", "paper:\n(3) or (4)", "ours:\nexact", "ours: samples\nsaved"),
        rows=[
            (name, str(epochs), str(formula[name]), str(exact[name]), percent(saved[name]))
            for name, (_, epochs) in SCHEDULES.items()
        ],
        caption="Where nothing else is said, the window is 60, the starting point 30, the attenuation 2, the block 4 "
        "and the count 2; 30 % sit out. The paper prints no values.",
    )
    for name, where in (
        (WHOLE_BLOCKS, "every window starts at one point, blocks are whole"),
        (USUAL, "attenuation 2, as the text wants it"),
    ):
        text = f"the formula counts the pruned epochs: {where}"
        because = f"{formula[name]} by the formula, {exact[name]} exactly"
        yield Claim(kind="value", text=text, holds=formula[name] == exact[name], because=because)
    for share, out in needed.items():
        text = f"to save {percent(share)}, as the paper's table 1 does, so many must sit out"
        yield Claim(kind="value", text=text, holds=True, because=f"{out:.1%} of the samples", judged=False)
    yield bar_chart(
        "epochs",
        "Pruned epochs",
        "By the paper's formulas, and by its listing.",
        list(runs),
        {"formula": list(map(float, formula.values())), "exact": list(map(float, exact.values()))},
        y="pruned epochs",
    )
    yield "The formulas know no attenuation, and take all epochs after a window's last whole block as pruned."
    yield NOT_STATED
    yield Numbers({name: {"formula": formula[name], "exact": exact[name]} for name in SCHEDULES})
    yield Numbers({"prune needed": {f"{share:.4f}": out for share, out in needed.items()}})
