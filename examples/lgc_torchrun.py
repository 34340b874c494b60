"""The fastest K under torchrun: one rank is five times slower; FullSync waits for it in every round, LGCSync does not.

torchrun --nproc-per-node 4 examples/lgc_torchrun.py
torchrun --nproc-per-node 4 examples/lgc_torchrun.py --slow-ranks 2 --slower 2  # two new machines and two old ones
"""

import argparse
import time
from collections import Counter

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--slow-ranks", type=int, default=1, help="how many ranks, the last ones, are slow")
parser.add_argument("--slower", type=float, default=5.0, help="how many times longer they compute")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
k = world - args.slow_ranks  # as many as are fast: a round closes without the slow ones
block_seconds = 0.005 * (args.slower if rank >= k else 1)  # each block sleeps, as if the model were larger
images, labels = (torch.tensor(each, device=device) for each in load_digits(return_X_y=True))
images = images.float() / 16
train = TensorDataset(images[:1500], labels[:1500])
for kind, settings in ((paceline.FullSync, {}), (paceline.LGCSync, {"k": k})):
    torch.manual_seed(0)
    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train), drop_last=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)  # no DDP
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rounds, begin = [], time.perf_counter()
    with kind(model, optimizer, on_round=rounds.append, **settings) as sync:
        for _ in range(args.epochs):
            for inputs, targets in sync.epoch(loader):  # ends at the same round on all ranks
                for x, y in sync.blocks(inputs, targets):  # a batch in 4 blocks; ends early once the round has closed
                    nn.functional.cross_entropy(model(x), y).backward()
                    time.sleep(block_seconds)
                sync.step()  # instead of optimizer.step() and zero_grad()
        sync.flush()  # all ranks are equal: evaluate, save
        pace = sync.version / (time.perf_counter() - begin)
    if rank == 0:
        accuracy = (model.eval()(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        print(f"{kind.__name__}: {sync.version} rounds, {pace:.1f} a second, test accuracy {accuracy:.1%}")
        fresh = Counter(gradient.worker for each in rounds for gradient in each.step.fresh)
        late = Counter(gradient.worker for each in rounds for gradient in each.step.late)
        dropped = Counter(gradient.worker for each in rounds for gradient in each.dropped)
        for each in range(world):
            print(f"  rank {each}: {fresh[each]} in time, {late[each]} one round late, {dropped[each]} dropped")
dist.destroy_process_group()
