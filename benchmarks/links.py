"""A training step between two hosts on a link of 200 Mbit/s: DistributedDataParallel with and without codecs.

Two network namespaces of this machine, joined by a cable whose both ends let 200 Mbit/s through, and a rank in each, on
gloo, with one thread. The model is fully connected, 11 million parameters, 16 samples a rank: it computes little beside
what it sends, so these figures say what codecs save where the link is what one waits for. In a model that computes more
they save less.

Times are of a whole step (forward, backward, optimiser), the median; bytes are what the kernel counted at rank 0's end
of the cable, headers and acknowledgements among them. Needs root and iproute2.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.cable import RATE, Cable, why_not
from benchmarks.links_rank import OURS, Plan, plan_text
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.ranks import ended_by_signals, measured

PEERS = ("torch: no hook", "torch: fp16", "torch: power-sgd, rank 1", "torch: power-sgd, rank 4")
FULL = Plan(lanes=[*PEERS, *OURS], widths=[1024, 2048, 2048, 2048, 256], batch=16, steps=7)
QUICK = Plan(lanes=[*PEERS[:3], "qsgd, 7 levels", "sparsifier"], widths=[64, 128, 10], batch=4, steps=2)
FASTER = Bar(sign=">=", limit=4.0, style=".1f")
FASTEST = Bar(sign=">=", limit=1.0)


def run(options: Options) -> None:
    """`python -m benchmarks links`."""
    reason = why_not()
    if reason:
        tables().print(f"links: skipped, and no bar judged: {reason}")
        save(options, "links", {"skipped": reason})
        return
    plan = QUICK if options.quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="paceline-links-"))
    try:
        with ended_by_signals(), Cable() as cable:
            lanes = measured("links", "benchmarks.links_rank", plan_text(plan), plan.lanes, cable, folder)
    finally:
        shutil.rmtree(folder)
    rows = rows_of(lanes)
    parameters = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(plan.widths))
    console = tables()
    console.print(_table(rows, parameters, plan, quick=options.quick))
    console.print(_verdicts(rows, plan))
    save(options, "links", {"rate": RATE, "parameters": parameters, "rows": rows, "lanes": lanes})


# -- the table -----------------------------------------------------------------------------------------------------


def rows_of(lanes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median step, times faster than no hook, and what was sent; the first lane is the one without a hook.

    >>> lanes = [{"lane": "torch: no hook", "seconds": [4.0, 2.0, 3.0], "sent_bytes": 8e6}]
    >>> rows_of([*lanes, {"lane": "qsgd", "seconds": [1.0], "sent_bytes": 1e6}])[1]["faster"]
    3.0
    """
    plain = median(lanes[0]["seconds"])
    return [
        {
            "lane": lane["lane"],
            "seconds": median(lane["seconds"]),
            "faster": plain / median(lane["seconds"]),
            "sent_bytes": lane["sent_bytes"],
        }
        for lane in lanes
    ]


def _table(rows: Sequence[dict[str, Any]], parameters: int, plan: Plan, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled(f"A step of {parameters:,} parameters over {RATE}/s, two ranks, gloo", quick=quick),
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("hook", no_wrap=True)
    for name in ("step, ms", "times faster", "MB sent"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["lane"] if row["lane"] in PEERS else f"paceline: {row['lane']}",
            f"{1000 * row['seconds']:,.0f}",
            f"{row['faster']:.2f}",
            f"{row['sent_bytes'] / 1e6:.3f}",
        )
    return table


def _verdicts(rows: Sequence[dict[str, Any]], plan: Plan) -> str:
    ours = min((row for row in rows if row["lane"] in OURS), key=lambda row: float(row["seconds"]))
    peer = min((row for row in rows if row["lane"] in PEERS), key=lambda row: float(row["seconds"]))
    ahead = peer["seconds"] / ours["seconds"]
    return (
        f"Median of {plan.steps} steps; MB sent: all that left rank 0's host, by the kernel's count.\n"
        f"Our best ({ours['lane']}) against no hook: {FASTER.show(ours['faster'])} times faster, bar {FASTER}: "
        f"{coloured(FASTER.verdict(ours['faster']))}\n"
        f"Our best against PyTorch's best ({peer['lane'].removeprefix('torch: ')}): {FASTEST.show(ahead)} times, "
        f"bar {FASTEST}: {coloured(FASTEST.verdict(ahead))}"
    )
