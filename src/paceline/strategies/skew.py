"""How differently the workers' data is dealt, judged by their losses.

    skew = variance between workers / (variance between workers + variance between the samples of a worker)

This is the intraclass correlation of a one-way analysis of variance. What the workers' means would differ by anyway,
as means of so many samples, is taken off the variance between them. Equally dealt data gives about 0, one class per
worker about 0.7 on digits at the start of training. As training goes on all losses become alike though the data does
not, so the highest skew seen is remembered, and fades slowly.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from paceline.events import LossSeen

UNSEEN = 0.3
FADES = 0.998
RECENT = 0.2


class Skew:
    """How much of the variance of losses lies between workers: the highest share seen, fading.

    >>> skew = Skew()
    >>> for version in (0, 1, 2):
    ...     for worker, loss in enumerate((1.0, 5.0, 9.0)):
    ...         skew.note(LossSeen(worker=worker, version=version, mean=loss, variance=1.0, samples=32))
    >>> round(skew.value, 2)
    0.94
    """

    def __init__(self) -> None:
        self.value = UNSEEN
        self._recent: float | None = None
        self._seen: defaultdict[int, dict[int, tuple[float, float, int]]] = defaultdict(dict)

    def note(self, event: LossSeen) -> None:
        """A version is judged once two newer ones have been heard of: its late gradients are in by then."""
        self._seen[event.version][event.worker] = event.mean, event.variance, event.samples
        for version in [version for version in self._seen if version <= event.version - 2]:
            self._judge(list(self._seen.pop(version).values()))

    def _judge(self, losses: list[tuple[float, float, int]]) -> None:
        if len(losses) < 3:
            return
        means, variances, samples = (np.array(column, dtype=np.float64) for column in zip(*losses, strict=True))
        within = float(variances.mean())
        between = max(0.0, float(means.var(ddof=1)) - float((variances / samples).mean()))
        if not within + between > 0:
            return
        share = between / (within + between)
        first = self._recent is None
        self._recent = share if self._recent is None else self._recent + RECENT * (share - self._recent)
        self.value = self._recent if first else max(self._recent, FADES * self.value)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on later, as plain values."""
        seen = [(version, sorted(by.items())) for version, by in sorted(self._seen.items())]
        return {"value": self.value, "recent": self._recent, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.value, self._recent = state["value"], state["recent"]
        self._seen = defaultdict(dict)
        for version, entries in state["seen"]:
            self._seen[int(version)] = {int(worker): tuple(entry) for worker, entry in entries}
