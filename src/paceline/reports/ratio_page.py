"""The page of `paceline inspect`: one file, as the report of a race is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

from plotly.offline import get_plotlyjs

from paceline.reports.chart import PAGE_COLOURS, Chart
from paceline.reports.page import asset, chart_card, colour_variables, prose, safe_json
from paceline.reports.ratio_chart import LIMITING, RatioBar, course_chart, ratio_chart
from paceline.reports.table import PlainTable

SWATCHES = {LIMITING: "limiting", "weights": "used", "biases": "biases", "normalisation": "norms"}


def ratio_page(
    bars: Sequence[RatioBar],
    table: PlainTable,
    *,
    title: str,
    headline: str,
    said: Sequence[str],
    conditions: Sequence[str],
    rate: float | None = None,
) -> str:
    """The page as text; the same values give the same text.

    >>> bar = RatioBar(name="fc.weight", kind="weight", ratio=6.0)
    >>> table = PlainTable(title="Layers", headings=("layer", "ratio"), rows=[("fc.weight", "6")], caption="")
    >>> page = ratio_page([bar], table, title="inspect", headline="fc it is", said=[], conditions=["batch of 32"])
    >>> "<h1>fc it is</h1>" in page, "<li>batch of 32</li>" in page
    (True, True)
    """
    course = course_chart(bars)
    charts = [ratio_chart(bars, rate=rate), *([course] if course is not None else [])]
    cards = [_with_key(charts[0], bars), *(chart_card(chart) for chart in charts[1:])]
    return Template(asset("ratios.html")).substitute(
        title=escape(title),
        headline=prose(headline),
        said="".join(f"<p>{prose(sentence)}</p>" for sentence in said),
        conditions="".join(f"<li>{escape(phrase)}</li>" for phrase in conditions),
        charts="\n".join(cards),
        table=f'<section class="card"><h2>{escape(table.title)}</h2>\n{table.html()}</section>',
        style=colour_variables(PAGE_COLOURS) + asset("page.css"),
        data=safe_json(
            {
                "charts": {chart.name: {"data": chart.data, "layout": chart.layout} for chart in charts},
                "colours": PAGE_COLOURS,
            }
        ),
        plotly=get_plotlyjs(),
        script=asset("page.js"),
    )


def _with_key(chart: Chart, bars: Sequence[RatioBar]) -> str:
    """The card of the bars, with a key to their colours above them."""
    keys = "".join(
        f'<span class="key"><i class="swatch {colour}"></i>{escape(group)}</span>'
        for group, colour in SWATCHES.items()
        if any(item.get("name") == group and item["x"] for item in chart.data)
    )
    if any(bar.later is not None for bar in bars):
        keys += '<span class="key"><i class="dot" style="--series: var(--ink)"></i>after the last step</span>'
    return chart_card(chart, keys)
