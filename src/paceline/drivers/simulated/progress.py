"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands after a round; `loss` and `accuracy` are those last measured.

    >>> Progress(round=3, seconds=0.4).loss is None
    True
    """

    round: int
    seconds: float
    loss: float | None = None
    accuracy: float | None = None
