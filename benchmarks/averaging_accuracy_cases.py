"""What `averaging-accuracy` runs: settings, optimisers, members, and the recipe of each run."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.recipes import Recipe

FIXED_SECONDS, RANDOM_SECONDS = 0.9, 0.1  # of a step, which takes a second in the mean


def small_cnn(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Two convolutions that halve each side, and two linear layers: a third of LeNet's time, which pools in between."""
    channels, height, width = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * math.ceil(height / 4) * math.ceil(width / 4), 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is trained: some of the training images often, so that accuracy comes to where it stays."""

    data: str = "fashion-mnist"
    images: int = 12_000
    rounds: int = 800
    batch_size: int = 32


QUICK = Size(data="digits", images=300, rounds=2, batch_size=8)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A cluster, and who holds what."""

    name: str
    workers: int = 4
    ring_steps: float = 2.0  # one all-reduce, in steps of computation
    classes_per_worker: int | None = None
    slow_factor: float = 1.0
    claimed: bool = True
    beside: str = ""  # whose ssgd it is measured against; with an equal one here, its own

    @property
    def reference(self) -> str:
        """The setting whose ssgd is compared with; the network does not change where ssgd ends."""
        return self.beside or self.name


IID = Setting(name="iid")
IID_SMALL = Setting(name="iid, small rates")
LONG = Setting(name="long windows", ring_steps=8.0, beside=IID_SMALL.name)
NON_IID = Setting(name="non-IID(2), one slow", workers=5, classes_per_worker=2, slow_factor=3.0, claimed=False)


@dataclass(frozen=True, kw_only=True)
class Local:
    """A worker's optimiser."""

    name: str
    momentum: float
    rate: float

    def __str__(self) -> str:
        return f"{self.name}, {self.rate:g}"


PLAIN = tuple(Local(name="plain", momentum=0.0, rate=rate) for rate in (0.4, 0.2))
MOMENTUM = Local(name="momentum", momentum=0.9, rate=0.04)
SMALL = (Local(name="plain", momentum=0.0, rate=0.1), dataclasses.replace(MOMENTUM, rate=0.01))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A member of the family with its settings."""

    strategy: str
    rebase: bool = False
    normalize: bool = False

    def __str__(self) -> str:
        words = ["no rebase"] * (self.strategy == "hpsgd" and not self.rebase) + ["normalize"] * self.normalize
        return ", ".join([self.strategy, *words])


SSGD, LOCAL_SGD, HPSGD = (Entry(strategy=name) for name in ("ssgd", "local-sgd", "hpsgd"))
REBASE = dataclasses.replace(HPSGD, rebase=True)
NORMALIZED = tuple(dataclasses.replace(entry, normalize=True) for entry in (HPSGD, REBASE))


@dataclass(frozen=True, kw_only=True)
class Part:
    """One table: a setting, and who runs in it."""

    setting: Setting
    entries: tuple[Entry, ...]
    locals: tuple[Local, ...] = SMALL


PARTS = (
    Part(setting=IID, entries=(SSGD, LOCAL_SGD, HPSGD, REBASE), locals=(*PLAIN, MOMENTUM)),
    Part(setting=IID_SMALL, entries=(SSGD, LOCAL_SGD, HPSGD, REBASE)),
    Part(setting=LONG, entries=(HPSGD, REBASE)),
    Part(setting=NON_IID, entries=(SSGD, LOCAL_SGD, HPSGD, REBASE, *NORMALIZED)),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run."""

    setting: Setting
    local: Local
    entry: Entry
    seed: int
    size: Size

    def recipe(self, network_bits_per_second: float) -> Recipe:
        """All of it; measured at the end alone."""
        setting, held = self.setting, self.setting.classes_per_worker
        return Recipe().with_settings(
            seed=self.seed,
            rounds=self.size.rounds,
            evaluate_every=self.size.rounds * 2,
            evaluation_samples=10_000,
            data=data_of(self.size) | ({"split": "non-iid", "classes_per_worker": held} if held else {"split": "iid"}),
            model={"name": f"{small_cnn.__module__}:{small_cnn.__name__}"},
            worker={"batch_size": self.size.batch_size, "blocks": 1},
            optimizer={"lr": self.local.rate, "momentum": self.local.momentum, "decay_at": (0.6, 0.85)},
            cluster={"workers": setting.workers},
            delay={
                "name": "slow-worker",
                "slow_factor": setting.slow_factor,
                "shift_seconds": FIXED_SECONDS,
                "mean_seconds": RANDOM_SECONDS,
                "persistence": 1,
            },
            network={"worker_bits_per_second": network_bits_per_second},
            strategy={"name": self.entry.strategy, "rebase": self.entry.rebase, "normalize": self.entry.normalize},
        )


def data_of(size: Size) -> dict[str, Any]:
    """The recipe's section; nothing is ever fetched."""
    return {"name": size.data, "download": False}


def all_tasks(size: Size, *, seeds: int, quick: bool) -> list[Task]:
    """Every run, a whole part after the other; quick: every other member, and not with plain SGD."""
    return [
        Task(setting=part.setting, local=local, entry=entry, seed=seed, size=size)
        for part in PARTS
        for seed in range(seeds)
        for local in part.locals
        for entry in part.entries[:: 2 if quick else 1]
        if local.momentum or not quick
    ]
