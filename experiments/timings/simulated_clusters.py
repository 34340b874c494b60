"""How large a cluster's times can be simulated: seconds and memory of `paceline simulate --timing-only`.

A whole process as a user starts it, from the start of Python to the report on disk. The limits are 120 seconds and
2 GB for 100,000 workers and 1,000 rounds; what is shown is the share of them that is used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from itertools import product
from typing import NamedTuple

from experiments.core.claims import percent
from experiments.core.story import NAN, Numbers, Size, Step, Telling, experiment
from experiments.core.turns import bar, verdict
from paceline.reports.table import PlainTable

SECONDS_LIMIT, BYTES_LIMIT = 120.0, 2e9
GIVE_UP_SECONDS = 5 * SECONDS_LIMIT
SHARE_CLOSING = 0.7  # lgc's K as a share of the workers, as in the default recipe
LANES = (("full", ""), ("lgc", "fixed"), ("lgc", "auto"), ("async", ""))


class Usage(NamedTuple):
    """What a process used, and how it ended."""

    wall_seconds: float
    peak_bytes: int
    exit_code: int


@experiment("timing", question="seconds and memory for the times of 100,000 workers", minutes=4)
def timing(size: Size) -> Telling:
    workers, rounds = size.pick((1_000, 20), (100_000, 1_000))
    cases = [(strategy, k, late) for late, (strategy, k) in product(("partial", "complete"), LANES)]
    rows, numbers, claims = [], [], []
    for strategy, k, late in cases:
        name = " ".join(word for word in (strategy, k, late) if word)
        yield Step(name, len(cases))
        with tempfile.TemporaryDirectory() as folder:
            usage = used_by([*simulate_command(strategy, k, late, workers, rounds), "--out", folder])
        fine = usage.exit_code == 0
        time_share = usage.wall_seconds / SECONDS_LIMIT if fine else NAN
        memory_share = usage.peak_bytes / BYTES_LIMIT if fine else NAN
        both = bar(f"{name}: share of 120 s or 2 GB", max(time_share, memory_share), most=1.0, write=percent)
        claims.append(both)
        shown = (f"{usage.wall_seconds:.1f}", percent(time_share), f"{usage.peak_bytes / 1e9:.2f} GB")
        rows.append((strategy, k, late, *shown, percent(memory_share), verdict(both)))
        numbers.append({"lane": name, **usage._asdict()})
    yield PlainTable(
        title=f"Times of {workers:,} workers over {rounds:,} rounds",
        headings=("strategy", "K", "late\nwork", "\nseconds", "of\nlimit", "peak\nmemory", "of\nlimit", ""),
        rows=rows,
        caption="The bar is 120 s and 2 GB, Python's start and the report included; fixed: K is 70 % of the workers.",
    )
    yield from claims
    yield Numbers({"workers": workers, "rounds": rounds, "rows": numbers})


def simulate_command(strategy: str, k: str, late_work: str, workers: int, rounds: int) -> list[str]:
    asked = {"cluster.workers": workers, "rounds": rounds, "strategy.name": strategy, "cluster.late-work": late_work}
    if k:
        asked["strategy.k"] = round(SHARE_CLOSING * workers) if k == "fixed" else k
    options = [text for name, value in asked.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "paceline", "simulate", "--timing-only", "--json", *options]


def used_by(command: list[str]) -> Usage:
    """Run a command to its end, or until it has taken hopelessly long.

    >>> used_by([sys.executable, "-c", "raise SystemExit(3)"]).exit_code
    3
    """
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            # Not process.wait: only wait4 tells the memory of this one child.
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            seconds = time.perf_counter() - began
            if pid:
                break
            if seconds > GIVE_UP_SECONDS:
                process.kill()
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        if process.returncode is None:
            process.kill()
    unit = 1 if sys.platform == "darwin" else 1024
    return Usage(seconds, used.ru_maxrss * unit, process.returncode)
