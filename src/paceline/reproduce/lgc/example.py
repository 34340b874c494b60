"""lgc-1, the paper's figure 1: in each round Full waits for the slowest of three workers, and LGC for the second."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.recipes import Recipe
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, equals
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.published import LGC_FIGURE_1, LGC_FIGURE_1_TOTALS
from paceline.reproduce.recipe_runs import run_recipe


def run_figure_1(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Simulate three rounds of three workers whose seconds stand in the settings."""
    with tempfile.TemporaryDirectory(prefix="paceline-lgc-1-") as folder:
        table = Path(folder, "delays.csv")
        table.write_text("\n".join(",".join(map(str, row)) for row in settings["seconds"]) + "\n", encoding="utf-8")
        recipe = Recipe(rounds=len(settings["seconds"])).with_settings(
            cluster={"workers": 3, "late_work": settings["late_work"]},
            strategy={"name": settings["strategy"], "k": 2},
            delay={"name": "recorded", "file": str(table)},
        )
        return run_recipe({"recipe": recipe.to_document(), "timing_only": True})


def jobs_of_figure_1(plan: ExperimentPlan) -> list[Job]:
    # The figure names who is waited for: the slowest, and the second. The quickest is any that is quicker still.
    seconds = [
        [1.0, middle, slowest] for middle, slowest in zip(LGC_FIGURE_1["lgc"], LGC_FIGURE_1["full"], strict=True)
    ]
    return [
        Job(
            name=f"{lane}, {late_work}",
            run=run_figure_1,
            settings={"strategy": lane, "late_work": late_work, "seconds": seconds},
        )
        for lane, late_work in (("full", "complete"), ("lgc", "complete"), ("lgc", "partial"))
    ]


def conclude_figure_1(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    full, lgc, partial = (outcomes[name]["seconds"] for name in ("full, complete", "lgc, complete", "lgc, partial"))
    paper = [LGC_FIGURE_1_TOTALS[lane] for lane in ("full", "lgc")]
    return Findings(
        tables=(
            PlainTable(
                title="Seconds of three rounds, three workers, K = 2",
                headings=("strategy", "paper", "ours"),
                rows=[
                    ("full", f"{paper[0]}", f"{full:.1f}"),
                    ("lgc", f"{paper[1]}", f"{lgc:.1f}"),
                    ("lgc, late workers finish their block", "-", f"{partial:.1f}"),
                ],
            ),
        ),
        claims=(
            equals("full takes 6.5 s", full, LGC_FIGURE_1_TOTALS["full"]),
            equals("lgc takes 4.0 s", lgc, LGC_FIGURE_1_TOTALS["lgc"]),
            ahead("lgc before full", {"lgc": lgc, "full": full}, best="low"),
        ),
        charts=(
            bar_chart(
                "seconds",
                "Three rounds, three workers, K = 2",
                "Full waits for the slowest of each round, lgc for the second.",
                ["full", "lgc"],
                {"paper": paper, "ours": [full, lgc]},
                y="seconds",
            ),
        ),
        series=("paper", "ours"),
        remarks=("The quickest worker of each round is not readable in the figure: 1.0 s is ours.",),
        numbers={"full": full, "lgc": lgc, "lgc_partial": partial},
    )
