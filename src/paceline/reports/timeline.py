"""Who worked and who waited: one lane per worker, one panel per strategy, one time axis for all.

full   w0  ######........|######........|      2 rounds in 0.3 s
       w1  ##############|##############|
lgc    w0  ######..|######..|######..|##       3 rounds in 0.3 s
       w1  ########|========|########|==       == late, used one round later

Three parts: which stretch of each run is shown (`windows`), what each worker did in it (`segments`), and the chart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from paceline.quantities import count_text, counted, seconds_text
from paceline.reports.chart import Chart, Json, axis, layout, plot_text
from paceline.reports.results import TraceGroup, baseline_name
from paceline.reports.sentences import clock_words
from paceline.terminal import shortened
from paceline.traces import Outcome, Round, Trace, Work
from paceline.traces.records import Absence

ASYNC = "async"
ROUNDS_SHOWN = 5
MOST_LANES = 16
MOST_ROUND_NUMBERS = 24
MOST_STEP_TICKS = 250
LANE_PIXELS = 17
BETWEEN_PANELS_PIXELS = 46
BELOW_PIXELS = 44
MOST_REASON = 160  # characters; a reason can come from a stranger

Activity = Outcome | Literal["flight", "waiting", "gone"]

ACTIVITY_NAMES: dict[Activity, str] = {
    "used": "used in time",
    "late": "late, used one round later",
    "dropped": "dropped",
    "flight": "on the network",
    "waiting": "waiting",
    "gone": "gone",
}
CAPTION = (
    "The same stretch of time for every strategy; vertical lines are round closings, numbers are rounds. "
    "Count them: more lines means more steps of the model in the same time."
)
OUTCOMES: tuple[Activity, ...] = ("used", "late", "dropped")
# The height of a bar and its distance from the lane's middle, in lanes.
FULL_BAR, FLIGHT_BAR, BESIDE_BAR = (0.68, -0.42), (0.26, -0.21), (0.18, 0.28)


# -- which stretch of each run is shown --------------------------------------------------------------------------------
# A few rounds of `full` are shown, and the same length of all others. Rounds are shown from the first that did not wait
# for everybody, so that a warm-up is not taken for the rule. All synchronous strategies begin at the same round: with
# the same seed they then meet the same delays.


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownWindow:
    """The stretch of a run that is shown; its length is the same for all runs of a report.

    >>> ShownWindow(start_seconds=1.0, length_seconds=2.0).end_seconds
    3.0
    """

    start_seconds: float
    length_seconds: float

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.length_seconds


def windows(traces: Sequence[Trace]) -> list[ShownWindow]:
    """Return one window per trace, all of one length: that of five rounds of `full`, or else of the slowest.

    >>> def run(name, seconds):
    ...     rounds = tuple(Round(version=v, opened_seconds=v * seconds, closed_seconds=(v + 1) * seconds,
    ...                          k=2, used=2, late=0) for v in range(9))
    ...     return Trace(strategy=name, seed=0, workers=2, recipe={}, rounds_done=9, seconds=9 * seconds,
    ...                  rounds=rounds)
    >>> [window.length_seconds for window in windows([run("full", 2.0), run("lgc", 1.0)])]
    [10.0, 10.0]
    """
    first = _first_version(traces)
    in_rounds = [trace for trace in traces if trace.strategy != ASYNC and _rounds_from(trace, first)]
    starts = {id(trace): _rounds_from(trace, first)[0].opened_seconds for trace in in_rounds}
    if not in_rounds:
        return [ShownWindow(start_seconds=0.0, length_seconds=_typical_length(traces)) for _ in traces]
    lengths = {trace.strategy: _length(trace, first) for trace in in_rounds}
    length = lengths.get(baseline_name(lengths)) or max(lengths.values())
    return [
        # A run without rounds begins with the others, or early enough to fill the window.
        ShownWindow(
            start_seconds=starts.get(id(trace), max(0.0, min(starts[id(in_rounds[0])], trace.seconds - length))),
            length_seconds=length,
        )
        for trace in traces
    ]


def _first_version(traces: Sequence[Trace]) -> int:
    """Return the first round that closed without everybody, in the strategy that was last to do so.

    Where the record ends soon after, an earlier round is returned, so that five can be shown.
    """
    versions, latest = [0], []
    for trace in traces:
        if trace.strategy == ASYNC:
            continue
        early = [step.version for step in trace.rounds if step.used < trace.workers]
        last = max((work.version for work in trace.works), default=0)
        latest.append(max(0, last - ROUNDS_SHOWN + 1))
        if early:
            versions.append(early[0])
    return min([max(versions), *latest])


def _rounds_from(trace: Trace, first: int) -> list[Round]:
    return [step for step in trace.rounds if step.version >= first][:ROUNDS_SHOWN]


def _length(trace: Trace, first: int) -> float:
    shown = _rounds_from(trace, first)
    return max(shown[-1].closed_seconds - shown[0].opened_seconds, 1e-9)


def _typical_length(traces: Sequence[Trace]) -> float:
    """Return the length for asynchronous runs, which have no rounds: as long as five pieces of work take."""
    seconds = sorted(work.compute_seconds for trace in traces for work in trace.works)
    middle = seconds[len(seconds) // 2] if seconds else 0.0
    return max(ROUNDS_SHOWN * middle, 1e-9)


# -- what a worker was doing at every moment ---------------------------------------------------------------------------
#     worker 3   ############~~~~.........#########.....
#                |- computing -|  |       |
#                              flight   waiting for the next model
#
# Whole late work goes on while the next round is already computed. The part that runs beside newer work is
# marked `beside` and drawn as a thin bar under it:
#
#     worker 3   ###############################~~~.....
#                            ==========                    <- the rest of the round before
#
# Workers that average among themselves send when the last of them is there. Until then those that do not train on wait:
#
#     worker 3   ########.....~~~~########      waiting for the others, then for the sum
#
# In a real run a worker can be away, or the server down: that time is `gone`, and nobody waited in it. Work that never
# arrived is in no journal, so a worker that had a new model and then went, or whose run ended, has a stretch without a
# bar: it did not wait, but what it did is not known.
#
#     worker 3   ######~~~...|          ::::::::::::########      | the round closed, a new model was sent   :: gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of one worker's time; `cause` is its work, the work before it when the worker waited, or its absence.

    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> Segment(activity="used", start_seconds=0.0, end_seconds=1.0, cause=work).beside
    False
    """

    activity: Activity
    start_seconds: float
    end_seconds: float
    cause: Work | Absence
    beside: bool = False


def segments(trace: Trace, worker: int) -> list[Segment]:
    """Return the bars of one worker's lane, in order of time.

    >>> works = (Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.5),
    ...          Work(worker=0, version=1, started_seconds=2.0, finished_seconds=3.0, arrived_seconds=3.0))
    >>> trace = Trace(strategy="full", seed=0, workers=1, recipe={}, rounds_done=2, seconds=3.0, works=works)
    >>> [(bar.activity, bar.start_seconds, bar.end_seconds) for bar in segments(trace, 0)]
    [('used', 0.0, 1.0), ('flight', 1.0, 1.5), ('waiting', 1.5, 2.0), ('used', 2.0, 3.0)]
    """
    works = sorted(
        (work for work in trace.works if work.worker == worker),
        key=lambda work: (work.started_seconds, work.version),
    )
    bars: list[Segment] = []
    busy_until = 0.0
    for work, following in zip_longest(works, works[1:]):
        next_start = trace.seconds if following is None else following.started_seconds
        arrived = work.finished_seconds if work.arrived_seconds is None else work.arrived_seconds
        overtaken_at = float("inf") if following is None else next_start
        bars += _split(work, work.outcome, work.started_seconds, work.finished_seconds, overtaken_at)
        sent = work.finished_seconds if work.sent_seconds is None else work.sent_seconds
        bars += _split(work, "waiting", work.finished_seconds, min(sent, overtaken_at), overtaken_at)
        bars += _split(work, "flight", sent, arrived, overtaken_at)
        busy_until = max(busy_until, arrived, work.finished_seconds)
        bars += _split(work, "waiting", busy_until, next_start, float("inf"))
    return bars if trace.clock == "virtual" else _without_unknown_time(bars, trace, worker)


def clipped(bars: Sequence[Segment], start_seconds: float, end_seconds: float) -> Iterator[Segment]:
    """Yield the parts of the bars inside a window.

    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> bar = Segment(activity="used", start_seconds=0.0, end_seconds=1.0, cause=work)
    >>> [(part.start_seconds, part.end_seconds) for part in clipped([bar], 0.25, 9.0)]
    [(0.25, 1.0)]
    """
    for bar in bars:
        start, end = max(bar.start_seconds, start_seconds), min(bar.end_seconds, end_seconds)
        if end > start:
            yield replace(bar, start_seconds=start, end_seconds=end)


def _without_unknown_time(bars: Sequence[Segment], trace: Trace, worker: int) -> list[Segment]:
    """Return the bars of a real run: absences are added, and no worker waits while away or with a model to work on.

    Where work and absence overlap, the work is shown.
    """
    closed = {step.version: step.closed_seconds for step in trace.rounds}
    absences = [absence for absence in trace.absences if absence.worker == worker]
    ends = [trace.seconds if absence.to_seconds is None else absence.to_seconds for absence in absences]
    away = [(absence.from_seconds, end) for absence, end in zip(absences, ends, strict=True)]
    endings = {trace.seconds, *(start for start, _ in away)}
    kept: list[Segment] = []
    for bar in bars:
        kept += [bar] if bar.activity != "waiting" else _waiting(_outside(bar, away), endings, closed)
    taken = [(bar.start_seconds, bar.end_seconds) for bar in kept if not bar.beside]
    for absence, (start, end) in zip(absences, away, strict=True):
        whole = Segment(activity="gone", start_seconds=start, end_seconds=min(end, trace.seconds), cause=absence)
        kept += _outside(whole, taken)
        taken.append((start, end))
    return sorted(kept, key=lambda bar: bar.start_seconds)


def _waiting(bars: Iterable[Segment], endings: set[float], closed: Mapping[int, float]) -> Iterator[Segment]:
    """Yield waiting bars; one that no work ended was over when the round closed and the next model was sent."""
    for bar in bars:
        sent = closed.get(bar.cause.version, bar.end_seconds) if isinstance(bar.cause, Work) else bar.end_seconds
        end = min(bar.end_seconds, sent) if bar.end_seconds in endings else bar.end_seconds
        if bar.start_seconds < end:
            yield replace(bar, end_seconds=end)


def _outside(bar: Segment, holes: Sequence[tuple[float, float]]) -> Iterator[Segment]:
    """Yield the parts of a bar outside the holes."""
    start = bar.start_seconds
    for hole_start, hole_end in sorted(holes):
        if start < min(hole_start, bar.end_seconds):
            yield replace(bar, start_seconds=start, end_seconds=min(hole_start, bar.end_seconds))
        start = max(start, hole_end)
    if start < bar.end_seconds:
        yield replace(bar, start_seconds=start)


def _split(work: Work, activity: Activity, start: float, end: float, overtaken_at: float) -> Iterator[Segment]:
    if start < min(end, overtaken_at):
        yield Segment(activity=activity, start_seconds=start, end_seconds=min(end, overtaken_at), cause=work)
    if max(start, overtaken_at) < end:
        yield Segment(
            activity=activity, start_seconds=max(start, overtaken_at), end_seconds=end, cause=work, beside=True
        )


# -- the chart ---------------------------------------------------------------------------------------------------------


def timeline_chart(groups: Sequence[TraceGroup]) -> Chart | None:
    """Return a few rounds of every strategy, one above the other on one time axis; None where no work was recorded.

    >>> from paceline.traces import Work
    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> trace = Trace(strategy="full", seed=0, workers=1, recipe={}, rounds_done=1, seconds=1, works=(work,),
    ...               rounds=(Round(version=0, opened_seconds=0.0, closed_seconds=1.0, k=1, used=1, late=0),))
    >>> timeline_chart([TraceGroup(label="full", strategy="full", traces=(trace,))]).name
    'timeline'
    """
    recorded = [(group, [trace for trace in group.traces if trace.works]) for group in groups]
    panels = [(group, traces[0]) for group, traces in recorded if traces]
    if not panels:
        return None
    workers = [_workers(trace) for _, trace in panels]
    lanes, most = max(len(some) for some, _ in workers), max(count for _, count in workers)
    height = len(panels) * (lanes * LANE_PIXELS + BETWEEN_PANELS_PIXELS) + BELOW_PIXELS
    figure = layout(
        height=height, barmode="overlay", annotations=[], margin={"l": 8, "r": 8, "t": 0, "b": BELOW_PIXELS}
    )
    data: list[Json] = []
    views = windows([trace for _, trace in panels])
    clock = clock_words([trace for _, trace in panels])
    for panel, ((group, trace), window) in enumerate(zip(panels, views, strict=True)):
        some, _ = workers[panel]
        data += _panel_data(trace, window, panel, lanes, some)
        _add_axes(figure, panel, len(panels), lanes, window, workers=some, clock=clock)
        figure["annotations"].append(_panel_title(group, trace, window, panel, groups.index(group)))
    return Chart(
        name="timeline",
        title="Who worked, who waited",
        caption=CAPTION + (f" Shown are the first {MOST_LANES} of {most:,} workers." if most > MOST_LANES else ""),
        data=data,
        layout=figure,
        legend="work",
        wide=True,
    )


def _workers(trace: Trace) -> tuple[list[int], int]:
    """Return the workers that have a lane, and how many workers there are: the planned ones and those beyond them."""
    seen = {work.worker for work in trace.works} | {absence.worker for absence in trace.absences}
    beyond = sorted(worker for worker in seen if worker >= trace.workers)
    planned = range(min(MOST_LANES, trace.workers))
    return [*planned, *beyond][:MOST_LANES], trace.workers + len(beyond)


def _panel_data(trace: Trace, window: ShownWindow, panel: int, lanes: int, workers: list[int]) -> list[Json]:
    bars: dict[tuple[Activity, bool], list[Segment]] = {}
    for worker in workers:
        for bar in clipped(segments(trace, worker), window.start_seconds, window.end_seconds):
            bars.setdefault((bar.activity, bar.beside), []).append(bar)
    lane_of = {worker: lane for lane, worker in enumerate(workers)}
    word = "step" if trace.strategy == ASYNC else "round"
    drawn = [
        _bar_trace(activity, beside, bars[activity, beside], window, panel, lane_of=lane_of, word=word)
        for activity in ACTIVITY_NAMES
        for beside in (False, True)
        if (activity, beside) in bars
    ]
    # Plotly leaves out the axes of an empty panel: an unseen point keeps them.
    unseen = {"type": "scatter", "x": [0], "y": [0], "opacity": 0, "hoverinfo": "skip", **_axes(panel)}
    return [*drawn, *_closings(trace, window, panel, lanes)] or [unseen]


def _bar_trace(
    activity: Activity,
    beside: bool,
    bars: list[Segment],
    window: ShownWindow,
    panel: int,
    *,
    lane_of: dict[int, int],
    word: str,
) -> Json:
    thick, offset = BESIDE_BAR if beside else FLIGHT_BAR if activity == "flight" else FULL_BAR
    # A hairline in the colour of the card parts works that follow each other without a pause.
    parted = 1 if activity in OUTCOMES and not beside else 0
    marker: Json = {"color": activity, "line": {"width": parted, "color": "card"}}
    if activity == "dropped":
        marker["pattern"] = {"shape": "/", "fgcolor": "card", "bgcolor": activity, "size": 6, "solidity": 0.22}
    if activity == "gone":
        marker["pattern"] = {"shape": ".", "fgcolor": activity, "bgcolor": "card", "size": 5, "solidity": 0.3}
    return {
        "type": "bar",
        "orientation": "h",
        "name": ACTIVITY_NAMES[activity],
        "base": [round(bar.start_seconds - window.start_seconds, 6) for bar in bars],
        "x": [round(bar.end_seconds - bar.start_seconds, 6) for bar in bars],
        "y": [lane_of[bar.cause.worker] for bar in bars],
        "width": thick,
        "offset": offset,
        "marker": marker,
        "hovertext": [_hover(bar, word) for bar in bars],
        "hovertemplate": "%{hovertext}<extra></extra>",
        **_axes(panel),
    }


def _hover(bar: Segment, word: str) -> str:
    work = bar.cause
    stretch = f"{seconds_text(bar.end_seconds - bar.start_seconds)} s shown"
    if isinstance(work, Absence):
        return f"<b>worker {work.worker}</b> gone, {stretch}<br>{_reason(work.reason)}"
    head = f"<b>worker {work.worker}</b>, {word} {work.version}"
    if bar.activity == "waiting":
        return f"{head} done<br>waiting, {stretch}"
    if bar.activity == "flight":
        return f"{head}<br>gradient on the network, {stretch}"
    reason = f"<br>{_reason(work.reason)}" if work.reason else ""
    return (
        f"{head}<br>computed for {seconds_text(work.compute_seconds)} s"
        f"<br>{work.blocks_done} of {work.blocks} blocks done<br>{ACTIVITY_NAMES[bar.activity]}{reason}"
    )


def _reason(text: str) -> str:
    return plot_text(shortened(text, MOST_REASON, dots="...", cut="end"))


def _closings(trace: Trace, window: ShownWindow, panel: int, lanes: int) -> list[Json]:
    closed = _closed_inside(trace, window)
    steps = trace.strategy == ASYNC
    if not closed or (steps and len(closed) > MOST_STEP_TICKS):
        return []
    # An asynchronous run steps with every gradient: full lines would hide the lanes, so it gets ticks.
    heights = [-0.95, -0.55, None] if steps else [-0.7, lanes - 0.5, None]
    at = [round(step.closed_seconds - window.start_seconds, 6) for step in closed]
    place = {**_axes(panel), "hoverinfo": "skip", "type": "scatter"}
    lines: list[Json] = [
        {
            **place,
            "mode": "lines",
            "x": [x for seconds in at for x in (seconds, seconds, None)],
            "y": heights * len(closed),
            "line": {"color": "ink", "width": 1 if steps else 1.4},
        }
    ]
    if not steps and len(closed) <= MOST_ROUND_NUMBERS:
        lines.append({**place, **_round_numbers(closed, window)})
    return lines


def _round_numbers(closed: list[Round], window: ShownWindow) -> Json:
    middles = [(max(step.opened_seconds, window.start_seconds) + step.closed_seconds) / 2 for step in closed]
    return {
        "mode": "text",
        "x": [round(middle - window.start_seconds, 6) for middle in middles],
        "y": [-0.95] * len(closed),
        "text": [str(step.version) for step in closed],
        "textfont": {"size": 10, "color": "soft"},
    }


def _closed_inside(trace: Trace, window: ShownWindow) -> list[Round]:
    edge = 1e-9 + 1e-6 * window.length_seconds
    first, last = window.start_seconds + edge, window.end_seconds + edge
    return [step for step in trace.rounds if first < step.closed_seconds <= last]


def _add_axes(
    figure: Json, panel: int, panels: int, lanes: int, window: ShownWindow, *, workers: Sequence[int], clock: str
) -> None:
    lowest = panel == panels - 1
    share = 1.0 / panels
    panel_pixels = lanes * LANE_PIXELS + BETWEEN_PANELS_PIXELS
    top = 1.0 - panel * share - share * (BETWEEN_PANELS_PIXELS - 16) / panel_pixels
    bottom = 1.0 - (panel + 1) * share
    x_name, y_name = _axes(panel).values()
    more = {} if panel == 0 else {"matches": "x"}
    figure[f"xaxis{x_name[1:]}"] = axis(
        f"{clock} since the first round shown" if lowest else "",
        range=[0, window.length_seconds],
        anchor=y_name,
        showgrid=False,
        showticklabels=lowest,
        **more,
    )
    figure[f"yaxis{y_name[1:]}"] = axis(
        domain=[max(bottom, 0.0), top],
        anchor=x_name,
        range=[lanes - 0.45, -1.3],
        tickvals=list(range(len(workers))),
        ticktext=[f"w{worker}" for worker in workers],
        showgrid=False,
        fixedrange=True,
    )


def _panel_title(group: TraceGroup, trace: Trace, window: ShownWindow, panel: int, series: int) -> Json:
    steps = len(_closed_inside(trace, window))
    count = counted(steps, "round")
    if trace.strategy == ASYNC:
        count = f"{count_text(steps)} steps ({steps / max(trace.workers, 1):.1f} rounds)"
    over = trace.seconds < window.end_seconds - 1e-6 * window.length_seconds
    seconds = seconds_text(trace.seconds - window.start_seconds if over else window.length_seconds)
    end = f", then {'stopped' if trace.stopped else 'done'}" if over else ""
    return {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": f"{_axes(panel)['yaxis']} domain",
        "y": 1,
        "yanchor": "bottom",
        "text": f"<b>{plot_text(group.label)}</b>   {count} in {seconds} s{end}",
        "showarrow": False,
        "font": {"size": 13, "color": f"s{series}"},
    }


def _axes(panel: int) -> dict[str, str]:
    number = panel + 1 if panel else ""
    return {"xaxis": f"x{number}", "yaxis": f"y{number}"}
