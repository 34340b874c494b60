"""How many samples a part of a batch has. No torch here.

Samples are counted where a part leaves no doubt. Tensors may be its columns, and a column's length is the number of
samples; or they may be in a list of samples, whose own length it is, while the tensors are 3 channels long. A list is
one of samples only if its things are all of one kind, so that is where there is doubt:

    inputs                                    (8, 5)                            8
    inputs, targets                           (8, 3, 32, 32), (8,)              8       columns
    noisy, clean                              (8, 5), (8, 5)                    8       a pair of tensors is two columns
    {ids, mask, labels}                       (8, 20) each                      8       things with names are columns
    images, targets                           4 of (3, h, w), 4 dicts           None    lists of samples, or columns?
    anchors, positives, negatives             (8, 5) each                       None    three columns, or samples?
    images, targets                           (4, 3, 32, 32), 4 dicts           4       the images say how many, and
    [view, view], labels                      (8, 3, 32, 32) each, (8,)         8       the labels: the list fits them
    time first; sums of lengths; ...          (20, 8, 5), (8,)                  None    two lengths

Where it is None, the caller of `Accumulate.backward` is asked. Whether a list is in doubt hangs on the kinds of its
things, not on how many there happen to be, so that a loader of lists is refused at its first part, and not in the
middle of a run. What is not seen: lists of two samples with nothing beside them (a pair), and tensors that all have
time first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

EMPTY: frozenset[object] = frozenset()  # the kind of a list without anything in it: it may be any other's


def count_samples(part: object) -> int | None:
    """Return how many samples a part has, where its tensors and arrays leave no doubt about it; else None.

    >>> import torch
    >>> image, labels = torch.zeros(3, 8, 8), torch.zeros(4)
    >>> count_samples({"id": "a", "pair": [torch.zeros(4, 5), labels]})
    4
    >>> count_samples([image] * 4) is None, count_samples(([image] * 4, labels))
    (True, 4)
    """
    while isinstance(part, list | tuple) and len(part) == 1 and not hasattr(part, "_fields"):
        part = part[0]  # what a DataLoader makes of samples that have one tensor each
    certain, doubtful = set[int](), list[Sequence[object]]()
    for column in part if _is_inputs_and_targets(part) else (part,):
        _sort(column, certain, doubtful)
    if len(certain) != 1:
        return None
    (samples,) = certain
    fits = (len(each) == samples or certain.issuperset(_lengths(each)) for each in doubtful)
    return samples if all(fits) else None


def _sort(part: object, certain: set[int], doubtful: list[Sequence[object]]) -> None:
    """Put lengths of what must be columns into `certain`, and what may be lists of samples into `doubtful`."""
    inner = _inner(part)
    if inner is None:
        certain.update(_lengths(part))
    elif isinstance(inner, Sequence) and len({_kind(each) for each in inner} - {EMPTY}) == 1:
        doubtful.append(inner)
    else:
        for each in inner:
            _sort(each, certain, doubtful)


def _lengths(part: object) -> Iterator[int]:
    """Yield the length of every tensor in a part that has one."""
    inner = _inner(part)
    if inner is None:
        shape: Any = getattr(part, "shape", None)
        if shape is not None and len(shape):
            yield int(shape[0])
    for each in inner or ():
        yield from _lengths(each)


def _inner(part: object) -> Iterable[object] | None:
    """Return what a container holds, as a sequence where it has places and no names; None for what is no container."""
    if getattr(part, "shape", None) is not None or hasattr(part, "batch_sizes"):
        return None  # the latter is a PackedSequence: a tuple whose first tensor has the steps of all sequences
    if isinstance(part, Mapping):
        return part.values()
    if isinstance(part, list | tuple):
        return iter(part) if hasattr(part, "_fields") else part
    return None


def _kind(part: object) -> object:
    """Return a key that is alike for all samples of a list: images differ in size, not in the number of dimensions."""
    shape: Any = getattr(part, "shape", None)
    if shape is not None:
        return len(shape), str(getattr(part, "dtype", ""))
    if isinstance(part, Mapping):
        return Mapping  # a sample may lack a key
    return frozenset(map(_kind, part)) - {EMPTY} if isinstance(part, list | tuple) else type(part)


def _is_inputs_and_targets(part: object) -> TypeGuard[Sequence[object]]:
    """Whether a part is two tensors (two samples only in a list without targets), or two dicts with other keys."""
    if not isinstance(part, list | tuple) or len(part) != 2:
        return False
    first, second = part
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return set(first) != set(second)
    return hasattr(first, "shape") and hasattr(second, "shape")


def checked_samples(given: Any, counted: int | None) -> float:
    """Return how many samples a part has: the number that the caller gives, or else what was counted.

    >>> checked_samples(None, 4), checked_samples(2.5, 4)
    (4.0, 2.5)
    """
    samples = counted if given is None else given
    if samples is None:
        raise ValueError(
            "cannot see how many samples this part has (its tensors have no length in common, or are in lists that may "
            "be lists of samples): backward(loss, samples=...) says it"
        )
    if not math.isfinite(samples) or samples <= 0:
        raise ValueError(f"samples must be more than 0, and finite (samples={samples})")
    return float(samples)
