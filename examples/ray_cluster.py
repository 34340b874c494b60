"""A recipe on a Ray cluster: a parameter server and workers that Ray starts, and starts again when they are lost.

    python examples/ray_cluster.py                              # a Ray of this machine, which ends with the run
    python examples/ray_cluster.py --address 10.0.0.7:6379      # a cluster; call it on one of its nodes

Needs pip install 'paceline[ray]', on every node.
"""

import argparse

import torch
from sklearn.datasets import load_digits

import paceline.ray
from paceline import Recipe


def data():
    """Digits, as (training, test): called on every node, so nothing is copied between them."""
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    return (inputs[:1500], targets[:1500]), (inputs[1500:], targets[1500:])


def net():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", help="of a Ray cluster, as for ray.init")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    # All workers but one close a round; the gradient of the last is added one round later.
    recipe = Recipe(rounds=options.rounds).with_settings(
        cluster={"workers": options.workers},
        strategy={"name": "lgc", "k": max(options.workers - 1, 1)},
        data={"split": "iid"},
    )
    # Ray reserves half a CPU for each process, so that three workers and a server fit on two cores.
    trained = paceline.ray.train(
        recipe, address=options.address, data=data, model=net, cpus_per_worker=0.5, server_cpus=0.5
    )
    summary = trained.result.summary
    print(f"{summary.rounds} rounds in {summary.seconds:.1f} s, test accuracy {trained.result.accuracy:.3f}")
    print(f"gradients: {summary.used} in time, {summary.late} one round late, {summary.dropped} dropped")
