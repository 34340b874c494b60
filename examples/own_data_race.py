"""Would it help you? Your own data, network and loss under four strategies, on a simulated cluster like yours.

python examples/own_data_race.py --rounds 150 --out own-race
"""

import argparse
import math
from pathlib import Path

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset, random_split

from paceline import Race, Recipe
from paceline.reports import results_table, write_report

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=150)
parser.add_argument("--out", default="own-race", help="the folder of report.html and model.pt")
args = parser.parse_args()


class Vibrations(Dataset):
    """Made-up signals of a motor: five conditions, each a frequency of its own under noise."""

    def __init__(self, samples=2000):
        self.labels = torch.arange(samples) % 5
        waves = torch.sin((self.labels[:, None] + 2) / 10 * torch.arange(64) + 2 * math.pi * torch.rand(samples, 1))
        self.signals = (waves + 1.2 * torch.randn(samples, 64))[:, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return self.signals[number], self.labels[number]


def focal_loss(outputs, targets):  # one loss for each sample
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses


torch.manual_seed(0)  # of data, split and network
train, test = random_split(Vibrations(), [1600, 400])
convolutions = nn.Conv1d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv1d(16, 16, 9, stride=2), nn.ReLU()
model = nn.Sequential(*convolutions, nn.AdaptiveMaxPool1d(4), nn.Flatten(), nn.Linear(64, 5))
recipe = Recipe(rounds=args.rounds, target_loss=0.1).with_settings(
    data={"classes_per_worker": 1},  # every worker sees one condition of the motor
    cluster={"workers": 10, "late_work": "partial"},  # a late worker stops at the next block and sends what it has
    delay={"name": "slow-worker", "slow_workers": 2, "slow_factor": 4.0},  # two machines are four times slower
)
race = Race(recipe, ["full", "fastest-k", "lgc", "async"], data=(train, test), model=model, loss=focal_loss)
for _ in race:  # (lane, progress): the lane that is behind on the cluster's clock goes next
    pass
traces = [result.trace for result in race.results]
Console(width=80).print(results_table(traces))
print("report:", write_report(traces, Path(args.out, "report.html"), title="A motor's conditions, ten machines"))
torch.save(race.results[2].state_dict, Path(args.out, "model.pt"))  # what lgc trained: model.load_state_dict takes it
