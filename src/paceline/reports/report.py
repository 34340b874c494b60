"""The report of a race or of a real run: one HTML page with results, charts, who came and went, and the recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from paceline.files import write_file
from paceline.quantities import UNKNOWN, count_text, loss_text, percent_text, seconds_text
from paceline.reports.arrivals import arrivals_chart
from paceline.reports.chart import Chart, Key, palette
from paceline.reports.curves import curve_charts, frontier_chart
from paceline.reports.page import Tile, page_html, recipe_text
from paceline.reports.results import (
    BASELINES,
    ResultRow,
    TraceGroup,
    accuracy_text,
    baseline_name,
    final_loss_text,
    group_traces,
    results,
    target_text,
)
from paceline.reports.sentences import (
    conditions,
    dropped_sentences,
    further_sentences,
    headline,
    missing_sentences,
    target_words,
)
from paceline.reports.shares import share_table
from paceline.reports.table import PlainTable
from paceline.reports.time_split import time_split_chart
from paceline.reports.timeline import ACTIVITY_NAMES, MOST_REASON, timeline_chart
from paceline.terminal import shortened
from paceline.traces import Trace
from paceline.traces.records import NOT_YET
from paceline.traces.worker_counts import WorkerCounts, mostly_dropped

TITLE = "paceline race"
TITLE_OF_ONE = "paceline run on a real cluster"
MOST_ROWS = 30
MOST_NAMES = 6
Column: TypeAlias = tuple[str, Callable[[ResultRow], str]]


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
    rows, phrases = results(groups), conditions(groups)
    curves = curve_charts(groups)
    alone = sum(not chart.wide for chart in curves) % 2 == 1  # the last of the narrow ones: there is room beside it
    split = time_split_chart(groups, wide=not alone)
    drawn = [frontier_chart(groups), *curves, split, timeline_chart(groups), arrivals_chart(groups)]
    return page_html(
        "race.html",
        title=title or (TITLE_OF_ONE if len(traces) == 1 and traces[0].clock == "real" else TITLE),
        headline=headline(rows),
        sentences=[
            *further_sentences(rows, target_words(traces)),
            *dropped_sentences(groups),
            *missing_sentences(groups),
        ],
        conditions=phrases,
        figures=[replace(chart, keys=_legend_keys(chart, groups)) for chart in drawn if chart is not None],
        colours=palette(group.strategy for group in groups),
        tiles=tiles(rows),
        table=result_table(rows, ", ".join(phrases) + "."),
        workers=worker_table(groups),
        shares=share_table(groups, most=MOST_ROWS),
        membership=membership_table(groups),
        no_charts=_no_charts(traces),
        recipes=[_recipe(index, group) for index, group in enumerate(groups)],
    )


# -- results, charts and recipes ---------------------------------------------------------------------------------------


def tiles(rows: Sequence[ResultRow]) -> list[Tile]:
    """Return one tile per strategy: its time as a number and as a bar, then loss and accuracy.

    >>> [tile.number for tile in tiles([ResultRow(label="lgc", strategy="lgc", seconds=6.5)])]
    ['6.50']
    """
    longest = max((row.seconds for row in rows), default=0.0) or 1.0
    against = baseline_name(row.strategy for row in rows)
    return [_tile(index, row, row.seconds / longest, against) for index, row in enumerate(rows)]


def _tile(index: int, row: ResultRow, share: float, against: str) -> Tile:
    loss, facts, pace = final_loss_text(row), list[str](), ""
    if row.stopped:
        facts.append("stopped early")
    elif row.strategy in BASELINES and row.saved is None:
        facts.append("waits for everybody")
    elif row.saved is None:
        facts += ["broke off"] if row.diverged else []
    elif abs(row.saved) < 0.005:
        facts.append(f"as long as {against}")
    else:
        pace = f"{percent_text(abs(row.saved))} {'sooner' if row.saved >= 0 else 'later'}"
    if loss != UNKNOWN:
        facts.append(f"loss {loss}" if row.loss is not None else loss)
    if row.accuracy is not None:
        facts.append(f"test accuracy {percent_text(row.accuracy, 1)}")
    elif row.test_loss is not None:  # nothing is guessed
        facts.append(f"test loss {loss_text(row.test_loss)}")
    return Tile(
        name=row.label,
        number=seconds_text(row.seconds),
        unit="s",
        facts=facts,
        pace=pace,
        against=f"than {against}",
        share=share,
        series=f"s{index}",
    )


def result_table(rows: Sequence[ResultRow], caption: str) -> PlainTable:
    """Return the results as a table; the test loss and the time to an accuracy where there are any.

    >>> row = ResultRow(label="lgc", strategy="lgc", target_accuracy=0.9, seconds_to_accuracy=1.5, test_loss=0.25)
    >>> table = result_table([row], "virtual seconds")
    >>> [f"{heading}: {cell}" for heading, cell in zip(table.headings, table.rows[0])][4:8]
    ['To target loss (s): -', 'To 90 % accuracy (s): 1.50', 'Final loss: -', 'Test loss: 0.2500']
    """
    columns = [*_columns(rows)]
    counts: list[Column] = [
        ("Used", lambda row: count_text(row.used)),
        ("Late", lambda row: count_text(row.late)),
        ("Dropped", lambda row: count_text(row.dropped)),
    ]
    return PlainTable(
        title="Results",
        headings=["Strategy", *(heading for heading, _ in [*columns, *counts])],
        rows=[[row.label, *(text(row) for _, text in [*columns, *counts])] for row in rows],
        caption=caption,
        warned=frozenset(index for index, row in enumerate(rows) if row.diverged),
        over=(("", 1 + len(columns)), ("Gradients", 3)),
        dots=[f"s{index}" for index, _ in enumerate(rows)],
    )


def _columns(rows: Sequence[ResultRow]) -> Iterator[Column]:
    asked = {row.target_accuracy for row in rows if row.target_accuracy is not None}
    yield "Rounds", lambda row: count_text(row.rounds)
    yield "Time (s)", lambda row: seconds_text(row.seconds)
    yield f"Saved against {baseline_name(row.strategy for row in rows)}", lambda row: percent_text(row.saved)
    yield "To target loss (s)" if asked else "To target (s)", target_text
    if asked:
        which = accuracy_text(min(asked)) if len(asked) == 1 else "target"
        yield f"To {which} accuracy (s)", lambda row: target_text(row, "accuracy")
    yield "Final loss", final_loss_text
    if any(row.test_loss is not None for row in rows):
        yield "Test loss", lambda row: loss_text(row.test_loss)
    yield "Test accuracy", lambda row: percent_text(row.accuracy, 1)


def _legend_keys(chart: Chart, groups: Sequence[TraceGroup]) -> tuple[Key, ...]:
    if chart.keys:
        return chart.keys
    if chart.legend == "work":
        drawn = {item.get("name") for item in chart.data}
        return tuple(
            Key(text=name, swatch=activity)
            for activity, name in ACTIVITY_NAMES.items()
            if activity != "gone" or name in drawn
        )
    series = {item.get("legendgroup") for item in chart.data}
    return tuple(
        Key(text=group.label, series=f"s{index}") for index, group in enumerate(groups) if f"s{index}" in series
    )


def _no_charts(traces: Sequence[Trace]) -> str:
    if any(trace.clock == "real" for trace in traces):
        return "The run ended before there was anything to draw."
    return "Timing only: nothing was trained, so there is no loss to draw."


def _recipe(index: int, group: TraceGroup) -> dict[str, str]:
    return {
        "series": f"s{index}",
        "label": group.label,
        "seeds": f"seed{'s' if len(group.traces) > 1 else ''} {', '.join(str(trace.seed) for trace in group.traces)}",
        "text": recipe_text(group.traces[0].recipe) or "# the trace holds no recipe",
    }


# -- workers -----------------------------------------------------------------------------------------------------------


def worker_table(groups: Sequence[TraceGroup]) -> PlainTable | None:
    """Return a table of what became of each worker's work; None where no run has counted it, as in a simulation.

    A worker that is mostly dropped is marked. Of very many workers those that were dropped most are shown.

    >>> worker_table([]) is None
    True
    """
    runs = [(group.label, trace) for group in groups for trace in group.traces if trace.by_worker]
    if not runs:
        return None
    several = len(runs) > 1
    counted = [
        (f"{label}, seed {trace.seed}, w{counts.worker}" if several else f"w{counts.worker}", counts)
        for label, trace in runs
        for counts in trace.by_worker
    ]
    named = {id(counts) for _, trace in runs for counts in mostly_dropped(trace.by_worker)}
    shown = counted
    if len(counted) > MOST_ROWS:
        shown = sorted(counted, key=lambda row: -row[1].dropped / max(row[1].gradients, 1))[:MOST_ROWS]
    averaged = all(trace.averaged for _, trace in runs)
    words = "Work that was used in time, that was late and is in the update of the next round, and that was dropped"
    if averaged:
        words = "The steps of each worker that are in an average"
    words += "; waited: from its arrival until its round closed." if not averaged else "; waited: for the others."
    if len(shown) < len(counted):
        words += f" The {len(shown)} of {len(counted):,} workers with the largest share dropped."
    return PlainTable(
        title="Workers",
        headings=("Worker", "used", "late", "dropped", "used", "late", "dropped", "Waited (s)"),
        rows=[_worker_row(name, counts) for name, counts in shown],
        caption=words,
        over=(("", 1), ("Samples", 3), ("Steps" if averaged else "Gradients", 3), ("", 1)),
        warned=frozenset(index for index, (_, counts) in enumerate(shown) if id(counts) in named),
    )


def _worker_row(name: str, counts: WorkerCounts) -> list[str]:
    samples = (counts.samples_used, counts.samples_late, counts.samples_dropped)
    return [
        name,
        *(f"{number:,}" if any(samples) else UNKNOWN for number in samples),
        *(f"{number:,}" for number in (counts.used, counts.late, counts.dropped)),
        seconds_text(counts.waited_seconds),
    ]


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


def membership_table(groups: Sequence[TraceGroup]) -> PlainTable | None:
    """Return a table of who came and went; None where all were there all the time, as in every simulation.

    >>> membership_table([]) is None
    True
    """
    runs = [(group.label, trace) for group in groups for trace in group.traces]
    rows = [(f"{label}, seed {trace.seed}", change) for label, trace in runs for change in membership_changes(trace)]
    if not rows:
        return None
    first = 0 if len(runs) > 1 else 1  # a single run needs no column with its name
    left_out = len(rows) - MOST_ROWS
    return PlainTable(
        title="Who came and went",
        headings=("Run", "Time (s)", "Who", "What")[first:],
        rows=[
            [
                run,
                seconds_text(change.at_seconds),
                change.names,
                shortened(change.event, MOST_REASON, dots="...", cut="end"),
            ][first:]
            for run, change in rows[:MOST_ROWS]
        ],
        caption=f"and {left_out:,} more" if left_out > 0 else "",
        left=True,
    )
