"""pruning-overhead, of the paper's section 5: how many seconds does pruning itself cost in 200 epochs?"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable
from paceline.reproduce.claims import ahead, figure, mean
from paceline.reproduce.experiment import ExperimentPlan, Findings, Job, Outcome
from paceline.reproduce.pruning.setting import CIFAR_SAMPLES, PAPER_BATCH
from paceline.reproduce.published import PRUNING_EPOCHS, PRUNING_RATE_CHANGES, PRUNING_TABLE_1

OVERHEAD_SECONDS = fmean(PRUNING_TABLE_1["overhead"])  # "around averaged 4.2 seconds over 200 epochs"


def run_overhead(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Go through the epochs of a run without training; return the CPU seconds of the sampler, and of `mean()` alone."""
    import torch

    from paceline.data.pruning.sampler import FinePruning

    samples, epochs = settings["samples"], settings["epochs"]
    values = torch.rand(samples, generator=torch.Generator().manual_seed(settings["seed"])).requires_grad_()
    losses = list(torch.split(values, PAPER_BATCH))
    sampler = FinePruning(samples, batch_size=PAPER_BATCH, window_at=settings["window_at"],
                          starting_point=settings["starting_point"], seed=settings["seed"])  # fmt: skip
    sampling = plain = 0.0
    for _ in range(epochs):
        begun, step = time.process_time(), 0
        for batch in sampler:
            each = losses[step]
            sampler.observe(each if len(each) == len(batch) else each[: len(batch)])
            step += 1
        sampling += time.process_time() - begun
        begun = time.process_time()
        for each in losses[:step]:
            each.mean()
        plain += time.process_time() - begun
    return {"seconds": sampling - plain, "sampling": sampling, "mean": plain, "epochs": epochs,
            "pruned": len(sampler.plan(epochs).pruned_epochs)}  # fmt: skip


def jobs_of_overhead(plan: ExperimentPlan) -> list[Job]:
    small = {"samples": 1_000, "epochs": 20, "window_at": [6, 12], "starting_point": 3}
    whole = {
        "samples": CIFAR_SAMPLES,
        "epochs": PRUNING_EPOCHS,
        "window_at": list(PRUNING_RATE_CHANGES),
        "starting_point": 30,
    }
    settings = plan.choose(toy=small, laboratory=whole, full=whole)
    return [
        Job(
            name=f"seed {seed}",
            run=run_overhead,
            settings={**settings, "seed": seed},
            seconds=plan.choose(toy=1.0, laboratory=3.0, full=3.0),
        )
        for seed in plan.seeds
    ]


def conclude_overhead(plan: ExperimentPlan, outcomes: Mapping[str, Outcome]) -> Findings:
    ours = mean([float(outcomes[f"seed {seed}"]["seconds"]) for seed in plan.seeds])
    low, high = min(PRUNING_TABLE_1["overhead"]), max(PRUNING_TABLE_1["overhead"])
    found = outcomes[f"seed {plan.seeds[0]}"]
    return Findings(
        tables=(
            PlainTable(
                title=f"Seconds that pruning costs in {found['epochs']} epochs, {found['pruned']} of them pruned",
                headings=("", "paper", "ours"),
                rows=[
                    ("on average", f"{OVERHEAD_SECONDS:.2f}", figure(ours)),
                    ("in the ten networks", f"{low:.2f}-{high:.2f}", "-"),
                ],
                caption="Ours are the CPU seconds of the sampler on one core: batches, losses and decisions, without "
                "the mean of losses that any loop takes.",
            ),
        ),
        claims=(
            ahead("no more than the paper's overhead", {"ours": ours, "paper": OVERHEAD_SECONDS}, best="low"),
        ),
        charts=(
            bar_chart(
                "overhead",
                "Seconds that pruning costs",
                "In 200 epochs of 50,000 samples.",
                ["overhead"],
                {"paper": [OVERHEAD_SECONDS], "ours": [ours]},
                y="seconds",
            ),
        ),
        series=("paper", "ours"),
        remarks=("Our machine is not the paper's. Nothing is trained: losses are random numbers.",),
        numbers={"ours": ours, "paper": OVERHEAD_SECONDS},
    )  # fmt: skip
