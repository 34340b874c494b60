"""One rank of the benchmark `links`: `python -m benchmarks.links_rank FOLDER RANK JOB`; JOB is a `Job` as JSON.

All lanes in the same processes, in turns: every pass takes some steps in each of them. Rank 0 writes a line for each
turn to FOLDER/lanes-0.jsonl: the seconds of its steps, what went out of a rank's network interface, by the kernel's
count, so that headers, acknowledgements and padding are in it, and beside it what the lane says that it sent. The first
line is which share of the rate a plain transfer has.
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.links_lanes import TIMEOUT_SECONDS, WARM_UP_STEPS, Lane, goodput, turn


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


def main(folder: Path, rank: int, job: Job) -> None:
    """Take all turns."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.ranks, timeout=timeout)
    lanes: dict[str, Lane] = {}
    with (folder / f"lanes-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        lines.write(json.dumps({"goodput": goodput(job.bits_per_second)}) + "\n")
        for number, name in job.turns:
            if name not in lanes:
                lanes[name] = Lane(name, widths=job.widths, sleep_seconds=job.sleep_seconds, bucket_mb=job.bucket_mb)
            figures = turn(lanes[name], job.steps, 1 if number else WARM_UP_STEPS)
            lines.write(json.dumps({"pass": number, "lane": name, **figures}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
