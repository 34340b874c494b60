"""How claims are judged: an order of lanes, a limit, a direction. Each claim states the figures that it was judged by.

A figure that is missing (a run diverged, a target was never reached) makes a claim false: nobody wins by not finishing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from paceline.quantities import number_text
from paceline.reproduce.experiment import Claim

Writer = Callable[[float | None], str]


def percent(value: float | None) -> str:
    """Write an accuracy or a share.

    >>> percent(0.447), percent(None)
    ('44.7 %', 'none')
    """
    return "none" if value is None else f"{100 * value:.1f} %"


def figure(value: float | None) -> str:
    """Write any number.

    >>> figure(0.12345), figure(None)
    ('0.123', 'none')
    """
    return "none" if value is None else number_text(value)


def ahead(
    text: str,
    figures: Mapping[str, float | None],
    *,
    best: Literal["high", "low"],
    by: float = 0.0,
    strictly: bool = True,
    write: Writer = figure,
    judged: bool = True,
) -> Claim:
    """Return the claim that lanes come in the order in which they are given, the best first.

    Each must be ahead of the next by more than `by`; with `strictly=False`, it may be behind by as much.

    >>> ahead("lgc before fastest-k", {"lgc": 0.47, "fastest-k": 0.38}, best="high", write=percent).line
    'same winner: yes, lgc 47.0 %, fastest-k 38.0 % (lgc before fastest-k)'
    >>> ahead("lgc before fastest-k", {"lgc": 0.38, "fastest-k": 0.47}, best="high").holds
    False
    >>> ahead("about as good", {"lgc": 0.465, "full": 0.47}, best="high", by=0.01, strictly=False).holds
    True
    """
    sign = 1.0 if best == "high" else -1.0
    values = list(figures.values())
    gaps = [
        None if first is None or second is None else sign * (first - second)
        for first, second in itertools.pairwise(values)
    ]
    holds = all(gap is not None and (gap > by if strictly else gap >= -by) for gap in gaps)
    because = ", ".join(f"{name} {write(value)}" for name, value in figures.items())
    return Claim(kind="winner", text=text, holds=holds, because=because, judged=judged)


def within(
    text: str,
    value: float | None,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    kind: Literal["winner", "shape", "value"] = "value",
    write: Writer = figure,
    judged: bool = True,
) -> Claim:
    """Return the claim that a figure lies between two limits.

    >>> within("time saved 30 to 38 %", 0.33, least=0.30, most=0.38, write=percent).line
    'same value: yes, 33.0 % is between 30.0 % and 38.0 % (time saved 30 to 38 %)'
    >>> within("at most a point behind", 0.02, most=0.01, write=percent).line
    'same value: no, because 2.0 % is not at most 1.0 % (at most a point behind)'
    """
    holds = value is not None and least <= value <= most
    if math.isfinite(least) and math.isfinite(most):
        limits = f"between {write(least)} and {write(most)}"
    else:
        limits = f"at least {write(least)}" if math.isfinite(least) else f"at most {write(most)}"
    because = f"{write(value)} is{'' if holds else ' not'} {limits}"
    return Claim(kind=kind, text=text, holds=holds, because=because, judged=judged)


def equals(
    text: str, value: float | None, published: float, *, tolerance: float = 1e-6, write: Writer = figure
) -> Claim:
    """Return the claim that a figure is the published one.

    >>> equals("lgc takes 4.0 s", 4.2, 4.0).line
    'same value: no, because 4.2 is not 4 (lgc takes 4.0 s)'
    """
    holds = value is not None and abs(value - published) <= tolerance
    because = f"{write(value)} is{'' if holds else ' not'} {write(published)}"
    return Claim(kind="value", text=text, holds=holds, because=because)


def falling(
    text: str,
    values: Sequence[float | None],
    *,
    rising: bool = False,
    slack: float = 0.0,
    write: Writer = figure,
    judged: bool = True,
) -> Claim:
    """Return the claim that each figure is below the one before it (above it, where they are `rising`).

    With `slack`, one may be on the wrong side by so much.

    >>> falling("accuracy falls with the batch", [0.8, 0.7, 0.71], slack=0.02, write=percent).holds
    True
    >>> falling("accuracy falls with the batch", [0.7, 0.8]).line
    'same shape: no, because 0.7, 0.8 (accuracy falls with the batch)'
    """
    sign = 1.0 if rising else -1.0
    holds = len(values) > 1 and all(
        first is not None and second is not None and sign * (second - first) >= -slack
        for first, second in itertools.pairwise(values)
    )
    known = [value for value in values if value is not None]
    holds = holds and sign * (known[-1] - known[0]) > 0
    because = ", ".join(map(write, values))
    return Claim(kind="shape", text=text, holds=holds, because=because, judged=judged)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean over seeds; None where one of them has no figure.

    >>> mean([1.0, 2.0]), mean([1.0, None]), mean([])
    (1.5, None, None)
    """
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
