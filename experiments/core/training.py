"""The one loop of small training runs: batches of indices in, a summed loss out, epoch by epoch.

    for indices in batches(epoch):                        accumulate: parts of a batch, one step for all of them
        loss = cross_entropy(model(vary(images)), ...)    observe: makes one loss of the losses of the samples
        loss.backward()
        before_step(epoch, share of this epoch's steps that are done)                       sets a rate, notes ratios
        optimizer.step()
        after_step()                                                                        a schedule goes on

A run whose loss is not finite has diverged: its epoch is NaN, and it ends nothing but itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.data import Augmentation, NoAugmentation, Samples
from paceline.optim.accumulate import Accumulate
from paceline.randomness import torch_generator

EVALUATED_AT_ONCE = 1000


@dataclass(kw_only=True)
class Clock:
    """Seconds of the wall and of this process, added up over the stretches inside of `with clock:`.

    >>> clock = Clock()
    >>> with clock:
    ...     _ = sum(range(1000))
    >>> clock.wall > 0
    True
    """

    wall: float = 0.0
    cpu: float = 0.0

    def __enter__(self) -> None:
        self.wall -= time.perf_counter()
        self.cpu -= time.process_time()

    def __exit__(self, *error: object) -> None:
        self.wall += time.perf_counter()
        self.cpu += time.process_time()


@dataclass(kw_only=True)
class Loop:
    """What an epoch of training takes.

    `batches(epoch)` returns the batches of an epoch, or their parts where there is an `accumulate`: indices of samples,
    with a length. `observe` takes the losses of a batch's samples, one each, and returns the loss to go back from; it
    never hears losses that are not finite. `sampling` is the time of taking batches and of observing. How images are
    varied follows from the seed and the epoch.

    >>> samples = Samples(inputs=torch.eye(4).view(4, 1, 2, 2), targets=torch.arange(4))
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    >>> loop = Loop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), samples=samples, seed=0,
    ...             batches=lambda epoch: [[0, 1], [2, 3]])
    >>> loop.epoch(0) > loop.epoch(1), loop.steps, loop.seen
    (True, 4, 8)
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    samples: Samples
    batches: Callable[[int], Any]
    seed: int
    vary: Augmentation = field(default_factory=NoAugmentation)
    accumulate: Accumulate | None = None
    observe: Callable[[Tensor], Tensor] | None = None
    before_step: Callable[[int, float], None] = lambda epoch, share: None
    after_step: Callable[[], None] = lambda: None
    sampling: Clock = field(default_factory=Clock)
    steps: int = 0
    seen: int = 0

    def epoch(self, number: int) -> float:
        """Train for an epoch; return the sum of its samples' losses, or NaN as soon as one is not finite."""
        self.model.train()
        drawn, total, done = torch_generator(self.seed, "augment", number), 0.0, 0
        with self.sampling:
            batches = self.batches(number)
            steps = math.ceil(len(batches) / (self.accumulate.steps if self.accumulate else 1))
            parts = self._parts(iter(batches))
        for inputs, targets in self.accumulate(parts) if self.accumulate else parts:
            images = self.vary(inputs, drawn).contiguous(memory_format=torch.channels_last)
            loss = self._loss(self.model(images), targets)
            value = loss.item()
            if not math.isfinite(value):
                return math.nan
            total += value * len(targets)
            if self.accumulate:
                self.accumulate.backward(loss)
            else:
                torch.autograd.backward(loss)
            if self.accumulate is None or self.accumulate.ready:
                self.before_step(number, done / steps)
                self.optimizer.step()
                self.after_step()
                self.optimizer.zero_grad()
                done, self.steps = done + 1, self.steps + 1
        return total

    def _parts(self, batches: Iterator[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            with self.sampling:
                batch = next(batches, None)
            if batch is None:
                return
            indices = torch.as_tensor(batch)
            self.seen += len(indices)
            yield self.samples.inputs[indices], self.samples.targets[indices]

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.observe is None:
            return cross_entropy(outputs, targets)
        losses = cross_entropy(outputs, targets, reduction="none")
        if not losses.isfinite().all():
            return losses.mean()
        with self.sampling:
            return self.observe(losses)


@torch.inference_mode()
def loss_and_accuracy(model: nn.Module, samples: Samples, *, most: int | None = None) -> tuple[float, float]:
    """Return the mean loss of the first samples, and the per cent that are classified rightly, as a model predicts.

    >>> images = Samples(inputs=torch.zeros(4, 2), targets=torch.tensor([0, 0, 0, 1]))
    >>> loss, right = loss_and_accuracy(nn.Identity(), images)
    >>> round(loss, 3), right
    (0.693, 75.0)
    """
    model.eval()
    losses, right, count = 0.0, 0, 0
    for inputs, targets in samples.parts(EVALUATED_AT_ONCE, most=most):
        scores = model(inputs)
        losses += float(cross_entropy(scores, targets, reduction="sum"))
        right += int((scores.argmax(1) == targets).sum())
        count += len(targets)
    return losses / count, 100 * right / count


def accuracy(model: nn.Module, samples: Samples) -> float:
    """Return the per cent of the samples that are classified rightly.

    >>> images = Samples(inputs=torch.tensor([[0.0, 1.0], [1.0, 0.0]]), targets=torch.tensor([1, 1]))
    >>> accuracy(nn.Identity(), images)
    50.0
    """
    return loss_and_accuracy(model, samples)[1]
