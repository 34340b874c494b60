"""A training step at 2, 4 and 8 ranks, a link of 200 Mbit/s for each: DistributedDataParallel with and without codecs.

Network namespaces of this machine on one switch, a rank in each, on gloo, with one thread. Both ends of every cable let
200 Mbit/s through. The network has 2.9 million parameters, and what it would compute is mostly time asleep, 30 ms a
step: these figures say what codecs save where the link is what one waits for. In a model that computes more they save
less.

Lanes take turns, pass after pass, in the same processes; a lane's time is the median step of its best pass. Bytes are
what a rank sends in a step: what the kernel counted at its interface, headers and acknowledgements among them, and
beside it what the lane itself says. Needs root and iproute2. epfml's power-sgd is a lane where its package `powersgd`
is installed.
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

from benchmarks.cable import Switch, why_not
from benchmarks.links_lanes import FP16, NO_HOOK, OURS, PEERS, parameters_of, peers_at_hand, short
from benchmarks.links_rank import Job
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.ranks import ended_by_signals, measured

BITS_PER_SECOND = 200e6
RANKS = (2, 4, 8)
FULL = Job(
    ranks=0,
    bits_per_second=BITS_PER_SECOND,
    lanes=[],
    widths=[512, 1024, 1024, 1024, 256],
    sleep_seconds=0.0025,
    bucket_mb=4.0,
    passes=4,
    steps=5,
)
QUICK = replace(FULL, widths=[64, 128, 10], sleep_seconds=0.0005, bucket_mb=0.02, passes=1, steps=2)
QUICK_LANES = (NO_HOOK, FP16, "bfloat16", "qsgd, 7 levels", "top-k, 1 % + error feedback")
RECOMMENDED = (
    "qsgd, 7 levels",
    "top-k, 1 % + error feedback",
    "one-bit + error feedback",
    "power-sgd, rank 4 + error feedback",
    "int8-sum",
)
QUICKEST = Bar(sign=">=", limit=1.0)
BEATS_FP16 = Bar(sign=">=", limit=1.0)
NEAR_FP16 = Bar(sign=">=", limit=0.95)
QSGD_BYTES = Bar(sign="<=", limit=0.45)
BYTES = Bar(sign="<=", limit=0.03, style=".1%")
HEADER_BYTES = 66  # of a packet: Ethernet, IP, TCP with its time stamps
JUDGED_BYTES = 50_000  # a lane that sends less sends mostly what gloo adds to each message
Row = dict[str, Any]


def run(options: Options) -> None:
    """`python -m benchmarks links`."""
    reason = why_not()
    if reason:
        tables().print(f"links: skipped, and no bar judged: {reason}")
        save(options, "links", {"skipped": reason})
        return
    job = replace(
        QUICK if options.quick else FULL,
        lanes=list(QUICK_LANES if options.quick else (*peers_at_hand(), *OURS)),
        **({"passes": options.repeat} if options.repeat else {}),
    )
    console = tables()
    results: dict[int, list[Row]] = {}
    turns: dict[int, list[Row]] = {}
    goodputs: dict[int, float] = {}
    for ranks in (3,) if options.quick else RANKS:
        first, *turns[ranks] = _measured(replace(job, ranks=ranks))
        goodputs[ranks] = first["goodput"]
        results[ranks] = rows_of(turns[ranks])
        console.print(_table(results[ranks], job, ranks, quick=options.quick))
    console.print(_bars(results))
    shares = ", ".join(f"{share:.0%}" for share in goodputs.values())
    console.print(
        f"ms: the median step of the best pass; processor: a rank's processor time in a step, ms.\n"
        f"A plain transfer had {shares} of the rate."
    )
    figures = {"parameters": parameters_of(job.widths), "rows": results, "goodputs": goodputs, "turns": turns}
    save(options, "links", {"job": asdict(job), **figures})


def _measured(job: Job) -> list[Row]:
    labels = ["a plain transfer", *(f"{lane}, pass {number + 1}" for number, lane in job.turns)]
    folder = Path(tempfile.mkdtemp(prefix="paceline-links-"))
    try:
        with ended_by_signals(), Switch(job.ranks) as switch:
            switch.shape(job.bits_per_second)
            name = f"links, {job.ranks} ranks"
            return measured(name, "benchmarks.links_rank", json.dumps(asdict(job)), labels, switch, folder)
    finally:
        shutil.rmtree(folder)


# -- rows, table and bars ----------------------------------------------------------------------------------------------


def rows_of(turns: Sequence[Row]) -> list[Row]:
    """Return a row for each lane, in the order of the first pass: its best pass, beside no hook and PyTorch's fp16.

    >>> counts = {"wire_bytes": 8e6, "packets": 1000, "reported_bytes": None, "processor_seconds": 0.01}
    >>> first = {"lane": NO_HOOK, "seconds": [4.0, 2.0, 3.0], **counts}
    >>> row = rows_of([first, {"lane": FP16, "seconds": [2.0], **counts}, first | {"seconds": [2.5]}])[0]
    >>> row["seconds"], row["of_fp16"], row["wire_bytes"]
    (2.5, 0.8, 8000000.0)
    """
    best = {
        lane: min((turn for turn in turns if turn["lane"] == lane), key=lambda turn: median(turn["seconds"]))
        for lane in dict.fromkeys(turn["lane"] for turn in turns)
    }
    plain, fp16 = (median(best[lane]["seconds"]) for lane in (NO_HOOK, FP16))
    return [
        {
            "lane": lane,
            "seconds": median(turn["seconds"]),
            "of_no_hook": plain / median(turn["seconds"]),
            "of_fp16": fp16 / median(turn["seconds"]),
            "wire_bytes": turn["wire_bytes"],
            "packets": turn["packets"],
            "reported_bytes": turn["reported_bytes"],
            "processor_seconds": turn["processor_seconds"],
        }
        for lane, turn in best.items()
    ]


def _table(rows: Sequence[Row], job: Job, ranks: int, *, quick: bool) -> Table:
    title = f"A step of {parameters_of(job.widths):,} parameters, {ranks} ranks, 200 Mbit/s for each"
    table = Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick), padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("hook", no_wrap=True)
    for name in ("ms", "processor", "x no hook", "x fp16", "MB sent", "as told"):
        table.add_column(name, justify="right")
    for row in rows:
        told = row["reported_bytes"]
        table.add_row(
            row["lane"] if row["lane"] in PEERS else f"ours: {short(row['lane'])}",
            f"{1000 * row['seconds']:,.0f}",
            f"{1000 * row['processor_seconds']:,.0f}",
            f"{row['of_no_hook']:.2f}",
            f"{row['of_fp16']:.2f}",
            f"{row['wire_bytes'] / 1e6:.3f}",
            "-" if told is None else f"{told / 1e6:.3f}",
        )
    return table


def judged(results: dict[int, list[Row]]) -> list[tuple[str, Bar, float | None]]:
    """Return what is judged: in words, the bar, and the figure; None is a figure that is missing."""
    found: list[tuple[str, Bar, float | None]] = []
    for ranks, rows in results.items():
        by_lane = {row["lane"]: row for row in rows}
        ours = min((row for row in rows if row["lane"] in OURS), key=lambda row: float(row["seconds"]))
        peer = min((row for row in rows if row["lane"] in PEERS), key=lambda row: float(row["seconds"]))
        at = f"{ranks} ranks: "
        found.append((f"{at}our best, {ours['lane']}, x {peer['lane']}", QUICKEST, peer["seconds"] / ours["seconds"]))
        found += [
            (f"{at}{lane}, x fp16", BEATS_FP16, by_lane[lane]["of_fp16"]) for lane in RECOMMENDED if lane in by_lane
        ]
        found.append((f"{at}bfloat16, x fp16", NEAR_FP16, by_lane["bfloat16"]["of_fp16"]))
        told = [_missing(row) for row in rows if row["reported_bytes"] and row["wire_bytes"] >= JUDGED_BYTES]
        found.append((f"{at}bytes as told against the interface's, the worst", BYTES, max(told, default=None)))
    most = max(results)
    by_lane = {row["lane"]: row for row in results[most]}
    share = by_lane["qsgd, 7 levels"]["wire_bytes"] / by_lane[FP16]["wire_bytes"]
    found.append((f"{most} ranks: bytes of qsgd / of fp16", QSGD_BYTES, share))
    return found


def _missing(row: Row) -> float:
    """Return by which share told bytes differ from what the interface sent, without the headers of its packets."""
    return abs(float(row["reported_bytes"]) / (row["wire_bytes"] - HEADER_BYTES * row["packets"]) - 1)


def _bars(results: dict[int, list[Row]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("what")
    for name in ("measured", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for what, bar, figure in judged(results):
        table.add_row(short(what), bar.show(figure), str(bar), coloured(bar.verdict(figure)))
    return table
