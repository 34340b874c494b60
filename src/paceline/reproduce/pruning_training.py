"""Training with pruning as a script does it: the plain loop of the pruning experiments, and what they run.

    for epoch in range(epochs):
        for indices in sampler:                                     rate by epoch + share of this epoch's steps done
            losses = cross_entropy(model(images[indices]), ..., reduction="none")
            sampler.observe(losses).backward()
        test                                                        the clocks stand still

The rate goes by the epoch, and inside one by the share of its own steps: an epoch that is shorter falls as early.
Images are averaged over squares of `shrink` pixels and varied by padding, cropping and mirroring.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy
from torch.utils.data import BatchSampler, RandomSampler

from paceline.data import PadCropFlip, Samples, load_dataset
from paceline.data.download import VARIABLE
from paceline.data.pruning.fine_pruning import FineSchedule
from paceline.data.pruning.sampler import FinePruning, InfoBatch
from paceline.data.reading import DatasetError
from paceline.models import build_model
from paceline.models.layers import initialise
from paceline.randomness import torch_generator

WHOLE, FEWER_EPOCHS, FINE_PRUNING, INFO_BATCH = "none", "fewer-epochs", "fine-pruning", "info-batch"
EVALUATED_AT_ONCE = 1000


# -- networks --------------------------------------------------------------------------------------------------------


def small_cnn(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return three convolutions with batch normalisation, each followed by a pooling, and one linear layer."""
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for wide in (16, 32, 64):
        layers += [
            nn.Conv2d(channels, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
        ]
        channels, height, width = wide, math.ceil(height / 2), math.ceil(width / 2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * height * width, classes))
    initialise(model)
    return model


MODELS = MappingProxyType({"lenet": "lenet", "small-cnn": f"{__name__}:{small_cnn.__name__}"})
"""Networks by their names here, and what `build_model` calls them; any other has the same name for both."""


# -- sizes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PruningSize:
    """How much is trained, and with what; the same for every run. Runs of one size can stand in one table."""

    data: str = "cifar10"
    shrink: int = 2  # images are averaged over squares of so many pixels
    images: int = 50_000
    epochs: int = 50
    batch: int = 128
    rate: float = 0.05
    falls_at: tuple[float, ...] = (0.3, 0.6, 0.8)  # the paper's 60, 120 and 160 of 200 epochs
    falls_to: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    padding: int = 2
    torch: str = field(default_factory=lambda: version("torch"))
    fewer: float = field(
        default=0.3, compare=False
    )  # share of the epochs that the control leaves out; others do not care

    def __post_init__(self) -> None:
        if self.shrink < 1:
            raise ValueError(f"shrink must be at least 1 pixel (shrink={self.shrink})")
        if self.images < self.batch:
            raise ValueError(f"images must be at least one batch of {self.batch} (images={self.images})")
        if self.epochs < 1:
            raise ValueError(f"epochs must be at least 1 (epochs={self.epochs})")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be above 0 and finite (rate={self.rate})")
        if not 0 <= self.fewer < 1:
            raise ValueError(f"fewer must be at least 0 and below 1 (fewer={self.fewer})")

    def rate_at(self, progress: float) -> float:
        """Return the learning rate where so much of the run is done.

        >>> [round(PruningSize(rate=0.1).rate_at(share), 5) for share in (0, 0.29, 0.3, 0.6, 0.8, 0.99)]
        [0.1, 0.1, 0.02, 0.004, 0.0008, 0.0008]
        """
        return float(self.rate * self.falls_to ** sum(progress >= share for share in self.falls_at))


# -- policies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PruningWay:
    """How a run goes through the samples: which sampler (None: torch's own) with which settings.

    A setting `epochs` is also how many the run has.
    """

    label: str
    sampler: Callable[..., Any] | None = None
    settings: Callable[[PruningSize], dict[str, Any]] = lambda size: {}

    def epochs(self, size: PruningSize) -> int:
        """Return how many epochs a run has.

        >>> [POLICIES[name].epochs(PruningSize(epochs=40)) for name in (WHOLE, FEWER_EPOCHS)]
        [40, 28]
        """
        return int(self.settings(size).get("epochs", size.epochs))


def fewer_settings(size: PruningSize) -> dict[str, Any]:
    """Return the settings of the control: fewer epochs, and the falls of the rate at the same shares of them.

    >>> fewer_settings(PruningSize(epochs=50, fewer=0.3))
    {'epochs': 35}
    """
    return {"epochs": max(1, round(size.epochs * (1 - size.fewer)))}


SAVES_AT_LEAST = 0.15  # of the samples: the paper's 14 % of the time, and what the time saved may fall short of it


def fine_settings(size: PruningSize) -> dict[str, Any]:
    """Return the paper's schedule, 60 of 200 epochs in a window, scaled to this run, which saves 15 % of the samples.

    >>> settings = fine_settings(PruningSize(epochs=50))
    >>> settings["window"], settings["starting_point"], settings["prune"]
    (15, 7, 0.4)
    """
    window = max(2, int(size.epochs * 0.3))
    schedule: dict[str, Any] = {
        "window": window,
        "starting_point": window // 2,
        "attenuation": 2,
        "block": 4,
        "count": 2,
    }
    pruned = sum(map(FineSchedule(**schedule).is_pruned, range(1, size.epochs + 1)))
    hundredths = math.ceil(100 * SAVES_AT_LEAST * size.epochs / pruned - 1e-9) if pruned else 0
    return schedule | {"prune": min(hundredths, 90) / 100}


def info_settings(size: PruningSize) -> dict[str, Any]:
    """Return the settings of InfoBatch as its authors run it.

    >>> info_settings(PruningSize(epochs=50))
    {'epochs': 50, 'ratio': 0.5, 'delta': 0.875}
    """
    return {"epochs": size.epochs, "ratio": 0.5, "delta": 0.875}


POLICIES: Mapping[str, PruningWay] = MappingProxyType(
    {
        WHOLE: PruningWay(label="none"),
        FEWER_EPOCHS: PruningWay(label="none, fewer epochs", settings=fewer_settings),
        FINE_PRUNING: PruningWay(label="fine-pruning", sampler=FinePruning, settings=fine_settings),
        INFO_BATCH: PruningWay(label="info-batch", sampler=InfoBatch, settings=info_settings),
    }
)
"""Every policy of the library by its name, and the two controls."""


# -- runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PruningTask:
    """One run."""

    model: str
    policy: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class PruningEnding:
    """What a run came to. Seconds are those of training; testing is not among them."""

    accuracies: list[float]  # per cent of the test images, after each epoch
    samples: int
    steps: int
    wall_seconds: float
    cpu_seconds: float
    sampling_seconds: float  # of cpu_seconds: taking batches, and making one loss of a batch's losses
    settings: dict[str, Any]  # the policy's

    @property
    def accuracy(self) -> float:
        """The mean of the last three epochs: what the run came to, whatever epoch was lucky."""
        last = self.accuracies[-3:]
        return sum(last) / len(last)

    @property
    def best_three(self) -> float:
        """The mean of the best three epochs, as the paper has it."""
        best = sorted(self.accuracies)[-3:]
        return sum(best) / len(best)


# -- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class PruningImages:
    """The images, shrunk."""

    training: Samples
    test: Samples
    input_shape: tuple[int, int, int]
    classes: int


@lru_cache(maxsize=1)
def load(size: PruningSize) -> PruningImages:
    """Return the images, read once per process; nothing is ever fetched."""
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
    return PruningImages(
        training=_normalised(training, mean, deviation, whole.train.targets[: size.images]),
        test=_normalised(test, mean, deviation, whole.test.targets),
        input_shape=(channels, height, width),
        classes=whole.classes,
    )


def _normalised(inputs: Tensor, mean: Tensor, deviation: Tensor, targets: Tensor) -> Samples:
    """Return images whose deviation is 1 again: averaging over squares takes from it."""
    inputs = (inputs - mean) / deviation
    return Samples(inputs=inputs.contiguous(memory_format=torch.channels_last), targets=targets)


class Unpruned(BatchSampler):
    """Torch's own sampler of random batches; `observe` is what a loop without pruning does."""

    @staticmethod
    def observe(losses: Tensor) -> Tensor:
        """Return their mean."""
        return losses.mean()


def make_sampler(
    size: PruningSize, task: PruningTask, policies: Mapping[str, PruningWay] = POLICIES
) -> tuple[Any, dict[str, Any]]:
    """Return the batch sampler of a run, and the settings that it was made with."""
    way = policies[task.policy]
    settings = way.settings(size)
    if not way.sampler:
        order = RandomSampler(range(size.images), generator=torch_generator(task.seed, "order"))
        return Unpruned(order, size.batch, drop_last=True), settings
    make = way.sampler
    return make(size.images, batch_size=size.batch, drop_last=True, seed=task.seed, **settings), settings


# -- the loop --------------------------------------------------------------------------------------------------------


class Clocks:
    """Seconds of the wall and of this process, added up over the stretches between `start` and `stop`."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        """Begin a stretch."""
        self.wall -= time.perf_counter()
        self.cpu -= time.process_time()

    def stop(self) -> None:
        """End the stretch."""
        self.wall += time.perf_counter()
        self.cpu += time.process_time()


def make_loop(size: PruningSize, task: PruningTask, sampler: Any) -> PruningLoop:
    """Return the loop of a run: its images, a new network, SGD with Nesterov momentum, and this sampler."""
    parts = load(size)
    model = build_model(
        MODELS.get(task.model, task.model), input_shape=parts.input_shape, classes=parts.classes, seed=task.seed
    )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=size.rate,
        momentum=size.momentum,
        weight_decay=size.weight_decay,
        nesterov=True,
        fused=True,
    )
    return PruningLoop(size=size, parts=parts, model=model, optimizer=optimizer, sampler=sampler, sampling=Clocks())


def train(size: PruningSize, task: PruningTask, policies: Mapping[str, PruningWay] = POLICIES) -> PruningEnding:
    """Carry out one run.

    >>> tiny = PruningSize(data="digits", shrink=1, images=64, epochs=2, batch=32, padding=1)
    >>> ending = train(tiny, PruningTask(model="lenet", policy="none", seed=0))
    >>> ending.samples, len(ending.accuracies)
    (128, 2)
    """
    load(size)  # before the clocks run
    epochs = policies[task.policy].epochs(size)
    training = Clocks()
    training.start()
    sampler, settings = make_sampler(size, task, policies)
    training.stop()
    loop = make_loop(size, task, sampler)
    accuracies, samples, steps = [], 0, 0
    for epoch in range(epochs):
        training.start()
        taken, seen = loop.epoch(epoch, epochs, torch_generator(task.seed, "augment", epoch))
        training.stop()
        samples, steps = samples + seen, steps + taken
        accuracies.append(measured(loop.model, loop.parts.test)[1])
    return PruningEnding(
        accuracies=accuracies,
        samples=samples,
        steps=steps,
        wall_seconds=training.wall,
        cpu_seconds=training.cpu,
        sampling_seconds=loop.sampling.cpu,
        settings=settings,
    )


@torch.inference_mode()
def measured(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """Return the mean loss, and per cent of the images that are classified rightly, with the statistics of training.

    >>> images = Samples(inputs=torch.zeros(4, 2), targets=torch.tensor([0, 0, 0, 1]))
    >>> measured(nn.Flatten(), images)[1]
    75.0
    """
    model.eval()
    loss, right = 0.0, 0
    pieces = zip(*(torch.split(each, EVALUATED_AT_ONCE) for each in (samples.inputs, samples.targets)), strict=True)
    for inputs, targets in pieces:
        outputs = model(inputs)
        loss += float(cross_entropy(outputs, targets, reduction="sum"))
        right += int((outputs.argmax(1) == targets).sum())
    return loss / len(samples), 100 * right / len(samples)


@dataclass(frozen=True, kw_only=True, eq=False)
class PruningLoop:
    """What an epoch of training takes."""

    size: PruningSize
    parts: PruningImages
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    sampler: Any
    sampling: Clocks

    def epoch(self, epoch: int, epochs: int, generator: torch.Generator) -> tuple[int, int]:
        """Make one pass over the batches of the sampler; return how many steps and samples it had."""
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
