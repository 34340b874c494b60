"""The report: one HTML file that holds everything it needs and asks the network for nothing.

The page carries a content security policy that forbids every request, so that this is not a promise but a
rule its reader's browser keeps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from paceline.files import write_file
from paceline.reports.arrivals import arrivals_chart
from paceline.reports.chart import Chart
from paceline.reports.conditions import conditions, target_losses
from paceline.reports.curves import curve_charts
from paceline.reports.groups import Group, group_traces
from paceline.reports.headline import beyond_the_headline, headline
from paceline.reports.membership import came_and_went
from paceline.reports.palette import palette
from paceline.reports.results import results
from paceline.reports.sections import chart_card, prose, recipes, table, tiles
from paceline.reports.timeline import timeline_chart
from paceline.traces import Trace

TITLE = "paceline race"
TITLE_OF_ONE = "paceline run on a real cluster"


def write_report(traces: Sequence[Trace], path: str | Path, *, title: str = "") -> Path:
    """Write the report and say where it is. A reader sees the old page or the new one, never half of one.

    Without a title it is called what it is: a race, or a run on a real cluster.

    >>> import tempfile
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report([trace], Path(folder) / "report.html").name
    'report.html'
    """
    target = Path(path)
    page = report_html(traces, title=title)
    target.parent.mkdir(parents=True, exist_ok=True)
    return write_file(target, page)


def report_html(traces: Sequence[Trace], *, title: str = "") -> str:
    """The page as text; the same traces give the same text.

    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0)
    >>> "<h1>full finished 5 rounds in 1.00\u00a0s</h1>" in report_html([trace])
    True
    """
    groups = group_traces(traces)
    rows = results(groups)
    charts = _charts(groups)
    targets = target_losses(traces)
    said = beyond_the_headline(rows, targets[0] if len(targets) == 1 else None)
    colours = palette(groups)
    title = title or (TITLE_OF_ONE if len(traces) == 1 and traces[0].clock == "real" else TITLE)
    drawn = {"charts": {chart.name: {"data": chart.data, "layout": chart.layout} for chart in charts}}
    page = Template(asset("page.html")).substitute(
        title=escape(title),
        headline=prose(headline(rows)),
        said="".join(f"<p>{prose(sentence)}</p>" for sentence in said),
        conditions="".join(f"<li>{escape(phrase)}</li>" for phrase in conditions(groups)),
        tiles=tiles(rows),
        table=table(rows, ", ".join(conditions(groups)) + "."),
        charts="\n".join(chart_card(chart, groups) for chart in charts) or _no_charts(traces),
        membership=came_and_went(groups),
        recipes=recipes(groups),
        style=colour_variables(colours) + asset("page.css"),
        data=safe_json({**drawn, "colours": colours}),
        plotly=get_plotlyjs() if charts else "",
        script=asset("page.js"),
    )
    return page


def safe_json(value: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element.

    >>> safe_json({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _charts(groups: Sequence[Group]) -> list[Chart]:
    charts: list[Chart | None] = [*curve_charts(groups), timeline_chart(groups), arrivals_chart(groups)]
    return [chart for chart in charts if chart is not None]


def colour_variables(colours: Any) -> str:
    """The colours of both schemes as variables of a style sheet.

    >>> print(colour_variables({"light": {"ink": "#000"}, "dark": {"ink": "#fff"}}), end="")
    :root{color-scheme:light dark;--ink:#000;}
    @media (prefers-color-scheme: dark){:root{--ink:#fff;}}
    """

    def block(scheme: str) -> str:
        return "".join(f"--{token}:{colour};" for token, colour in colours[scheme].items())

    dark = f"@media (prefers-color-scheme: dark){{:root{{{block('dark')}}}}}"
    return f":root{{color-scheme:light dark;{block('light')}}}\n{dark}\n"


def _no_charts(traces: Sequence[Trace]) -> str:
    said = "Timing only: nothing was trained, so there is no loss to draw."
    if any(trace.clock == "real" for trace in traces):
        said = "The run ended before there was anything to draw."
    return f'<section class="card wide"><p class="caption">{said}</p></section>'


def asset(name: str) -> str:
    """A file that pages are made of.

    >>> "$headline" in asset("page.html")
    True
    """
    return (files("paceline.reports") / "assets" / name).read_text(encoding="utf-8")
