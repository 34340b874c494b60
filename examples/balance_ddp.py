"""Batches by speed under DDP: the last rank is three times slower; plain DDP waits for it, Balance deals it less.

torchrun --nproc-per-node 4 examples/balance_ddp.py
torchrun --nproc-per-node 4 examples/balance_ddp.py --slow-ranks 2 --slower 2  # two new machines and two old ones
"""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--slow-ranks", type=int, default=1, help="how many ranks, the last ones, are slow")
parser.add_argument("--slower", type=float, default=3.0, help="how many times longer they compute")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
sample_seconds = 0.001 * (args.slower if rank >= world - args.slow_ranks else 1)  # as if the model were larger
images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
images = images.float() / 16
train = TensorDataset(images[:1500], labels[:1500])
for name in ("DDP", "Balance"):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "DDP":
        loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    else:
        balance = paceline.Balance(model, batch_size=32 * world)  # of all ranks together
        loader = DataLoader(train, batch_sampler=balance.sampler(train))  # each rank batches of its own size
    samples, seconds = 0, 0.0
    for epoch in range(args.epochs):
        begin = time.perf_counter()
        for inputs, targets in loader:
            time.sleep(sample_seconds * len(inputs))
            nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch >= args.epochs // 2:  # shares are found in the first half
            samples, seconds = samples + len(train), seconds + time.perf_counter() - begin
    if rank == 0:
        accuracy = (model.module.eval()(images[1500:].to(device)).argmax(1).cpu() == labels[1500:]).float().mean()
        print(f"{name}: {samples / seconds:,.0f} samples a second, test accuracy {accuracy:.1%}")
if rank == 0:
    print(balance.table())
dist.destroy_process_group()
