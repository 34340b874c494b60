"""The fastest K ranks, qsgd on the wire, LARS as the optimiser and InfoBatch as the sampler: four parts in one script.

torchrun --nproc-per-node 4 examples/everything_at_once.py --rounds 200 --k 3
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=200)
parser.add_argument("--k", type=int, default=3, help="gradients that close a round")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
digits, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
inputs, targets = torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
shard = TensorDataset(inputs[rank:1500:world], targets[rank:1500:world])

# Each rank prunes its own shard alone (world_size=1): ranks that take rounds end their passes at different times.
passes = max(1, 2 * args.rounds * 32 // len(shard))  # pruned ones are shorter: at most twice as many as whole ones
pruning = paceline.InfoBatch(shard, batch_size=32, epochs=passes, drop_last=True, rank=0, world_size=1)
loader = DataLoader(shard, batch_sampler=pruning)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = paceline.LARS(model.parameters(), lr=0.2, trust_coefficient=0.1, weight_decay=5e-4)
schedule = paceline.warmup_poly(optimizer, warmup_steps=args.rounds // 20, total_steps=args.rounds)

with paceline.LGCSync(model, optimizer, k=args.k, blocks=8, scheduler=schedule, codec="qsgd levels=7") as sync:
    for x, y in sync.epoch(loader, rounds=args.rounds):
        weights = pruning.next_weights()  # an easy sample that stays weighs more; None: all weigh 1
        weights, done = torch.ones(len(x)) if weights is None else weights, []
        for bx, by, bw in sync.blocks(x, y, weights):  # ends early once the round has closed
            done.append(nn.functional.cross_entropy(model(bx), by, reduction="none"))
            (bw * done[-1]).mean().backward()
            time.sleep(0.015 if rank == world - 1 else 0.003)  # the last rank plays a machine five times slower
        losses = torch.cat(done).detach()
        pruning.observe(losses) if len(losses) == len(x) else pruning.skip()  # a batch cut short is not judged
        sync.step(losses)
    sync.flush()  # every rank has every round: collectives of your own are allowed here
    vector, outcomes = torch.cat([p.detach().flatten() for p in model.parameters()]), sync.outcomes
    gradients = f"{outcomes.used:4} used, {outcomes.late:3} late, {outcomes.dropped.total():2} dropped"
    lines, sums = [None] * world, [None] * world
    dist.all_gather_object(lines, f"rank {rank}: {gradients}; {pruning.share_pruned:.0%} of its samples sat out")
    dist.all_gather_object(sums, vector.double().sum().item())
    if rank == 0:
        with torch.inference_mode():
            accuracy = (model.eval()(inputs[1500:]).argmax(1) == targets[1500:]).float().mean()
        ring = 2 * (world - 1) / world * 4 * len(vector) * sync.version / 1e6
        print(f"accuracy {accuracy:.1%}, replicas equal: {len(set(sums)) == 1}")
        print(f"rank 0 sent {sync.sent_bytes / 1e6:.1f} MB by plan {sync.plan}; as float32 in a ring: {ring:.1f} MB")
        print(*lines, sep="\n")
