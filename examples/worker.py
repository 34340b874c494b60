"""A worker of examples/parameter_server.py on its own data: it may join at any time, and leave or die at any time.

The server on this machine, or on another:
    python examples/worker.py
    python examples/worker.py ps.example.org:29400 --tls keys/worker
"""

import argparse
import signal
import sys

import torch
from parameter_server import SHARDS, digits, network  # the model must be the server's; the data is the worker's own
from torch import nn

import paceline


def batches(inputs, targets, size=32):
    while True:
        for rows in torch.randperm(len(targets)).split(size):
            yield inputs[rows], targets[rows]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address", nargs="?", default="127.0.0.1:29400")
    parser.add_argument("--tls", help="keys/worker, where the server has keys/server")
    parser.add_argument("--patience-seconds", type=float, default=60, help="how long to look for a lost server")
    options = parser.parse_args()
    torch.set_num_threads(1)  # several workers share this machine; leave it out where a worker has one of its own
    model = network()
    # SIGTERM is the notice of a spot machine that goes: leaving the `with` tells the server so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to go"))
    with paceline.Worker(options.address, model, tls=options.tls, patience_seconds=options.patience_seconds) as worker:
        print(f"worker {worker.number}: shard {worker.shard} of {SHARDS}", flush=True)
        (inputs, targets), _ = digits()
        torch.manual_seed(worker.number)
        samples, done = batches(inputs[worker.shard :: SHARDS], targets[worker.shard :: SHARDS]), 0
        while worker.running():  # the server says when it is over
            for x, y in worker.blocks(*next(samples)):  # ends early once the round has closed
                nn.functional.cross_entropy(model(x), y).backward()
            done += worker.send()  # gradient out, new parameters in
    print(f"worker {worker.number}: training is over, {done} gradients sent")


if __name__ == "__main__":
    main()
