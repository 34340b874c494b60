"""DiLoCo between two sites: the ranks of a site average every step, the sites once in `--period` steps.

    torchrun --nproc-per-node 2 examples/diloco_two_sites.py                         # two sites of one rank
    torchrun --nproc-per-node 4 examples/diloco_two_sites.py --ranks-per-site 2      # two sites of two ranks

A site is what a fast network joins: a machine, or a rack. The link between the sites is slow.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--ranks-per-site", type=int, default=1)
parser.add_argument("--period", type=int, default=25)
parser.add_argument("--windows", type=int, default=16)
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
leader = rank - rank % args.ranks_per_site  # the first rank of this site: only leaders use the slow link
site, _ = dist.new_subgroups(args.ranks_per_site)  # ranks 0 .. n-1 are one site, the next n another
leaders = dist.new_group(range(0, world, args.ranks_per_site))

images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
images, draw = images.float() / 16, torch.Generator().manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sync = paceline.DiLoCo(model, optimizer, period=args.period, process_group=leaders) if rank == leader else None

for window in range(args.windows + 1):
    for parameter in model.parameters():  # the leader's model to its site: first rank 0's, then each new average
        dist.broadcast(parameter.data, leader, group=site)
    if rank == 0:
        loss = cross_entropy(model(images), labels)
        print(f"step {window * args.period}: loss {loss:.3f}, sent to the other site {sync.sent_bytes:,} bytes")
    for _ in range(args.period if window < args.windows else 0):
        batch = torch.randint(len(images), (16,), generator=draw)
        cross_entropy(model(images[batch]), labels[batch]).backward()
        for parameter in model.parameters():  # the mean over the site, by hand: DiLoCo refuses a model in DDP
            dist.all_reduce(parameter.grad, group=site)
            parameter.grad /= args.ranks_per_site
        optimizer.step()  # in the last step of a window the leaders average, and wait for it
        optimizer.zero_grad()

vectors = [torch.nn.utils.parameters_to_vector(model.parameters()).detach() for _ in range(world)]
dist.all_gather(vectors, vectors[0].clone())
if rank == 0:
    spread = max((vector - vectors[0]).abs().max().item() for vector in vectors)
    ddp = 2 * (world - 1) / world * vectors[0].nbytes * args.windows * args.period  # what a ring sends over each link
    print(f"largest difference between two ranks: {spread}\nDDP would have sent {ddp:,.0f} bytes")
if sync:
    sync.close()
dist.destroy_process_group()
