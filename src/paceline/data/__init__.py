"""Samples: data sets, which worker holds which samples, in what order they come, and how they are varied.

The rule of this package: files are data, never programs. Nothing read from a disk or a network is run,
unpacked to a path of its own choosing, or believed about its own size. And nothing here touches a global
random generator: the same seed gives the same samples in the same order, however many workers there are.

Importing this package loads neither torch nor scikit-learn; using it does.

    DATASETS -> load_dataset -> Dataset(train, test) -> split -> BatchOrder -> PadCropFlip -> a worker's batch
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.reading import DatasetError
from paceline.lazy import lazy_names
from paceline.lookup import unknown

if TYPE_CHECKING:
    from paceline.data.augment import Augmentation, ExtendedAugmentation, NoAugmentation, PadCropFlip
    from paceline.data.batches import BatchOrder
    from paceline.data.pruning.policy import PruningError
    from paceline.data.pruning.sampler import FinePruning, InfoBatch
    from paceline.data.samples import Dataset, Samples
    from paceline.data.splits import SPLITS, split

__all__ = [
    "DATASETS",
    "SPLITS",
    "Augmentation",
    "BatchOrder",
    "Dataset",
    "DatasetEntry",
    "DatasetError",
    "ExtendedAugmentation",
    "FinePruning",
    "InfoBatch",
    "NoAugmentation",
    "PadCropFlip",
    "PruningError",
    "Request",
    "Samples",
    "load_dataset",
    "split",
]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of `load_dataset`; each loader reads those that concern it.

    >>> Request(download=False).samples
    2000
    """

    directory: Path | None = None
    download: bool = True
    mirror: str | None = None
    seed: int = 0
    samples: int = 2000
    classes: int = 10
    channels: int = 3
    size: int = 16


@dataclass(frozen=True, kw_only=True)
class DatasetEntry:
    """One line of the table: what a data set is, and the function that loads it.

    `classes` is None where the caller chooses.

    >>> DATASETS["digits"].needs_files
    False
    """

    description: str
    module: str
    function: str
    needs_files: bool
    classes: int | None = 10

    def loader(self) -> Callable[[Request], Dataset]:
        """Import the module of the data set, and return the function that reads it.

        >>> DATASETS["digits"].loader().__name__
        'load_digits'
        """
        found: Callable[[Request], Dataset] = getattr(importlib.import_module(self.module), self.function)
        return found


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(
        description="1,797 handwritten digits of 8x8 pixels, grey; comes with scikit-learn",
        module="paceline.data.digits",
        function="load_digits",
        needs_files=False,
    ),
    "mnist": DatasetEntry(
        description="70,000 handwritten digits of 28x28 pixels, grey; 12 MB",
        module="paceline.data.mnist",
        function="load_mnist",
        needs_files=True,
    ),
    "fashion-mnist": DatasetEntry(
        description="70,000 pieces of clothing of 28x28 pixels, grey; 31 MB",
        module="paceline.data.mnist",
        function="load_fashion_mnist",
        needs_files=True,
    ),
    "cifar10": DatasetEntry(
        description="60,000 photographs of 10 kinds of things, 32x32 pixels, colour; 170 MB",
        module="paceline.data.cifar",
        function="load_cifar10",
        needs_files=True,
    ),
    "cifar100": DatasetEntry(
        description="60,000 photographs of 100 kinds of things, 32x32 pixels, colour; 169 MB",
        module="paceline.data.cifar",
        function="load_cifar100",
        needs_files=True,
        classes=100,
    ),
    "synthetic": DatasetEntry(
        description="made-up images of any size: a pattern for each class, and noise",
        module="paceline.data.synthetic",
        function="load_synthetic",
        needs_files=False,
        classes=None,
    ),
}
"""Every data set by name; adding one is its file and an entry here.

>>> list(DATASETS)
['digits', 'mnist', 'fashion-mnist', 'cifar10', 'cifar100', 'synthetic']
"""


def load_dataset(
    name: str,
    *,
    directory: str | Path | None = None,
    download: bool = True,
    mirror: str | None = None,
    seed: int = 0,
    samples: int = 2000,
    classes: int = 10,
    channels: int = 3,
    size: int = 16,
) -> Dataset:
    """Load a data set by name, its images normalised by the training images' mean and deviation per channel.

    Files are looked for in `directory`, else in $PACELINE_DATA, else in ~/.cache/paceline, and in the
    folders there that other tools make. Missing ones are downloaded unless `download` is off, from
    `mirror` (an http or https address of a folder) if one is given. The last five settings shape
    `synthetic` and no other data set.

    >>> load_dataset("synthetic", samples=64, classes=4, channels=1, size=8).input_shape
    (1, 8, 8)
    >>> len(load_dataset("digits").train)
    1500
    >>> load_dataset("diggits")
    Traceback (most recent call last):
    ValueError: unknown data set 'diggits'; did you mean 'digits'? choose from digits, mnist, ...
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    request = Request(
        directory=None if directory is None else Path(directory),
        download=download,
        mirror=mirror,
        seed=seed,
        samples=samples,
        classes=classes,
        channels=channels,
        size=size,
    )
    return DATASETS[name].loader()(request)


_HOMES = {
    "Augmentation": "augment",
    "ExtendedAugmentation": "augment",
    "NoAugmentation": "augment",
    "PadCropFlip": "augment",
    "BatchOrder": "batches",
    "Dataset": "samples",
    "Samples": "samples",
    "SPLITS": "splits",
    "split": "splits",
    "PruningError": "pruning.policy",
    "FinePruning": "pruning.sampler",
    "InfoBatch": "pruning.sampler",
}

if not TYPE_CHECKING:  # mypy reads the imports above instead, and so still sees a misspelt name
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
