"""DDP whose gradients travel compressed: the bytes of a step, what the exchange costs in time, and the loss.

torchrun --nproc-per-node 2 examples/ddp_codec.py                                # qsgd: 4 bits an element
torchrun --nproc-per-node 2 examples/ddp_codec.py --codec none                   # plain DDP, to compare
torchrun --nproc-per-node 2 examples/ddp_codec.py --codec "power-sgd rank=4"
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
parser.add_argument("--codec", default="qsgd levels=7")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group("nccl" if device == "cuda" else "gloo")
images, labels = (torch.tensor(each, device=device) for each in load_digits(return_X_y=True))
loader = DataLoader(data := TensorDataset(images.float() / 16, labels), 32, sampler=DistributedSampler(data))
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = DistributedDataParallel(network.to(device))
compression = None if args.codec == "none" else paceline.compress(model, args.codec)  # the one new line
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def epoch(number):
    loader.sampler.set_epoch(number)
    total, began = 0.0, time.perf_counter()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # gradients are encoded and travel in here, bucket by bucket
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    if dist.get_rank() == 0:
        took = 1e3 * (time.perf_counter() - began)
        print(f"epoch {number + 1}: loss {total / len(loader):.4f}, {took / len(loader):.1f} ms a step")


for number in range(args.epochs):
    epoch(number)
if dist.get_rank() == 0:
    ring = 2 * (1 - 1 / dist.get_world_size()) * sum(p.nbytes for p in model.parameters())  # DDP's all-reduce
    sent = compression.sent_bytes / compression.steps if compression else ring
    print(f"{args.codec}: a rank sends {sent:,.0f} bytes a step, plain DDP {ring:,.0f}\nwithout any exchange:")
with model.no_sync():  # the step without the network; at the very end, for the replicas differ from here on
    epoch(args.epochs)
dist.destroy_process_group()
