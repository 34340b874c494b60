"""What a rank can tell of an average: every rank's window, and its own moments.

started          begun            done        merged
|### window #####|~~~ on its way ~~|           |
                 |### the next window #########|          merged at the first step boundary after it was done
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.events import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """One average that is merged; the moments are this rank's, by its `time.perf_counter()`.

    >>> Average(number=0, windows=(Window(steps=3),), started=0.0, begun=1.0, done=1.5, merged=1.75).brought
    3
    """

    number: int
    windows: tuple[Window, ...]
    started: float
    begun: float
    done: float
    merged: float

    @property
    def brought(self) -> int:
        """The steps of all ranks that are in it."""
        return sum(window.brought for window in self.windows)
