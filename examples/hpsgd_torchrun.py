"""HPSGD under torchrun: no step waits for the network; evaluation after a flush, and checkpoints to go on from.

torchrun --nproc-per-node 2 examples/hpsgd_torchrun.py --epochs 10
torchrun --nproc-per-node 2 --max-restarts 2 examples/hpsgd_torchrun.py --epochs 20      # goes on from epoch 10
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--codec", default="identity", help="such as 'qsgd levels=7', in a --folder of its own")
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)
store, rank, world = next(dist.rendezvous("env://"))
life = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)  # after a restart: keys of its own
dist.init_process_group("gloo", store=life, rank=rank, world_size=world)
images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
images = images.float() / 16
train = TensorDataset(images[:1500], labels[:1500])
loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))  # no DDP
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
with paceline.HPSGD(model, optimizer, codec=args.codec) as sync:
    saved = [int(path.stem.split("-")[1]) for path in args.folder.glob(f"epoch-*-rank-{rank}.pt")]
    newest = [number for [number] in sync.gather_numbers([max(saved, default=0)])]
    if any(newest) and not all(newest):  # as with more ranks than before
        raise SystemExit(f"{args.folder} has no checkpoint of rank {newest.index(0)}: begin anew in another --folder")
    if begin := min(newest):  # the last epoch that all ranks have; paceline refuses what fewer ranks would load
        state = torch.load(args.folder / f"epoch-{begin}-rank-{rank}.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])  # after the model's
    for epoch in range(begin + 1, args.epochs + 1):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()  # averages begin and are merged here, and none is waited for
            optimizer.zero_grad()
        sync.flush()  # here all ranks wait, and hold the same model afterwards
        model.eval()
        with torch.inference_mode():
            accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.1%}, {sync.steps} steps, {sync.sent_bytes / 1e6:.1f} MB sent")
        state = {"sync": sync.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, partial := args.folder / f"partial-{rank}.pt")  # every rank saves what is its own
        partial.rename(args.folder / f"epoch-{epoch}-rank-{rank}.pt")  # so that no file of this name is half-written
        (args.folder / f"epoch-{epoch - 2}-rank-{rank}.pt").unlink(missing_ok=True)  # all ranks have epoch - 1
