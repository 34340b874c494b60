"""Every plan of every codec, measured, against the one that `compress` chooses: ranks x links x codecs.

The step is that of `links`: 2.9 million parameters, 30 ms of computation, mostly asleep, a link for each rank. All
lanes of a number of ranks are in the same processes, and the links are set to 1,000, 200 and 50 Mbit/s in place. A cell
is a codec at a number of ranks and a rate; the choice is within 10 % of the best plan in nine cells of ten, or the bar
is missed.

What the cost model of `paceline.exchanges` needs is fitted beside it, and says what a step would take at up to 1,024
ranks. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.cable import Switch, why_not
from benchmarks.links_lanes import OURS, parameters_of, short
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.plans_rank import AUTO, LARGE_BYTES, Job
from benchmarks.plans_scale import scale_rows, scale_table
from benchmarks.ranks import ended_by_signals, measured

RANKS = (2, 4, 8)
RATES = (1000e6, 200e6, 50e6)  # the quickest first: it is there that lanes warm up
PLANS = ("all-reduce", "gather", "two-step")
FULL = Job(
    ranks=0,
    switch=0,
    rates=list(RATES),
    codecs=[lane for lane in OURS if "rank 1" not in lane],
    widths=[512, 1024, 1024, 1024, 256],
    sleep_seconds=0.0025,
    bucket_mb=4.0,
    passes=3,
    steps=3,
)
QUICK = replace(
    FULL, rates=[1000e6], codecs=["bfloat16", "qsgd, 7 levels"], widths=[64, 128, 10], bucket_mb=0.02, passes=1
)
NEAR = 1.10
CELLS = Bar(sign=">=", limit=0.9, style=".0%")
MINUTES = Bar(sign="<=", limit=40.0, style=".1f")
Row = dict[str, Any]


def run(options: Options) -> None:
    """`python -m benchmarks plans`."""
    reason = why_not()
    if reason:
        tables().print(f"plans: skipped, and no bar judged: {reason}")
        save(options, "plans", {"skipped": reason})
        return
    job = QUICK if options.quick else FULL
    job = replace(job, passes=options.repeat or job.passes)
    started = time.monotonic()
    console = tables()
    lines: dict[int, list[Row]] = {}
    cells: list[Row] = []
    for ranks in (2,) if options.quick else RANKS:
        lines[ranks] = _measured(replace(job, ranks=ranks))
        found = cells_of(lines[ranks], ranks)
        cells += found
        console.print(_table(found, job, ranks, quick=options.quick))
    costs = fitted(lines, os.cpu_count() or 1)
    console.print(_costs_table(costs))
    scales = {rate: scale_rows(lines, cells, costs, job, rate) for rate in job.rates}
    for rate, rows in scales.items():
        console.print(scale_table(rows, rate))
    minutes = (time.monotonic() - started) / 60
    near = sum(cell["of_best"] <= NEAR for cell in cells) / len(cells)
    console.print(
        f"The choice within {NEAR - 1:.0%} of the best plan measured, of {len(cells)} cells: {CELLS.show(near)}, "
        f"bar {CELLS}: {coloured(CELLS.verdict(near))}\n"
        f"Minutes: {MINUTES.show(minutes)}, bar {MINUTES}: {coloured(MINUTES.verdict(minutes))}"
    )
    figures = {"cells": cells, "costs": costs, "scales": list(scales.values()), "minutes": minutes, "lines": lines}
    save(options, "plans", {"job": asdict(job), **figures})


def _measured(job: Job) -> list[Row]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-plans-"))
    try:
        with ended_by_signals(), Switch(job.ranks) as switch:
            job = replace(job, switch=switch.number)
            name = f"plans, {job.ranks} ranks"
            return measured(name, "benchmarks.plans_rank", json.dumps(asdict(job)), job.labels, switch, folder)
    finally:
        shutil.rmtree(folder)


# -- cells -------------------------------------------------------------------------------------------------------------


def cells_of(lines: Sequence[Row], ranks: int) -> list[Row]:
    """Return a cell for each codec and rate: the median step of each plan's best pass, the choice, and its ratio.

    >>> lines = [{"kind": "choice", "codec": "qsgd", "plans": ["two-step", "two-step"]}]
    >>> turn = {"kind": "turn", "rate": 50e6, "codec": "qsgd"}
    >>> lines += [turn | {"plan": "gather", "seconds": [3.0]}, turn | {"plan": "two-step", "seconds": [2.0]}]
    >>> lines += [turn | {"plan": "gather", "seconds": [1.0]}, turn | {"plan": "auto", "seconds": None}]
    >>> cell, = cells_of(lines, 2)
    >>> cell["seconds"], cell["choice"], cell["of_best"]
    ({'gather': 1.0, 'two-step': 2.0}, 'two-step', 2.0)
    """
    chosen = {line["codec"]: sorted(set(line["plans"])) for line in lines if line["kind"] == "choice"}
    cells: dict[tuple[str, float], dict[str, float]] = {}
    for line in lines:
        if line["kind"] == "turn" and line["seconds"] is not None:
            seconds = cells.setdefault((line["codec"], line["rate"]), {})
            taken = median(line["seconds"])
            seconds[line["plan"]] = min(taken, seconds.get(line["plan"], taken))
    rows = []
    for (codec, rate), seconds in cells.items():
        taken = seconds[chosen[codec][0] if len(chosen[codec]) == 1 else AUTO]
        row = {"ranks": ranks, "codec": codec, "rate": rate, "seconds": seconds, "choice": " + ".join(chosen[codec])}
        rows.append(row | {"chosen_seconds": taken, "of_best": taken / min(seconds.values())})
    return rows


def _table(cells: Sequence[Row], job: Job, ranks: int, *, quick: bool) -> Table:
    title = f"ms a step of {parameters_of(job.widths):,} parameters by plan, {ranks} ranks"
    table = Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick), padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("codec", no_wrap=True)
    for name in ("Mbit/s", "reduce", "gather", "2-step"):
        table.add_column(name, justify="right")
    table.add_column("choice")
    table.add_column("/ best", justify="right")
    for cell in cells:
        seconds = cell["seconds"]
        table.add_row(
            short(cell["codec"]),
            f"{cell['rate'] / 1e6:,.0f}",
            *(f"{1000 * seconds[plan]:,.0f}" if plan in seconds else "-" for plan in PLANS),
            cell["choice"],
            f"{cell['of_best']:.2f}" if cell["of_best"] <= NEAR else f"[red]{cell['of_best']:.2f}[/]",
        )
    return table


# -- costs -------------------------------------------------------------------------------------------------------------


def fitted(lines: dict[int, list[Row]], cores: int) -> Row:
    """Return what a cost model needs.

    Latency: all_reduce goes 2 (N - 1) hops around a ring, all_gather N - 1, and all_to_all is one hop for all. A hop is
    fitted where every rank has a core of its own, or to the fewest ranks: else it is a wait for the processor.
    """
    found = [(ranks, line) for ranks, some in lines.items() for line in some if line["kind"] == "collectives"]
    hops = {"all_reduce": lambda ranks: 2 * (ranks - 1), "all_gather": lambda ranks: ranks - 1}
    alone = [(ranks, line) for ranks, line in found if ranks <= max(cores, min(lines))]
    equations = torch.tensor([[1.0, hop(ranks)] for ranks, _ in alone for hop in hops.values()])
    taken = torch.tensor([[line[f"tiny_{name}_seconds"]] for _, line in alone for name in hops])
    collective, hop = torch.linalg.lstsq(equations.double(), taken.double()).solution.flatten().tolist()
    latencies = {
        ranks: {
            name: median(line[f"tiny_{name}_seconds"] for line in some if line["kind"] == "collectives")
            for name in ("all_reduce", "all_gather", "all_to_all")
        }
        for ranks, some in lines.items()
    }
    rates: dict[str, list[float]] = {}
    for ranks, line in found:
        share = (ranks - 1) / ranks * LARGE_BYTES
        moved = {"all_reduce": 2 * share, "all_gather": share, "all_to_all": share}
        for name, size in moved.items():
            net = line[f"large_{name}_seconds"] - line[f"tiny_{name}_seconds"]
            rates.setdefault(f"{line['rate'] / 1e6:,.0f} Mbit/s", []).append(size / net)
    some = next(iter(lines.values()))
    return {
        "collective_seconds": max(0.0, collective),
        "hop_seconds": max(0.0, hop),
        "latency_seconds": latencies,
        "bytes_per_second": {rate: median(each) for rate, each in rates.items()},
        "coding": [line for line in some if line["kind"] == "coding"],
    }


def _costs_table(costs: Row) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Costs, for the model that chooses", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("cost", no_wrap=True)
    table.add_column("measured", justify="right")
    table.add_row(
        "a collective, ms, and a hop", f"{1e3 * costs['collective_seconds']:.2f}, {1e3 * costs['hop_seconds']:.2f}"
    )
    for ranks, latencies in costs["latency_seconds"].items():
        shown = ", ".join(f"{1e3 * seconds:.2f}" for seconds in latencies.values())
        table.add_row(f"{ranks} ranks, a tiny all_reduce, all_gather, all_to_all, ms", shown)
    for rate, bytes_per_second in costs["bytes_per_second"].items():
        table.add_row(f"a link of {rate}, MB/s", f"{bytes_per_second / 1e6:.1f}")
    for line in costs["coding"]:
        shown = f"{1e9 * line['encode_seconds']:.2f}, {1e9 * line['decode_seconds']:.2f}"
        table.add_row(f"{short(line['codec'])}: encode, decode, ns an element", shown)
    return table
