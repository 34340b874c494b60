"""One rank of the benchmark `trainer`: Hugging Face's Trainer, turn after turn, each with a new model.

    python -m benchmarks.trainer_rank FOLDER RANK PLAN

Tokens are a Markov chain's: after each token comes one of four that a seed has drawn, with shares 1/2, 1/4, 1/8, 1/8.
The loss of whoever knows the chain is its entropy, 1.75 bit or 1.213 nats.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.cable import ADDRESSES

PORT = 29581
SHARES = (0.5, 0.25, 0.125, 0.125)
FIRST_STEPS = 5  # of a turn, not timed
HELD_OUT = 10_000  # added to a chain's seed for the samples that are evaluated
DDP, OURS = "Trainer's DDP", "hpsgd, qsgd"
LANES = (DDP, OURS)


@dataclass(frozen=True, kw_only=True)
class TrainerPlan:
    """What the ranks do."""

    seeds: list[int]
    steps: int
    batch: int
    width: int
    layers: int
    length: int
    vocabulary: int
    rate: float
    period: int
    held_out: int

    @property
    def turns(self) -> list[tuple[int, str]]:
        """Every turn: the seed of chain, order and weights, and the lane; lanes take turns in going first."""
        return [
            (seed, lane) for place, seed in enumerate(self.seeds) for lane in (LANES if place % 2 == 0 else LANES[::-1])
        ]


class Chain(Dataset[dict[str, torch.Tensor]]):
    """Sequences of a Markov chain."""

    def __init__(self, samples: int, plan: TrainerPlan, *, chain: int, seed: int) -> None:
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


def turn(seed: int, lane: str, plan: TrainerPlan, folder: str) -> dict[str, Any]:
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
        folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch,
        learning_rate=plan.rate,
        warmup_steps=plan.steps // 10,
        seed=seed,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        ddp_backend="gloo",
    )
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
    seconds = moments["ended"] - moments["began"]
    return {
        "seed": seed,
        "lane": lane,
        "samples_per_second": 2 * plan.batch * (plan.steps - FIRST_STEPS) / seconds,
        "loss": trainer.evaluate()["eval_loss"],
        "sent_bytes": moments["sent"] / (plan.steps - FIRST_STEPS),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def sent_bytes() -> int:
    """Return what this host's interface has sent, by the kernel's count."""
    return int(Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes").read_text())


def main(folder: Path, rank: int, plan: TrainerPlan) -> None:
    """Take all turns as one rank; rank 0 writes a line for each."""
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": PORT}
    os.environ |= {name: str(number) for name, number in place.items()} | {"MASTER_ADDR": ADDRESSES[0]}
    torch.set_num_threads(1)
    with (
        (folder / f"lanes-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines,
        tempfile.TemporaryDirectory() as out,
    ):
        for seed, lane in plan.turns:
            lines.write(json.dumps(turn(seed, lane, plan, out)) + "\n")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), TrainerPlan(**json.loads(sys.argv[3])))
