"""Training on fewer samples: InfoBatch lets some of the easy ones sit out, FinePruning some of the hard ones.

python examples/infobatch.py
python examples/infobatch.py --epochs 60 --page pruning.html
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--page", help="write who sat out, and whose label looks wrong: pruning.html")
args = parser.parse_args()

inputs, targets = load_digits(return_X_y=True)
inputs, targets = torch.tensor(inputs / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(targets)
shuffled = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
data, test = TensorDataset(inputs[shuffled[:1500]], targets[shuffled[:1500]]), shuffled[1500:]


def train(pruning, epochs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)  # in epochs: their lengths vary
    loader, seen = DataLoader(data, batch_sampler=pruning), 0  # instead of batch_size=32, shuffle=True
    for _ in range(epochs):
        for x, y in loader:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")  # one for each sample
            optimizer.zero_grad()
            pruning.observe(losses).backward()  # the mean to train on, weighted where the policy weighs
            optimizer.step()
            seen += len(y)
        scheduler.step()
    with torch.inference_mode():
        accuracy = (model.eval()(inputs[test]).argmax(1) == targets[test]).float().mean().item()
    return model, seen, accuracy


epochs, shorter = args.epochs, round(0.7 * args.epochs)
third = {"window": max(1, epochs // 3), "starting_point": epochs // 6}  # FinePruning begins anew in each third
runs = {  # the second row is what pruning must beat: as little work, by fewer epochs
    "every sample": (epochs, paceline.InfoBatch(data, batch_size=32, epochs=epochs, ratio=0.0)),
    "fewer epochs": (shorter, paceline.InfoBatch(data, batch_size=32, epochs=shorter, ratio=0.0)),
    "InfoBatch": (epochs, paceline.InfoBatch(data, batch_size=32, epochs=epochs)),
    "FinePruning": (epochs, paceline.FinePruning(data, batch_size=32, prune=0.3, **third)),
}
print("              samples   saved   test accuracy")
for name, (number, pruning) in runs.items():
    model, seen, accuracy = train(pruning, number)
    print(f"{name:12} {seen:8,}  {1 - seen / (epochs * len(data)):6.1%}  {accuracy:14.1%}")
if args.page:
    print("written:", paceline.pruning_page(pruning, data, args.page, model=model))
