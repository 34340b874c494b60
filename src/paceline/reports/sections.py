"""The parts of the page as HTML. Every text that is not ours goes through `escape` on its way in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from paceline.quantities import percent_text, seconds_text
from paceline.reports.chart import Chart
from paceline.reports.groups import Group
from paceline.reports.numbers import final_loss_text
from paceline.reports.recipe_text import recipe_text
from paceline.reports.results import BASELINES, Result, baseline_name
from paceline.reports.table import cells
from paceline.reports.timeline import WORDS

HEADINGS = (
    "Strategy",
    "Rounds",
    "Time (s)",
    "Saved against {baseline}",
    "To target (s)",
    "Final loss",
    "Test accuracy",
    "Used",
    "Late",
    "Dropped",
)


def prose(sentence: str) -> str:
    """A sentence, escaped, in which no line ends between a number and its unit.

    >>> prose("<lgc>: 33 % in 2 s").replace("\u00a0", "_")
    '&lt;lgc&gt;: 33_% in 2_s'
    """
    return escape(re.sub(r"(\d) (%|s\b)", "\\1\u00a0\\2", sentence))


def tiles(rows: Sequence[Result]) -> str:
    """One tile per strategy: its time as a number and as a bar, then loss and accuracy.

    >>> "&lt;lgc&gt;" in tiles([Result(label="<lgc>", strategy="lgc")])
    True
    """
    longest = max((row.seconds for row in rows), default=0.0) or 1.0
    against = baseline_name(row.strategy for row in rows)
    return "\n".join(_tile(index, row, row.seconds / longest, against) for index, row in enumerate(rows))


def _tile(index: int, row: Result, share: float, against: str) -> str:
    loss = final_loss_text(row)
    facts = [_pace(row, against)]
    if loss != "-":
        facts.append(escape(f"loss {loss}" if row.loss is not None else loss))
    if row.accuracy is not None:
        facts.append(f"test accuracy {percent_text(row.accuracy, 1)}")
    return (
        f'<div class="tile" style="--series: var(--s{index})">'
        f'<div class="tile-name"><i class="dot"></i>{escape(row.label)}</div>'
        f'<div class="tile-number">{seconds_text(row.seconds)}<small>s</small></div>'
        f'<div class="tile-bar"><i style="width: {100 * share:.1f}%"></i></div>'
        f'<div class="tile-facts">{"<br>".join(filter(None, facts))}</div>'
        "</div>"
    )


def _pace(row: Result, against: str) -> str:
    if row.stopped:
        return "stopped early"
    if row.strategy in BASELINES and row.saved is None:
        return "waits for everybody"
    if row.saved is None:
        return "broke off" if row.diverged else ""
    if abs(row.saved) < 0.005:
        return f"as long as {against}"
    word = "sooner" if row.saved >= 0 else "later"
    return f"<b>{percent_text(abs(row.saved))} {word}</b><span> than {against}</span>"


def table(rows: Sequence[Result], caption: str) -> str:
    """The results as an HTML table in a box that scrolls by itself on a narrow screen.

    >>> table([], "virtual seconds").count("<th ")
    12
    """
    against = baseline_name(row.strategy for row in rows)
    head = "".join(f'<th scope="col">{heading.format(baseline=against)}</th>' for heading in HEADINGS)
    body = "\n".join(_table_row(index, row) for index, row in enumerate(rows))
    return (
        '<div class="scroller" tabindex="0" role="region" aria-label="Results"><table>'
        '<thead><tr class="over"><th colspan="7"></th><th colspan="3">Gradients</th></tr>'
        f"<tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
        f'<p class="note">{escape(caption)}</p>'
    )


def _table_row(index: int, row: Result) -> str:
    first = f'<th scope="row"><i class="dot" style="--series: var(--s{index})"></i>{escape(row.label)}</th>'
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
    return f'<tr class="diverged">{first}{rest}</tr>' if row.diverged else f"<tr>{first}{rest}</tr>"


def chart_card(chart: Chart, groups: Sequence[Group]) -> str:
    """A chart's place on the page; the script draws into it.

    >>> 'id="chart-loss"' in chart_card(Chart(name="loss", title="Loss", caption="", data=[], layout={}), [])
    True
    """
    wide = " wide" if chart.wide else ""
    height = int(chart.layout.get("height", 320))
    return (
        f'<section class="card{wide}" aria-labelledby="title-{chart.name}">'
        f'<h2 id="title-{chart.name}">{escape(chart.title)}</h2>'
        f'<p class="caption">{escape(chart.caption)}</p>{_legend(chart, groups)}'
        f'<div class="chart" id="chart-{chart.name}" style="height: {height}px"></div></section>'
    )


def _legend(chart: Chart, groups: Sequence[Group]) -> str:
    if chart.legend == "work":
        keys = "".join(
            f'<span class="key"><i class="swatch {doing}"></i>{word}</span>'
            for doing, word in WORDS.items()
            if doing != "gone" or any(item.get("name") == word for item in chart.data)
        )
        return f'<div class="legend">{keys}</div>'
    if chart.legend == "strategies":
        drawn = {item.get("legendgroup") for item in chart.data}
        keys = "".join(
            f'<button class="key" type="button" aria-pressed="true" data-series="s{index}" '
            f'style="--series: var(--s{index})"><i class="dot"></i>{escape(group.label)}</button>'
            for index, group in enumerate(groups)
            if f"s{index}" in drawn
        )
        return f'<div class="legend">{keys}</div>'
    return ""


def recipes(groups: Sequence[Group]) -> str:
    """Every group's recipe, folded away.

    >>> from paceline.traces import Trace
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={"a": "</pre>"}, rounds_done=5, seconds=1.0)
    >>> "&lt;/pre&gt;" in recipes([Group(label="full", strategy="full", traces=(trace,))])
    True
    """
    folded = []
    for index, group in enumerate(groups):
        seeds = ", ".join(str(trace.seed) for trace in group.traces)
        text = recipe_text(group.traces[0].recipe) or "# the trace holds no recipe"
        folded.append(
            f'<details style="--series: var(--s{index})"><summary><i class="dot"></i>{escape(group.label)}'
            f"<small>seed{'s' if len(group.traces) > 1 else ''} {seeds}</small></summary>"
            f"<pre>{escape(text)}</pre></details>"
        )
    return "\n".join(folded)
