"""One run of `pruning`: a plain loop over the batches of a sampler, as a user would write it.

    for epoch in range(epochs):
        for indices in sampler:                                     rate by epoch + share of this epoch's steps done
            losses = cross_entropy(model(images[indices]), ..., reduction="none")
            sampler.observe(losses).backward()
        test                                                        the clocks stand still

The rate goes by the epoch, and inside one by the share of its own steps: an epoch that is shorter falls as early.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.utils.data import BatchSampler, RandomSampler

from benchmarks.large_batch_training import accuracy
from benchmarks.pruning_cases import MODELS, POLICIES, Ending, Size, Task
from paceline.data import PadCropFlip, Samples, load_dataset
from paceline.data.download import VARIABLE
from paceline.data.reading import DatasetError
from paceline.models import build_model
from paceline.randomness import torch_generator


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """The images, shrunk."""

    training: Samples
    test: Samples
    input_shape: tuple[int, int, int]
    classes: int


@lru_cache(maxsize=1)
def load(size: Size) -> Parts:
    """The images, once per process; nothing is ever fetched."""
    try:
        whole = load_dataset(size.data, download=False)
    except DatasetError as error:
        raise ValueError(f"{error}, or name another folder in ${VARIABLE}") from error
    if size.images > len(whole.train):
        raise ValueError(
            f"images must be at most the {len(whole.train)} training images of {size.data} (images={size.images})"
        )
    training, test = (avg_pool2d(part.inputs, size.shrink) for part in (whole.train, whole.test))
    training = training[: size.images]
    mean, deviation = training.mean((0, 2, 3), keepdim=True), training.std((0, 2, 3), keepdim=True).clamp_min(1e-6)
    channels, height, width = training.shape[1:]
    return Parts(
        training=_normalised(training, mean, deviation, whole.train.targets[: size.images]),
        test=_normalised(test, mean, deviation, whole.test.targets),
        input_shape=(channels, height, width),
        classes=whole.classes,
    )


def _normalised(inputs: Tensor, mean: Tensor, deviation: Tensor, targets: Tensor) -> Samples:
    """Averaging over squares takes from the deviation: here it is 1 again."""
    inputs = (inputs - mean) / deviation
    return Samples(inputs=inputs.contiguous(memory_format=torch.channels_last), targets=targets)


class Unpruned(BatchSampler):
    """Torch's own sampler of random batches; `observe` is what a loop without pruning does."""

    @staticmethod
    def observe(losses: Tensor) -> Tensor:
        """Their mean."""
        return losses.mean()


def make_sampler(size: Size, task: Task) -> tuple[Any, dict[str, Any]]:
    """The batch sampler of a run, and the settings that it was made with."""
    way = POLICIES[task.policy]
    settings = way.settings(size)
    if not way.sampler:
        order = RandomSampler(range(size.images), generator=torch_generator(task.seed, "order"))
        return Unpruned(order, size.batch, drop_last=True), settings
    make = way.sampler
    return make(size.images, batch_size=size.batch, drop_last=True, seed=task.seed, **settings), settings


class Clocks:
    """Seconds of the wall and of this process, added up over the stretches between `start` and `stop`."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        """A stretch begins."""
        self.wall -= time.perf_counter()
        self.cpu -= time.process_time()

    def stop(self) -> None:
        """It ends."""
        self.wall += time.perf_counter()
        self.cpu += time.process_time()


def train(size: Size, task: Task) -> Ending:
    """Carry out one run."""
    parts, epochs = load(size), POLICIES[task.policy].epochs(size)
    model = build_model(MODELS[task.model], input_shape=parts.input_shape, classes=parts.classes, seed=task.seed)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=size.rate,
        momentum=size.momentum,
        weight_decay=size.weight_decay,
        nesterov=True,
        fused=True,
    )
    training, sampling = Clocks(), Clocks()
    training.start()
    sampler, settings = make_sampler(size, task)
    training.stop()
    loop = Loop(size=size, parts=parts, model=model, optimizer=optimizer, sampler=sampler, sampling=sampling)
    accuracies, samples, steps = [], 0, 0
    for epoch in range(epochs):
        training.start()
        taken, seen = loop.epoch(epoch, epochs, torch_generator(task.seed, "augment", epoch))
        training.stop()
        samples, steps = samples + seen, steps + taken
        accuracies.append(accuracy(model, parts.test))
    return Ending(
        accuracies=accuracies,
        samples=samples,
        steps=steps,
        wall_seconds=training.wall,
        cpu_seconds=training.cpu,
        sampling_seconds=sampling.cpu,
        settings=settings,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Loop:
    """What an epoch of training takes."""

    size: Size
    parts: Parts
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    sampler: Any
    sampling: Clocks

    def epoch(self, epoch: int, epochs: int, generator: torch.Generator) -> tuple[int, int]:
        """One pass over the batches of the sampler: how many steps and samples it had."""
        vary = PadCropFlip(padding=self.size.padding)
        self.model.train()
        steps = samples = 0
        self.sampling.start()
        in_epoch, batches = len(self.sampler), iter(self.sampler)
        batch = next(batches, None)
        self.sampling.stop()
        while batch is not None:
            self._set_rate((epoch + steps / in_epoch) / epochs)
            indices = torch.as_tensor(batch)
            inputs = vary(self.parts.training.inputs[indices], generator)
            outputs = self.model(inputs.contiguous(memory_format=torch.channels_last))
            losses = cross_entropy(outputs, self.parts.training.targets[indices], reduction="none")
            self.sampling.start()
            loss = self.sampler.observe(losses)
            self.sampling.stop()
            if not math.isfinite(loss.item()):
                raise ValueError(f"the loss is {loss.item()} in epoch {epoch + 1}: rate={self.size.rate} is too high")
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            steps, samples = steps + 1, samples + len(batch)
            self.sampling.start()
            batch = next(batches, None)
            self.sampling.stop()
        return steps, samples

    def _set_rate(self, progress: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.size.rate_at(progress)
