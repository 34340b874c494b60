"""How long gradients take to arrive: a small histogram for every worker, so that slow ones stand out.

The dashed lines are the mean length of a round under each strategy. What lies to the right of a strategy's
line is what that strategy does not wait for.

Where workers average among themselves, the sum of all arrives at all of them at one time, whoever is slow. There a
worker's part has come when it has computed it:

    w0  ####............~~~~|      from the opening of a round to here: the same for all
    w1  ################~~~~|
            |           |
            when each part is ready
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import numpy.typing as npt

from paceline.quantities import seconds_text
from paceline.reports.chart import Chart, Json, axis, layout, plot_text
from paceline.reports.results import TraceGroup, baseline_name
from paceline.reports.timeline import ASYNC

MOST_RIDGES = 16
TENTHS = 10
BINS = 48
RIDGE_PIXELS = 28
RIDGE_HEIGHT = 0.92
DASH_PIXELS = 8
AVERAGED = ", of how long it computes before its part of an average can leave"

Ridge = tuple[str, npt.NDArray[np.float64]]


def arrivals_chart(groups: Sequence[TraceGroup]) -> Chart | None:
    """Return the time from the opening of a round to the arrival, per worker; None where no arrival was recorded.

    >>> from paceline.traces import Trace, Work
    >>> work = Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.0, arrived_seconds=1.0)
    >>> trace = Trace(strategy="full", seed=0, workers=1, recipe={}, rounds_done=1, seconds=1, works=(work,))
    >>> arrivals_chart([TraceGroup(label="full", strategy="full", traces=(trace,))]).name
    'arrivals'
    """
    source = _source(groups)
    if source is None:
        return None
    by_worker = arrival_seconds(source)
    ridges = _ridges(by_worker)
    each = "tenth of the workers, ordered by speed" if len(by_worker) > MOST_RIDGES else "worker"
    everything = np.concatenate([values for _, values in ridges])
    averaged = all(trace.averaged for trace in source.traces)
    round_lines = _round_lines(groups, len(ridges))
    furthest = max([float(np.quantile(everything, 0.995)), *(line["x"][0] for line in round_lines)])
    edges = np.linspace(0.0, max(1.04 * furthest, 1e-9), BINS + 1)
    figure = layout(
        height=len(ridges) * RIDGE_PIXELS + 90,
        xaxis=axis(
            "seconds until its part is ready" if averaged else "seconds from opening to arrival",
            range=[0, float(edges[-1])],
        ),
        yaxis=axis(
            tickvals=list(range(len(ridges))),
            ticktext=[label for label, _ in reversed(ridges)],
            range=[-0.25, len(ridges) + 0.15],
            showgrid=False,
            fixedrange=True,
        ),
    )
    return Chart(
        name="arrivals",
        title="When gradients arrive",
        caption=f"One histogram for each {each}, as seen under {source.label}{AVERAGED if averaged else ''}; dots are "
        "medians. Dashed lines are the mean round of each strategy: right of its line lies what a strategy, on "
        "average, does not wait for.",
        data=[*_ridge_lines(ridges, edges), *round_lines],
        layout=figure,
        legend="strategies",
        wide=True,
    )


def arrival_seconds(group: TraceGroup) -> dict[int, npt.NDArray[np.float64]]:
    """Return for each worker how long after the opening of the round its gradients arrived, or its part was ready.

    >>> from paceline.traces import Trace, Work
    >>> work = Work(worker=3, version=0, started_seconds=0.5, finished_seconds=1.0, arrived_seconds=1.25)
    >>> trace = Trace(strategy="full", seed=0, workers=4, recipe={}, rounds_done=1, seconds=1, works=(work,))
    >>> {worker: list(map(float, seconds)) for worker, seconds in
    ...  arrival_seconds(TraceGroup(label="full", strategy="full", traces=(trace,))).items()}
    {3: [0.75]}
    """
    gathered: dict[int, list[float]] = {}
    for trace in group.traces:
        # An asynchronous worker takes the model when it is free, so its own start is its opening.
        opened = {} if trace.strategy == ASYNC else {step.version: step.opened_seconds for step in trace.rounds}
        for work in trace.works:
            if trace.averaged:  # a window begins when its worker is free, so its own start is its opening
                gathered.setdefault(work.worker, []).append(work.compute_seconds)
            elif work.arrived_seconds is not None:
                since = opened.get(work.version, work.started_seconds)
                gathered.setdefault(work.worker, []).append(work.arrived_seconds - since)
    return {worker: np.array(gathered[worker]) for worker in sorted(gathered)}


def _source(groups: Sequence[TraceGroup]) -> TraceGroup | None:
    """Return the group that is shown: the baseline if it ran, which waits for everybody and so cuts nothing short."""
    able = [
        group
        for group in groups
        if any(trace.averaged or work.arrived_seconds is not None for trace in group.traces for work in trace.works)
    ]
    against = baseline_name(group.strategy for group in able)
    return next((group for group in able if group.strategy == against), able[0] if able else None)


def _ridges(by_worker: dict[int, npt.NDArray[np.float64]]) -> list[Ridge]:
    if len(by_worker) <= MOST_RIDGES:
        return [(f"w{worker}", values) for worker, values in by_worker.items()]
    ranked = sorted(by_worker, key=lambda worker: (float(np.mean(by_worker[worker])), worker))
    tenths = np.array_split(np.array(ranked), TENTHS)
    names = ["fastest 10 %", *(f"{10 * n}-{10 * n + 10} %" for n in range(1, TENTHS - 1)), "slowest 10 %"]
    return [
        (name, np.concatenate([by_worker[int(worker)] for worker in tenth]))
        for name, tenth in zip(names, tenths, strict=True)
    ]


def _ridge_lines(ridges: list[Ridge], edges: npt.NDArray[np.float64]) -> list[Json]:
    shares = [np.histogram(np.clip(values, 0.0, edges[-1]), edges)[0] / len(values) for _, values in ridges]
    # The square root keeps a long flat tail visible beside a worker that always takes the same time.
    heights = [np.sqrt(share / max(float(np.max(shares)), 1e-12)) for share in shares]
    lines: list[Json] = []
    for index, ((label, values), height) in enumerate(zip(ridges, heights, strict=True)):
        floor = len(ridges) - 1 - index
        x = [float(edges[0]), *np.repeat(edges, 2)[1:-1].tolist(), float(edges[-1])]
        y = [float(floor), *(floor + RIDGE_HEIGHT * np.repeat(height, 2)).tolist(), float(floor)]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": [round(value, 6) for value in x],
                "y": [round(value, 3) for value in y],
                "fill": "toself",
                "fillcolor": "used/0.35",
                "line": {"color": "used", "width": 1},
                "hoverinfo": "skip",
            }
        )
        lines.append(_median_mark(label, values, floor))
    return lines


def _median_mark(label: str, values: npt.NDArray[np.float64], floor: int) -> Json:
    median, slow = (float(np.quantile(values, share)) for share in (0.5, 0.9))
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [round(median, 6)],
        "y": [floor],
        "marker": {"symbol": "circle", "size": 7, "color": "ink", "line": {"color": "card", "width": 1.5}},
        "hovertext": [
            f"<b>{label}</b><br>median {seconds_text(median)} s<br>9 of 10 within {seconds_text(slow)} s"
            f"<br>{len(values):,} arrivals"
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _round_lines(groups: Sequence[TraceGroup], ridges: int) -> list[Json]:
    lines = []
    # Strategies with the same K have rounds of the same length: their dashes take turns, so both are seen.
    dash = f"{DASH_PIXELS}px,{DASH_PIXELS}px"
    dash_height = DASH_PIXELS * (ridges + 0.4) / (ridges * RIDGE_PIXELS + 30)
    for index, group in enumerate(groups):
        lengths = [step.seconds for trace in group.traces for step in trace.rounds]
        if group.strategy == ASYNC or not lengths:
            continue
        mean = fmean(lengths)
        lines.append(
            {
                "type": "scatter",
                "mode": "lines",
                "legendgroup": f"s{index}",
                "x": [round(mean, 6)] * 2,
                "y": [round(-0.25 + index % 2 * dash_height, 4), ridges + 0.1],
                "line": {"color": f"s{index}", "width": 2.4, "dash": dash},
                "hovertext": [f"<b>{plot_text(group.label)}</b><br>mean round {seconds_text(mean)} s"] * 2,
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    return lines
