"""The other processes that train together, as far as pruning has to know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Peers(Protocol):
    """How ranks agree. `agree` and `add_up` are for all ranks together."""

    rank: int
    ranks: int

    def agree(self, moment: str, numbers: Sequence[int], names: Sequence[str]) -> None:
        """Refuse to go on unless all ranks come with the same numbers."""

    def add_up(self, values: NDArray[np.float32]) -> None:
        """Replace the values by their sum over all ranks."""


class Alone:
    """One process.

    >>> Alone().ranks
    1
    """

    rank, ranks = 0, 1

    def agree(self, moment: str, numbers: Sequence[int], names: Sequence[str]) -> None:
        """There is nobody to disagree with."""

    def add_up(self, values: NDArray[np.float32]) -> None:
        """The sum of one is itself."""
