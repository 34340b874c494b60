"""What a chart is: a plotly figure as plain values, with a title and a sentence on how to read it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Json: TypeAlias = dict[str, Any]

MOST_POINTS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure and the words around it. `legend` names the key the page shows above it.

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


def plot_text(text: str) -> str:
    """Text for a figure. Plotly reads a little HTML in labels, so what is not ours is escaped.

    >>> plot_text("<b>lgc</b>")
    '&lt;b&gt;lgc&lt;/b&gt;'
    """
    return html.escape(text, quote=False)


def axis(title: str = "", **more: Any) -> Json:
    """An axis in the page's colours.

    >>> axis("seconds")["title"]["text"]
    'seconds'
    """
    quiet: Json = {
        "gridcolor": "line",
        "linecolor": "line",
        "zeroline": False,
        "ticks": "",
        "automargin": True,
        "title": {"text": title, "standoff": 8, "font": {"size": 12, "color": "soft"}},
        "tickfont": {"size": 11, "color": "soft"},
    }
    return {**quiet, **more}


def layout(*, height: int, **more: Any) -> Json:
    """A layout in the page's colours: no box, no legend of its own (the page has one that wraps).

    >>> layout(height=300)["height"]
    300
    """
    plain: Json = {
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
    }
    return {**plain, **more}


def thinned(points: Sequence[Any], most: int = MOST_POINTS) -> list[Any]:
    """At most so many points, evenly chosen; the first and the last always stay.

    >>> thinned(list(range(10)), most=4)
    [0, 3, 6, 9]
    """
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(index * step)] for index in range(most)]
