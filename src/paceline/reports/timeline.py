"""Who worked and who waited: one lane per worker, one panel per strategy, one time axis for all.

full   w0  ######........|######........|      2 rounds in 0.3 s
       w1  ##############|##############|
lgc    w0  ######..|######..|######..|##       3 rounds in 0.3 s
       w1  ########|========|########|==       == late, used one round later
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.quantities import count_text, seconds_text
from paceline.reports.chart import Chart, Json, axis, layout, plot_text
from paceline.reports.conditions import clock_words
from paceline.reports.groups import Group
from paceline.reports.numbers import shortened
from paceline.reports.segments import Doing, Segment, clipped, segments
from paceline.reports.window import ASYNC, Window, windows
from paceline.traces import Round, Trace
from paceline.traces.records import Absence

MOST_LANES = 16
MOST_ROUND_NUMBERS = 24
MOST_STEP_TICKS = 250
LANE_PIXELS = 17
BETWEEN_PANELS_PIXELS = 46
BELOW_PIXELS = 44

WORDS: dict[Doing, str] = {
    "used": "used in time",
    "late": "late, used one round later",
    "dropped": "dropped",
    "flight": "on the network",
    "waiting": "waiting",
    "gone": "gone",
}
OUTCOMES: tuple[Doing, ...] = ("used", "late", "dropped")
# The height of a bar and its distance from the lane's middle, in lanes.
FULL_BAR, FLIGHT_BAR, BESIDE_BAR = (0.68, -0.42), (0.26, -0.21), (0.18, 0.28)


def timeline_chart(groups: Sequence[Group]) -> Chart | None:
    """A few rounds of every strategy, side by side in time; None where no work was recorded.

    >>> from paceline.traces import Work
    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> trace = Trace(strategy="full", seed=0, workers=1, recipe={}, rounds_done=1, seconds=1, works=(work,),
    ...               rounds=(Round(version=0, opened_seconds=0.0, closed_seconds=1.0, k=1, used=1, late=0),))
    >>> timeline_chart([Group(label="full", strategy="full", traces=(trace,))]).name
    'timeline'
    """
    shown = [(group, _representative(group)) for group in groups]
    panels = [(group, trace) for group, trace in shown if trace is not None]
    if not panels:
        return None
    workers = [_workers(trace) for _, trace in panels]
    lanes = max(len(some) for some, _ in workers)
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
        caption=_caption(max(count for _, count in workers)),
        data=data,
        layout=figure,
        legend="work",
        wide=True,
    )


def _representative(group: Group) -> Trace | None:
    return next((trace for trace in group.traces if trace.works), None)


def _workers(trace: Trace) -> tuple[list[int], int]:
    """Who has a lane, and how many there are: those a run was planned with, and those who came beyond them."""
    seen = {work.worker for work in trace.works} | {absence.worker for absence in trace.absences}
    beyond = sorted(worker for worker in seen if worker >= trace.workers)
    planned = range(min(MOST_LANES, trace.workers))
    return [*planned, *beyond][:MOST_LANES], trace.workers + len(beyond)


def _panel_data(trace: Trace, window: Window, panel: int, lanes: int, workers: list[int]) -> list[Json]:
    bars: dict[tuple[Doing, bool], list[Segment]] = {}
    for worker in workers:
        for bar in clipped(segments(trace, worker), window.start_seconds, window.end_seconds):
            bars.setdefault((bar.doing, bar.beside), []).append(bar)
    lane_of = {worker: lane for lane, worker in enumerate(workers)}
    word = "step" if trace.strategy == ASYNC else "round"
    drawn = [
        _bar_trace(doing, beside, bars[doing, beside], window, panel, lane_of=lane_of, word=word)
        for doing in WORDS
        for beside in (False, True)
        if (doing, beside) in bars
    ]
    return [*drawn, *_closings(trace, window, panel, lanes)] or [_nothing(panel)]


def _nothing(panel: int) -> Json:
    """An unseen point: plotly leaves out the axes of a panel that has nothing in it."""
    place = {"xaxis": _axis_name("x", panel), "yaxis": _axis_name("y", panel)}
    return {"type": "scatter", "x": [0], "y": [0], "opacity": 0, "hoverinfo": "skip", **place}


def _bar_trace(
    doing: Doing,
    beside: bool,
    bars: list[Segment],
    window: Window,
    panel: int,
    *,
    lane_of: dict[int, int],
    word: str,
) -> Json:
    thick, offset = BESIDE_BAR if beside else FLIGHT_BAR if doing == "flight" else FULL_BAR
    # A hairline in the colour of the card parts works that follow each other without a pause.
    parted = 1 if doing in OUTCOMES and not beside else 0
    marker: Json = {"color": doing, "line": {"width": parted, "color": "card"}}
    if doing == "dropped":
        marker["pattern"] = {"shape": "/", "fgcolor": "card", "bgcolor": doing, "size": 6, "solidity": 0.22}
    if doing == "gone":
        marker["pattern"] = {"shape": ".", "fgcolor": doing, "bgcolor": "card", "size": 5, "solidity": 0.3}
    return {
        "type": "bar",
        "orientation": "h",
        "name": WORDS[doing],
        "base": [round(bar.start_seconds - window.start_seconds, 6) for bar in bars],
        "x": [round(bar.end_seconds - bar.start_seconds, 6) for bar in bars],
        "y": [lane_of[bar.cause.worker] for bar in bars],
        "width": thick,
        "offset": offset,
        "marker": marker,
        "hovertext": [_hover(bar, word) for bar in bars],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "xaxis": _axis_name("x", panel),
        "yaxis": _axis_name("y", panel),
    }


def _hover(bar: Segment, word: str) -> str:
    work = bar.cause
    stretch = f"{seconds_text(bar.end_seconds - bar.start_seconds)} s shown"
    if isinstance(work, Absence):
        return f"<b>worker {work.worker}</b> gone, {stretch}<br>{plot_text(shortened(work.reason))}"
    head = f"<b>worker {work.worker}</b>, {word} {work.version}"
    if bar.doing == "waiting":
        return f"{head} done<br>waiting, {stretch}"
    if bar.doing == "flight":
        return f"{head}<br>gradient on the network, {stretch}"
    reason = f"<br>{plot_text(shortened(work.reason))}" if work.reason else ""
    return (
        f"{head}<br>computed for {seconds_text(work.compute_seconds)} s"
        f"<br>{work.blocks_done} of {work.blocks} blocks done<br>{WORDS[bar.doing]}{reason}"
    )


def _closings(trace: Trace, window: Window, panel: int, lanes: int) -> list[Json]:
    closed = _closed_inside(trace, window)
    steps = trace.strategy == ASYNC
    if steps and len(closed) > MOST_STEP_TICKS:
        return []
    x: list[float | None] = []
    y: list[float | None] = []
    for step in closed:
        at = round(step.closed_seconds - window.start_seconds, 6)
        # An asynchronous run steps with every gradient: full lines would hide the lanes, so it gets ticks.
        x += [at, at, None]
        y += [-0.95 if steps else -0.7, -0.55 if steps else lanes - 0.5, None]
    place = {
        "xaxis": _axis_name("x", panel),
        "yaxis": _axis_name("y", panel),
        "hoverinfo": "skip",
        "type": "scatter",
    }
    line = {"color": "ink", "width": 1 if steps else 1.4}
    lines: list[Json] = [{**place, "mode": "lines", "x": x, "y": y, "line": line}] if closed else []
    if not steps and 0 < len(closed) <= MOST_ROUND_NUMBERS:
        lines.append({**place, **_round_numbers(closed, window)})
    return lines


def _round_numbers(closed: list[Round], window: Window) -> Json:
    starts = [max(step.opened_seconds, window.start_seconds) for step in closed]
    middles = [(start + step.closed_seconds) / 2 for start, step in zip(starts, closed, strict=True)]
    return {
        "mode": "text",
        "x": [round(middle - window.start_seconds, 6) for middle in middles],
        "y": [-0.95] * len(closed),
        "text": [str(step.version) for step in closed],
        "textfont": {"size": 10, "color": "soft"},
    }


def _closed_inside(trace: Trace, window: Window) -> list[Round]:
    edge = 1e-9 + 1e-6 * window.length_seconds
    first, last = window.start_seconds + edge, window.end_seconds + edge
    return [step for step in trace.rounds if first < step.closed_seconds <= last]


def _add_axes(
    figure: Json, panel: int, panels: int, lanes: int, window: Window, *, workers: Sequence[int], clock: str
) -> None:
    lowest = panel == panels - 1
    share = 1.0 / panels
    panel_pixels = lanes * LANE_PIXELS + BETWEEN_PANELS_PIXELS
    top = 1.0 - panel * share - share * (BETWEEN_PANELS_PIXELS - 16) / panel_pixels
    bottom = 1.0 - (panel + 1) * share
    y_name, x_name = _axis_name("y", panel), _axis_name("x", panel)
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


def _panel_title(group: Group, trace: Trace, window: Window, panel: int, series: int) -> Json:
    steps = len(_closed_inside(trace, window))
    count = f"{steps} round{'' if steps == 1 else 's'}"
    if trace.strategy == ASYNC:
        count = f"{count_text(steps)} steps ({steps / max(trace.workers, 1):.1f} rounds)"
    over = trace.seconds < window.end_seconds - 1e-6 * window.length_seconds
    seconds = seconds_text(trace.seconds - window.start_seconds if over else window.length_seconds)
    end = f", then {'stopped' if trace.stopped else 'done'}" if over else ""
    return {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": f"{_axis_name('y', panel)} domain",
        "y": 1,
        "yanchor": "bottom",
        "text": f"<b>{plot_text(group.label)}</b>   {count} in {seconds} s{end}",
        "showarrow": False,
        "font": {"size": 13, "color": f"s{series}"},
    }


def _axis_name(letter: str, panel: int) -> str:
    return letter if panel == 0 else f"{letter}{panel + 1}"


def _caption(workers: int) -> str:
    said = (
        "The same stretch of time for every strategy; vertical lines are round closings, numbers are rounds. "
        "Count them: more lines means more steps of the model in the same time."
    )
    cut = f" Shown are the first {MOST_LANES} of {workers:,} workers." if workers > MOST_LANES else ""
    return said + cut
