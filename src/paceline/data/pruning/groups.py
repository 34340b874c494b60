"""Groups of samples, and what pruning takes from each: classes, the tails of a target, or groups of a script's own.

Fine-pruning lets samples with high losses sit out. Where classes are of unequal sizes, or a target has rare values,
those are the rare cases:

    class        7,000 cats    300 foxes         prune=0.3: 2,190 samples sit out
    sit out      1,980 (28 %)  210 (70 %)        more than twice their share: warned of, once
    protected    2,100 (30 %)   90 (30 %)        protect="classes"

A small group may lose twice its share by chance; what is warned of is also four standard deviations from a fair draw.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.pruning.policy import Indices

CLASSES = "classes"
OF_CLASSES = 'protect="classes"'
TAIL = 0.1  # the lowest and the highest tenth of a target
FEW_VALUES = 20  # of floating-point targets that are classes all the same
TIMES_ITS_SHARE, DEVIATIONS = 2.0, 4.0
GroupOf = Callable[[int], Hashable]
"""Says which group a sample is in, by its number."""


class Groups:
    """A group for each sample: `numbers` of the groups, and their `names`.

    >>> groups = Groups.of_targets(np.array([0, 0, 0, 1]))
    >>> groups.names, groups.numbers
    (('class 0', 'class 1'), array([0, 0, 0, 1]))
    """

    MOST_NAMED: ClassVar[int] = 3

    def __init__(self, numbers: NDArray[np.intp], names: tuple[str, ...], remedy: str) -> None:
        self.numbers, self.names, self.remedy = numbers, names, remedy
        self._sizes = np.bincount(numbers, minlength=len(names))

    @classmethod
    def of_targets(cls, targets: NDArray[Any]) -> Groups:
        """Return the classes of integers, words, truth values and a few numbers, or the tails of many numbers."""
        if not are_classes(targets):
            low, high = np.quantile(targets[np.isfinite(targets)], (TAIL, 1 - TAIL))
            numbers = np.where(targets < low, 0, np.where(targets > high, 2, 1))
            names = (f"the targets below {low:.4g}", "the other targets", f"the targets above {high:.4g}")
            return cls(numbers, names, "protect=..., a function that says which group a sample is in by its number,")
        kinds, numbers = np.unique(targets, return_inverse=True)
        return cls(numbers, tuple(f"class {kind}" for kind in kinds), OF_CLASSES)

    @classmethod
    def by(cls, group_of: GroupOf, samples: int) -> Groups:
        """Return the groups that a function says, asked once for each sample.

        >>> Groups.by(lambda sample: sample < 2, 5).numbers
        array([0, 0, 1, 1, 1])
        """
        known: dict[Hashable, int] = {}
        numbers = np.fromiter((known.setdefault(group_of(sample), len(known)) for sample in range(samples)), np.intp)
        return cls(numbers, tuple(f"group {name}" for name in known), "")

    def within(self, samples: Indices) -> Groups:
        """Return the groups of some of the samples, by their positions among these.

        >>> Groups.of_targets(np.array([0, 0, 1, 1])).within(np.array([3, 0])).numbers
        array([1, 0])
        """
        return Groups(self.numbers[samples], self.names, self.remedy)

    @property
    def digest(self) -> str:
        """What tells these groups from others: how many they are, and a checksum of who is in which."""
        return f"{len(self.names)} groups {zlib.crc32(self.numbers.astype(np.int64).tobytes()):08x}"

    def quotas(self, number: int) -> NDArray[np.int64]:
        """Return how many of each group sit out where `number` of all do: its share, and the rest from the largest.

        >>> Groups.by(lambda sample: sample >= 7, 10).quotas(4)
        array([3, 1])
        """
        quotas = self._sizes.astype(np.int64) * number // len(self.numbers)
        rest = number - int(quotas.sum())
        quotas[np.argsort(-self._sizes, kind="stable")[:rest]] += 1
        return quotas

    def unequal_shares(self, keep: NDArray[np.bool_]) -> str:
        """Return which groups lose more than twice their share in an epoch in which `keep` takes part; "" if none.

        >>> groups = Groups.of_targets(np.repeat([0, 1], [900, 100]))
        >>> groups.unequal_shares(np.repeat([True, False], [900, 100]))
        'fine-pruning lets 100 of 100 of class 1 sit out, and 10% of all samples: it takes those with high losses, ...'
        """
        lost = np.bincount(self.numbers[~keep], minlength=len(self.names))
        share = 1 - np.count_nonzero(keep) / len(keep)
        fair = self._sizes * share
        unfair = (lost > TIMES_ITS_SHARE * fair) & (lost - fair > DEVIATIONS * np.sqrt(fair * (1 - share)))
        if not unfair.any():
            return ""
        worst = np.flatnonzero(unfair)
        worst = worst[np.argsort(-lost[worst] / self._sizes[worst], kind="stable")]
        named = [f"{lost[i]:,} of {self._sizes[i]:,} of {self.names[i]}" for i in worst[: self.MOST_NAMED]]
        more = f", and of {len(worst) - len(named)} more" if len(worst) > len(named) else ""
        return (
            f"fine-pruning lets {', '.join(named)}{more} sit out, and {share:.0%} of all samples: it takes those with "
            "high losses, the rare or the hard ones"
        )


def find_groups(data: Any, samples: int, protect: str | GroupOf | None) -> Groups | None:
    """Return the groups that are to be protected, or, with `protect=None`, those that can be looked at; None if none.

    >>> find_groups(range(4), 4, None) is None
    True
    >>> find_groups(range(4), 4, "classes")
    Traceback (most recent call last):
    ValueError: protect='classes' needs the class of each sample, and range has no targets: give ...
    """
    if protect is not None and protect != CLASSES:
        if not callable(protect):
            raise ValueError(
                f"protect must be {CLASSES!r}, or a function that says which group a sample is in by its number "
                f"(protect={protect!r})"
            )
        return Groups.by(protect, samples)
    try:
        targets = usable(targets_of(data), samples)
    except Exception:  # of a data set's own property: a script that asks for nothing is not to fail by it
        if protect is not None:
            raise
        targets = None
    if protect == CLASSES and (targets is None or not are_classes(targets)):
        found = "targets that are no classes" if targets is not None else "no targets"
        raise ValueError(
            f"protect={CLASSES!r} needs the class of each sample, and {type(data).__name__} has {found}: give a "
            "function, protect=lambda sample: ..., or a data set with `targets`, one whole number or word each"
        )
    return None if targets is None else Groups.of_targets(targets)


def usable(targets: NDArray[Any] | None, samples: int) -> NDArray[Any] | None:
    """Return targets as one value for each sample; None where they are several, or none that can be compared.

    >>> usable(np.zeros((3, 1)), 3).shape, usable(np.zeros((3, 2)), 3)
    ((3,), None)
    """
    if targets is None or targets.shape != (samples, *(1,) * (targets.ndim - 1)) or targets.dtype.kind not in "biufUS":
        return None
    targets = targets.reshape(samples)
    return None if targets.dtype.kind == "f" and not np.isfinite(targets).any() else targets


def are_classes(targets: NDArray[Any]) -> bool:
    """Return whether targets are classes: words, whole numbers, or a few values, as 0.0 and 1.0 of a binary loss.

    >>> are_classes(np.array([0.0, 1.0, 1.0])), are_classes(np.linspace(0, 1, 100))
    (True, False)
    """
    return targets.dtype.kind != "f" or len(np.unique(targets[np.isfinite(targets)])) <= FEW_VALUES


def targets_of(data: Any) -> NDArray[Any] | None:
    """Return the targets of a data set without loading a sample; None where they stand at no usual place.

    They stand in `targets` or `labels`, in the last tensor of a TensorDataset, or in the column `label` or `labels`.

    >>> import torch
    >>> from torch.utils.data import Subset, TensorDataset
    >>> targets_of(Subset(TensorDataset(torch.zeros(3, 2), torch.tensor([5, 6, 7])), [2, 0]))
    array([7, 5])
    """
    from torch.utils.data import Subset, TensorDataset  # here, since a plan needs no torch

    if isinstance(data, Subset):
        whole = targets_of(data.dataset)
        return None if whole is None else whole[np.asarray(data.indices)]
    if isinstance(data, TensorDataset):
        found: Any = data.tensors[-1] if len(data.tensors) > 1 else None
    else:
        columns = getattr(data, "column_names", None)
        column = next((name for name in ("label", "labels") if name in columns), None) if columns else None
        name = "targets" if hasattr(data, "targets") else "labels"
        found = data[column] if column else getattr(data, name, None)
    if found is None or callable(found):
        return None
    try:
        return np.asarray(found.detach().cpu() if hasattr(found, "detach") else found)
    except (TypeError, ValueError):  # rows of unequal lengths, say
        return None
