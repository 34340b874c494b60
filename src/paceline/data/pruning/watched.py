"""The losses of a few chosen samples over the epochs: what a policy sees of them, kept for whoever wants to look.

    epoch      1     2     3     4     5
    sample 7   2.30  1.90  -     1.42  0.80          -: it sat out, or its batch was skipped

Memory is that of the chosen samples alone. The losses of an epoch are kept when the epoch is over and the ranks have
put theirs together, so every rank has the same history; an epoch that is broken off leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.policy import chunks, saved_array, whole_number

History = dict[int, list[tuple[int, float]]]


class WatchedLosses:
    """The (epoch, loss) of each watched sample, in the order of the epochs.

    >>> watched = WatchedLosses([7, 3], samples=10)
    >>> watched.add(1, np.array([3, 9, 7]), np.array([0.5, 0.25, 2.0], np.float32))
    >>> watched.add(2, np.array([7, 9]), np.array([1.0, 0.25], np.float32))
    >>> watched.history
    {3: [(1, 0.5)], 7: [(1, 2.0), (2, 1.0)]}
    >>> WatchedLosses([10], samples=10)
    Traceback (most recent call last):
    ValueError: watch must be a whole number between 0 and 9 (watch=10)
    """

    def __init__(self, watch: Iterable[int], *, samples: int) -> None:
        if isinstance(watch, str) or not isinstance(watch, Iterable):
            raise ValueError(f"watch must be numbers of samples, such as [3, 7] (watch={watch!r})")
        chosen = {whole_number("watch", each, least=0, most=samples - 1) for each in watch}
        self._chosen = np.array(sorted(chosen), np.int64)
        self.history: History = {sample: [] for sample in sorted(chosen)}

    def add(self, epoch: int, samples: NDArray[Any], losses: NDArray[np.float32]) -> None:
        """Keep the losses of the watched among these samples; of one that comes several times, the last."""
        if not self.history:
            return
        found = dict[int, float]()
        for part in chunks(len(samples)):
            places = np.flatnonzero(np.isin(samples[part], self._chosen))
            found |= zip(samples[part][places].tolist(), losses[part][places].tolist(), strict=True)
        for sample, loss in found.items():
            self.history[sample].append((epoch, loss))

    def state_dict(self) -> dict[str, Any]:
        """Return the history as tensors."""
        rows = [(sample, epoch, loss) for sample, kept in self.history.items() for epoch, loss in kept]
        return {
            "watched_samples": torch.tensor([row[0] for row in rows], dtype=torch.int64),
            "watched_epochs": torch.tensor([row[1] for row in rows], dtype=torch.int64),
            "watched_losses": torch.tensor([row[2] for row in rows], dtype=torch.float32),
        }

    def histories_in(self, state: Mapping[str, Any]) -> History:
        """Return the history in a state, of those who are watched here; a state that says nothing leaves it empty."""
        history: History = {sample: [] for sample in self.history}
        if "watched_samples" not in state:
            return history
        size = np.asarray(state["watched_samples"]).size
        samples = saved_array(state["watched_samples"], np.int64, size, "watched_samples")
        epochs = saved_array(state["watched_epochs"], np.int64, size, "watched_epochs")
        losses = saved_array(state["watched_losses"], np.float32, size, "watched_losses")
        for sample, epoch, loss in zip(samples.tolist(), epochs.tolist(), losses.tolist(), strict=True):
            if sample in history:
                history[sample].append((epoch, loss))
        return history
