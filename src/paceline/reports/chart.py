"""Charts as plain values: plotly figures with a title and a caption, and the colours they share with the page.

A strategy has the same colour in every report. The hues are those of Okabe and Ito, which people with any of the
common colour deficiencies can tell apart; marker shapes and hatching make the same distinction a second time.

Charts name colours by *token* ("ink", "s0/0.2" for the first series at a fifth of its strength). The page's script
replaces a token by the colour of the reader's scheme, light or dark, so one figure serves both.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Json: TypeAlias = dict[str, Any]
Scheme = Literal["light", "dark"]

MOST_POINTS = 2000

PAGE_COLOURS: dict[Scheme, dict[str, str]] = {
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
        "shade": "#d5dae2",
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
        "shade": "#3a4553",
    },
}

# strategy -> (light, dark)
STRATEGY_COLOURS: dict[str, tuple[str, str]] = {
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
    "full@ranks": ("#2f4a9e", "#93a8f5"),
    "fastest-k@ranks": ("#8a6d00", "#d9cb55"),
    "lgc@ranks": ("#12424a", "#9fe6ea"),
}
OTHER_COLOURS: tuple[tuple[str, str], ...] = (
    ("#c24e00", "#f08a4b"),
    ("#2a93c9", "#8fd0f5"),
    ("#6a51a3", "#b3a2e0"),
    ("#7a7a3a", "#c9c97a"),
    ("#8a4b38", "#d39b86"),
    ("#4d4d4d", "#c0c0c0"),
)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "star")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An entry of a legend: a swatch (a class of the style sheet), a dot (a token), or a series to show and hide.

    >>> Key(text="late", swatch="late").series
    ''
    """

    text: str
    swatch: str = ""
    dot: str = ""
    series: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A plotly figure with a title and a caption; `keys` are the legend above it.

    `legend` says what the keys are, where the chart itself does not know them: the page does.

    >>> Chart(name="loss", title="Loss", caption="Lower is better.", data=[], layout={}).wide
    False
    """

    name: str
    title: str
    caption: str
    data: list[Json]
    layout: Json
    legend: Literal["strategies", "work", ""] = ""
    wide: bool = False
    keys: tuple[Key, ...] = ()


def plot_text(text: str) -> str:
    """Return text for a figure: plotly reads a little HTML in labels, so text from outside is escaped.

    >>> plot_text("<b>lgc</b>")
    '&lt;b&gt;lgc&lt;/b&gt;'
    """
    return html.escape(text, quote=False)


def axis(title: str = "", **more: Any) -> Json:
    """Return an axis in the page's colours.

    >>> axis("seconds")["title"]["text"]
    'seconds'
    """
    return {
        "gridcolor": "line",
        "linecolor": "line",
        "zeroline": False,
        "ticks": "",
        "automargin": True,
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": "soft"}},
        "tickfont": {"size": 11, "color": "soft"},
        **more,
    }


def layout(*, height: int, **more: Any) -> Json:
    """Return a layout in the page's colours, without a box or a legend (the page has one that wraps).

    >>> layout(height=300)["height"]
    300
    """
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "paper_bgcolor": "card",
        "plot_bgcolor": "card",
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "color": "ink"},
        "hoverlabel": {
            "bgcolor": "card",
            "bordercolor": "soft",
            "font": {"color": "ink", "size": 12},
            "align": "left",
        },
        **more,
    }


def log_ticks(lowest_power: float, highest_power: float, *, most_decades: int) -> Json:
    """Return an axis's ticks at 1, 2, 5, 10, 20, ...; over more than `most_decades` decades, at powers of ten alone.

    >>> log_ticks(-1, 0.5, most_decades=2)["ticktext"]
    ['0.1', '1', '10']
    """
    decades = range(math.floor(lowest_power), math.ceil(highest_power) + 1)
    values = [
        step * 10.0**decade for decade in decades for step in ((1, 2, 5) if len(decades) <= most_decades else (1,))
    ]
    return {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}


def thinned(points: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """Return at most `most` of the points, evenly chosen; the first and the last always stay.

    >>> thinned(list(range(10)), most=4)
    [0, 3, 6, 9]
    """
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(index * step)] for index in range(most)]


def palette(strategies: Iterable[str]) -> dict[Scheme, dict[str, str]]:
    """Return every token's colour in both schemes: the page's, and `s0`, `s1`, ... for the strategies in order.

    A strategy that comes a second time, and one without a colour of its own, takes the next of the other colours.

    >>> colours = palette(["lgc"])
    >>> colours["light"]["s0"], colours["dark"]["s0"]
    ('#00886a', '#2cc79b')
    """
    free, others = dict(STRATEGY_COLOURS), itertools.cycle(OTHER_COLOURS)
    return series_colours(free.pop(strategy) if strategy in free else next(others) for strategy in strategies)


def series_colours(hues: Iterable[tuple[str, str]]) -> dict[Scheme, dict[str, str]]:
    """Return the page's colours and `s0`, `s1`, ... for the (light, dark) hues in order."""
    series = list(hues)
    return {
        scheme: {**PAGE_COLOURS[scheme], **{f"s{index}": hue[column] for index, hue in enumerate(series)}}
        for column, scheme in enumerate(PAGE_COLOURS)
    }


def symbol(index: int) -> str:
    """Return the marker of the series with this index.

    >>> symbol(0), symbol(8)
    ('circle', 'circle')
    """
    return SYMBOLS[index % len(SYMBOLS)]
