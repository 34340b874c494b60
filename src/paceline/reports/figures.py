"""Figures of any numbers: lines, bars in groups, points with labels. Series have the colours of `palette`, in order.

Experiments draw with them; charts of runs have files of their own (`curves`, `timeline`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Required, TypedDict, Unpack

from paceline.reports.chart import Chart, Json, Key, axis, layout, log_ticks, plot_text, symbol, thinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line or a cloud of points: its name, and (x, y) of each point; a y that is None is not drawn.

    `labels`, if given, stand beside the points. A `dashed` line is one that was not measured: a bound, or a formula.

    >>> Series(name="lgc", points=[(1.0, 0.5)]).dashed
    False
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    labels: Sequence[str] = ()
    dashed: bool = False


class ChartFrame(TypedDict, total=False):
    """The keywords of `line_chart` and `point_chart`; only the titles of the axes, `x` and `y`, must be given.

    With `percent`, y is written in per cent. A chart has the width of the page, unless `wide` is False.
    """

    x: Required[str]
    y: Required[str]
    log_x: bool
    log_y: bool
    percent: bool
    wide: bool


def line_chart(name: str, title: str, caption: str, series: Sequence[Series], **frame: Unpack[ChartFrame]) -> Chart:
    """Return lines, one for each series.

    >>> chart = line_chart("loss", "Loss", "", [Series(name="lgc", points=[(1, 0.5), (2, 0.4)])], x="rounds", y="loss")
    >>> chart.data[0]["y"], chart.keys[0].text
    ([0.5, 0.4], 'lgc')
    """
    data = [
        _trace(index, each, mode="lines" if len(each.points) > 60 else "lines+markers")
        for index, each in enumerate(series)
    ]
    return _chart(name, title, caption, data, [each.name for each in series], **frame)


def point_chart(name: str, title: str, caption: str, series: Sequence[Series], **frame: Unpack[ChartFrame]) -> Chart:
    """Return points with their labels, joined by a faint line in their order.

    >>> points = [Series(name="lgc", points=[(20.0, 0.5)], labels=["K=5"])]
    >>> point_chart("k", "Choice of K", "", points, x="seconds", y="loss").data[0]["text"]
    ['K=5']
    """
    data = []
    for index, each in enumerate(series):
        trace = _trace(index, each, mode="lines+markers+text" if each.labels else "lines+markers")
        trace["line"] = {"color": f"s{index}/0.35", "width": 1.2}
        trace["marker"] = {"symbol": symbol(index), "size": 10, "color": f"s{index}"}
        if each.labels:
            trace |= {"text": [plot_text(label) for label in each.labels], "textposition": "top center"}
            trace["textfont"] = {"size": 11, "color": "soft"}
        data.append(trace)
    return _chart(name, title, caption, data, [each.name for each in series], **frame)


def bar_chart(
    name: str,
    title: str,
    caption: str,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    *,
    y: str,
    x: str = "",
    percent: bool = False,
    log_y: bool = False,
    wide: bool = True,
) -> Chart:
    """Return bars, for each group one of each series.

    >>> chart = bar_chart("acc", "Accuracy", "", ["c = 1", "c = 2"], {"lgc": [0.4, 0.5]}, y="accuracy", percent=True)
    >>> chart.data[0]["x"], chart.data[0]["y"]
    (['c = 1', 'c = 2'], [0.4, 0.5])
    """
    data: list[Json] = [
        {
            "type": "bar",
            "name": plot_text(series),
            "legendgroup": f"s{index}",
            "x": [plot_text(group) for group in groups],
            "y": [_number(value) for value in values],
            "marker": {"color": f"s{index}"},
            "hovertemplate": f"<b>{plot_text(series)}</b>, %{{x}}<br>%{{y{':.1%' if percent else ''}}}<extra></extra>",
        }
        for index, (series, values) in enumerate(bars.items())
    ]
    chart = _chart(name, title, caption, data, list(bars), x=x, y=y, log_y=log_y, percent=percent, wide=wide)
    chart.layout["barmode"] = "group"
    chart.layout["xaxis"]["type"] = "category"
    return chart


def _trace(index: int, series: Series, *, mode: str) -> Json:
    kept = [(x, y) for x, y in series.points]
    points = kept if series.labels else thinned(kept)
    return {
        "type": "scatter",
        "mode": mode,
        "name": plot_text(series.name),
        "legendgroup": f"s{index}",
        "x": [_number(x) for x, _ in points],
        "y": [_number(y) for _, y in points],
        "line": {"color": f"s{index}", "width": 2.2, **({"dash": "dash"} if series.dashed else {})},
        "marker": {"symbol": symbol(index), "size": 6, "color": f"s{index}"},
        "hovertemplate": f"<b>{plot_text(series.name)}</b><br>%{{x}}, %{{y}}<extra></extra>",
        "cliponaxis": False,
    }


def _chart(
    name: str,
    title: str,
    caption: str,
    data: list[Json],
    series: Sequence[str],
    *,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    percent: bool = False,
    wide: bool = True,
) -> Chart:
    shown: dict[str, Any] = {"tickformat": ".0%"} if percent else {}
    return Chart(
        name=name,
        title=title,
        caption=caption,
        data=data,
        layout=layout(
            height=380,
            xaxis=_axis(x, log_x, [each for trace in data for each in trace["x"]]),
            yaxis=_axis(y, log_y, [each for trace in data for each in trace["y"]], **shown),
        ),
        wide=wide,
        keys=tuple(Key(text=each, series=f"s{index}") for index, each in enumerate(series)),
    )


def _axis(title: str, log: bool, values: Sequence[Any], **more: Any) -> Json:
    if not log:
        return axis(title, **more)
    powers = [math.log10(value) for value in values if isinstance(value, float) and value > 0] or [0.0, 1.0]
    room = 0.05 * max(1e-9, max(powers) - min(powers)) or 0.1
    low, high = min(powers) - room, max(powers) + room
    return axis(f"{title} (log scale)", type="log", range=[low, high], **log_ticks(low, high, most_decades=4), **more)


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
