"""The training loop of a recipe's worker: its own batches, block by block, at the pace that was asked for.

Injected delays are those of the simulator: a batch that is to take d seconds in s blocks has done block i no sooner
than i * d / s after it began. A machine that is slower than that is not slowed down further.

Where samples are pruned, a worker judges the losses of what it has sent, and nothing else. A connection that is lost is
the end of what it knows: with the next it begins empty, as does whoever else takes its number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from paceline.drivers.served.messages import Welcome
from paceline.drivers.served.worker import Worker
from paceline.training import Batches, Training
from paceline.workers.gradients import accumulate

Delay = Callable[[int, int], float]


def no_delay(worker: int, draw: int) -> float:
    """The null delay.

    >>> no_delay(3, 7)
    0.0
    """
    return 0.0


def work(worker: Worker, module: nn.Module, training: Training, delay_seconds: Delay = no_delay) -> None:
    """Train until the server says that it is over; `module` is the one the worker holds."""
    batches = Batches(training)
    welcome: Welcome | None = None
    module.train()
    while worker.training():
        number, draw = worker.number, worker.draw
        if worker.welcome is not welcome:  # a connection of its own has its own
            welcome = worker.welcome
            batches.joined(number, draw=draw)
        assignment = batches.assignment(worker=number, shard=worker.shard, draw=draw, blocks_done=training.blocks)
        pace = _Pace(delay_seconds(number, draw) / training.blocks)
        worker.begin_batch(training.blocks)
        torch.default_generator.manual_seed(assignment.seed)

        def go_on(done: int, pace: _Pace = pace) -> bool:
            pace.keep(done)
            return worker.block_done()

        losses, _ = accumulate(module, assignment, parts=training.blocks, go_on=go_on)
        if worker.send(losses):
            batches.judge(worker=number, draw=draw, losses=losses)


class _Pace:
    """Blocks are done no sooner than one by one in so many seconds each."""

    def __init__(self, block_seconds: float) -> None:
        self._block_seconds = block_seconds
        self._began = time.monotonic()

    def keep(self, done: int) -> None:
        wait = self._began + done * self._block_seconds - time.monotonic()
        if wait > 0:
            time.sleep(wait)
