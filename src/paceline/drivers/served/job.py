"""The training loop of a recipe's worker: its own batches, block by block, at the pace that was asked for.

Where samples are pruned, a worker judges the losses of what it has sent, and nothing else. A connection that is lost is
the end of what it knows: with the next it begins empty, as does whoever else takes its number.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from paceline.drivers.served.messages import Welcome
from paceline.drivers.served.worker import Worker
from paceline.training import Batches, Training
from paceline.training.batches import BatchPlace
from paceline.workers.paced import Delay, compute_blocks, no_delay


def work(
    worker: Worker,
    module: nn.Module,
    training: Training,
    delay_seconds: Delay = no_delay,
    *,
    on_gradient: Callable[[int], None] = lambda sent: None,
) -> None:
    """Train until the server says that it is over; `module` is the one the worker holds.

    `on_gradient` is called with the number of gradients that were sent, after each.
    """
    sent = 0
    batches = Batches(training)
    welcome: Welcome | None = None
    module.train()
    while worker.running():
        number, draw = worker.number, worker.draw
        if worker.welcome is not welcome:  # a connection of its own has its own
            welcome = worker.welcome
            batches.joined(number, draw=draw)
        place = BatchPlace(first=worker.first_sample, samples=worker.samples) if worker.samples else None
        assignment = batches.assignment(
            worker=number, shard=worker.shard, draw=draw, blocks_done=training.blocks, place=place
        )
        worker.begin_batch(training.blocks, samples=worker.samples)
        losses = compute_blocks(
            module,
            assignment,
            training.loss,
            least_seconds=delay_seconds(number, draw, worker.samples or None),
            block_done=worker.block_done,
        )
        if worker.send(losses):
            batches.judge(worker=number, draw=draw, losses=losses)
            sent += 1
        on_gradient(sent)
