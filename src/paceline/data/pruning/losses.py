"""The losses of one epoch, at the places of its order, until they are judged.

On the CPU a loss is looked at as it comes. On an accelerator that would wait for the device in every step, so copies of
them stay there and are fetched together, some dozens of batches late. One that is then found not to be finite is told,
and not judged: its step has been taken long ago.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.peers import Peers

FETCHED_AT_ONCE = 64


class Losses:
    """Room for the losses of an order of samples; one that has not come is NaN.

    >>> losses = Losses(np.array([7, 8, 9], np.int32))
    >>> losses.put(1, torch.tensor([0.5, 0.25]))
    >>> losses.values
    array([ nan, 0.5 , 0.25], dtype=float32)
    """

    def __init__(self, order: NDArray[np.int32]) -> None:
        self._order = order
        self._values = np.full(len(order), np.nan, np.float32)
        self._waiting: list[tuple[int, torch.Tensor]] = []

    @property
    def values(self) -> NDArray[np.float32]:
        """All that has come."""
        self._fetch()
        return self._values

    def put(self, start: int, losses: torch.Tensor) -> None:
        """The losses of the places from `start` on; what is beyond the last place is not kept."""
        if losses.is_cpu:
            if losses.dtype is torch.float32 and start + len(losses) <= len(self._values):
                self._values[start : start + len(losses)] = losses.numpy()  # nearly always
            else:
                self._store(start, losses)
            return
        self._waiting.append((start, losses.to(torch.float32, copy=True)))  # the tensor may be a buffer used again
        if len(self._waiting) >= FETCHED_AT_ONCE:
            self._fetch()

    def _fetch(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        together = torch.cat([losses for _, losses in waiting]).cpu()
        for (start, _), fetched in zip(waiting, torch.split(together, [len(each[1]) for each in waiting]), strict=True):
            self._store(start, torch.where(torch.isfinite(fetched), fetched, torch.nan))
            bad = int((~torch.isfinite(fetched)).to(torch.uint8).argmax())
            if not torch.isfinite(fetched[bad]):
                sample = self._order[(start + bad) % len(self._order)]
                warnings.warn(f"the loss of sample {sample} was {float(fetched[bad])}: it is not judged", stacklevel=2)

    def _store(self, start: int, losses: torch.Tensor) -> None:
        values = (losses if losses.dtype is torch.float32 else losses.float()).numpy()
        room = len(self._values) - start
        if room < len(values):
            values = values[: max(room, 0)]
        self._values[start : start + len(values)] = values


def seen_by_any(values: NDArray[np.float32], peers: Peers) -> NDArray[np.float32]:
    """The losses that any rank has seen.

    >>> from paceline.data.pruning.peers import Alone
    >>> seen_by_any(np.array([0.5, np.nan], np.float32), Alone())
    array([0.5, nan], dtype=float32)
    """
    if peers.ranks == 1:
        return values
    unseen = np.isnan(values)
    total, seen = np.where(unseen, np.float32(0), values), (~unseen).astype(np.float32)
    peers.add_up(total)
    peers.add_up(seen)
    total[seen == 0] = np.nan
    return total


def seen_only(
    order: NDArray[np.int32], values: NDArray[np.float32], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]:
    """The samples whose losses came, and where their batches end among them.

    >>> seen_only(np.arange(4, dtype=np.int32), np.array([1, np.nan, 2, 3], np.float32), np.array([2, 4]))
    (array([0, 2, 3], dtype=int32), array([1., 2., 3.], dtype=float32), array([1, 3]))
    """
    order, values = order[: ends[-1]], values[: ends[-1]]
    unseen = np.isnan(values)
    if unseen.any():
        sizes = np.diff(np.concatenate(([0], np.cumsum(~unseen)[ends - 1])))
        ends, order, values = np.cumsum(sizes[sizes > 0]), order[~unseen], values[~unseen]
    return order, values, ends
