"""HPSGD under torchrun: no step waits for the network; evaluation after a flush, and checkpoints to go on from.

torchrun --nproc-per-node 2 examples/hpsgd_torchrun.py --epochs 10
torchrun --nproc-per-node 2 examples/hpsgd_torchrun.py --epochs 20               # goes on from epoch 10
torchrun --nproc-per-node 2 examples/hpsgd_torchrun.py --codec "qsgd levels=7" --folder checkpoints-qsgd
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--codec", default="identity")
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()
images, labels = (torch.tensor(each, device=device) for each in load_digits(return_X_y=True))
images = images.float() / 16
train = TensorDataset(images[:1500], labels[:1500])
loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)  # no DDP
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
with paceline.HPSGD(model, optimizer, codec=args.codec) as sync:
    saved = [int(path.stem.split("-")[1]) for path in args.folder.glob(f"epoch-*-rank-{rank}.pt")]
    begin = min(newest for [newest] in sync.gather_numbers([max(saved, default=0)]))  # the last that all ranks have
    if begin:
        state = torch.load(args.folder / f"epoch-{begin}-rank-{rank}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])  # after the model's
    for epoch in range(begin + 1, args.epochs + 1):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()  # averages begin and are merged here, and none is waited for
            optimizer.zero_grad()
        sync.flush()  # here all ranks wait, and hold the same model afterwards
        if rank == 0:
            accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
            print(f"epoch {epoch}: accuracy {accuracy:.1%}, {sync.steps} steps, {sync.averages} averages,", end=" ")
            print(f"{sync.sent_bytes / 1e6:.1f} MB sent, {sync.figures()['wait_seconds']:.2f} s waited")
        state = {"sync": sync.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, partial := args.folder / f"partial-{rank}.pt")  # every rank saves what is its own
        partial.rename(args.folder / f"epoch-{epoch}-rank-{rank}.pt")  # so that no file of this name is half-written
dist.destroy_process_group()
