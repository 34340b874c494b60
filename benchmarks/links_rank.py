"""One rank of the benchmark `links`: `python -m benchmarks.links_rank FOLDER RANK JOB`; JOB is a `Job` as JSON.

All lanes in the same processes, in turns: every pass takes some steps in each of them. Rank 0 writes a line for each
turn to FOLDER/lanes-0.jsonl: the seconds of its steps, what went out of a rank's network interface, by the kernel's
count, so that headers, acknowledgements and padding are in it, and beside it what the lane says that it sent. The first
line is which share of the rate a plain transfer has.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.links_lanes import WARM_UP_STEPS, Lane, goodput, turn, write_figures


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks do."""

    ranks: int
    bits_per_second: float
    lanes: list[str]
    widths: list[int]
    sleep_seconds: float
    bucket_mb: float
    passes: int
    steps: int

    @property
    def turns(self) -> list[tuple[int, str]]:
        """Every pass over every lane."""
        return [(number, lane) for number in range(self.passes) for lane in self.lanes]


def figures(job: Job) -> Iterator[dict[str, Any]]:
    """Take all turns."""
    yield {"goodput": goodput(job.bits_per_second)}
    lanes: dict[str, Lane] = {}
    for number, name in job.turns:
        if name not in lanes:
            lanes[name] = Lane(name, widths=job.widths, sleep_seconds=job.sleep_seconds, bucket_mb=job.bucket_mb)
        yield {"pass": number, "lane": name, **turn(lanes[name], job.steps, 1 if number else WARM_UP_STEPS)}


if __name__ == "__main__":
    job = Job(**json.loads(sys.argv[3]))
    write_figures(Path(sys.argv[1]), int(sys.argv[2]), job.ranks, functools.partial(figures, job))
