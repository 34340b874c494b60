"""A transformer too big for one rank: measured, cut where both stages take equally long, and trained by two ranks.

torchrun --nproc-per-node 2 examples/pipeline_transformer.py
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
parser.add_argument("--stages", type=int, default=2, help="ranks that share one model")
parser.add_argument("--microbatches", type=int, default=8, help="parts in which a batch goes through the stages")
parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zero-bubble")
parser.add_argument("--memory", type=int, default=22, help="megabytes that a rank has for its stage")
args = parser.parse_args()
WORDS, LENGTH, WIDTH, BATCH = 64, 32, 128, 32


class Transformer(nn.Module):
    """An ordinary model: nothing in it knows of stages."""

    def __init__(self):
        super().__init__()
        one = {"nhead": 4, "dim_feedforward": 4 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, **one) for _ in range(6)])

    def forward(self, words):
        return self.head(self.blocks(self.embed(words))).transpose(1, 2)  # (samples, words, length)


torch.manual_seed(0)  # every rank makes the same model
model, secret = Transformer(), torch.randperm(WORDS)  # the task: decipher a secret alphabet
sample = torch.randint(WORDS, (BATCH, LENGTH))  # one batch, as large as those of the training
cut = {"stages": args.stages, "microbatches": args.microbatches, "schedule": args.schedule}
plan = paceline.plan_pipeline(model, sample, **cut, memory_bytes=args.memory * 10**6, states=2.0)  # 2: Adam's
with paceline.Pipeline(model, plan, free_others=True, record=True) as pipe:
    if pipe.rank == 0:
        print(plan, end="\n\n")
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-4)  # this rank's part of the model
    drawn, idle = torch.Generator().manual_seed(pipe.replica), []  # four ranks are two replicas: other batches each
    for step in range(args.steps):
        words, began = torch.randint(WORDS, (BATCH, LENGTH), generator=drawn), time.perf_counter()
        loss = pipe.step(words, secret[words], nn.functional.cross_entropy)  # fills .grad; the loss is on every rank
        idle.append(1 - sum(span.seconds for span in pipe.spans) / (time.perf_counter() - began))
        optimizer.step()
        if pipe.rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step:3}   loss {loss:.3f}")
    told = [None] * dist.get_world_size()
    dist.all_gather_object(told, (pipe.stage, sum(p.numel() for p in pipe.parameters()), statistics.median(idle)))
    for rank, (stage, weights, share) in enumerate(told if pipe.rank == 0 else []):
        print(f"rank {rank}   stage {stage}   {weights:,} weights   idle for {share:.0%} of a step")
