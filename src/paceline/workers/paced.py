"""A batch of a recipe's worker, block by block, at the pace that was asked for.

Injected delays are those of the simulator: a batch that is to take d seconds in s blocks has done block i no sooner
than i * d / s after it began. A machine that is slower than that is not slowed down further.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from paceline.workers.gradients import Assignment, accumulate
from paceline.workers.losses import SampleLoss

Delay = Callable[[int, int], float]  # of a worker and the number of its batch: the least seconds it takes


def no_delay(worker: int, draw: int) -> float:
    """The null delay.

    >>> no_delay(3, 7)
    0.0
    """
    return 0.0


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
