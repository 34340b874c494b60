"""The page of `paceline bench codecs`: one file, as the report of a race is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from plotly.offline import get_plotlyjs

from paceline.files import write_file
from paceline.reports.codec_chart import CodecPoint, codec_chart
from paceline.reports.page import asset, colour_variables, safe_json
from paceline.reports.palette import OTHERS, PAGE, STRATEGIES, Scheme
from paceline.reports.plain_table import PlainTable
from paceline.reports.sections import chart_card, prose

HUES = (*STRATEGIES.values(), *OTHERS)


def codec_page(
    points: Sequence[CodecPoint], tables: Sequence[PlainTable], *, headline: str, conditions: Sequence[str]
) -> str:
    """The page as text.

    >>> point = CodecPoint(label="half", family="half", bits=16.0, error=0.002)
    >>> "<h1>half it is</h1>" in codec_page([point], [], headline="half it is", conditions=["2 threads"])
    True
    """
    chart = codec_chart(points)
    colours = _colours(len({point.family for point in points}))
    return Template(asset("codecs.html")).substitute(
        title="paceline bench codecs",
        headline=prose(headline),
        conditions="".join(f"<li>{escape(phrase)}</li>" for phrase in conditions),
        chart=chart_card(chart, []),
        tables="\n".join(
            f'<section class="card"><h2>{escape(table.title)}</h2>\n{table.html()}</section>' for table in tables
        ),
        style=colour_variables(colours) + asset("page.css"),
        data=safe_json({"charts": {chart.name: {"data": chart.data, "layout": chart.layout}}, "colours": colours}),
        plotly=get_plotlyjs(),
        script=asset("page.js"),
    )


def write_page(page: str, path: Path) -> Path:
    """Write a page and return its path. A reader sees the old page or the new one, never half of one."""
    return write_file(path, page)


def _colours(families: int) -> dict[Scheme, dict[str, str]]:
    light, dark = dict(PAGE["light"]), dict(PAGE["dark"])
    for index in range(families):
        light[f"s{index}"], dark[f"s{index}"] = HUES[index % len(HUES)]
    return {"light": light, "dark": dark}
