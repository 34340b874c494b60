"""The fastest K under torchrun: one rank is five times slower; FullSync waits for it in every round, LGCSync does not.

torchrun --nproc-per-node 4 examples/lgc_torchrun.py
"""

import argparse
import time
from collections import Counter

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import paceline


def train(kind, train_set, test_set, options, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(train_set, batch_size=32, sampler=DistributedSampler(train_set), drop_last=True)
    # Each block also sleeps 5 ms, as if the model were larger; the last rank, the old machine, sleeps longer.
    block_seconds = 0.005 * (options.slower if dist.get_rank() == dist.get_world_size() - 1 else 1)
    counts = {"in time": Counter(), "one round late": Counter(), "dropped": Counter()}  # gradients of each rank

    def count(closed):  # is called with each round
        for what, gradients in zip(counts, (closed.step.fresh, closed.step.late, closed.dropped), strict=True):
            counts[what].update(gradient.worker for gradient in gradients)

    begin = time.perf_counter()
    with kind(model, optimizer, on_round=count, **settings) as sync:
        for _ in range(options.epochs):
            for inputs, targets in sync.epoch(loader):  # ends at the same round on all ranks
                for x, y in sync.blocks(inputs, targets):  # a batch in 4 blocks; ends early once the round has closed
                    nn.functional.cross_entropy(model(x), y).backward()
                    time.sleep(block_seconds)
                sync.step()  # instead of optimizer.step() and zero_grad()
        sync.flush()  # all ranks are equal: evaluate, save
        pace = sync.version / (time.perf_counter() - begin)
    if dist.get_rank() == 0:
        inputs, targets = test_set[:]
        accuracy = (model(inputs).argmax(1) == targets).float().mean()
        print(f"{kind.__name__}: {sync.version} rounds, {pace:.1f} a second, test accuracy {accuracy:.1%}")
        for rank in range(dist.get_world_size()):
            print(f"  rank {rank}: " + ", ".join(f"{ranks[rank]} {what}" for what, ranks in counts.items()))


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--slower", type=float, default=5.0, help="how many times longer the last rank computes")
options = parser.parse_args()
dist.init_process_group("gloo")
digits = TensorDataset(torch.tensor(load_digits().data / 16).float(), torch.tensor(load_digits().target))
parts = random_split(digits, [1500, 297], torch.Generator().manual_seed(0))
train(paceline.FullSync, *parts, options)
train(paceline.LGCSync, *parts, options, k=dist.get_world_size() - 1)  # the round closes without the slowest
dist.destroy_process_group()
