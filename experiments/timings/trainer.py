"""Hugging Face's Trainer on two hosts, 200 Mbit/s between them: `average(trainer, "hpsgd", codec="qsgd")` beside DDP.

    host A: rank 0 ==== 200 Mbit/s each way ==== host B: rank 1

A small GPT-2 learns a Markov chain of tokens: after each comes one of four that a seed has drawn, with shares 1/2, 1/4,
1/8, 1/8. The loss of a model that knows the chain is its entropy, 1.75 bit or 1.213 nats.

Both lanes train the same weights from the same seed on the same samples, in the same processes, one after the other;
which goes first alternates. Samples a second are of the best turn of each lane, from the sixth step to the end of
training, the last flush among them. The loss is that of the model on samples that were not trained on, the mean over
the seeds. Learning rate, period and sizes were set once, and tried with seeds 100 and 101. Needs root, iproute2,
transformers and accelerate.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.utils.data import Dataset

from experiments.core.claims import ratio_text
from experiments.core.hosts import ADDRESSES, RATE, Cable, why_not
from experiments.core.ranks import ended_by_signals, told_by_ranks
from experiments.core.story import Numbers, Size, Skipped, Telling, experiment
from experiments.core.turns import bar
from paceline.reports.table import PlainTable

PORT = 29581
SHARES = (0.5, 0.25, 0.125, 0.125)
FIRST_STEPS = 5  # of a turn, not timed
HELD_OUT = 10_000  # added to a chain's seed for the samples that are evaluated
DDP, OURS = "Trainer's DDP", "hpsgd, qsgd"
LANES = (DDP, OURS)
LEAST_FASTER, MOST_LOSS = 1.0, 1.02
INSTALL = "pip install 'paceline[huggingface]'"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks do."""

    seeds: Sequence[int]
    steps: int
    width: int
    layers: int
    length: int
    held_out: int
    batch: int = 8
    vocabulary: int = 64
    rate: float = 1e-3
    period: int = 1

    @property
    def turns(self) -> list[tuple[int, str]]:
        """Every turn: the seed of chain, order and weights, and the lane; lanes take turns in going first.

        >>> [lane for _, lane in Plan(seeds=(0, 1), steps=8, width=16, layers=1, length=8, held_out=16).turns]
        ["Trainer's DDP", 'hpsgd, qsgd', 'hpsgd, qsgd', "Trainer's DDP"]
        """
        return [
            (seed, lane) for place, seed in enumerate(self.seeds) for lane in (LANES if place % 2 == 0 else LANES[::-1])
        ]


@experiment("trainer", question="Hugging Face's Trainer on two hosts: hpsgd against its DDP", minutes=5, seeds=3)
def trainer(size: Size) -> Telling:
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if reason := f"{' and '.join(missing)} not installed: {INSTALL}" if missing else why_not():
        yield Skipped(reason)
        return
    plan = size.pick(
        Plan(seeds=size.seeds[:1], steps=8, width=16, layers=1, length=8, held_out=16),
        Plan(seeds=size.seeds, steps=300, width=192, layers=2, length=32, held_out=512),
    )
    labels = [f"{lane}, seed {seed}" for seed, lane in plan.turns]
    with ended_by_signals(), Cable() as cable:
        hosts = list(zip(cable.hosts, cable.interfaces, strict=True))
        turns = yield from told_by_ranks(__name__, 2, asdict(plan), labels, hosts=hosts, total=len(labels))
    rows = rows_of(turns)
    yield PlainTable(
        title=f"GPT-2 of {turns[0]['parameters']:,} parameters in Trainer, two ranks, {RATE}/s between them",
        headings=("lane", "samples/s", "loss", "MB sent in a step"),
        rows=[
            (row["lane"], f"{row['samples_per_second']:.1f}", f"{row['loss']:.4f}", f"{row['sent_bytes'] / 1e6:.3f}")
            for row in rows
        ],
    )
    ratio = {name: rows[1][name] / rows[0][name] for name in ("samples_per_second", "loss")}
    yield bar(f"samples a second, {OURS} / DDP", ratio["samples_per_second"], least=LEAST_FASTER)
    yield bar(f"loss after the same samples, {OURS} / DDP", ratio["loss"], most=MOST_LOSS, write=ratio_text)
    yield Numbers({"plan": asdict(plan), "rows": rows, "turns": turns})


def rows_of(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each lane: its best turn's samples a second, and the mean of its losses.

    >>> turns = [{"lane": DDP, "samples_per_second": rate, "loss": rate / 10, "sent_bytes": 8.0} for rate in (20, 30)]
    >>> rows_of([*turns, {"lane": OURS, "samples_per_second": 60, "loss": 2.5, "sent_bytes": 1.0}])[0]
    {'lane': "Trainer's DDP", 'samples_per_second': 30, 'loss': 2.5, 'sent_bytes': 8.0}
    """
    rows = []
    for lane in LANES:
        own = [turn for turn in turns if turn["lane"] == lane]
        fastest = max(turn["samples_per_second"] for turn in own)
        means = {name: mean(turn[name] for turn in own) for name in ("loss", "sent_bytes")}
        rows.append({"lane": lane, "samples_per_second": fastest, **means})
    return rows


# -- a rank ------------------------------------------------------------------------------------------------------------


class Chain(Dataset[dict[str, torch.Tensor]]):
    """Sequences of a Markov chain."""

    def __init__(self, samples: int, plan: Plan, *, chain: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(chain)
        follows = torch.stack([torch.randperm(plan.vocabulary, generator=drawn)[:4] for _ in range(plan.vocabulary)])
        generator = torch.Generator().manual_seed(seed)
        rows = torch.empty(samples, plan.length, dtype=torch.long)
        rows[:, 0] = torch.randint(plan.vocabulary, (samples,), generator=generator)
        for place in range(1, plan.length):
            which = torch.multinomial(torch.tensor(SHARES), samples, replacement=True, generator=generator)
            rows[:, place] = follows[rows[:, place - 1], which]
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def take_turn(seed: int, lane: str, plan: Plan, folder: str) -> dict[str, Any]:
    """Train one model by one lane; return samples a second, the loss on held-out samples, and what was sent."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    import paceline.huggingface

    torch.manual_seed(seed)
    sizes = {"n_embd": plan.width, "n_layer": plan.layers, "n_head": 4, "n_positions": plan.length}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=plan.vocabulary, bos_token_id=0, eos_token_id=0, **sizes, **rates))
    moments: dict[str, float] = {}

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when the timed steps begin and end."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == FIRST_STEPS:
                moments["began"], moments["bytes"] = time.perf_counter(), sent_bytes()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            moments["ended"], moments["sent"] = time.perf_counter(), sent_bytes() - moments["bytes"]

    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=plan.steps,
        per_device_train_batch_size=plan.batch, learning_rate=plan.rate, warmup_steps=plan.steps // 10, seed=seed,
        dataloader_pin_memory=False, ddp_find_unused_parameters=False, ddp_backend="gloo",
    )  # fmt: skip
    trainer = Trainer(
        model,
        args,
        train_dataset=Chain(2 * plan.batch * plan.steps, plan, chain=seed, seed=seed),
        eval_dataset=Chain(plan.held_out, plan, chain=seed, seed=seed + HELD_OUT),
        callbacks=[Clock()],
    )
    if lane == OURS:
        paceline.huggingface.average(trainer, "hpsgd", codec="qsgd levels=7", period=plan.period)
    trainer.train()
    timed, seconds = plan.steps - FIRST_STEPS, moments["ended"] - moments["began"]
    return {
        "seed": seed,
        "lane": lane,
        "samples_per_second": 2 * plan.batch * timed / seconds,
        "loss": trainer.evaluate()["eval_loss"],
        "sent_bytes": moments["sent"] / timed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def sent_bytes() -> int:
    """Return what this host's interface has sent, by the kernel's count."""
    return int(Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes").read_text())


def main(folder: Path, rank: int, plan: Plan) -> None:
    """Be a rank: take all turns, each with a new model, and write a line for each. Trainer itself joins the ranks."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
    os.environ |= {name: str(number) for name, number in place.items()} | {"MASTER_ADDR": ADDRESSES[0]}
    torch.set_num_threads(1)
    with (
        (folder / f"lines-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines,
        tempfile.TemporaryDirectory() as out,
    ):
        for seed, lane in plan.turns:
            lines.write(json.dumps(take_turn(seed, lane, plan, out)) + "\n")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Plan(**json.loads(sys.argv[3])))
