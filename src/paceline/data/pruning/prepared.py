"""An epoch that is ready to be handed out: who takes part, in which order, what each weighs."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.base import Base
from paceline.data.pruning.dealing import Dealing
from paceline.data.pruning.policy import Decision, Policy, parts_of
from paceline.randomness import torch_generator

SAME_ORDER = 1  # retries in the same order: who always breaks off is to meet others too


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedEpoch:
    """The samples of an epoch in their order: those that take part, and what each weighs (None: all weigh 1).

    `shares` are the weights divided by the size of a whole batch: their product with its losses is their mean.
    """

    order: NDArray[np.int32]
    shares: torch.Tensor | None
    keep: NDArray[np.bool_] | None
    dealing: Dealing
    _whole_steps: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_whole_steps", len(self.order) // self.dealing.step_size)

    @property
    def steps(self) -> int:
        """How many batches every rank gets."""
        return self.dealing.steps(len(self.order))

    def places(self, step: int) -> tuple[int, int]:
        """Where this rank's batch begins and ends in the order."""
        dealing = self.dealing
        if step < self._whole_steps:  # nearly always: this is asked for every batch
            start = (step * dealing.ranks + dealing.rank) * dealing.batch_size
            return start, start + dealing.batch_size
        return dealing.places(step, len(self.order))

    def batch(self, step: int) -> NDArray[np.int32]:
        """The samples of this rank's batch."""
        start, stop = self.places(step)
        if stop <= len(self.order):
            return self.order[start:stop]
        return self.order[np.arange(start, stop) % len(self.order)]

    def mean(self, losses: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """The weighted mean of the losses of a batch at these places."""
        if self.shares is None:
            return losses.mean()
        if stop <= len(self.order):
            shares = self.shares[start:stop]
        else:
            shares = self.shares[torch.arange(start, stop) % len(self.order)]
        whole = self.dealing.batch_size
        if losses.is_cpu and losses.dtype is torch.float32 and stop - start == whole:
            return torch.dot(losses, shares)  # one kernel; the other way it is three
        return (losses * (shares * whole).to(losses)).mean()

    @property
    def fingerprint(self) -> int:
        """A number that differs where the order does."""
        return zlib.crc32(self.order.tobytes())


def prepare(
    policy: Policy,
    dealing: Dealing,
    *,
    epoch: int,
    attempt: int,
    progress: float,
    base: Base | None = None,
) -> PreparedEpoch:
    """Let the policy decide, and put those who take part in order: a new one for each epoch, or the base's.

    >>> from paceline.data.pruning.info_policy import InfoPolicy
    >>> ready = prepare(InfoPolicy(5), Dealing(batch_size=2), epoch=1, attempt=0, progress=0.0)
    >>> sorted(ready.order.tolist()), ready.steps
    ([0, 1, 2, 3, 4], 3)
    """
    decision = policy.decide(epoch, progress)
    if base is None:
        place = (policy.seed, "pruning", "order", epoch, max(0, attempt - SAME_ORDER))
        return with_order(decision, dealing, _shuffled(policy.samples, decision.keep, torch_generator(*place)))
    order = base.draw(epoch)
    return with_order(decision, dealing, order if decision.keep is None else order[decision.keep[order]])


def with_order(decision: Decision, dealing: Dealing, order: NDArray[np.int32]) -> PreparedEpoch:
    """An epoch in a given order; refused if there is not one step in it.

    >>> with_order(Decision(), Dealing(batch_size=4, drop_last=True), np.arange(3, dtype=np.int32))
    Traceback (most recent call last):
    ValueError: 3 samples take part in this epoch, and with drop_last one step takes 4: give a smaller batch_size, ...
    """
    weights = decision.weights_of(order)
    ready = PreparedEpoch(
        order=order,
        shares=None if weights is None else torch.from_numpy(weights).div_(dealing.batch_size),
        keep=decision.keep,
        dealing=dealing,
    )
    if not ready.steps:
        raise ValueError(
            f"{len(order)} samples take part in this epoch, and with drop_last one step takes {dealing.step_size}: "
            "give a smaller batch_size, prune less, or leave drop_last out"
            if len(order)
            else "no sample takes part in this epoch: all that the base sampler gave sit out; prune less"
        )
    return ready


def _shuffled(samples: int, keep: NDArray[np.bool_] | None, generator: torch.Generator) -> NDArray[np.int32]:
    number = samples if keep is None else int(np.count_nonzero(keep))
    order: NDArray[np.int32] = torch.randperm(number, generator=generator, dtype=torch.int32).numpy()
    if keep is not None:
        kept, filled = np.empty(number, np.int32), 0
        for part in parts_of(samples):
            found = np.flatnonzero(keep[part]) + part.start
            kept[filled : filled + len(found)] = found
            filled += len(found)
        for part in parts_of(number):
            order[part] = kept[order[part]]
    return order
