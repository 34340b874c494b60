"""Data of a user's own: what a factory or a script gives -> a Dataset.

    (train, test)                      each a map-style torch Dataset of (input, target), or a pair (inputs, targets)
    {"train": ..., "test": ...}        the same by name
    Dataset                            ours, as it is

Inputs have any shape: images, rows of a table, token ids. Targets are classes, sequences of them, or numbers. Tensors
are used where they lie, so those of a memory-mapped file stay on the disk. A torch Dataset is read sample by sample
when a batch is drawn, as a DataLoader would, and is never held in memory as a whole; what its transforms draw from the
generators of torch, numpy and Python follows from the seed, so a run can be replayed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch

from paceline.data.reading import DatasetError
from paceline.data.samples import MOST_LABELS, Dataset, Samples, labels_among, spread
from paceline.randomness import seeded
from paceline.user_code import Offered, call, make

MOST_READ = 16  # samples that are read to know some of the targets
CHECKED = 100_000  # samples of tensors that are looked at before a run
SHAPES = "(train, test), each a torch Dataset of (input, target) or a pair of tensors (inputs, targets)"


class ReadSamples(Samples):
    """The samples of a map-style torch Dataset, read one by one when they are asked for.

    >>> squares = torch.utils.data.TensorDataset(torch.arange(4.0), torch.arange(4) ** 2)
    >>> samples = ReadSamples(torch.utils.data.Subset(squares, [1, 2, 3]), "my_data:load")
    >>> len(samples), samples.take(torch.tensor([2, 0]))
    (3, (tensor([3., 1.]), tensor([9, 1])))
    """

    reads = True

    def __init__(self, dataset: Any, name: str) -> None:
        self.__dict__.update(_source=dataset, _name=name, _process=None)
        self.__dict__["_first"] = self._read([0])

    _source: Any
    _name: str
    _process: int | None
    _copy: Any
    _first: tuple[torch.Tensor, torch.Tensor]

    @property
    def _items(self) -> Any:
        """A copy of the data set for this process: a file that it opens at its first read is no other process's."""
        if self._process != os.getpid():
            self.__dict__.update(_process=os.getpid(), _copy=_copied(self._source))
        return self._copy

    def __len__(self) -> int:
        return len(self._source)

    def take(self, indices: torch.Tensor, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(indices.tolist(), seed)

    def first(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(range(min(count, len(self))))

    def parts(self, size: int, most: int | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        end = len(self) if most is None else min(most, len(self))
        for start in range(0, end, size):
            yield self._read(range(start, min(start + size, end)))

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self._first[0].shape[1:])

    @property
    def inputs(self) -> torch.Tensor:
        """All inputs, in memory."""
        return self._read(range(len(self)))[0]

    @cached_property
    def targets(self) -> torch.Tensor:
        """All targets: the data set's own list of them where it has one, else every sample is read once."""
        listed = _listed_targets(self._source)
        if listed is not None and len(listed) == len(self):
            some = sorted({0, len(self) // 2, len(self) - 1})  # a transform may make another target of what is listed
            if torch.equal(_targets(listed)[some], self._read(some)[1]):
                return _targets(listed)
        return torch.cat([targets for _, targets in self.parts(512)])

    def some_targets(self, most: int) -> torch.Tensor:
        listed = _listed_targets(self._source)
        if listed is not None and len(listed) == len(self):
            return _targets(listed)[spread(len(self), most)]
        return self._read(spread(len(self), min(most, MOST_READ)).tolist())[1]

    @cached_property
    def labels(self) -> torch.Tensor | None:
        if labels_among(self._first[1]) is None:
            return None  # nothing else needs to be read to know it
        return labels_among(self.targets)

    def _read(self, indices: Iterable[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        with _drawing(seed):
            pairs = [self._item(index) for index in indices]
        try:
            inputs, targets = (torch.stack(column) for column in zip(*pairs, strict=True))
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise DatasetError(
                f"samples of data set {self._name!r} do not make a batch ({reason}); give all of them one shape"
            ) from None
        return _inputs(inputs), _targets(targets)

    def _item(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        try:
            item = self._items[index]
        except Exception as error:
            reason = " ".join(str(error).split())
            raise DatasetError(
                f"sample {index} of data set {self._name!r} cannot be read: {type(error).__name__}: {reason}"
            ) from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DatasetError(
                f"sample {index} of data set {self._name!r} is a {type(item).__name__}; "
                "it must be (input, target), where the input is the one tensor that the model takes"
            )
        try:
            return _tensor(item[0]), _tensor(item[1])
        except (TypeError, ValueError, RuntimeError):
            kinds = " and ".join(type(part).__name__ for part in item)
            raise DatasetError(
                f"sample {index} of data set {self._name!r} is a pair of {kinds}; give tensors, arrays or numbers"
            ) from None


def _copied(dataset: Any) -> Any:
    """Return a shallow copy of a data set, and of those that it wraps (Subset, ConcatDataset)."""
    copied = copy.copy(dataset)
    if isinstance(inner := getattr(copied, "dataset", None), torch.utils.data.Dataset):
        copied.dataset = _copied(inner)
    if isinstance(several := getattr(copied, "datasets", None), list):
        copied.datasets = [_copied(each) for each in several]
    return copied


def _listed_targets(dataset: Any) -> torch.Tensor | None:
    """Return the targets that a data set lists beside its samples, as those of torchvision do."""
    if isinstance(dataset, torch.utils.data.Subset):
        inner = _listed_targets(dataset.dataset)
        return None if inner is None else inner[torch.as_tensor(dataset.indices)]
    for attribute in ("targets", "labels"):
        held = getattr(dataset, attribute, None)
        if isinstance(held, torch.Tensor | np.ndarray | list | tuple):
            with suppress(TypeError, ValueError, RuntimeError):
                return _tensor(held)
    return None


class OwnDataset(Dataset):
    """A data set of a user's own; how many classes it has is found when somebody asks."""

    def __init__(self, name: str, train: Samples, test: Samples) -> None:
        for field, value in (("name", name), ("train", train), ("test", test)):
            object.__setattr__(self, field, value)

    @cached_property
    def classes(self) -> int:
        """The classes, the values of a position of a sequence, or how many numbers a target has."""
        parts, (_, few) = (self.train, self.test), self.train.first(1)
        if few.is_floating_point():
            return max(1, few[0].numel())
        if few.ndim == 1:
            return 1 + max(int(_labels(samples, self.name).max()) for samples in parts)
        return 1 + max(int(targets.max()) for samples in parts for _, targets in samples.parts(512))


def load_own(name: str, *, directory: str = "", seed: int = 0) -> Dataset:
    """Return the data that a user's factory, named 'module:factory', gives.

    The factory is given `directory` and `seed` if it takes them. What it draws from the generators of torch, numpy and
    Python follows from the seed, so that a random split is the same in every process.
    """
    with _drawing(seed):
        return dataset_of(make("data set", name, _offered(directory, seed)), name)


def dataset_of(given: Any, name: str, *, directory: str = "", seed: int = 0) -> Dataset:
    """Return the data set that a script gave, as an object or as a factory of one.

    >>> pair = (torch.zeros(6, 20), torch.arange(6) % 3)
    >>> found = dataset_of((pair, pair), "script:tuple")
    >>> found.classes, found.input_shape
    (3, (20,))
    >>> dataset_of([1, 2, 3], "my_data:load")
    Traceback (most recent call last):
    paceline.data.reading.DatasetError: data set 'my_data:load' gave a list of 3; it must give (train, test), each ...
    """
    if isinstance(given, Dataset):
        return given
    if callable(given) and not hasattr(given, "__getitem__"):
        with _drawing(seed):
            return dataset_of(call("data set", name, given, _offered(directory, seed)), name)
    if isinstance(given, Mapping) and {"train", "test"} <= set(given):
        given = (given["train"], given["test"])
    if not isinstance(given, tuple | list) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, Sized) else ""
        hint = "; split it in two, with torch.utils.data.random_split for example" if _has_items(given) else ""
        raise DatasetError(f"data set {name!r} gave a {type(given).__name__}{size}; it must give {SHAPES}{hint}")
    train, test = (_samples(part, name, kind) for part, kind in zip(given, ("train", "test"), strict=True))
    if train.input_shape != test.input_shape:
        raise DatasetError(
            f"training and test inputs of data set {name!r} must have one shape "
            f"(train={train.input_shape}, test={test.input_shape})"
        )
    return OwnDataset(name, train, test)


def _offered(directory: str, seed: int) -> Offered:
    return {"directory": lambda: directory, "seed": lambda: seed}


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Let a user's code draw as the seed says, and leave the generators as they were."""
    with seeded(seed, "own data"):
        yield


def _samples(part: Any, name: str, kind: str) -> Samples:
    """Return one of the two parts."""
    if isinstance(part, Samples):
        return part
    if type(part) is torch.utils.data.TensorDataset:  # a subclass may make something else of its tensors
        part = part.tensors
    pair = isinstance(part, tuple | list) and len(part) == 2
    if pair and all(isinstance(each, torch.Tensor | np.ndarray) for each in part):
        samples = _held(part, name, kind)
    elif _has_items(part) and not isinstance(part, tuple | list | torch.Tensor | np.ndarray):
        if len(part) == 0:
            raise DatasetError(f"data set {name!r} has no {kind} samples; give at least one")
        samples = ReadSamples(part, name)
    else:
        iterable = isinstance(part, torch.utils.data.IterableDataset)
        why = "; workers draw samples by their numbers, which an IterableDataset does not have" if iterable else ""
        raise DatasetError(f"data set {name!r} gave a {type(part).__name__} to {kind}; it must give {SHAPES}{why}")
    if len(samples) == 0:
        raise DatasetError(f"data set {name!r} has no {kind} samples; give at least one")
    return samples


def _held(pair: Any, name: str, kind: str) -> Samples:
    try:
        inputs, targets = (_tensor(each) for each in pair)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DatasetError(f"{kind} samples of data set {name!r} are no numbers ({reason}); give numbers") from None
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs[:CHECKED]).all()):
        raise DatasetError(
            f"{kind} inputs of data set {name!r} are not all finite; fill in or leave out what is missing"
        )
    return OwnSamples(inputs=inputs, targets=targets)


class OwnSamples(Samples):
    """Tensors of a user's own, of any kind of whole number; a batch of them is of torch's usual kinds."""

    def take(self, indices: torch.Tensor, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return _inputs(self.inputs[indices]), _targets(self.targets[indices])

    def first(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return _inputs(self.inputs[:count]), _targets(self.targets[:count])


def _inputs(inputs: torch.Tensor) -> torch.Tensor:
    """Return token ids as int64, whatever whole numbers a file holds them in; bytes may be pixels, and stay."""
    return inputs.long() if inputs.dtype in (torch.int8, torch.int16, torch.int32, torch.uint16) else inputs


def _targets(targets: torch.Tensor) -> torch.Tensor:
    return targets if targets.is_floating_point() else targets.long()


def _has_items(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _tensor(value: Any) -> torch.Tensor:
    """Return a value as a tensor of floats of four bytes, or of whole numbers."""
    tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    if tensor.is_complex():
        raise TypeError("complex numbers")
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor


def _labels(samples: Samples, name: str) -> torch.Tensor:
    if samples.labels is None:
        low, high = int(samples.targets.min()), int(samples.targets.max())
        raise DatasetError(
            f"data set {name!r} has whole numbers from {low:,} to {high:,} as targets; classes are counted from 0 "
            f"to at most {MOST_LABELS - 1:,}, and numbers to be predicted are given as floats"
        )
    return samples.labels
