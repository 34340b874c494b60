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
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled

SECONDS_LIMIT = 120.0
BYTES_LIMIT = 2e9
GIVE_UP_SECONDS = 5 * SECONDS_LIMIT
SHARE_CLOSING = 0.7  # lgc's K as a share of the workers, as in the default recipe
BAR = Bar(sign="<=", limit=1.0, style=".0%")
CASES = tuple(
    (strategy, k, late_work)
    for late_work in ("partial", "complete")
    for strategy, k in (("full", ""), ("lgc", "fixed"), ("lgc", "auto"), ("async", ""))
)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a process used, and how it ended."""

    wall_seconds: float
    peak_bytes: int
    exit_code: int


def run(options: Options) -> None:
    """`python -m benchmarks timing`."""
    workers, rounds = (1_000, 20) if options.quick else (100_000, 1_000)
    rows = []
    with progress_bar() as progress:
        bar = progress.add_task("timing: commands", total=len(CASES))
        for strategy, k, late_work in CASES:
            progress.update(bar, description=f"timing: {strategy} {k} {late_work}".replace("  ", " "))
            command = _command(strategy, k, late_work, workers=workers, rounds=rounds)
            with tempfile.TemporaryDirectory() as folder:
                usage = measure([*command, "--out", folder])
            rows.append(_row(strategy, k, late_work, usage))
            progress.advance(bar)
    tables().print(_table(rows, workers, rounds, quick=options.quick))
    save(options, "timing", {"workers": workers, "rounds": rounds, "rows": rows})


def _command(strategy: str, k: str, late_work: str, *, workers: int, rounds: int) -> list[str]:
    arguments = {
        "--cluster.workers": str(workers),
        "--rounds": str(rounds),
        "--strategy.name": strategy,
        "--cluster.late-work": late_work,
    }
    if k:
        arguments["--strategy.k"] = str(round(SHARE_CLOSING * workers)) if k == "fixed" else k
    pairs = [text for pair in arguments.items() for text in pair]
    return [sys.executable, "-m", "paceline", "simulate", "--timing-only", "--json", *pairs]


def measure(command: list[str]) -> Usage:
    """Run a command to its end, or until it has taken hopelessly long.

    >>> measure([sys.executable, "-c", "raise SystemExit(3)"]).exit_code
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
    return Usage(wall_seconds=seconds, peak_bytes=used.ru_maxrss * unit, exit_code=process.returncode)


def _row(strategy: str, k: str, late_work: str, usage: Usage) -> dict[str, Any]:
    time_share, memory_share = usage.wall_seconds / SECONDS_LIMIT, usage.peak_bytes / BYTES_LIMIT
    held = [BAR.verdict(share) == "PASS" for share in (time_share, memory_share)]
    return {
        "strategy": strategy,
        "k": k,
        "late_work": late_work,
        "wall_seconds": usage.wall_seconds,
        "peak_bytes": usage.peak_bytes,
        "exit_code": usage.exit_code,
        "share_of_seconds": time_share,
        "share_of_bytes": memory_share,
        "verdict": "PASS" if all(held) and usage.exit_code == 0 else "MISS",
    }


def _table(rows: list[dict[str, Any]], workers: int, rounds: int, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled(f"Times of {workers:,} workers over {rounds:,} rounds", quick=quick),
        caption=f"bar: at most {SECONDS_LIMIT:.0f} s and {BYTES_LIMIT / 1e9:.0f} GB, Python's start and the report "
        f"included; fixed: K is {SHARE_CLOSING:.0%} of the workers",
    )
    for name in ("strategy", "K", "late work"):
        table.add_column(name)
    for name in ("seconds", "of limit", "peak memory", "of limit"):
        table.add_column(name, justify="right")
    table.add_column(f"bar {BAR}")
    for row in rows:
        failed = f" (exit {row['exit_code']})" if row["exit_code"] else ""
        table.add_row(
            row["strategy"],
            row["k"],
            row["late_work"],
            f"{row['wall_seconds']:.1f}",
            BAR.show(row["share_of_seconds"]),
            f"{row['peak_bytes'] / 1e9:.2f} GB",
            BAR.show(row["share_of_bytes"]),
            coloured(row["verdict"]) + failed,
        )
    return table
