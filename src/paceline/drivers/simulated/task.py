"""One worker's work on one batch, as the virtual clock sees it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True, eq=False)
class Task:
    """Who works on which batch (`draw`) at which version, from when to when, and how far it gets.

    >>> Task(worker=0, version=0, draw=0, started_seconds=0.0, seconds=2.0, blocks=4,
    ...      finished_seconds=2.0, blocks_done=4).arrived_seconds is None
    True
    """

    worker: int
    version: int
    draw: int
    started_seconds: float
    seconds: float
    blocks: int
    finished_seconds: float
    blocks_done: int
    delivery_seconds: float = 0.0
    arrived_seconds: float | None = None


def blocks_by(
    elapsed_seconds: float | NDArray[np.float64], block_seconds: float | NDArray[np.float64], blocks: int
) -> NDArray[np.float64]:
    """Blocks a worker will have done when it stops at the next boundary: at least one, at most all.

    >>> float(blocks_by(0.3, 0.25, 4)), float(blocks_by(0.0, 0.25, 4)), float(blocks_by(9.9, 0.25, 4))
    (2.0, 1.0, 4.0)
    """
    return np.asarray(np.clip(np.ceil(elapsed_seconds / block_seconds), 1, blocks))
