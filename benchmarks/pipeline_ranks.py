"""Real steps of pipelines: a process for each stage on this machine, one thread each, by the loopback interface.

All processes of a machine read one clock, so what the ranks write down can be laid side by side:

    rank 0   |F0|F1|......|===B0===|===B1===|         busy: what is computed
    rank 1      |F0|F1|===B0===|===B1===|             step: from the first begin to the last end
             '------------ step -------------'        idle = 1 - busy / (ranks x step)

A receive is waited for before a piece's forward or backward is called, so waiting is in no span; nor are the loss, the
sending, and what the ranks tell each other between steps.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.pipeline.plan import Plan
from paceline.pipeline.timing import Span
from paceline.reproduce.lecture.cut_models import Subject

ROOT = Path(__file__).parents[1]
LINE_SECONDS = 180.0
LOOK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Steps of one pipeline, with so many micro-batches each."""

    plan: str
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What all ranks did in one step, in seconds from its begin."""

    spans: tuple[Span, ...]
    ranks: int

    @property
    def seconds(self) -> float:
        """From the first begin to the last end."""
        return max(span.end for span in self.spans) - min(span.begin for span in self.spans)

    @property
    def busy_seconds(self) -> float:
        """What all ranks computed."""
        return math.fsum(span.seconds for span in self.spans)

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they did not compute."""
        return 1 - self.busy_seconds / (self.ranks * self.seconds)


def steps(
    subject: Subject,
    plans: Mapping[str, Plan],
    lanes: Sequence[Lane],
    *,
    turns: int,
    on_step: Callable[[], None] = lambda: None,
) -> list[list[Step]]:
    """For each lane its steps, turn by turn; the first turn warms up and is not among them. No rank outlives this."""
    ranks = next(iter(plans.values())).stages
    job = {"subject": asdict(subject), "ranks": ranks, "turns": 1 + turns, "lanes": [asdict(lane) for lane in lanes]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        for key, plan in plans.items():
            plan.save(folder / f"{key}.json")
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                command = [sys.executable, "-m", "benchmarks.pipeline_rank", str(folder), str(rank)]
                with (folder / f"rank-{rank}.log").open("wb") as log:
                    environment = os.environ | {"OMP_NUM_THREADS": "1"}
                    processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
            lines = _lines(processes, folder, expected=len(lanes) * (1 + turns), on_step=on_step)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(20)
    return [[_step(rows, ranks) for rows in _of_lane(lines, lane)] for lane in range(len(lanes))]


def _lines(
    processes: Sequence[subprocess.Popen[bytes]], folder: Path, *, expected: int, on_step: Callable[[], None]
) -> list[list[dict[str, Any]]]:
    """Every rank's lines once all have written all; an error as soon as a rank ends badly or nothing comes any more."""
    counts = [0] * len(processes)
    deadline, done = time.monotonic() + LINE_SECONDS, 0
    while min(counts) < expected:
        time.sleep(LOOK_SECONDS)
        bad = [rank for rank, process in enumerate(processes) if process.poll()]
        counts = [_count(folder / f"lines-{rank}.jsonl") for rank in range(len(processes))]
        if min(counts) > done:
            for _ in range(done, min(counts)):
                on_step()
            done, deadline = min(counts), time.monotonic() + LINE_SECONDS
        if bad or time.monotonic() > deadline:
            log = (folder / f"rank-{bad[0] if bad else 0}.log").read_text(encoding="utf-8", errors="replace")
            raise ValueError(f"pipeline: {done} of {expected} steps, and then no more:\n{log[-2000:]}")
    return [
        [json.loads(line) for line in (folder / f"lines-{rank}.jsonl").read_text(encoding="utf-8").splitlines()]
        for rank in range(len(processes))
    ]


def _count(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _of_lane(lines: Sequence[Sequence[dict[str, Any]]], lane: int) -> list[list[dict[str, Any]]]:
    """For each turn of a lane but the first the line of every rank."""
    kept = [[row for row in rows if row["lane"] == lane and row["turn"] > 0] for rows in lines]
    return [list(rows) for rows in zip(*kept, strict=True)]


def _step(rows: Sequence[dict[str, Any]], ranks: int) -> Step:
    spans = [Span(*span) for row in rows for span in row["spans"]]
    first = min(span.begin for span in spans)
    moved = [span._replace(begin=span.begin - first, end=span.end - first) for span in spans]
    return Step(spans=tuple(sorted(moved, key=lambda span: span.begin)), ranks=ranks)
