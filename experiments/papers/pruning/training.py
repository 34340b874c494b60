"""Training with pruning as a script does it: how large a run is, the policies, and what a job of them runs.

    for epoch in range(epochs):
        for indices in sampler:                                     rate by epoch + share of this epoch's steps done
            losses = cross_entropy(model(images[indices]), ..., reduction="none")
            sampler.observe(losses).backward()
        test                                                        the clocks stand still

The rate goes by the epoch, and inside one by the share of its own steps: an epoch that is shorter falls as early.
Images are averaged over squares of `shrink` pixels and varied by padding, cropping and mirroring.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from experiments.core.images import Images, load_images
from experiments.core.networks import build_network
from experiments.core.story import NAN, Size
from experiments.core.training import Clock, Loop, accuracy
from experiments.papers.pruning.setting import CIFAR_SAMPLES
from experiments.papers.pruning.turns import TakeTurns
from experiments.papers.published import PRUNING_EPOCHS
from paceline.data import PadCropFlip
from paceline.data.pruning.fine_pruning import FineSchedule
from paceline.data.pruning.sampler import FinePruning, InfoBatch
from paceline.randomness import torch_generator

WHOLE, FEWER_EPOCHS, FINE_PRUNING, TRIED = "none", "fewer-epochs", "fine-pruning", "take-turns"
SAVES_AT_LEAST = 0.15  # of the samples: the paper's 14 % of the time, and what the time saved may fall short of it


# -- sizes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PruningSize:
    """How much is trained, and with what; the same for every run of a table."""

    data: str = "cifar10"
    shrink: int = 2  # images are averaged over squares of so many pixels
    images: int = 50_000
    epochs: int = 50
    batch: int = 128
    rate: float = 0.05
    falls_at: Sequence[float] = (0.3, 0.6, 0.8)  # the paper's 60, 120 and 160 of 200 epochs
    falls_to: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    padding: int = 2
    torch: str = field(default_factory=lambda: version("torch"))
    fewer: float = 0.3  # share of the epochs that the control leaves out; the others do not care

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

    @property
    def document(self) -> dict[str, Any]:
        """Itself as plain values, of which `PruningSize(**document)` makes it again."""
        return {**dataclasses.asdict(self), "falls_at": list(self.falls_at)}

    def rate_at(self, progress: float) -> float:
        """Return the learning rate where so much of the run is done.

        >>> [round(PruningSize(rate=0.1).rate_at(share), 5) for share in (0, 0.29, 0.3, 0.6, 0.8, 0.99)]
        [0.1, 0.1, 0.02, 0.004, 0.0008, 0.0008]
        """
        return float(self.rate * self.falls_to ** sum(progress >= share for share in self.falls_at))

    def load_images(self) -> Images:
        """Load the images, once per process; nothing is ever fetched."""
        return load_images(self.data, images=self.images, shrink=self.shrink, normalise=True)


TOY_SIZE = PruningSize(data="digits", shrink=1, images=128, epochs=10, batch=32, padding=1)


def pruning_size(size: Size, **laboratory: Any) -> PruningSize:
    """Return how much is trained at a size: digits, what the laboratory is given, or the paper's own.

    >>> pruning_size(Size(), images=5_000).images, pruning_size(Size("full"), images=5_000).images
    (5000, 50000)
    """
    full = PruningSize(shrink=1, images=CIFAR_SAMPLES, epochs=PRUNING_EPOCHS, padding=4)
    chosen: PruningSize = size.pick(TOY_SIZE, PruningSize(**laboratory), full)
    return chosen


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Policy:
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


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        WHOLE: Policy(label="none"),
        FEWER_EPOCHS: Policy(label="none, fewer epochs", settings=fewer_settings),
        FINE_PRUNING: Policy(label="fine-pruning", sampler=FinePruning, settings=fine_settings),
        "info-batch": Policy(
            label="info-batch",
            sampler=InfoBatch,
            settings=lambda size: {"epochs": size.epochs, "ratio": 0.5, "delta": 0.875},  # as its authors run it
        ),
        TRIED: Policy(
            label="take-turns",
            sampler=TakeTurns,
            settings=lambda size: {"epochs": size.epochs, "ratio": 0.6, "delta": 0.875},
        ),
    }
)
"""Two controls, every policy of the library by its name, and one that was tried."""


# -- runs --------------------------------------------------------------------------------------------------------------


def make_sampler(size: PruningSize, policy: str, seed: int) -> Any:
    """Return the batch sampler of a run."""
    make, settings = POLICIES[policy].sampler, POLICIES[policy].settings(size)
    if make is None:
        order = RandomSampler(range(size.images), generator=torch_generator(seed, "order"))
        return BatchSampler(order, size.batch, drop_last=True)
    return make(size.images, batch_size=size.batch, drop_last=True, seed=seed, **settings)


def make_loop(size: PruningSize, network: str, seed: int, sampler: Any, *, epochs: int) -> Loop:
    """Return the loop of a run: its images, a new network, SGD with Nesterov momentum, and this sampler."""
    images = size.load_images()
    model = build_network(network, input_shape=images.input_shape, classes=images.classes, seed=seed)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=size.rate,
        momentum=size.momentum,
        weight_decay=size.weight_decay,
        nesterov=True,
        fused=True,
    )

    def set_rate(epoch: int, share: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = size.rate_at((epoch + share) / epochs)

    return Loop(
        model=model,
        optimizer=optimizer,
        samples=images.training,
        batches=lambda epoch: sampler,
        seed=seed,
        vary=PadCropFlip(padding=size.padding),
        observe=getattr(sampler, "observe", torch.mean),  # the mean is what a loop without pruning takes
        before_step=set_rate,
    )


def mean_of_three(accuracies: Sequence[float]) -> float:
    """Return the mean of the last three; NaN where there is none.

    >>> mean_of_three([90.0, 10.0, 20.0, 30.0]), mean_of_three([7.0])
    (20.0, 7.0)
    """
    last = accuracies[-3:]
    return sum(last) / len(last) if last else NAN


def run_training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train with a policy; return accuracies in per cent after each epoch, samples and seconds.

    Seconds are those of training; testing is not among them. Those of sampling are CPU seconds of taking batches and of
    making one loss of a batch's losses. `last_three` is the mean of the last three epochs: what the run came to,
    whatever epoch was lucky. `best_three` is the paper's. A run that diverged has none of these figures.

    >>> tiny = PruningSize(data="digits", shrink=1, images=64, epochs=2, batch=32, padding=1)
    >>> found = run_training({"size": tiny.document, "model": "lenet", "policy": "none", "seed": 0})
    >>> found["samples"], len(found["accuracies"])
    (128, 2)
    """
    size, policy, seed = PruningSize(**settings["size"]), POLICIES[settings["policy"]], settings["seed"]
    images, epochs, clock = size.load_images(), policy.epochs(size), Clock()
    with clock:
        sampler = make_sampler(size, settings["policy"], seed)
    loop = make_loop(size, settings["model"], seed, sampler, epochs=epochs)
    accuracies: list[float] = []
    diverged = False
    for epoch in range(epochs):
        with clock:
            diverged = math.isnan(loop.epoch(epoch))
        if diverged:
            break
        accuracies.append(accuracy(loop.model, images.test))
    figures = {
        "samples": loop.seen,
        "steps": loop.steps,
        "wall_seconds": clock.wall,
        "cpu_seconds": clock.cpu,
        "sampling_seconds": loop.sampling.cpu,
        "best_three": mean_of_three(sorted(accuracies)),
        "last_three": mean_of_three(accuracies),
    }
    found: dict[str, Any] = dict.fromkeys(figures, NAN) if diverged else figures
    return {"accuracies": accuracies, "settings": policy.settings(size), **found}
