"""A batch of a recipe's worker, block by block, at the pace that was asked for.

Injected delays are those of the simulator: a batch that is to take d seconds in s blocks has done block i no sooner
than i * d / s after it began. A machine that is slower than that is not slowed down further.

A delay d is that of a batch of `batch_size` samples. Of it `fixed_seconds` are the same for a batch of any size, and
the rest is in proportion to the samples:

    d  |ffff|................|            batch_size samples
       |ffff|........|                    half as many
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from paceline.workers.gradients import Assignment, accumulate
from paceline.workers.losses import SampleLoss


class Delay(Protocol):
    """The least seconds that a worker's batch number `draw` takes; `samples` are its size, None: `batch_size`."""

    def __call__(self, worker: int, draw: int, samples: int | None = None, /) -> float: ...


def no_delay(worker: int, draw: int, samples: int | None = None, /) -> float:
    """The null delay.

    >>> no_delay(3, 7)
    0.0
    """
    return 0.0


def seconds_of_batch(seconds: float, samples: int, *, batch_size: int, fixed_seconds: float = 0.0) -> float:
    """Return how long a batch of `samples` takes where one of `batch_size` takes `seconds`.

    `fixed_seconds` of them do not depend on the samples; a delay that is shorter than that is fixed as a whole. A batch
    of `batch_size` takes `seconds`, to the bit.

    >>> seconds_of_batch(0.5, 16, batch_size=32, fixed_seconds=0.25), seconds_of_batch(0.1, 16, batch_size=32)
    (0.375, 0.05)
    >>> seconds_of_batch(0.1, 16, batch_size=32, fixed_seconds=0.25)
    0.1
    """
    if samples == batch_size:
        return seconds
    fixed = min(fixed_seconds, seconds)
    return fixed + (seconds - fixed) * samples / batch_size


def compute_blocks(
    module: nn.Module,
    assignment: Assignment,
    loss: SampleLoss,
    *,
    least_seconds: float,
    block_done: Callable[[], bool],
) -> torch.Tensor:
    """Add the gradient of a batch to `.grad`, block by block; return the loss of every sample in it.

    `block_done` is called after each block, and says whether to go on with the next.

    >>> from paceline.workers.losses import CrossEntropy
    >>> batch = Assignment(inputs=torch.ones(4, 2), targets=torch.zeros(4, dtype=torch.int64), blocks=2, blocks_done=2)
    >>> len(compute_blocks(nn.Linear(2, 2), batch, CrossEntropy(), least_seconds=0.0, block_done=lambda: False))
    2
    """
    began, block_seconds = time.monotonic(), least_seconds / assignment.blocks
    torch.default_generator.manual_seed(assignment.seed)

    def go_on(done: int) -> bool:
        wait = began + done * block_seconds - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return block_done()

    losses, _ = accumulate(module, assignment, loss, parts=assignment.blocks, go_on=go_on)
    return losses
