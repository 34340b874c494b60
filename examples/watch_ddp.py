"""Which rank is slow, and in what: DDP with one line more, and what each rank has written down.

torchrun --nproc-per-node 2 examples/watch_ddp.py                                # rank 1's input takes 20 ms longer
torchrun --nproc-per-node 2 examples/watch_ddp.py --slow 0 --delay 0.05
paceline diagnose runs/watch                                                     # the whole story, afterwards
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.traces.step_times import read_times

parser = argparse.ArgumentParser()
parser.add_argument("--slow", type=int, default=1, help="the rank whose batches come late")
parser.add_argument("--delay", type=float, default=0.02, help="by how many seconds")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--out", default=None)
args = parser.parse_args()
dist.init_process_group("gloo")
images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
loader = DataLoader(data := TensorDataset(images.float() / 16, labels), 64, sampler=DistributedSampler(data))
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with paceline.watch(model, out=args.out) as watch:  # the one new line
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            if dist.get_rank() == args.slow:
                time.sleep(args.delay)  # a slow disk, say
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

dist.barrier()
if dist.get_rank() == 0:
    for path in sorted(Path(watch.folder, "times").glob("rank-*.jsonl")):
        steps = read_times(path).steps[1:]
        means = {name: sum(getattr(each, f"{name}_seconds") for each in steps) / len(steps)
                 for name in ("input", "forward", "backward", "wait", "optimiser")}  # fmt: skip
        print(f"{path.stem}: " + ", ".join(f"{name} {1e3 * mean:.1f} ms" for name, mean in means.items()))
dist.destroy_process_group()
