"""The figures of one setting: what each K took, and how auto compares. Only arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Times: TypeAlias = dict[int | Literal["auto"], list[float | None]]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Mean times by K, and auto against the best of them; None is what cannot be said.

    `standard_error` is that of `ratio`. `held_out` is auto against the K that was best on the other seeds.
    """

    times: Times
    means: Mapping[int, float | None]
    auto: float | None
    best_k: int | None
    ratio: float | None
    standard_error: float | None
    held_out: float | None

    @property
    def full(self) -> float | None:
        """The time of all workers: that of the largest K."""
        return self.means[max(self.means)]

    def saved(self, k: int | None) -> float | None:
        """The share of full's time that a K does not need."""
        mean = self.means.get(k) if k is not None else None
        return None if mean is None or self.full is None else 1 - mean / self.full

    def as_numbers(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "seconds": {str(k): values for k, values in self.times.items()},
            "best_k": self.best_k,
            "auto_over_best": self.ratio,
            "standard_error": self.standard_error,
            "auto_over_held_out": self.held_out,
            "best_saves": self.saved(self.best_k),
            "k7_saves": self.saved(7),
        }


def figures(times: Times) -> Figures:
    """The figures of a setting from its times, seed by seed.

    >>> found = figures({1: [4.0, 6.0], 2: [3.0, 3.0], "auto": [3.0, 3.3]})
    >>> found.best_k, round(found.ratio, 3), round(found.standard_error, 3), round(found.held_out, 3)
    (2, 1.05, 0.05, 1.05)
    """
    means = {k: _mean(values) for k, values in times.items() if isinstance(k, int)}
    auto = _mean(times["auto"])
    best_k = _best(means)
    best = times[best_k] if best_k is not None else []
    return Figures(
        times=times,
        means=means,
        auto=auto,
        best_k=best_k,
        ratio=_ratio(times["auto"], best),
        standard_error=_standard_error(times["auto"], best),
        held_out=_held_out(times),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    reached = [value for value in values if value is not None]
    return sum(reached) / len(reached) if reached and len(reached) == len(values) else None


def _best(means: Mapping[int, float | None]) -> int | None:
    reached = {k: mean for k, mean in means.items() if mean is not None}
    return min(reached, key=lambda k: reached[k]) if reached else None


def _ratio(auto: Sequence[float | None], best: Sequence[float | None]) -> float | None:
    top, bottom = _mean(auto), _mean(best)
    return None if top is None or bottom is None else top / bottom


def _standard_error(auto: Sequence[float | None], best: Sequence[float | None]) -> float | None:
    """Of a ratio of means over paired seeds, to first order: the spread of auto - ratio * best."""
    ratio, bottom = _ratio(auto, best), _mean(best)
    if ratio is None or bottom is None or len(auto) < 2:
        return None
    rests = [(a or 0.0) - ratio * (b or 0.0) for a, b in zip(auto, best, strict=True)]
    spread = math.sqrt(sum(rest * rest for rest in rests) / (len(rests) - 1))
    return spread / math.sqrt(len(rests)) / bottom


def _held_out(times: Times) -> float | None:
    """Auto against the K that the other seeds would have chosen, seed by seed."""
    seeds = range(len(times["auto"]))
    chosen: list[float | None] = []
    for out in seeds:
        others = {k: _mean([values[s] for s in seeds if s != out]) for k, values in times.items() if isinstance(k, int)}
        best = _best(others)
        chosen.append(None if best is None else times[best][out])
    return _ratio(times["auto"], chosen)
