"""A batch of half the data, in as many epochs as a small batch: SGD loses accuracy at every rate, LARS keeps it.

python examples/lars_large_batch.py
python examples/lars_large_batch.py --batch 1500 --epochs 60
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=750, choices=(500, 750, 1500), help="samples of a large batch")
parser.add_argument("--epochs", type=int, default=40)
args = parser.parse_args()
SMALL, FITS, RATES = 50, 250, (0.05, 0.1, 0.2, 0.4, 0.8)  # 250 samples fit the memory, let us say

inputs, targets = load_digits(return_X_y=True)
inputs, targets = torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(targets)
shuffled = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
train, test = shuffled[:1500], shuffled[1500:]


def lars(parameters, **settings):  # 0.1 instead of the paper's 0.001: then rates are of SGD's size, for biases too
    return paceline.LARS(parameters, trust_coefficient=0.1, **settings)


def test_accuracy(make_optimizer, rate, batch):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = make_optimizer(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    part = min(batch, FITS)
    accumulate = paceline.Accumulate(model, steps=batch // part)
    steps = args.epochs * -(-len(train) // batch)  # a batch 15 times as large has a 15th of the steps
    schedule = paceline.warmup_poly(optimizer, warmup_steps=steps // 10, total_steps=steps)
    for _ in range(args.epochs):
        loader = train[torch.randperm(len(train))].split(part)  # in your script a DataLoader, with batches that fit
        for samples in accumulate(loader):
            accumulate.backward(nn.functional.cross_entropy(model(inputs[samples]), targets[samples]))
            if accumulate.ready:  # the parts are together: .grad is that of the whole batch
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    with torch.inference_mode():
        return (model.eval()(inputs[test]).argmax(1) == targets[test]).float().mean().item()


print("test accuracy     rate", *(f"{rate:7}" for rate in RATES))
rows = ("SGD", torch.optim.SGD, SMALL), ("SGD", torch.optim.SGD, args.batch), ("LARS", lars, args.batch)
for name, make_optimizer, batch in rows:
    print(f"{name:5} batches of {batch:5}", *(f"{test_accuracy(make_optimizer, rate, batch):7.1%}" for rate in RATES))
