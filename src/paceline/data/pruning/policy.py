"""The interface of a pruning policy: which samples sit an epoch out, and what the others' losses teach.

    decide(epoch, progress)  ->  Decision       nothing is changed by asking; the same question has the same answer
         |
         |      the samples that are kept are trained on, in batches
         v
    judge(epoch, samples, losses, ends)         their losses, once: all of an epoch together or batch by batch
         |
    end_epoch(keep)                             the epoch is over: who sat out is counted

A policy knows samples by their number and nothing of batches, loaders or ranks. Epochs count from 1, as in the paper.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.randomness import seed_for

MOST_SAMPLES = 2**31 - 1
CHUNK = 1 << 20
Indices = NDArray[np.integer[Any]]


class PruningError(PacelineError, RuntimeError):
    """Batches were not observed one by one; what was observed in this epoch is forgotten, nothing is counted wrongly.

    >>> raise PruningError("no batch is waiting to be observed")
    Traceback (most recent call last):
    paceline.data.pruning.policy.PruningError: no batch is waiting to be observed
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """A policy's decision for one epoch: `keep` marks the samples that take part (None: all).

    The losses of samples marked by `heavier` (None: no sample) are multiplied by `weight`, all others by 1.

    >>> decision = Decision(keep=np.array([True, False, True]))
    >>> decision.pruned, Decision().pruned
    (1, 0)
    """

    keep: NDArray[np.bool_] | None = None
    heavier: NDArray[np.bool_] | None = None
    weight: float = 1.0

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """The weight of every sample; None if all weigh 1.

        >>> Decision(heavier=np.array([True, False]), weight=2.0).weights
        array([2., 1.], dtype=float32)
        """
        return None if self.heavier is None else self.weights_of(np.arange(len(self.heavier)))

    def weights_of(self, samples: Indices) -> NDArray[np.float32] | None:
        """Return the weights of these samples, or None if all weigh 1.

        >>> Decision(heavier=np.array([True, False]), weight=2.0).weights_of(np.array([1, 0, 0]))
        array([1., 2., 2.], dtype=float32)
        """
        if self.heavier is None:
            return None
        return np.where(take(self.heavier, samples), np.float32(self.weight), np.float32(1))

    @property
    def pruned(self) -> int:
        """The number of samples that sit out."""
        return 0 if self.keep is None else int(self.keep.size - np.count_nonzero(self.keep))


class Policy(ABC):
    """The common part of all policies: how often each sample has sat out.

    `PrunedBatches` (`sampler.py`) hands out batches as a policy decides; `PrunedOrder` (`order.py`) does so for
    recipes.
    """

    name: ClassVar[str]
    settings: Mapping[str, Any] = MappingProxyType({})
    """The settings that it was made with, to be saved beside what it learns."""

    def __init__(self, samples: int, *, seed: int = 0) -> None:
        self.samples, self.seed = whole_number("samples", samples, least=1, most=MOST_SAMPLES), seed
        self.population = self.samples
        """The samples that are really drawn from: fewer, where a base draws from a part of the data set."""
        self.times_pruned = np.zeros(self.samples, np.uint16)

    @abstractmethod
    def decide(self, epoch: int, progress: float = 0.0) -> Decision:
        """Return who takes part in this epoch; `progress` is the share of the run that is done before it."""

    @abstractmethod
    def judge(self, epoch: int, samples: Indices, losses: NDArray[np.float32], ends: Indices) -> None:
        """Learn from the losses of batches: batch i is `samples[ends[i - 1]:ends[i]]`."""

    def end_epoch(self, keep: NDArray[np.bool_] | None) -> None:
        """Count who sat out of an epoch that is over, in which `keep` took part (None: all)."""
        if keep is not None:
            most = np.iinfo(self.times_pruned.dtype).max
            self.times_pruned += ~keep & (self.times_pruned < most)

    def difficulty(self) -> NDArray[np.float32]:
        """Return how hard each sample is, as far as the policy can tell; only the order means anything."""
        return self.times_pruned.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned so far, as plain values and arrays."""
        return {"samples": self.samples, "times_pruned": self.times_pruned.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a policy over as many samples; one that is refused changes nothing."""
        self.check_samples(state)
        self.times_pruned = saved_array(state["times_pruned"], np.uint16, self.samples, "times_pruned")

    def check_samples(self, state: dict[str, Any]) -> None:
        """Refuse a state of another data set, before anything else of the state is read."""
        if state["samples"] != self.samples:
            raise ValueError(
                f"this state is of {state['samples']:,} samples, and there are {self.samples:,}: "
                "it belongs to another data set"
            )

    def generator(self, purpose: str, epoch: int) -> np.random.Generator:
        """Return random numbers for one purpose in one epoch: asked again, the same again."""
        return np.random.Generator(np.random.PCG64(seed_for(self.seed, "pruning", purpose, epoch)))


# -- arrays of millions of samples -------------------------------------------------------------------------------------


def chunks(size: int) -> Iterator[slice]:
    """Yield slices of about a million: numpy widens indices to 64 bits, and what it makes on the way stays small.

    >>> list(chunks(3))
    [slice(0, 3, None)]
    """
    for start in range(0, size, CHUNK):
        yield slice(start, min(start + CHUNK, size))


def take(values: NDArray[Any], indices: Indices) -> NDArray[Any]:
    """Return `values[indices]`, computed chunk by chunk.

    >>> take(np.array([5, 6]), np.array([1, 1, 0]))
    array([6, 6, 5])
    """
    found = np.empty(len(indices), values.dtype)
    for part in chunks(len(indices)):
        found[part] = values[indices[part]]
    return found


def saved_array(value: Any, kind: type[np.generic], size: int, name: str) -> NDArray[Any]:
    """Return a copy of an array (or tensor) out of a state, if it is of this kind and size.

    >>> saved_array([1.0], np.float32, 1, "scores")
    Traceback (most recent call last):
    ValueError: scores must be 1 values of type float32 (found shape (1,), type float64); the state is damaged
    """
    found = np.array(value.numpy() if hasattr(value, "numpy") else value)
    if found.shape != (size,) or found.dtype != kind:
        raise ValueError(
            f"{name} must be {size:,} values of type {np.dtype(kind).name} "
            f"(found shape {found.shape}, type {found.dtype.name}); the state is damaged"
        )
    return found


# -- steps of an epoch -------------------------------------------------------------------------------------------------


def count_steps(samples: int, step_size: int, *, drop_last: bool = False, joined: int = 0) -> int:
    """Return how many steps an epoch has; a last step of `joined` samples or fewer is part of the one before it.

    >>> count_steps(33, 16), count_steps(33, 16, joined=1), count_steps(34, 16, joined=1), count_steps(1, 16, joined=1)
    (3, 2, 3, 1)
    """
    whole, rest = divmod(samples, step_size)
    return whole + (rest > 0 and not drop_last and not (whole and rest <= joined))


# -- numbers as users give them ----------------------------------------------------------------------------------------


def whole_number(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Return the value as an int, if it is a whole number in its range (of any type that is one, numpy's too).

    >>> whole_number("batch_size", 2.5, least=1)
    Traceback (most recent call last):
    ValueError: batch_size must be a whole number of at least 1 (batch_size=2.5)
    """
    limits = f"of at least {least:,}" if most is None else f"between {least:,} and {most:,}"
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be a whole number {limits} ({name}={value!r})")
    return number


def finite_number(name: str, value: Any) -> float:
    """Return the value as a float, if it is a number and finite.

    >>> finite_number("tolerance", "much")
    Traceback (most recent call last):
    ValueError: tolerance must be a finite number (tolerance='much')
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool | str) or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number ({name}={value!r})")
    return number
