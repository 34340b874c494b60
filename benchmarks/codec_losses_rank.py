"""One rank of the benchmark `codec-losses`: `python -m benchmarks.codec_losses_rank FOLDER RANK JOB`; JOB is JSON.

Run after run in the same processes: a new network, DistributedDataParallel, a codec. Rank 0 writes a line for each run
to FOLDER/lanes-0.jsonl: its loss over all training samples at the end, and the plans that the ranks took.
"""

from __future__ import annotations

import copy
import datetime
import functools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs.naming import parse_codec
from paceline.data import load_dataset
from paceline.drivers.ddp import compress
from paceline.exchanges.plans import plans_of

TIMEOUT = datetime.timedelta(seconds=120)
BUCKET_MB = 0.1
PLAIN = "none"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks do: every codec from every seed, after `warm` steps without a codec."""

    codecs: list[str]
    seeds: list[int]
    ranks: int
    warm: int
    steps: int
    batch: int = 16
    rate: float = 0.1

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Seeds and codecs, in the order of the runs."""
        return [(seed, codec) for seed in self.seeds for codec in self.codecs]


@functools.cache
def digits() -> Any:
    """The training samples, read once."""
    return load_dataset("digits").train


def network(seed: int) -> nn.Module:
    """A small convolutional network."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def train(module: nn.Module, codec: str, job: Job, *, steps: int, seed: int) -> tuple[nn.Module, list[str]]:
    """Train a copy of a network, the rate falling to zero; return it, and the plans that were taken."""
    model = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=BUCKET_MB)
    compression = None
    if codec != PLAIN:
        parsed = parse_codec(codec)  # with more than two ranks the point is what is not gathered
        plan = next((plan for plan in ("two-step", "all-reduce") if plan in plans_of(parsed)), "auto")
        compression = compress(model, parsed, plan=plan, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    data, order, rank = digits(), torch.Generator().manual_seed(seed), dist.get_rank()
    for _ in range(steps):
        chosen = torch.randperm(len(data), generator=order)[: job.ranks * job.batch][rank :: job.ranks]
        optimizer.zero_grad()
        F.cross_entropy(model(data.inputs[chosen]), data.targets[chosen]).backward()
        optimizer.step()
        schedule.step()
    return model.module, [] if compression is None else compression.plans


def main(folder: Path, rank: int, job: Job) -> None:
    """All runs."""
    address = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=job.ranks, timeout=TIMEOUT)
    torch.set_num_threads(1)
    begun: dict[int, nn.Module] = {}
    with (folder / f"lanes-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for seed, codec in job.runs:
            if seed not in begun:
                fresh = network(seed)
                begun[seed] = train(fresh, PLAIN, job, steps=job.warm, seed=2 * seed + 1)[0] if job.warm else fresh
            module, plans = train(begun[seed], codec, job, steps=job.steps, seed=2 * seed)
            with torch.no_grad():
                loss = F.cross_entropy(module(digits().inputs), digits().targets).item()
            lines.write(json.dumps({"seed": seed, "codec": codec, "loss": loss, "plans": plans}) + "\n")
    dist.destroy_process_group()


def job_text(job: Job) -> str:
    """A job as the command line takes it."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
