"""What every pruning policy answers: who sits this epoch out, how much do the others weigh, what do their losses teach.

    decide(epoch, progress)  ->  Decision       nothing is changed by asking; the same question has the same answer
         |
         |      the samples that are kept are trained on, in batches
         v
    judge(epoch, samples, losses, ends)         their losses, once: all of an epoch together or batch by batch
         |
    completed(keep)                             the epoch is over: who sat out is counted

A policy knows samples by their number and nothing of batches, loaders or ranks. Epochs count from 1, as in the paper.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paceline.data.pruning.numbers import whole
from paceline.randomness import seed_for

MOST_SAMPLES = 2**31 - 1
AT_ONCE = 1 << 20
Indices = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """Who takes part in an epoch (None: everybody), and who of them weighs `weight` (None: nobody) instead of 1.

    >>> decision = Decision(keep=np.array([True, False, True]))
    >>> decision.pruned, Decision().pruned
    (1, 0)
    """

    keep: NDArray[np.bool_] | None = None
    heavier: NDArray[np.bool_] | None = None
    weight: float = 1.0

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """What each sample weighs; None: all weigh 1.

        >>> Decision(heavier=np.array([True, False]), weight=2.0).weights
        array([2., 1.], dtype=float32)
        """
        return None if self.heavier is None else self._weighed(self.heavier)

    def weights_of(self, samples: Indices) -> NDArray[np.float32] | None:
        """What these samples weigh; None: all weigh 1.

        >>> Decision(heavier=np.array([True, False]), weight=2.0).weights_of(np.array([1, 0, 0]))
        array([1., 2., 2.], dtype=float32)
        """
        return None if self.heavier is None else self._weighed(picked(self.heavier, samples))

    def _weighed(self, heavier: NDArray[np.bool_]) -> NDArray[np.float32]:
        return np.where(heavier, np.float32(self.weight), np.float32(1))

    @property
    def pruned(self) -> int:
        """How many samples sit out.

        >>> Decision().pruned
        0
        """
        return 0 if self.keep is None else int(self.keep.size - np.count_nonzero(self.keep))


class Policy(ABC):
    """The common part of all policies: how often each sample has sat out.

    `PrunedBatches` (`sampler.py`) hands out batches as a policy decides; `training/pruned.py` does so for recipes.
    """

    name: ClassVar[str]

    def __init__(self, samples: int, *, seed: int = 0) -> None:
        self.samples, self.seed = whole("samples", samples, least=1, most=MOST_SAMPLES), seed
        self.population = self.samples
        """The samples that there really are to draw from: fewer, where a base draws from a part of the data set."""
        self.times_pruned = np.zeros(self.samples, np.uint16)

    @abstractmethod
    def decide(self, epoch: int, progress: float = 0.0) -> Decision:
        """Who takes part in this epoch; `progress` is the share of the run that is done before it."""

    @abstractmethod
    def judge(self, epoch: int, samples: Indices, losses: NDArray[np.float32], ends: Indices) -> None:
        """Learn from the losses of batches: batch i is `samples[ends[i - 1]:ends[i]]`."""

    def completed(self, keep: NDArray[np.bool_] | None) -> None:
        """An epoch is over in which these took part (None: everybody)."""
        if keep is not None:
            most = np.iinfo(self.times_pruned.dtype).max
            self.times_pruned += ~keep & (self.times_pruned < most)

    def difficulty(self) -> NDArray[np.float32]:
        """How hard each sample is, as far as the policy can tell; only the order means anything."""
        return self.times_pruned.astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """What was learned so far, as plain values and arrays."""
        return {"samples": self.samples, "times_pruned": self.times_pruned.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of a policy over as many samples; one that is refused changes nothing."""
        self.check_data(state)
        self.times_pruned = array_of(state["times_pruned"], np.uint16, self.samples, "times_pruned")

    def check_data(self, state: dict[str, Any]) -> None:
        """Refuse a state of another data set, before anything of it is looked at or taken."""
        if state["samples"] != self.samples:
            raise ValueError(
                f"this state is of {state['samples']:,} samples, and there are {self.samples:,}: "
                "it belongs to another data set"
            )

    def generator(self, purpose: str, epoch: int) -> np.random.Generator:
        """Random numbers for one purpose in one epoch: asked again, the same again."""
        return np.random.Generator(np.random.PCG64(seed_for(self.seed, "pruning", purpose, epoch)))


def parts_of(size: int) -> Iterator[slice]:
    """About a million at a time: numpy widens indices to 64 bits, and what it makes on the way stays small.

    >>> list(parts_of(3))
    [slice(0, 3, None)]
    """
    for start in range(0, size, AT_ONCE):
        yield slice(start, min(start + AT_ONCE, size))


def picked(values: NDArray[Any], indices: Indices) -> NDArray[Any]:
    """`values[indices]`, part by part.

    >>> picked(np.array([5, 6]), np.array([1, 1, 0]))
    array([6, 6, 5])
    """
    found = np.empty(len(indices), values.dtype)
    for part in parts_of(len(indices)):
        found[part] = values[indices[part]]
    return found


def array_of(value: Any, kind: type[np.generic], size: int, name: str) -> NDArray[Any]:
    """A copy of an array (or tensor) out of a state, if it is of this kind and size.

    >>> array_of([1.0], np.float32, 1, "scores")
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
