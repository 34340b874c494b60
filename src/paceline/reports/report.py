"""The report of a race or of a real run: one HTML page with results, charts, who came and went, and the recipes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from paceline.files import write_file
from paceline.quantities import UNKNOWN, percent_text, seconds_text
from paceline.reports.arrivals import arrivals_chart
from paceline.reports.chart import Chart, palette
from paceline.reports.curves import curve_charts
from paceline.reports.page import chart_card, page_html, recipe_text
from paceline.reports.results import (
    BASELINES,
    ResultRow,
    TraceGroup,
    baseline_name,
    cells,
    final_loss_text,
    group_traces,
    results,
)
from paceline.reports.sentences import conditions, further_sentences, headline, target_losses
from paceline.reports.timeline import ACTIVITY_NAMES, MOST_REASON, timeline_chart
from paceline.terminal import shortened
from paceline.traces import Trace
from paceline.traces.records import NOT_YET

TITLE = "paceline race"
TITLE_OF_ONE = "paceline run on a real cluster"
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
MOST_ROWS = 30
MOST_NAMES = 6


def write_report(traces: Sequence[Trace], path: str | Path, *, title: str = "") -> Path:
    """Write the report and return its path. A reader sees the old page or the new one, never half of one.

    Without a title the page is called a race, or a run on a real cluster.

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
    """Return the page as text; the same traces give the same text.

    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0)
    >>> "<h1>full finished 5 rounds in 1.00\u00a0s</h1>" in report_html([trace])
    True
    """
    groups = group_traces(traces)
    rows, phrases, targets = results(groups), conditions(groups), target_losses(traces)
    drawn = [*curve_charts(groups), timeline_chart(groups), arrivals_chart(groups)]
    charts = [chart for chart in drawn if chart is not None]
    return page_html(
        "page.html",
        title=title or (TITLE_OF_ONE if len(traces) == 1 and traces[0].clock == "real" else TITLE),
        headline=headline(rows),
        sentences=further_sentences(rows, targets[0] if len(targets) == 1 else None),
        conditions=phrases,
        figures=charts,
        colours=palette(group.strategy for group in groups),
        tiles=tiles(rows),
        table=table(rows, ", ".join(phrases) + "."),
        charts="\n".join(chart_card(chart, _legend_keys(chart, groups)) for chart in charts) or _no_charts(traces),
        membership=membership(groups),
        recipes=recipes(groups),
    )


# -- results, charts and recipes ---------------------------------------------------------------------------------------


def tiles(rows: Sequence[ResultRow]) -> str:
    """Return one tile per strategy: its time as a number and as a bar, then loss and accuracy.

    >>> "&lt;lgc&gt;" in tiles([ResultRow(label="<lgc>", strategy="lgc")])
    True
    """
    longest = max((row.seconds for row in rows), default=0.0) or 1.0
    against = baseline_name(row.strategy for row in rows)
    return "\n".join(_tile(index, row, row.seconds / longest, against) for index, row in enumerate(rows))


def _tile(index: int, row: ResultRow, share: float, against: str) -> str:
    loss = final_loss_text(row)
    facts = [_pace(row, against)]
    if loss != UNKNOWN:
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


def _pace(row: ResultRow, against: str) -> str:
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


def table(rows: Sequence[ResultRow], caption: str) -> str:
    """Return the results as a table in a box that scrolls by itself on a narrow screen.

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


def _table_row(index: int, row: ResultRow) -> str:
    first = f'<th scope="row"><i class="dot" style="--series: var(--s{index})"></i>{escape(row.label)}</th>'
    rest = "".join(f"<td>{escape(cell)}</td>" for cell in cells(row))
    return f'<tr class="diverged">{first}{rest}</tr>' if row.diverged else f"<tr>{first}{rest}</tr>"


def _legend_keys(chart: Chart, groups: Sequence[TraceGroup]) -> str:
    if chart.legend == "work":
        return "".join(
            f'<span class="key"><i class="swatch {activity}"></i>{name}</span>'
            for activity, name in ACTIVITY_NAMES.items()
            if activity != "gone" or any(item.get("name") == name for item in chart.data)
        )
    drawn = {item.get("legendgroup") for item in chart.data}
    return "".join(
        f'<button class="key" type="button" aria-pressed="true" data-series="s{index}" '
        f'style="--series: var(--s{index})"><i class="dot"></i>{escape(group.label)}</button>'
        for index, group in enumerate(groups)
        if f"s{index}" in drawn
    )


def _no_charts(traces: Sequence[Trace]) -> str:
    reason = (
        "The run ended before there was anything to draw."
        if any(trace.clock == "real" for trace in traces)
        else "Timing only: nothing was trained, so there is no loss to draw."
    )
    return f'<section class="card wide"><p class="caption">{reason}</p></section>'


def recipes(groups: Sequence[TraceGroup]) -> str:
    """Return every group's recipe, folded away.

    >>> from paceline.traces import Trace
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={"a": "</pre>"}, rounds_done=5, seconds=1.0)
    >>> "&lt;/pre&gt;" in recipes([TraceGroup(label="full", strategy="full", traces=(trace,))])
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


# -- who came and went -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipChange:
    """An event that some workers had in common at one time; without workers, an event of the run itself.

    >>> MembershipChange(at_seconds=2.5, workers=(0, 3), event="came back").names
    'w0, w3'
    >>> MembershipChange(at_seconds=2.5, workers=tuple(range(10)), event="came back").names
    'w0, w1, w2, w3, w4, w5 and 4 more'
    """

    at_seconds: float
    workers: tuple[int, ...]
    event: str

    @property
    def names(self) -> str:
        """The names of the workers, as far as there is room."""
        first = ", ".join(f"w{worker}" for worker in self.workers[:MOST_NAMES])
        more = len(self.workers) - MOST_NAMES
        return f"{first} and {more:,} more" if more > 0 else first or "the run"


def membership_changes(trace: Trace) -> list[MembershipChange]:
    """Return when workers came and went, in order of time; that they leave when the run ends is left out.

    >>> from paceline.traces.records import Absence
    >>> away = Absence(worker=1, from_seconds=2.0, to_seconds=5.0, reason="its connection was lost")
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=9.0, absences=(away,))
    >>> [(change.at_seconds, change.names, change.event) for change in membership_changes(trace)]
    [(2.0, 'w1', 'gone: its connection was lost'), (5.0, 'w1', 'came back')]
    """
    together: dict[tuple[float, str], list[int]] = {}
    for at_seconds, event, worker in _single_changes(trace):
        together.setdefault((at_seconds, event), []).append(worker)
    found = [
        MembershipChange(at_seconds=at_seconds, workers=tuple(sorted(workers)), event=event)
        for (at_seconds, event), workers in together.items()
    ]
    # At the same moment (the clock stands while no server runs) one goes before one comes back.
    found.sort(key=lambda change: (change.at_seconds, change.event == "came back", change.workers))
    if trace.ended and trace.stopped:
        found.append(MembershipChange(at_seconds=trace.seconds, workers=(), event=f"ended: {trace.ended}"))
    return found


def _single_changes(trace: Trace) -> Iterator[tuple[float, str, int]]:
    for absence in trace.absences:
        if absence.reason == NOT_YET:
            never = absence.to_seconds is None
            yield absence.to_seconds or 0.0, "never joined" if never else "joined", absence.worker
            continue
        if absence.to_seconds is None and absence.reason == trace.ended:
            continue
        yield absence.from_seconds, f"gone: {absence.reason}", absence.worker
        if absence.to_seconds is not None:
            yield absence.to_seconds, "came back", absence.worker


def membership(groups: Sequence[TraceGroup]) -> str:
    """Return the section on who came and went; empty where all were there all the time, as in every simulation.

    >>> membership([])
    ''
    """
    runs = [(group.label, trace) for group in groups for trace in group.traces]
    rows = [(f"{label}, seed {trace.seed}", change) for label, trace in runs for change in membership_changes(trace)]
    if not rows:
        return ""
    first = 0 if len(runs) > 1 else 1  # a single run needs no column with its name
    head = _cells("th", ["Run", "Time (s)", "Who", "What"][first:])
    texts = [
        [
            run,
            seconds_text(change.at_seconds),
            change.names,
            shortened(change.event, MOST_REASON, dots="...", cut="end"),
        ]
        for run, change in rows[:MOST_ROWS]
    ]
    body = "\n".join(f"<tr>{_cells('td', row[first:])}</tr>" for row in texts)
    left_out = len(rows) - MOST_ROWS
    more = f'<p class="note">and {left_out:,} more</p>' if left_out > 0 else ""
    return (
        '<section class="card" aria-labelledby="title-membership"><h2 id="title-membership">Who came and went</h2>'
        '<p class="caption">Seconds since the first round began. A run that is started again goes on at the time of '
        "its checkpoint: the time in between is not counted.</p>"
        '<div class="scroller" tabindex="0" role="region" aria-label="Who came and went"><table class="events">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{more}</section>\n"
    )


def _cells(kind: str, texts: Iterable[str]) -> str:
    scope = ' scope="col"' if kind == "th" else ""
    return "".join(f"<{kind}{scope}>{escape(text)}</{kind}>" for text in texts)
