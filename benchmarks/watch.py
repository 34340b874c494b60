"""What paceline.watch costs: processor time in a step, beside the same step that nobody watches.

The cost of a step does not depend on how long the step computes: hooks are called, buckets are timed, a line is
written. So it is measured in steps that compute little, where a few microseconds show, and judged by its share in a
step of 20 ms. Lanes take turns in the same processes; of each the turn with the least processor time counts, since
whatever else the machine does only adds to it. The plain lane is measured twice, first and last in each pass: the
difference of the two is what the measurement itself is worth.

Processor time of a whole process has a noise of its own (gloo's threads spin), which is larger than what is looked
for. So watch's own code is timed as well: the processor time of the threads inside it, every way into it wrapped, less
what the wrapper itself takes around nothing. The start of each bucket's all-reduce, which DDP would do itself, is timed
apart. That is the figure which is judged.

A communication hook in Python makes DDP scale gradients in a pass of its own (DDP does so while it copies them); the
lane with PyTorch's own hook shows that part.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.ranks import ended_by_signals, measured
from benchmarks.watch_rank import AGAIN, LANES, PLAIN, Job

STEP_SECONDS = 0.02
SHARE = Bar(sign="<=", limit=0.01, style=".2%")
RANKS = (2, 4)


def run(options: Options) -> None:
    """`python -m benchmarks watch`."""
    job = Job(ranks=2, layers=6, width=224, passes=3 if options.quick else 40, steps=10 if options.quick else 30)
    console, rows, inside = tables(), dict[int, Any](), dict[int, Any]()
    for ranks in RANKS[:1] if options.quick else RANKS:
        rows[ranks] = rows_of(_measured(replace(job, ranks=ranks)))
        console.print(_table(rows[ranks], job, ranks, quick=options.quick))
        inside[ranks] = inside_of(_measured(replace(job, ranks=ranks, inside=True)))
        console.print(_inside_line(inside[ranks]))
    console.print("added: processor time of a step over the plain lanes' least; the last column is its share in 20 ms")
    save(options, "watch", {"job": asdict(job), "rows": rows, "inside": inside})


def inside_of(turns: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the least and the median seconds inside watch in a step, and how far two halves of the turns differ.

    >>> one = {"inside_seconds": 3.0, "wrapping_seconds": 1.0, "started_seconds": 0.5}
    >>> inside_of([one, one | {"inside_seconds": 5.0}])
    {'least': 2.0, 'median': 3.0, 'wrapping': 1.0, 'started': 0.5, 'halves_apart': 2.0}
    """
    own = [turn["inside_seconds"] - turn["wrapping_seconds"] for turn in turns]
    return {
        "least": min(own),
        "median": median(own),
        "wrapping": min(turn["wrapping_seconds"] for turn in turns),
        "started": min(turn["started_seconds"] for turn in turns),
        "halves_apart": abs(min(own[::2]) - min(own[1::2])) if len(own) > 1 else 0.0,
    }


def _inside_line(found: dict[str, float]) -> str:
    share = found["least"] / STEP_SECONDS
    return (
        f"inside watch: {1e6 * found['least']:.0f} us of processor time in a step (median "
        f"{1e6 * found['median']:.0f}), {SHARE.show(share)} of 20 ms ({SHARE}): {coloured(SHARE.verdict(share))}\n"
        f"  even against odd turns: {1e6 * found['halves_apart']:.0f} us apart; the wrappers around nothing took "
        f"{1e6 * found['wrapping']:.0f} us, which are subtracted\n"
        f"  beside it: {1e6 * found['started']:.0f} us to start the buckets' all-reduces, as DDP does itself\n"
    )


def _measured(job: Job) -> list[dict[str, Any]]:
    labels = [f"{lane}, pass {number + 1}" for number, lane in job.turns]
    folder = Path(tempfile.mkdtemp(prefix="paceline-watch-"))
    try:
        with ended_by_signals():
            plan = json.dumps(asdict(job))
            name = f"watch, {job.ranks} ranks"
            return measured(name, "benchmarks.watch_rank", plan, labels, None, folder, ranks_per_host=job.ranks)
    finally:
        shutil.rmtree(folder)


def rows_of(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each lane: the least processor time of a step, and what it adds to the plain lanes'.

    >>> turns = [{"lane": PLAIN, "processor_seconds": 0.003}, {"lane": PLAIN, "processor_seconds": 0.001},
    ...          {"lane": AGAIN, "processor_seconds": 0.002}, {"lane": WATCHED, "processor_seconds": 0.0012}]
    >>> [(row["lane"], round(row["added_seconds"], 6)) for row in rows_of(turns)]
    [('plain', 0.0), ('watched', 0.0002), ('plain again', 0.001)]
    """
    least: dict[str, float] = {}
    for turn in turns:
        lane, seconds = turn["lane"], float(turn["processor_seconds"])
        least[lane] = min(seconds, least.get(lane, seconds))
    plain = min(least[PLAIN], least[AGAIN])
    return [
        {"lane": lane, "processor_seconds": least[lane], "added_seconds": least[lane] - plain}
        for lane in LANES
        if lane in least
    ]


def _table(rows: Sequence[dict[str, Any]], job: Job, ranks: int, *, quick: bool) -> Table:
    parameters = job.layers * job.width * (job.width + 1)
    title = f"A step of {parameters:,} parameters in a few buckets, {ranks} ranks on this machine"
    table = Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick), padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("lane", no_wrap=True)
    for name in ("processor, us", "added, us", "of 20 ms"):
        table.add_column(name, justify="right")
    for row in rows:
        share = row["added_seconds"] / STEP_SECONDS
        figures = (f"{1e6 * row['processor_seconds']:,.0f}", f"{1e6 * row['added_seconds']:,.0f}", SHARE.show(share))
        table.add_row(row["lane"], *figures)
    return table
