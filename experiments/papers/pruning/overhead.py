"""pruning-overhead, of the paper's section 5: how many seconds does pruning itself cost in 200 epochs?

Nothing is trained: losses are random numbers. Ours are the CPU seconds of the sampler, without the mean of losses that
any loop takes; they are judged against the paper's average over ten networks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import torch

from experiments.core.claims import ahead, figure
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.papers.pruning.setting import CIFAR_SAMPLES, PAPER_BATCH
from experiments.papers.published import PRUNING_EPOCHS, PRUNING_RATE_CHANGES, PRUNING_TABLE_1
from paceline.data.pruning.sampler import FinePruning
from paceline.reports.figures import bar_chart
from paceline.reports.table import PlainTable

OVERHEAD_SECONDS = fmean(PRUNING_TABLE_1["overhead"])  # "around averaged 4.2 seconds over 200 epochs"


def run_overhead(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Go through the epochs of a run without training; return the CPU seconds of the sampler, and of `mean()` alone."""
    samples, epochs = settings["samples"], settings["epochs"]
    values = torch.rand(samples, generator=torch.Generator().manual_seed(settings["seed"])).requires_grad_()
    losses = list(torch.split(values, PAPER_BATCH))
    schedule = {name: settings[name] for name in ("window_at", "starting_point", "seed")}
    sampler = FinePruning(samples, batch_size=PAPER_BATCH, **schedule)
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
    pruned = len(sampler.plan(epochs).pruned_epochs)
    return {"seconds": sampling - plain, "sampling": sampling, "mean": plain, "epochs": epochs, "pruned": pruned}


@experiment(
    "pruning-overhead",
    source="Data fine-pruning, section 5",
    question="what pruning itself costs in 200 epochs",
    minutes=0.3,
    full_hours=0.01,
    timed=True,
)
def overhead(size: Size) -> Telling:
    small = {"samples": 1_000, "epochs": 20, "window_at": [6, 12], "starting_point": 3}
    changes = list(PRUNING_RATE_CHANGES)
    whole = {"samples": CIFAR_SAMPLES, "epochs": PRUNING_EPOCHS, "window_at": changes, "starting_point": 30}
    settings = size.pick(small, whole)
    runs = yield {"epochs": Job(run_overhead, lambda seed: {**settings, "seed": seed}, size.pick(1.0, 3.0))}
    ours, found = runs.mean("seconds")["epochs"], runs["epochs"][0]

    low, high = min(PRUNING_TABLE_1["overhead"]), max(PRUNING_TABLE_1["overhead"])
    yield PlainTable(
        title=f"Seconds that pruning costs in {found['epochs']} epochs, {found['pruned']} of them pruned",
        headings=("", "paper", "ours"),
        rows=[
            ("on average", f"{OVERHEAD_SECONDS:.2f}", figure(ours)),
            ("in the ten networks", f"{low:.2f}-{high:.2f}", "-"),
        ],
        caption="Ours are the CPU seconds of the sampler on one core: batches, losses and decisions, without the mean "
        "of losses that any loop takes.",
    )
    yield ahead("no more than the paper's overhead", {"ours": ours, "paper": OVERHEAD_SECONDS}, best="low")
    yield bar_chart(
        "overhead",
        "Seconds that pruning costs",
        "In 200 epochs of 50,000 samples.",
        ["overhead"],
        {"paper": [OVERHEAD_SECONDS], "ours": [ours]},
        y="seconds",
    )
    yield "Our machine is not the paper's. Nothing is trained: losses are random numbers."
    yield Numbers({"ours": ours, "paper": OVERHEAD_SECONDS})
