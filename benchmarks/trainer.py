"""Hugging Face's Trainer on two hosts, 200 Mbit/s between them: `average(trainer, "hpsgd", codec="qsgd")` beside DDP.

    host A: rank 0 ==== 200 Mbit/s each way ==== host B: rank 1

A small GPT-2 learns a Markov chain of tokens. Both lanes train the same weights from the same seed on the same samples,
in the same processes, one after the other; who goes first alternates. Samples a second are of the best turn of each
lane, from the sixth step to the end of training, the last flush among them. The loss is that of the model on samples
that were not trained on, the mean over the seeds. Learning rate, period and sizes were set once, and
tried with seeds 100 and 101. Needs root, iproute2, transformers and accelerate.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.cable import RATE, Cable, why_not
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.ranks import ended_by_signals, measured
from benchmarks.trainer_rank import DDP, LANES, OURS, TrainerPlan

FULL = TrainerPlan(
    seeds=[0, 1, 2],
    steps=300,
    batch=8,
    width=192,
    layers=2,
    length=32,
    vocabulary=64,
    rate=1e-3,
    period=1,
    held_out=512,
)
QUICK = replace(FULL, seeds=[0], steps=8, width=16, layers=1, length=8, held_out=16)
FASTER = Bar(sign=">=", limit=1.0)
AS_GOOD = Bar(sign="<=", limit=1.02, style=".3f")
INSTALL = "pip install 'paceline[huggingface]'"
Row = dict[str, Any]


def run(options: Options) -> None:
    """`python -m benchmarks trainer`."""
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(missing)} not installed: {INSTALL}" if missing else why_not()
    if reason:
        tables().print(f"trainer: skipped, and no bar judged: {reason}", markup=False)
        save(options, "trainer", {"skipped": reason})
        return
    first = options.first_seed
    seeds = list(range(first, first + (options.seeds or len(FULL.seeds))))
    plan = QUICK if options.quick else replace(FULL, seeds=seeds)
    labels = [f"{lane}, seed {seed}" for seed, lane in plan.turns]
    folder = Path(tempfile.mkdtemp(prefix="paceline-trainer-"))
    try:
        with ended_by_signals(), Cable() as cable:
            turns = measured("trainer", "benchmarks.trainer_rank", json.dumps(asdict(plan)), labels, cable, folder)
    finally:
        shutil.rmtree(folder)
    rows = rows_of(turns)
    console = tables()
    console.print(_table(rows, turns[0]["parameters"], quick=options.quick))
    console.print(_bars(rows))
    save(options, "trainer", {"plan": asdict(plan), "rows": rows, "turns": turns})


def rows_of(turns: Sequence[Row]) -> list[Row]:
    """Return a row for each lane: its best turn's samples a second, and the mean of its losses.

    >>> turns = [{"lane": DDP, "samples_per_second": rate, "loss": rate / 10, "sent_bytes": 8.0} for rate in (20, 30)]
    >>> rows_of([*turns, {"lane": OURS, "samples_per_second": 60, "loss": 2.5, "sent_bytes": 1.0}])[0]
    {'lane': "Trainer's DDP", 'samples_per_second': 30, 'loss': 2.5, 'sent_bytes': 8.0}
    """
    rows = []
    for lane in LANES:
        ours = [turn for turn in turns if turn["lane"] == lane]
        rows.append(
            {
                "lane": lane,
                "samples_per_second": max(turn["samples_per_second"] for turn in ours),
                "loss": mean(turn["loss"] for turn in ours),
                "sent_bytes": mean(turn["sent_bytes"] for turn in ours),
            }
        )
    return rows


def _table(rows: Sequence[Row], parameters: int, *, quick: bool) -> Table:
    title = f"GPT-2 of {parameters:,} parameters in Trainer, two ranks, {RATE}/s between them"
    table = Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick), padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("lane", no_wrap=True)
    for name in ("samples/s", "loss", "MB sent in a step"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["lane"], f"{row['samples_per_second']:.1f}", f"{row['loss']:.4f}", f"{row['sent_bytes'] / 1e6:.3f}"
        )
    return table


def _bars(rows: Sequence[Row]) -> Table:
    by_lane = {row["lane"]: row for row in rows}
    ours, ddp = by_lane[OURS], by_lane[DDP]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("what")
    for name in ("measured", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for what, bar, figure in (
        (f"samples a second, {OURS} / DDP", FASTER, ours["samples_per_second"] / ddp["samples_per_second"]),
        (f"loss after the same samples, {OURS} / DDP", AS_GOOD, ours["loss"] / ddp["loss"]),
    ):
        table.add_row(what, bar.show(figure), str(bar), coloured(bar.verdict(figure)))
    return table
