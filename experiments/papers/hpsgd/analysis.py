"""hpsgd-analysis, the paper's section 3.2: averages and local steps of HPSGD in the time of a loop of Local SGD.

    a loop of Local SGD    gamma + 1 steps, and an average that takes as long as k steps
    HPSGD in that time     (gamma + 1) / k + 1 averages and gamma + k + 1 local steps

The first line is the paper's loop and the second its count; here HPSGD is timed, with steps of one second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.core.claims import within
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.papers.hpsgd.setting import LANES, PAPER
from paceline.recipes import Recipe
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.runs.simulation import simulate

ANALYSED = ((8, 2.0), (8, 4.0), (16, 2.0), (8, 0.5))  # gamma and k, an average in steps


def run_analysis(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Time hpsgd with steps of one second and averages of k: return its averages and a worker's steps in a second."""
    workers, k = 4, settings["k"]
    recipe = Recipe(rounds=settings["rounds"]).with_settings(
        cluster={"workers": workers},
        delay={"shift_seconds": 1.0, "mean_seconds": 0.0, "persistence": 1},
        network={"latency_seconds": k / (2 * (workers - 1))},
        strategy=LANES[PAPER],
    )
    trace = simulate(recipe, timing_only=True).trace
    return {"averages": len(trace.rounds) / trace.seconds, "steps": trace.used / workers / trace.seconds}


@experiment(
    "hpsgd-analysis",
    source="HPSGD, section 3.2",
    question="averages and steps in the time of a loop of Local SGD",
    minutes=0.1,
    full_hours=0.01,
)
def section_3_2(size: Size) -> Telling:
    rounds = size.pick(400, 4000)
    runs = yield {k: Job(run_analysis, {"k": k, "rounds": rounds}, 0.5) for _, k in ANALYSED}
    in_a_second = {name: runs.mean(name) for name in ("averages", "steps")}
    rows, averages = [], dict[str, list[float]](paper=[], ours=[])
    for gamma, k in ANALYSED:
        loop = gamma + 1 + k
        ours = {name: loop * found[k] for name, found in in_a_second.items()}
        paper = {"averages": (gamma + 1) / k + 1, "steps": gamma + k + 1}
        where = f"gamma = {gamma}, k = {k:g}"
        rows.append((where, f"{loop:g}", *(f"{side[name]:.1f}" for name in paper for side in (paper, ours))))
        for name, text in (("averages", "averages"), ("steps", "local steps")):
            text = f"{text} in the time of a loop, to one: {where}"
            yield within(text, ours[name], least=paper[name] - 1, most=paper[name] + 1)
        averages["paper"].append(paper["averages"])
        averages["ours"].append(ours["averages"])
        yield Numbers({where: {"paper": paper, "ours": ours}})
    yield PlainTable(
        title="HPSGD in the time of a loop of Local SGD",
        headings=("", "loop,\nsteps", "averages:\npaper", "averages:\nours", "steps:\npaper", "steps:\nours"),
        rows=rows,
        caption="A loop: gamma + 1 steps, and an average that takes as long as k.\n"
        "Paper: (gamma + 1) / k + 1 averages and gamma + k + 1 local steps.",
    )
    yield bar_chart(
        "averages",
        "Averages in the time of a loop of Local SGD",
        "Every step takes one second, an average k.",
        [f"gamma {gamma}, k {k:g}" for gamma, k in ANALYSED],
        averages,
        y="averages",
    )
    yield (
        "Algorithm 2 begins an average after a step, and so at most one a step: with k below 1 the formula counts "
        "averages that nobody begins."
    )
    yield "The paper's loop has gamma + 1 steps; local-sgd here has gamma of them."
