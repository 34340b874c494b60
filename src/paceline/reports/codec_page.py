"""The page of `paceline bench codecs`: tables, and bits against error with one point per codec."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.reports.chart import (
    OTHER_COLOURS,
    STRATEGY_COLOURS,
    Chart,
    Json,
    axis,
    layout,
    log_ticks,
    plot_text,
    series_colours,
    symbol,
)
from paceline.reports.page import page_html
from paceline.reports.table import PlainTable

HUES = (*STRATEGY_COLOURS.values(), *OTHER_COLOURS)
HEIGHT = 460
# Labels are placed for the narrowest chart that the page draws, in pixels of what the axes enclose.
ACROSS, UP = 630.0, 390.0
_LETTER, _LINE, _MARKER = 7.0, 17.0, 7.0
# Where a label begins, or ends, or is centred, seen from its point: near it first, then further off, with a line to it.
_NEAR = (("left", 11, 0), ("right", -11, 0), ("center", 0, 18), ("center", 0, -18))
_FAR = tuple(
    (side, sign * across, up)
    for distance in (30, 50, 70, 90)
    for side, sign, across in (("center", 0, 0), ("left", 1, 24), ("right", -1, 24), ("left", 1, 70), ("right", -1, 70))
    for up in (distance, -distance)
)
Place = tuple[str, float, float]
Box = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class CodecPoint:
    """A codec on the chart; points of one `family` have one colour.

    >>> CodecPoint(label="half", family="half", bits=16.0, error=0.002).bits
    16.0
    """

    label: str
    family: str
    bits: float
    error: float


def codec_page(
    points: Sequence[CodecPoint], tables: Sequence[PlainTable], *, headline: str, conditions: Sequence[str]
) -> str:
    """Return the page as text.

    >>> point = CodecPoint(label="half", family="half", bits=16.0, error=0.002)
    >>> "<h1>half it is</h1>" in codec_page([point], [], headline="half it is", conditions=["2 threads"])
    True
    """
    chart = codec_chart(points)
    return page_html(
        "codecs.html",
        title="paceline bench codecs",
        headline=headline,
        conditions=conditions,
        figures=[chart],
        colours=series_colours(HUES[index % len(HUES)] for index, _ in enumerate({point.family for point in points})),
        tables=tables,
    )


def codec_chart(points: Sequence[CodecPoint]) -> Chart:
    """Return the chart; an error of 0 has no place on a logarithmic axis, so it lies on the bottom line, labelled so.

    >>> chart = codec_chart([CodecPoint(label="half", family="half", bits=16.0, error=0.002)])
    >>> chart.layout["annotations"][0]["text"], chart.data[0]["x"], chart.data[0]["y"]
    ('half', [16.0], [0.002])
    """
    floor = shown_floor(points)
    shown = [max(point.error, floor) for point in points]
    x_range, y_range = _range([point.bits for point in points], 0.12), _range([*shown, 1.0], 0.1)
    labels = _labels(points, shown, x_range, y_range)
    families = list(dict.fromkeys(point.family for point in points))
    data: list[Json] = []
    for index, family in enumerate(families):
        mine = [number for number, point in enumerate(points) if point.family == family]
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "legendgroup": f"s{index}",
                "x": [float(f"{points[number].bits:.6g}") for number in mine],
                "y": [float(f"{shown[number]:.6g}") for number in mine],
                "marker": {"symbol": symbol(index), "size": 10, "color": f"s{index}"},
                "hovertext": [
                    f"<b>{plot_text(points[number].label)}</b><br>{points[number].bits:.3g} bits per element"
                    f"<br>relative error {points[number].error:.2g}"
                    for number in mine
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "cliponaxis": False,
            }
        )
    return Chart(
        name="codecs",
        title="Bits against error",
        caption="Further down is closer to the gradient, further left is smaller. Above the dashed line the error is "
        "larger than that of sending nothing: only the mean over many workers or steps makes sense of it.",
        data=data,
        layout=layout(
            height=HEIGHT,
            xaxis=_log_axis("bits per element", x_range),
            yaxis=_log_axis("relative error", y_range),
            annotations=labels,
            shapes=[
                {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1,
                 "line": {"color": "soft", "width": 1.2, "dash": "dash"}}
            ],
        ),
        wide=True,
    )  # fmt: skip


def shown_floor(points: Sequence[CodecPoint]) -> float:
    """Return the height at which an error of 0 is drawn: a power of ten clearly below all others.

    >>> shown_floor([CodecPoint(label="half", family="half", bits=16.0, error=0.002)])
    0.0001
    """
    least = min((point.error for point in points if point.error > 0), default=1.0)
    return float(10.0 ** (math.floor(math.log10(least)) - 1))


def _label(point: CodecPoint) -> str:
    return point.label if point.error > 0 else f"{point.label} (exact)"


def _range(values: Sequence[float], room: float) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    room *= max(high - low, 1.0)
    return low - room, high + room


def _log_axis(name: str, powers: tuple[float, float]) -> Json:
    return axis(f"{name} (log scale)", type="log", range=list(powers), **log_ticks(*powers, most_decades=5))


def _labels(
    points: Sequence[CodecPoint], shown: Sequence[float], x_range: tuple[float, float], y_range: tuple[float, float]
) -> list[Json]:
    """Return a label for each point, at the first place that is free of points and other labels."""
    powers = [(math.log10(point.bits), math.log10(error)) for point, error in zip(points, shown, strict=True)]
    across, up = ACROSS / (x_range[1] - x_range[0]), UP / (y_range[1] - y_range[0])
    at = [((x - x_range[0]) * across, (y - y_range[0]) * up) for x, y in powers]
    taken = [(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in at]
    labels = []
    for point, power, (x, y) in zip(points, powers, at, strict=True):
        boxes = [(place, _box(x, y, _label(point), place)) for place in (*_NEAR, *_FAR)]
        free = [(place, box) for place, box in boxes if _inside(box) and not any(_overlap(box, it) for it in taken)]
        place, box = (free or boxes)[0]
        taken.append(box)
        labels.append(_annotation(point, power, place))
    return labels


def _annotation(point: CodecPoint, power: tuple[float, float], place: Place) -> Json:
    side, across, up = place
    return {
        "x": power[0],
        "y": power[1],
        "ax": across,
        "ay": -up,
        "xanchor": side,
        "yanchor": "middle",
        "text": plot_text(_label(point)),
        "font": {"size": 12, "color": "ink"},
        "bgcolor": "card/0.75",
        "borderpad": 0,
        "showarrow": True,
        "arrowhead": 0,
        "arrowwidth": 1,
        "arrowcolor": "card/0" if place in _NEAR else "soft/0.7",
        "standoff": 6,
    }


def _box(x: float, y: float, text: str, place: Place) -> Box:
    side, across, up = place
    width = _LETTER * len(text)
    left = x + across - width * {"left": 0.0, "center": 0.5, "right": 1.0}[side]
    return left, y + up - _LINE / 2, left + width, y + up + _LINE / 2


def _inside(box: Box) -> bool:
    return box[0] >= 0 and box[2] <= ACROSS and box[1] >= 0 and box[3] <= UP


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
