"""A sampler of the user's own, from whose draws those who sit out are taken away."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Base:
    """Draws from a sampler, and remembers whom it has given and how it can draw the same again.

    A sampler has a `generator` of torch (as torch's own have if they are given one), a `state_dict`, or a `set_epoch`,
    or it draws otherwise after a resumption than it would have.

    >>> base = Base([3, 1, 3], samples=5)
    >>> base.draw(epoch=1), base.population
    (array([3, 1, 3], dtype=int32), 2)
    """

    def __init__(self, sampler: Iterable[int], *, samples: int) -> None:
        if isinstance(sampler, Iterator):
            raise TypeError(
                f"base must be a sampler that can be iterated over in every epoch (it is a {type(sampler).__name__}, "
                "which is used up after one)"
            )
        if hasattr(sampler, "num_replicas"):
            raise TypeError(
                f"base must draw for all ranks (it is a {type(sampler).__name__}, which draws for one of several): the "
                "pruning sampler deals what a base draws to the ranks itself"
            )
        self._sampler, self._samples = sampler, samples
        self.given = np.zeros(samples, np.bool_)
        self._before: Any = None

    @property
    def population(self) -> int:
        """How many different samples it has given so far."""
        return int(np.count_nonzero(self.given))

    def draw(self, epoch: int) -> NDArray[np.int32]:
        """What it gives in an epoch."""
        self._before = self._state()
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch - 1)
        try:
            order = np.fromiter((operator.index(index) for index in self._sampler), np.int64)
        except TypeError as error:
            raise TypeError(f"base must give numbers of samples, one by one, as samplers do: {error}") from error
        wrong = order[(order < 0) | (order >= self._samples)]
        if len(wrong):
            raise ValueError(
                f"the base sampler gave index {wrong[0]}, and there are {self._samples} samples: "
                "give the number of samples of the data set it draws from"
            )
        if not len(order):
            raise ValueError("the base sampler gave no index at all")
        self.given[order] = True
        return order.astype(np.int32)

    def state(self, *, to_draw_again: bool) -> dict[str, Any]:
        """What it takes to draw what it will draw next; or, once more, what it drew last."""
        drawn = self._before if to_draw_again else self._state()
        return {"given": torch.from_numpy(self.given.copy()), "sampler": drawn}

    def restore(self, given: NDArray[np.bool_], sampler: Any) -> None:
        """Go on from a `state`."""
        self.given = given
        if sampler is None:
            return
        if hasattr(self._sampler, "load_state_dict"):
            self._sampler.load_state_dict(sampler)
        elif isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
            generator.set_state(sampler)

    def _state(self) -> Any:
        if hasattr(self._sampler, "state_dict"):
            return self._sampler.state_dict()
        generator = getattr(self._sampler, "generator", None)
        return generator.get_state() if isinstance(generator, torch.Generator) else None
