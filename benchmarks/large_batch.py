"""LARS against SGD as the batch grows and the number of epochs stays: who keeps the accuracy of the small batch?

The claim (You, Gitman, Ginsburg 2017, tables 1 and 3): AlexNet trained with SGD, a linear warm-up and the best of many
rates loses 14 points from a batch of 512 to one of 8K, AlexNet-BN 2.2; with LARS both lose next to nothing. The bars
here: LARS at the largest batch not more than 1.5 points behind SGD at the smallest, and ahead of SGD at the largest.

Laboratory size: a small CNN without normalisation, and the first 16,384 images of Fashion-MNIST, shrunk to 14x14. At 8K
a run has 128 steps, where the paper's has 15,600, and a batch is half of the images. The size was chosen so that such
few steps can be enough: with three times as many images, and 96 steps, LARS at 8K was ahead of SGD too, but five points
behind the small batch.

    both        momentum 0.9, weight decay 5e-4, linear warm-up over a tenth of the steps, then (1 - s)^2
    SGD         torch's
    LARS        ours, as it comes: biases and the scales of normalisation are not scaled; but trust is 0.1

Why that trust: a layer moves by rate * trust of its length, so the paper's rate 10 with trust 0.001 is our rate 0.1
with trust 0.1. But what is not scaled takes the rate as it is, and biases do not bear a rate of 10.

How rates are chosen: every cell of the table tries the same rates, one run each, with a seed that the table does not
have, measured on training images that no run trains on. The best rate's runs with other seeds, measured on the test
images, are the table. Where the best rate is the smallest or the largest of those tried, a note says so: the other side
of it has not been seen. SGD by the rule alone, the rate of the smallest batch times k, is beside it, with one seed.

    tuning      cells x rates      seed 1000       held-out images  --> best rate of each cell
    final       cells x seeds      seeds 0, 1, ..  test images      --> the table

What is there is kept after every run, and a command that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.large_batch_cases import (
    FINAL,
    SEEDS,
    Cell,
    Ending,
    Size,
    Task,
    best_rate,
    final_tasks,
    size_of,
    tuning_tasks,
)
from benchmarks.large_batch_tables import cell_line, show
from benchmarks.large_batch_training import load, train
from benchmarks.options import Options
from benchmarks.output import save
from benchmarks.pool import run_all

NAME = "large-batch"


def run(options: Options) -> None:
    """`python -m benchmarks large-batch`."""
    size = size_of(options)
    seeds = options.seeds or (1 if options.quick else SEEDS)
    load(size)  # refused here, before any process is started
    endings = left_over(options, size)
    if endings:
        print(f"large batches: {len(endings)} runs are there already, in {_file(options)}", file=sys.stderr)
    _run_those_missing(options, size, tuning_tasks(size), endings, label="large batches: tuning")
    _run_those_missing(
        options, size, final_tasks(size, endings, seeds=seeds), endings, label="large batches: final runs"
    )
    save(options, NAME, document(size, endings, complete=True))
    show(size, endings, quick=options.quick)


def _run_those_missing(
    options: Options, size: Size, tasks: Sequence[Task], endings: dict[Task, Ending], *, label: str
) -> None:
    """Run what is not among the endings yet; they are kept, and a cell is told, as soon as they are there."""

    def keep(task: Task, ending: Ending) -> None:
        endings[task] = ending
        save(options, NAME, document(size, endings, complete=False))
        own = [each for each in tasks if (each.phase, each.cell) == (task.phase, task.cell)]
        if all(each in endings for each in own):
            print(cell_line(own, endings), file=sys.stderr)

    missing = [task for task in tasks if task not in endings]
    if options.quick:  # a pool's processes would take longer than the runs
        for task in missing:
            keep(task, train(size, task))
    elif missing:
        run_all(partial(train, size), missing, label=label, done=keep)


# -- what is kept ----------------------------------------------------------------------------------------------------


def document(size: Size, endings: dict[Task, Ending], *, complete: bool) -> dict[str, Any]:
    """The raw numbers; `complete` where no run is missing."""
    runs = [dataclasses.asdict(task) | dataclasses.asdict(ending) for task, ending in endings.items()]
    rates: list[dict[str, Any]] = []
    if complete:
        cells = dict.fromkeys(task.cell for task in endings if task.phase == FINAL)
        rates = [dataclasses.asdict(cell) | {"rate": best_rate(size, endings, cell)} for cell in cells]
    return {"complete": complete, "size": dataclasses.asdict(size), "rates": rates, "runs": runs}


def _file(options: Options) -> Path:
    return Path(options.out, f"{NAME}.json")


def left_over(options: Options, size: Size) -> dict[Task, Ending]:
    """The runs of a command that was stopped, if they would come out the same now; else none.

    Which batches and rates were asked for is no matter: each run is by itself.
    """
    try:
        kept = json.loads(_file(options).read_text(encoding="utf-8"))
        was, asked = (Size(**{**each, "batches": (1,), "rates": (1.0,)}) for each in (kept["size"], vars(size)))
        if kept["complete"] or was != asked or kept["machine"]["torch"] != version("torch"):
            return {}
        return dict(_run_of(each) for each in kept["runs"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _run_of(kept: dict[str, Any]) -> tuple[Task, Ending]:
    task = Task(phase=kept["phase"], cell=Cell(**kept["cell"]), rate=kept["rate"], seed=kept["seed"])
    return task, Ending(**{field.name: kept[field.name] for field in dataclasses.fields(Ending)})
