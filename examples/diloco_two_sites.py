"""DiLoCo between two sites: the ranks of a site average every step, the sites once in `--period` steps.

torchrun --nproc-per-node 2 examples/diloco_two_sites.py                         # two sites of one rank
torchrun --nproc-per-node 4 examples/diloco_two_sites.py --ranks-per-site 2      # two sites of two ranks
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
    for tensor in model.state_dict().values():  # the leader's to its site: first rank 0's, then each new average
        dist.broadcast(tensor, leader, group=site)
    if rank == 0:
        with torch.inference_mode():
            loss = cross_entropy(model.eval()(images), labels)
        print(f"step {window * args.period}: loss {loss:.3f}, sent to the other site {sync.sent_bytes:,} bytes")
    model.train()
    for _ in range(args.period if window < args.windows else 0):
        batch = torch.randint(len(images), (16,), generator=draw)
        cross_entropy(model(images[batch]), labels[batch]).backward()
        for weight in filter(lambda each: each.requires_grad, model.parameters()):  # by hand: DiLoCo refuses DDP
            mean = torch.zeros_like(weight) if weight.grad is None else weight.grad / args.ranks_per_site
            dist.all_reduce(mean, group=site)
            weight.grad = mean
        optimizer.step()  # in the last step of a window the leaders average, and wait for it
        optimizer.zero_grad()

state = torch.cat([each.flatten().double() for each in model.state_dict().values()])  # buffers are in it too
dist.all_gather(states := [torch.empty_like(state) for _ in range(world)], state)
if rank == 0:
    spread = max((other - state).abs().max().item() for other in states)
    steps, gradient = args.windows * args.period, sum(weight.nbytes for weight in model.parameters())
    print(f"largest difference between two ranks: {spread}")
    print(f"DDP would have sent {2 * (world - 1) / world * gradient * steps:,.0f} bytes")  # a ring, over each link
if sync:
    sync.close()
