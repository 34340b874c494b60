"""Colours, once, for the page and its charts, in light and in dark.

A strategy has the same colour in every report. The hues are those of Okabe and Ito, which people with any
of the common colour deficiencies can tell apart; marker shapes and hatching say the same a second time.

Charts name colours by *token* ("ink", "s0/0.2" for the first series at a fifth of its strength). The page's
script puts the colour of the reader's scheme in its place, so one figure serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.reports.groups import Group

Scheme = Literal["light", "dark"]

PAGE: dict[Scheme, dict[str, str]] = {
    "light": {
        "page": "#f6f7f9",
        "card": "#ffffff",
        "ink": "#18202b",
        "soft": "#566171",
        "line": "#e1e5ea",
        "used": "#3f6ea3",
        "late": "#e8a317",
        "dropped": "#c4452f",
        "flight": "#9fb4cc",
        "waiting": "#e6e9ee",
        "gone": "#b4bdc9",
    },
    "dark": {
        "page": "#10141a",
        "card": "#181e26",
        "ink": "#e9edf2",
        "soft": "#9aa6b5",
        "line": "#2c3541",
        "used": "#6d9fd6",
        "late": "#f2b844",
        "dropped": "#e8705a",
        "flight": "#4f6580",
        "waiting": "#262e39",
        "gone": "#4a5666",
    },
}

# strategy -> (light, dark)
STRATEGIES: dict[str, tuple[str, str]] = {
    "full": ("#0072b2", "#56a9e4"),
    "fastest-k": ("#d98e00", "#f0b23e"),
    "lgc": ("#00886a", "#2cc79b"),
    "async": ("#b8568f", "#e39bc3"),
    "ssgd": ("#2a93c9", "#8fd0f5"),
    "local-sgd": ("#c24e00", "#f08a4b"),
    "bmuf": ("#8a4b38", "#d39b86"),
    "diloco": ("#6a51a3", "#b3a2e0"),
    "hpsgd": ("#3d8b1f", "#86cf62"),
    "psgd": ("#5f5f5f", "#b0b0b0"),
}
OTHERS: tuple[tuple[str, str], ...] = (
    ("#c24e00", "#f08a4b"),
    ("#2a93c9", "#8fd0f5"),
    ("#6a51a3", "#b3a2e0"),
    ("#7a7a3a", "#c9c97a"),
    ("#8a4b38", "#d39b86"),
    ("#4d4d4d", "#c0c0c0"),
)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "star")


def palette(groups: Sequence[Group]) -> dict[Scheme, dict[str, str]]:
    """Every token's colour in both schemes: the page's, and `s0`, `s1`, ... for the groups in order.

    >>> colours = palette([Group(label="lgc", strategy="lgc", traces=())])
    >>> colours["light"]["s0"], colours["dark"]["s0"]
    ('#00886a', '#2cc79b')
    """
    colours: dict[Scheme, dict[str, str]] = {scheme: dict(tokens) for scheme, tokens in PAGE.items()}
    taken: set[str] = set()
    others = 0
    for index, group in enumerate(groups):
        if group.strategy in STRATEGIES and group.strategy not in taken:
            light, dark = STRATEGIES[group.strategy]
            taken.add(group.strategy)
        else:
            light, dark = OTHERS[others % len(OTHERS)]
            others += 1
        colours["light"][f"s{index}"] = light
        colours["dark"][f"s{index}"] = dark
    return colours


def symbol(index: int) -> str:
    """The marker of the group with this index.

    >>> symbol(0), symbol(8)
    ('circle', 'circle')
    """
    return SYMBOLS[index % len(SYMBOLS)]
