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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
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
    """What the ranks do: every codec from every seed, after `warm` steps without a codec.

    `task` is "cnn", a small CNN on digits with SGD, or "gpt", a small transformer on text with AdamW.
    """

    codecs: list[str]
    seeds: list[int]
    ranks: int
    warm: int
    steps: int
    batch: int = 16
    task: str = "cnn"

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Seeds and codecs, in the order of the runs."""
        return [(seed, codec) for seed in self.seeds for codec in self.codecs]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network, its optimiser, and its data: `batch` picks samples from a generator, `whole` is for the last loss."""

    network: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[torch.Generator, int], tuple[torch.Tensor, torch.Tensor]]
    whole: Callable[[], tuple[torch.Tensor, torch.Tensor]]


@functools.cache
def digits() -> Any:
    """The training samples, read once."""
    return load_dataset("digits").train


def cnn() -> nn.Module:
    """A small convolutional network."""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def chosen_digits(order: torch.Generator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures, and what they show."""
    data = digits()
    chosen = torch.randperm(len(data), generator=order)[:number]
    return data.inputs[chosen], data.targets[chosen]


LETTERS, CONTEXT, WIDTH = 96, 64, 64


@functools.cache
def letters() -> torch.Tensor:
    """The manual that comes with Python, 700 kB of English and code, as numbers of letters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([min(max(ord(letter) - 32, -1), LETTERS - 2) + 1 for letter in text])


class GPT(nn.Module):
    """Two blocks of a transformer that say the next letter."""

    def __init__(self) -> None:
        super().__init__()
        block = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 4, **block) for _ in range(2)])
        self.out = nn.Linear(WIDTH, LETTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Scores of each next letter: (samples, letters, places)."""
        values = self.letters(text) + self.places
        for block in self.blocks:
            values = block(values, src_mask=self.mask, is_causal=True)
        return self.out(values).transpose(1, 2)


def pieces(order: torch.Generator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces of the text, and the letters that come next."""
    text = letters()
    begins = torch.randint(len(text) - CONTEXT - 1, (number, 1), generator=order) + torch.arange(CONTEXT)
    return text[begins], text[begins + 1]


TASKS = {
    "cnn": Task(
        network=cnn,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1),
        batch=chosen_digits,
        whole=lambda: (digits().inputs, digits().targets),
    ),
    "gpt": Task(
        network=GPT,
        optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2),
        batch=pieces,
        whole=lambda: pieces(torch.Generator().manual_seed(0), 512),
    ),
}


def train(module: nn.Module, codec: str, job: Job, *, steps: int, seed: int) -> tuple[nn.Module, list[str]]:
    """Train a copy of a network, the rate falling to zero; return it, and the plans that were taken."""
    task = TASKS[job.task]
    model = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=BUCKET_MB)
    compression = None
    if codec != PLAIN:
        parsed = parse_codec(codec)  # with more than two ranks the point is what is not gathered
        plan = next((plan for plan in ("two-step", "all-reduce") if plan in plans_of(parsed)), "auto")
        compression = compress(model, parsed, plan=plan, seed=seed)
    optimizer = task.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    order, rank = torch.Generator().manual_seed(seed), dist.get_rank()
    for _ in range(steps):
        inputs, targets = (each[rank :: job.ranks] for each in task.batch(order, job.ranks * job.batch))
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
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
                torch.manual_seed(seed)
                fresh = TASKS[job.task].network()
                begun[seed] = train(fresh, PLAIN, job, steps=job.warm, seed=2 * seed + 1)[0] if job.warm else fresh
            module, plans = train(begun[seed], codec, job, steps=job.steps, seed=2 * seed)
            with torch.no_grad():
                inputs, targets = TASKS[job.task].whole()
                loss = F.cross_entropy(module(inputs), targets).item()
            lines.write(json.dumps({"seed": seed, "codec": codec, "loss": loss, "plans": plans}) + "\n")
    dist.destroy_process_group()


def job_text(job: Job) -> str:
    """A job as the command line takes it."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
