"""How claims are judged: an order of lanes, a limit, a direction. Each claim states the figures that it was judged by.

A figure that is missing is NaN and makes a claim false: no lane wins by not finishing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from experiments.core.story import Claim
from paceline.quantities import number_text

Writer = Callable[[float], str]


def percent(value: float) -> str:
    """Write an accuracy or a share.

    >>> percent(0.447), percent(math.nan)
    ('44.7 %', 'none')
    """
    return "none" if math.isnan(value) else f"{100 * value:.1f} %"


def figure(value: float) -> str:
    """Write any number.

    >>> figure(0.12345), figure(math.nan)
    ('0.123', 'none')
    """
    return "none" if math.isnan(value) else number_text(value)


def ratio_text(value: float) -> str:
    """Write a loss against another.

    >>> ratio_text(0.9914), ratio_text(math.nan)
    ('0.991', 'none')
    """
    return "none" if math.isnan(value) else f"{value:.3f}"


def with_spread(mean: float, spread: float) -> str:
    """Write a mean of accuracies, with their standard deviation where there are several seeds.

    >>> with_spread(0.48, 0.014), with_spread(0.48, math.nan), with_spread(math.nan, math.nan)
    ('48.0 ± 1.4 %', '48.0 %', 'none')
    """
    return percent(mean) if math.isnan(mean) or math.isnan(spread) else f"{100 * mean:.1f} ± {percent(spread)}"


def ahead(
    text: str,
    figures: Mapping[str, float],
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
    gaps = [sign * (first - second) for first, second in itertools.pairwise(figures.values())]
    holds = all(gap > by if strictly else gap >= -by for gap in gaps)
    because = ", ".join(f"{name} {write(value)}" for name, value in figures.items())
    return Claim(kind="winner", text=text, holds=holds, because=because, judged=judged)


def within(
    text: str,
    value: float,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    kind: Literal["winner", "shape", "value", "bar"] = "value",
    write: Writer = figure,
    judged: bool = True,
) -> Claim:
    """Return the claim that a figure lies between two limits.

    >>> within("time saved 30 to 38 %", 0.33, least=0.30, most=0.38, write=percent).line
    'same value: yes, 33.0 % is between 30.0 % and 38.0 % (time saved 30 to 38 %)'
    >>> within("at most a point behind", 0.02, most=0.01, write=percent).line
    'same value: no, because 2.0 % is not at most 1.0 % (at most a point behind)'
    """
    holds = least <= value <= most
    if math.isfinite(least) and math.isfinite(most):
        limits = f"between {write(least)} and {write(most)}"
    else:
        limits = f"at least {write(least)}" if math.isfinite(least) else f"at most {write(most)}"
    because = f"{write(value)} is{'' if holds else ' not'} {limits}"
    return Claim(kind=kind, text=text, holds=holds, because=because, judged=judged)


def equals(text: str, value: float, published: float, *, tolerance: float = 1e-6, write: Writer = figure) -> Claim:
    """Return the claim that a figure is the published one.

    >>> equals("lgc takes 4.0 s", 4.2, 4.0).line
    'same value: no, because 4.2 is not 4 (lgc takes 4.0 s)'
    """
    holds = abs(value - published) <= tolerance
    because = f"{write(value)} is{'' if holds else ' not'} {write(published)}"
    return Claim(kind="value", text=text, holds=holds, because=because)


def falling(
    text: str,
    values: Sequence[float],
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
    steps = all(sign * (second - first) >= -slack for first, second in itertools.pairwise(values))
    known = [value for value in values if not math.isnan(value)]
    holds = len(values) > 1 and steps and sign * (known[-1] - known[0]) > 0
    return Claim(kind="shape", text=text, holds=holds, because=", ".join(map(write, values)), judged=judged)
