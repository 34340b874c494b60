"""The page of `paceline inspect rates`: ratios of weights to gradients on a logarithmic scale.

A bar per layer and, where steps were taken, a line per layer over them; one file, as the report of a race is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.reports.chart import Chart, Json, Key, axis, layout, plot_text
from paceline.reports.page import page_html
from paceline.reports.table import PlainTable
from paceline.terminal import shortened

MOST_BARS = 130  # beyond that only weights are drawn: the table has the rest
MOST_LABEL = 38
AXES = 78  # pixels above and below the bars
KINDS = {"weight": "weights", "bias": "biases", "norm": "normalisation"}
LIMITING = "limits the rate"
COLOURS = {"weights": "used", "biases": "late", "normalisation": "gone", LIMITING: "dropped"}
HATCHES = {"biases": "/", "normalisation": "."}  # what the colour says, once more
SWATCHES = {LIMITING: "limiting", "weights": "used", "biases": "biases", "normalisation": "norms"}


@dataclass(frozen=True, kw_only=True)
class RatioBar:
    """A layer on the charts: its ratio before the first step, and at each later moment that was looked at.

    >>> RatioBar(name="fc.weight", kind="weight", ratio=6.0).group
    'weights'
    """

    name: str
    kind: Literal["weight", "bias", "norm"]
    ratio: float | None
    remark: str = ""
    limiting: bool = False
    course: tuple[tuple[int, float | None], ...] = ()
    facts: str = ""

    @property
    def group(self) -> str:
        """The group of layers whose colour it has."""
        return LIMITING if self.limiting else KINDS[self.kind]

    @property
    def later(self) -> float | None:
        """Its ratio at the last moment, if there is one that can be drawn."""
        return self.course[-1][1] if self.course and drawable(self.course[-1][1]) else None


def drawable(ratio: float | None) -> bool:
    """Whether a logarithmic axis has a place for it.

    >>> drawable(3.0), drawable(0.0), drawable(math.inf), drawable(None)
    (True, False, False, False)
    """
    return ratio is not None and 0 < ratio < math.inf


def ratio_page(
    bars: Sequence[RatioBar],
    table: PlainTable,
    *,
    title: str,
    headline: str,
    sentences: Sequence[str],
    conditions: Sequence[str],
    rate: float | None = None,
) -> str:
    """Return the page as text; the same values give the same text.

    >>> bar = RatioBar(name="fc.weight", kind="weight", ratio=6.0)
    >>> table = PlainTable(title="Layers", headings=("layer", "ratio"), rows=[("fc.weight", "6")], caption="")
    >>> page = ratio_page([bar], table, title="inspect", headline="fc it is", sentences=[], conditions=["batch of 32"])
    >>> "<h1>fc it is</h1>" in page, "<li>batch of 32</li>" in page
    (True, True)
    """
    course = course_chart(bars)
    charts = [ratio_chart(bars, rate=rate), *([course] if course is not None else [])]
    charts[0] = replace(charts[0], keys=_keys(charts[0], bars))
    return page_html(
        "ratios.html",
        title=title,
        headline=headline,
        sentences=sentences,
        conditions=conditions,
        figures=charts,
        table=table,
    )


def _keys(chart: Chart, bars: Sequence[RatioBar]) -> tuple[Key, ...]:
    """Return the key to the colours of the bars."""
    drawn = {item.get("name") for item in chart.data if item["x"]}
    keys = [Key(text=group, swatch=swatch) for group, swatch in SWATCHES.items() if group in drawn]
    if any(bar.later is not None for bar in bars):
        keys.append(Key(text="after the last step", dot="ink"))
    return tuple(keys)


def ratio_chart(bars: Sequence[RatioBar], *, rate: float | None = None) -> Chart:
    """Draw a bar per layer; with `rate`, a line at the learning rate; a dot at the ratio after the last step.

    >>> chart = ratio_chart([RatioBar(name="fc.weight", kind="weight", ratio=6.0, limiting=True)])
    >>> chart.data[0]["x"], chart.data[0]["marker"]["color"]
    ([6.0], 'dropped')
    """
    shown = list(bars) if len(bars) <= MOST_BARS else [bar for bar in bars if bar.kind == "weight" or bar.limiting]
    values = [bar.ratio for bar in shown] + [bar.later for bar in shown] + [rate]
    low, high = _range([value for value in values if value is not None and drawable(value)])
    numbered = list(enumerate(shown))
    data = [_bars(group, numbered) for group in COLOURS if any(bar.group == group for bar in shown)]
    data += _dots(numbered)
    pixels = 26 if len(shown) <= 24 else 19 if len(shown) <= 70 else 15
    annotations, shapes = _remarks(numbered, low), list[Json]()
    if rate is not None:
        place: Json = {"x": math.log10(rate), "yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False}
        annotations.append({**place, "text": f"rate {rate:.3g}", "font": {"size": 12, "color": "ink"}})
        dashed = {"color": "ink", "width": 1.5, "dash": "dash"}
        shapes.append({"type": "line", "x0": rate, "x1": rate, "yref": "paper", "y0": 0, "y1": 1, "line": dashed})
    return Chart(
        name="ratios",
        title="How much rate each layer bears",
        caption=_caption(bars, shown, rate),
        data=data,
        layout=layout(
            height=AXES + pixels * max(len(shown), 2),
            barmode="overlay",
            xaxis=axis("|w| / |gradient| (log scale)", type="log", range=[low, high], **_ticks(low, high)),
            yaxis=axis(
                range=[len(shown) - 0.4, -0.6],
                showgrid=False,
                fixedrange=len(shown) <= 24,
                tickvals=[number for number, _ in numbered],
                ticktext=[plot_text(shortened(bar.name, MOST_LABEL, cut="early")) for bar in shown],
            ),
            margin={"l": 8, "r": 12, "t": 26, "b": 8},
            shapes=shapes,
            annotations=annotations,
        ),
        wide=True,
    )


def course_chart(bars: Sequence[RatioBar]) -> Chart | None:
    """Draw a line per layer of weights while it trains; None without a second moment.

    >>> bar = RatioBar(name="fc.weight", kind="weight", ratio=6.0, course=((0, 6.0), (1, None), (2, 3.0)))
    >>> course_chart([bar]).data[0]["y"]
    [6.0, None, 3.0]
    """
    drawn = [bar for bar in bars if (bar.kind == "weight" or bar.limiting) and len(bar.course) > 1]
    if not drawn:
        return None
    low, high = _range([ratio for bar in drawn for _, ratio in bar.course if ratio is not None and drawable(ratio)])
    data: list[Json] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plot_text(bar.name),
            "x": [step for step, _ in bar.course],
            "y": [_rounded(ratio) if drawable(ratio) else None for _, ratio in bar.course],
            "line": {"color": "dropped" if bar.limiting else "used/0.5", "width": 2.5 if bar.limiting else 1.2},
            "hovertemplate": "%{fullData.name}<br>step %{x}: %{y:.3g}<extra></extra>",
        }
        for bar in sorted(drawn, key=lambda bar: bar.limiting)  # the limiting one on top
    ]
    return Chart(
        name="course",
        title="The same ratios while it trains",
        caption="A line per layer of weights, each point from one batch. The red line is the layer that limits the "
        "rate before the first step; further up, a layer bears a larger rate.",
        data=data,
        layout=layout(
            height=380,
            xaxis=axis("steps", range=[0, max(bar.course[-1][0] for bar in drawn)]),
            yaxis=axis("|w| / |gradient| (log scale)", type="log", range=[low, high], **_ticks(low, high)),
        ),
        wide=True,
    )


def _caption(bars: Sequence[RatioBar], shown: Sequence[RatioBar], rate: float | None) -> str:
    dots = any(bar.later is not None for bar in shown)
    left_out = len(bars) - len(shown)
    sentences = [
        "The length of a layer's weights over the length of its gradient.",
        "A plain gradient step at this rate would move the layer by as much as it is long.",
        "Dashed: the recipe's rate at the first step." if rate is not None else "",
        f"Dots: after {max(bar.course[-1][0] for bar in shown if bar.course):,} steps." if dots else "",
        f"{left_out} biases and scales of normalisation are not drawn; the table has them." if left_out else "",
    ]
    return " ".join(filter(None, sentences))


def _bars(group: str, numbered: Sequence[tuple[int, RatioBar]]) -> Json:
    mine = [(number, bar) for number, bar in numbered if bar.group == group and drawable(bar.ratio)]
    marker: Json = {"color": COLOURS[group], "line": {"width": 0}}
    if group in HATCHES:
        hatch: Json = {"shape": HATCHES[group], "size": 5, "solidity": 0.25}
        marker["pattern"] = {**hatch, "fillmode": "overlay", "fgcolor": "card", "fgopacity": 0.9}
    return {
        "type": "bar",
        "orientation": "h",
        "name": group,
        "x": [_rounded(bar.ratio) for _, bar in mine],
        "y": [number for number, _ in mine],
        "width": 0.66,  # else plotly takes it from the distance of the next bar of the same colour
        "marker": marker,
        "hovertext": [_hover(bar) for _, bar in mine],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _dots(numbered: Sequence[tuple[int, RatioBar]]) -> list[Json]:
    mine = [(number, bar) for number, bar in numbered if bar.later is not None and drawable(bar.ratio)]
    if not mine:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "after the last step",
            "x": [_rounded(bar.later) for _, bar in mine],
            "y": [number for number, _ in mine],
            "marker": {"color": "ink", "size": 7, "line": {"color": "card", "width": 1.5}},
            "hovertext": [_hover(bar) for _, bar in mine],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "cliponaxis": False,
        }
    ]


def _remarks(numbered: Sequence[tuple[int, RatioBar]], low: float) -> list[Json]:
    """Return notes that say why there is no bar, where there is none."""
    plain: Json = {"x": low, "xanchor": "left", "yanchor": "middle", "showarrow": False, "bgcolor": "card", "xshift": 6}
    return [
        {**plain, "y": number, "text": plot_text(bar.remark), "font": {"size": 11, "color": "soft"}, "borderpad": 0}
        for number, bar in numbered
        if not drawable(bar.ratio)
    ]


def _ticks(low: float, high: float) -> Json:
    """Return ticks at 1, 2, 5, 10, ... between two powers of ten; over many decades only the powers of ten."""
    steps = (1, 2, 5) if high - low <= 3.5 else (1,)
    values = [step * 10.0**decade for decade in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}


def _range(values: Sequence[float]) -> list[float]:
    """Return the range from a little below the smallest to a little above the largest, in powers of ten."""
    if not values:
        return [0.0, 1.0]
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.15, 0.04 * (high - low))
    return [round(low - room, 3), round(high + room, 3)]


def _hover(bar: RatioBar) -> str:
    words = [f"<b>{plot_text(bar.name)}</b>", plot_text(bar.facts), f"ratio {bar.ratio:.3g}" if bar.ratio else ""]
    if bar.later is not None:
        words.append(f"after {bar.course[-1][0]:,} steps {bar.later:.3g}")
    return "<br>".join(filter(None, [*words, LIMITING if bar.limiting else ""]))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
