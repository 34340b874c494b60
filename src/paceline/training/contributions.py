"""One rank's part of a step: what it adds to the all-reduce that gives every rank the same update.

A `Step` is data, so every rank that knows it can weigh its own gradients. In step t rank i contributes

    c_i  =    w_i * g_i(t)              if the step has its gradient of this round as fresh, with the weight w_i
            + u_i * g_i(t-1)            if the step has its gradient of the round before as late, with the weight u_i
            - p * w'_i * g_i(t-1)       if it was fresh in step t-1, with the weight w'_i; p is previous_mean_weight

and zeros if it is none of these. The sum of all c_i is the update that a server would have made:

    sum of c_i  =  fresh sum + late sum - p * (fresh sum of the step before)

A message is one vector for a rank and round, whatever K is:

    [ contribution | change of the buffers | which parameters have a gradient ]
      of the model's size                     1 or 0 for each

A rank in the step (fresh or late) adds what its batch changed in the buffers (BatchNorm's statistics) since the model
that it took, divided by the number of gradients in the step: the sum is their mean change.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.decoding import Count, Fraction, decode
from paceline.events import Share, Step
from paceline.training.saved_state import check_tensor

MOST_FREE = 3  # vectors that a pool keeps


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLayout:
    """How many elements of a message are gradient, buffers, and flags (one for each parameter tensor).

    >>> MessageLayout(gradient=10, buffers=4, flags=2).size
    16
    """

    gradient: int
    buffers: int
    flags: int

    @property
    def size(self) -> int:
        """The elements of a message."""
        return self.gradient + self.buffers + self.flags

    def gradient_of(self, message: torch.Tensor) -> torch.Tensor:
        """Return the part of a message that is a gradient, or an update."""
        return message[: self.gradient]

    def buffers_of(self, message: torch.Tensor) -> torch.Tensor:
        """Return the part of a message that is the change of the buffers."""
        return message[self.gradient : self.gradient + self.buffers]

    def flags_of(self, message: torch.Tensor) -> torch.Tensor:
        """Return the part of a message that says which parameters have a gradient."""
        return message[self.gradient + self.buffers :]


class VectorPool:
    """Vectors of one size that are used again and again: memory that was touched before costs no page faults.

    >>> pool = VectorPool(3, torch.float32, torch.device("cpu"))
    >>> first = pool.take()
    >>> pool.give(first)
    >>> pool.take() is first
    True
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._size, self._dtype, self._device = size, dtype, device
        self._free: list[tuple[torch.Tensor, Any]] = []
        self._lock = threading.Lock()

    def take(self) -> torch.Tensor:
        """Return a vector with anything in it."""
        with self._lock:
            vector, given = self._free.pop() if self._free else (None, None)
        if vector is None:
            return torch.empty(self._size, dtype=self._dtype, device=self._device)
        if given is not None:  # on a GPU whoever gave it may still read it, in a stream of its own
            torch.cuda.current_stream(self._device).wait_event(given)
        return vector

    def give(self, vector: torch.Tensor) -> None:
        """Take back a vector that nobody reads any more; more than MOST_FREE are let go of."""
        given = None
        if self._device.type == "cuda" and torch.cuda.is_available():
            given = torch.cuda.Event()  # type: ignore[no-untyped-call]
            given.record(torch.cuda.current_stream(self._device))
        with self._lock:
            if len(self._free) < MOST_FREE:
                self._free.append((vector, given))


class RankGradients:
    """The gradients of one rank that a step may still ask for, and what the rank contributes to each step.

    `rank` is its number in the shares of steps. Messages are kept by the version of the model that they are of. One
    thread may keep them while another contributes. A strategy that never `compensates` asks for a gradient only once.

    >>> layout = MessageLayout(gradient=2, buffers=0, flags=1)
    >>> mine = RankGradients(0, layout, VectorPool(3, torch.float32, torch.device("cpu")))
    >>> mine.keep(0, torch.tensor([4.0, 8.0, 1.0]))
    >>> step = Step(version=0, fresh=(Share(worker=0, version=0, weight=0.5), Share(worker=1, version=0, weight=0.5)))
    >>> mine.contribute(step)
    tensor([2., 4., 1.])
    """

    def __init__(self, rank: int, layout: MessageLayout, pool: VectorPool, *, compensates: bool = True) -> None:
        self.rank, self.layout, self._pool, self._compensates = rank, layout, pool, compensates
        self._kept: dict[int, torch.Tensor] = {}
        self._before: tuple[int, float] | None = None  # version and weight of its fresh gradient in the step before
        self._lock = threading.Lock()

    def keep(self, version: int, message: torch.Tensor) -> None:
        """Keep the message of a batch at this version, until no step can ask for it."""
        with self._lock:
            if version in self._kept:
                raise ValueError(f"rank {self.rank} has a gradient of round {version} already")
            self._kept[version] = message

    def has_part_in(self, step: Step) -> bool:
        """Whether this rank contributes anything to the next step, which this is."""
        compensates = self._before is not None and bool(step.previous_mean_weight)
        return compensates or any(share.worker == self.rank for share in (*step.fresh, *step.late))

    @torch.no_grad()
    def contribute(self, step: Step) -> torch.Tensor:
        """Return this rank's part of a step, in a vector of the pool; let go of what no later step can ask for."""
        fresh, late = _share_of(self.rank, step.fresh), _share_of(self.rank, step.late)
        of_buffers = 1.0 / (len(step.fresh) + len(step.late))
        terms = [(share.version, share.weight, of_buffers) for share in (late, fresh) if share is not None]
        if self._before is not None and step.previous_mean_weight:
            version, weight = self._before
            terms.insert(0, (version, -step.previous_mean_weight * weight, 0.0))
        out = self._add_up(terms, used_up=step.version - 1 if self._compensates else step.version)
        self._before = (fresh.version, fresh.weight) if fresh is not None and self._compensates else None
        self._let_go(older_than=step.version)
        return out

    def _add_up(self, terms: Sequence[tuple[int, float, float]], *, used_up: int) -> torch.Tensor:
        """Add up messages: (version, weight of the gradient, weight of the buffers) each.

        One of a version up to `used_up` is asked for no more, and the sum is made where it lies.
        """
        layout = self.layout
        if not terms:
            return self._pool.take().zero_()
        (version, weight, of_buffers), *others = terms
        first = self._message(version, take=version <= used_up)
        out = first if version <= used_up else self._pool.take()
        torch.mul(layout.gradient_of(first), weight, out=layout.gradient_of(out))
        torch.mul(layout.buffers_of(first), of_buffers, out=layout.buffers_of(out))
        layout.flags_of(out).copy_(layout.flags_of(first))
        for version, weight, of_buffers in others:
            message = self._message(version)
            layout.gradient_of(out).add_(layout.gradient_of(message), alpha=weight)
            layout.buffers_of(out).add_(layout.buffers_of(message), alpha=of_buffers)
            layout.flags_of(out).add_(layout.flags_of(message))
        return out

    def _message(self, version: int, *, take: bool = False) -> torch.Tensor:
        with self._lock:
            if version not in self._kept:
                raise KeyError(f"a step asks for the gradient of round {version}, which rank {self.rank} has not kept")
            return self._kept.pop(version) if take else self._kept[version]

    def _let_go(self, *, older_than: int) -> None:
        with self._lock:
            for version in [version for version in self._kept if version < older_than]:
                self._pool.give(self._kept.pop(version))

    def state_dict(self) -> dict[str, Any]:
        """Return the gradients that the next step may ask for, between two steps."""
        with self._lock:
            kept = {str(version): message.clone() for version, message in self._kept.items()}
        before = [] if self._before is None else list(self._before)
        return {"kept": kept, "before": before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        like, kept = self._pool.take(), {}
        for version, message in state["kept"].items():
            check_tensor("a gradient", message, like)
            number: int = decode(Count, int(version), "kept")
            kept[number] = message.to(like, copy=True)  # its memory is used again, and is not ours
        self._pool.give(like)
        before = decode(tuple[Count, Fraction], state["before"], "before") if state["before"] else None
        if before is not None and before[0] not in kept:
            raise ValueError(f"the fresh gradient of round {before[0]} is not among those that were kept")
        self._kept, self._before = kept, before


def _share_of(rank: int, shares: Sequence[Share]) -> Share | None:
    return next((share for share in shares if share.worker == rank), None)
