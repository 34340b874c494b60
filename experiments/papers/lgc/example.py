"""lgc-1, the paper's figure 1: in each round Full waits for the slowest of three workers, and LGC for the second."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.core.claims import ahead, equals
from experiments.core.recipes import run_recipe
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.papers.published import LGC_FIGURE_1, LGC_FIGURE_1_TOTALS
from paceline.recipes import Recipe
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable


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


@experiment(
    "lgc-1",
    source="LGC, figure 1",
    question="three workers, three rounds: whose time is waited for",
    minutes=0.2,
    full_hours=0.01,
)
def figure_1(size: Size) -> Telling:
    # The figure names who is waited for: the slowest, and the second. The quickest is any that is quicker still.
    seconds = [[1.0, *pair] for pair in zip(LGC_FIGURE_1["lgc"], LGC_FIGURE_1["full"], strict=True)]
    lanes = [("full", "complete"), ("lgc", "complete"), ("lgc", "partial")]
    runs = yield {
        (lane, late_work): Job(run_figure_1, {"strategy": lane, "late_work": late_work, "seconds": seconds})
        for lane, late_work in lanes
    }
    mean = runs.mean("seconds")
    full, lgc, partial = (mean[lane] for lane in lanes)
    paper = [LGC_FIGURE_1_TOTALS[lane] for lane in ("full", "lgc")]
    yield PlainTable(
        title="Seconds of three rounds, three workers, K = 2",
        headings=("strategy", "paper", "ours"),
        rows=[
            ("full", f"{paper[0]}", f"{full:.1f}"),
            ("lgc", f"{paper[1]}", f"{lgc:.1f}"),
            ("lgc, late workers finish their block", "-", f"{partial:.1f}"),
        ],
    )
    yield equals("full takes 6.5 s", full, LGC_FIGURE_1_TOTALS["full"])
    yield equals("lgc takes 4.0 s", lgc, LGC_FIGURE_1_TOTALS["lgc"])
    yield ahead("lgc before full", {"lgc": lgc, "full": full}, best="low")
    yield bar_chart(
        "seconds",
        "Three rounds, three workers, K = 2",
        "Full waits for the slowest of each round, lgc for the second.",
        ["full", "lgc"],
        {"paper": paper, "ours": [full, lgc]},
        y="seconds",
    )
    yield "The quickest worker of each round is not readable in the figure: 1.0 s is ours."
    yield Numbers({"full": full, "lgc": lgc, "lgc_partial": partial})
