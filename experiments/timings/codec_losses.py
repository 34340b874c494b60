"""What the plans of codecs cost in learning: losses of four real ranks, beside those of no codec after the same steps.

A small CNN on digits with SGD, and a small transformer on text with AdamW; four ranks on gloo, 16 samples each. Every
codec by the plan that is taken among many ranks: two-step, or all-reduce for those that are added up on their way. The
CNN has two beginnings: after 150 steps without a codec, and from the very first step, where error feedback sends late
what it holds back. Nothing is tuned for a codec: learning rate, steps and batches are those of the run without one,
seed by seed. A codec's mean is judged: at most 1.05 times the loss without one.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from experiments.core.ranks import Line, told_by_ranks, write_lines
from experiments.core.story import FIRST_SEED, Claim, Numbers, Size, Telling, experiment
from experiments.core.turns import bar, verdict
from paceline.codecs.naming import parse_codec
from paceline.data import load_dataset
from paceline.data.samples import Samples
from paceline.drivers.ddp import compress
from paceline.exchanges.plans import AUTO, plans_of
from paceline.reports.table import PlainTable

PLAIN = "none"
CODECS = ("qsgd", "one-bit", "top-k", "power-sgd", "int8-sum", "bfloat16")
OWN_FIRST_SEED = 20
BATCH = 16
BUCKET_MB = 0.1
LETTERS, CONTEXT, WIDTH = 96, 64, 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks do: every codec from every seed, after `warm` steps without a codec."""

    task: str = "cnn"
    codecs: Sequence[str] = (PLAIN, *CODECS)
    seeds: Sequence[int]
    ranks: int = 4
    warm: int = 0
    steps: int = 300

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Seeds and codecs, in the order of the runs."""
        return list(itertools.product(self.seeds, self.codecs))


@experiment("codec-losses", question="losses of four ranks by plan and codec, same steps", minutes=20, seeds=3)
def codec_losses(size: Size) -> Telling:
    seeds = [OWN_FIRST_SEED + seed - FIRST_SEED for seed in size.seeds]
    tiny = Job(codecs=(PLAIN, "qsgd", "one-bit"), seeds=seeds, ranks=3, warm=2, steps=3)
    laboratory = {
        "after a beginning without a codec": Job(seeds=seeds, warm=150),
        "from the first step": Job(seeds=seeds),
        "AdamW, from the first step": Job(seeds=seeds, task="gpt", steps=400),
    }
    jobs: dict[str, Job] = size.pick({"after a beginning without a codec": tiny}, laboratory)
    total, kept = sum(len(job.runs) for job in jobs.values()), {}
    for name, job in jobs.items():
        labels = [f"{job.task}, {codec}, seed {seed}" for seed, codec in job.runs]
        lines = yield from told_by_ranks(__name__, job.ranks, asdict(job), labels, total=total)
        rows = rows_of(lines)
        claims = claims_of(name, rows)
        yield PlainTable(
            title=f"Loss over the loss without a codec, {job.ranks} ranks, {job.steps} steps, {name}",
            headings=("codec", "plan", "lowest", "mean", "highest", ""),
            rows=[
                (
                    row["codec"],
                    row["plans"],
                    *(f"{figure:.2f}" for figure in (min(row["ratios"]), row["mean"], max(row["ratios"]))),
                    verdict(claim),
                )
                for row, claim in zip(rows, claims, strict=True)
            ],
        )
        yield from claims
        kept[name] = {"rows": rows, "lines": lines}
    yield Numbers(kept)


def rows_of(lines: Sequence[Line]) -> list[Line]:
    """Return each codec's loss over that of no codec, seed by seed.

    >>> lines = [{"seed": 0, "codec": "none", "loss": 0.5, "plans": []}]
    >>> rows_of([*lines, {"seed": 0, "codec": "qsgd", "loss": 0.51, "plans": ["two-step"]}])
    [{'codec': 'qsgd', 'plans': 'two-step', 'ratios': [1.02], 'mean': 1.02}]
    """
    plain = {line["seed"]: line["loss"] for line in lines if line["codec"] == PLAIN}
    rows = []
    for codec in dict.fromkeys(line["codec"] for line in lines if line["codec"] != PLAIN):
        own = [line for line in lines if line["codec"] == codec]
        ratios = [line["loss"] / plain[line["seed"]] for line in own]
        rows.append({"codec": codec, "plans": ", ".join(own[0]["plans"]), "ratios": ratios, "mean": fmean(ratios)})
    return rows


def claims_of(name: str, rows: Sequence[Line]) -> list[Claim]:
    return [bar(f"{row['codec']}'s mean, {name}", row["mean"], most=1.05) for row in rows]


# -- a rank ------------------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """A network, its optimiser, and its data: `batch` picks samples from a generator, `whole` is for the last loss."""

    network: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    batch: Callable[[torch.Generator, int], tuple[torch.Tensor, torch.Tensor]]
    whole: Callable[[], tuple[torch.Tensor, torch.Tensor]]


@functools.cache
def digits() -> Samples:
    return load_dataset("digits").train


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def chosen_digits(order: torch.Generator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.randperm(len(digits()), generator=order)[:number]
    return digits().inputs[chosen], digits().targets[chosen]


@functools.cache
def letters() -> torch.Tensor:
    """Return the manual that comes with Python, 700 kB of English and code, as numbers of letters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor([min(max(ord(letter) - 32, -1), LETTERS - 2) + 1 for letter in text])


class GPT(nn.Module):
    """Two blocks of a transformer that say the next letter."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        block: dict[str, Any] = {"dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 4, **block) for _ in range(2)])
        self.out = nn.Linear(WIDTH, LETTERS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next letter: (samples, letters, places)."""
        values: torch.Tensor = self.letters(text) + self.places
        for block in self.blocks:
            values = block(values, src_mask=self.mask, is_causal=True)
        scores: torch.Tensor = self.out(values)
        return scores.transpose(1, 2)


def pieces(order: torch.Generator, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pieces of the text, and the letters that come next."""
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


def trained(module: nn.Module, codec: str, job: Job, *, steps: int, seed: int) -> tuple[nn.Module, list[str]]:
    """Train a copy of a network, the rate falling to zero; return it, and the plans that were taken."""
    task = TASKS[job.task]
    model = DistributedDataParallel(copy.deepcopy(module), bucket_cap_mb=BUCKET_MB)
    compression = None
    if codec != PLAIN:
        parsed = parse_codec(codec)  # with more than two ranks the point is what is not gathered
        plan = next((plan for plan in ("two-step", "all-reduce") if plan in plans_of(parsed)), AUTO)
        compression = compress(model, parsed, plan=plan, seed=seed)
    optimizer = task.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    order, rank = torch.Generator().manual_seed(seed), dist.get_rank()
    for _ in range(steps):
        inputs, targets = (each[rank :: job.ranks] for each in task.batch(order, job.ranks * BATCH))
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        schedule.step()
    return model.module, [] if compression is None else compression.plans


def losses_of(job: Job) -> Iterator[Line]:
    """Train run after run, as one rank; tell each one's loss over all samples at the end, and the ranks' plans."""
    begun: dict[int, nn.Module] = {}
    task = TASKS[job.task]
    for seed, codec in job.runs:
        if seed not in begun:
            torch.manual_seed(seed)
            fresh = task.network()
            begun[seed] = trained(fresh, PLAIN, job, steps=job.warm, seed=2 * seed + 1)[0] if job.warm else fresh
        module, plans = trained(begun[seed], codec, job, steps=job.steps, seed=2 * seed)
        with torch.no_grad():
            inputs, targets = task.whole()
            loss = F.cross_entropy(module(inputs), targets).item()
        yield {"seed": seed, "codec": codec, "loss": loss, "plans": plans}


def main(folder: Path, rank: int, job: Job) -> None:
    """Be a rank."""
    write_lines(folder, rank, job.ranks, lambda: losses_of(job))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Job(**json.loads(sys.argv[3])))
