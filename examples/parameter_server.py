"""A parameter server with a model of your own: it holds model and optimiser, workers that come and go bring gradients.

On one machine, in three terminals, the second line in two of them:
    python examples/parameter_server.py
    python examples/worker.py
On several machines, with the keys that `paceline keys keys --hosts ps.example.org` makes:
    python examples/parameter_server.py --listen 0.0.0.0:29400 --tls keys/server
    python examples/worker.py ps.example.org:29400 --tls keys/worker
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline

SHARDS = 2  # the data is dealt to so many workers, for the whole run; the first round waits for them, at most a minute


def network():
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def digits():  # 1,500 images to train on, 297 to test
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]
    return (inputs[:1500], targets[:1500]), (inputs[1500:], targets[1500:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:29400")
    parser.add_argument("--tls", help="keys/server, on any address that other machines reach")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--out", default="runs/spot", help="folder for checkpoints, trace, report and weights")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, or begin it")
    options = parser.parse_args()
    options.resume = options.resume and Path(options.out, "trace.jsonl").exists()
    (_, (inputs, targets)), model = digits(), network()

    def evaluate(model):  # gets a copy of the model, in eval mode, every ten rounds; training does not wait for it
        outputs = model(inputs)
        return nn.functional.cross_entropy(outputs, targets), (outputs.argmax(1) == targets).float().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = paceline.LGC(k=2)  # two gradients close a round; where one worker is left, its own does
    outcome = paceline.serve(model, optimizer, strategy=strategy, workers=SHARDS, evaluate=evaluate, **vars(options))
    torch.save(model.state_dict(), Path(options.out, "model.pt"))
    print(f"{outcome.reason}; accuracy {evaluate(model.eval())[1]:.1%}")
    raise SystemExit(not outcome.finished)  # stopped by SIGTERM or Ctrl-C: 1, after a checkpoint


if __name__ == "__main__":
    main()
