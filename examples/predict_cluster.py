"""Predict before you rent: a step measured here, prices from a list, and what clusters that nobody has yet would take.

python examples/predict_cluster.py                                          # measures a step on this machine
python examples/predict_cluster.py --step 0.1 --jitter 0.02 --codec qsgd    # or with seconds measured elsewhere
"""

import argparse
import time

import torch
from torch import nn

from paceline import Race, Recipe

MACHINES = [("1 Gbit/s", 0.10, 1e9), ("10 Gbit/s", 0.16, 10e9)]  # link, price of a machine and hour: put your list here
WORKERS, STRATEGIES, BATCH = (4, 8, 16, 32), ("ssgd", "lgc@ranks", "hpsgd"), 32
model = nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def measure(steps=100):
    """Return the shortest step of one worker without any network, and how much longer a step takes on average."""
    optimizer, seconds = torch.optim.SGD(model.parameters(), lr=0.01), []
    inputs, targets = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    del seconds[: steps // 10]  # the first steps allocate memory
    return min(seconds), sum(seconds) / len(seconds) - min(seconds)


parser = argparse.ArgumentParser()
parser.add_argument("--step", type=float, help="seconds of the shortest step; left out: measured here")
parser.add_argument("--jitter", type=float, default=0.0, help="seconds that a step takes longer on average")
parser.add_argument("--samples", type=float, default=50e6, help="samples of the whole job: data set times epochs")
parser.add_argument("--codec", default="identity", help="how gradients travel")
args = parser.parse_args()
step, jitter = (args.step, args.jitter) if args.step else measure()
print(f"step {step * 1e3:.1f} ms, on average {jitter * 1e3:.1f} ms more; hours and cost with codec {args.codec}:")
print(f"{'link':10}{'workers':>8}" + "".join(f"{name:>20}" for name in STRATEGIES))
for link, price, bits in MACHINES:
    for workers in WORKERS:
        recipe = Recipe(rounds=200).with_settings(
            cluster={"workers": workers, "late_work": "partial"},
            delay={"shift_seconds": step, "mean_seconds": jitter},
            network={"latency_seconds": 0.0005, "worker_bits_per_second": bits},
            strategy={"k": 3 * workers // 4},  # lgc closes a round with three quarters of the workers
            codec={"name": args.codec},
        )
        race = Race(recipe, STRATEGIES, model=model, timing_only=True)
        list(race)  # runs it
        print(f"{link:10}{workers:>8}", end="")
        for result in race.results:  # a round is a batch of every worker, whatever the strategy
            hours = result.seconds / result.rounds * args.samples / (workers * BATCH) / 3600
            print(f"{hours:>11.1f} h{hours * workers * price:>5.0f} $", end="")
        print()
