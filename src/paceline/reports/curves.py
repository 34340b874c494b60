"""The curves of training: losses and accuracy against time and rounds, a strong mean line over faint single runs.

Where a strategy ran with several values of a setting, where each of them ended: a point in time and loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from paceline.quantities import loss_text, percent_text, seconds_text
from paceline.reports.chart import Chart, Json, axis, layout, log_ticks, plot_text, symbol, thinned
from paceline.reports.figures import Series, point_chart
from paceline.reports.results import TraceGroup, accuracy_text, results
from paceline.reports.sentences import clock_words, target_accuracies, target_losses
from paceline.traces import Evaluation, Trace

# From this ratio on, a linear axis shows the end of training as a flat line.
LOG_FROM_RATIO = 8.0
# The values of a point that a chart can draw, with the digits that can be seen.
DRAWN: dict[str, Callable[[Evaluation], float | None]] = {
    "seconds": lambda point: round(point.seconds, 6),
    "rounds": lambda point: point.round,
    "loss": lambda point: float(f"{point.loss:.6g}"),
    "accuracy": lambda point: None if point.accuracy is None else round(point.accuracy, 5),
    "test_loss": lambda point: None if point.test_loss is None else float(f"{point.test_loss:.6g}"),
}


def curve_charts(groups: Sequence[TraceGroup]) -> list[Chart]:
    """Return loss against time and rounds, test accuracy and test loss against time; none where nothing was evaluated.

    Without the last two where they were not measured: nothing is guessed where targets are numbers, or the loss is of a
    kind of its own, and older runs have no test loss.

    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0,
    ...               evaluations=(Evaluation(round=5, seconds=1.0, loss=0.7, accuracy=0.9, test_loss=0.8),))
    >>> [chart.name for chart in curve_charts([TraceGroup(label="full", strategy="full", traces=(trace,))])]
    ['loss-time', 'loss-rounds', 'accuracy-time', 'test-loss-time']
    """
    points = [point for group in groups for trace in group.traces for point in trace.evaluations]
    if not points:
        return []
    clock = clock_words([trace for group in groups for trace in group.traces])
    shown = _loss_range(groups, "loss")
    loss_axis = axis("training loss" + (" (log scale)" if "type" in shown else ""), **shown)
    runs = [trace for group in groups for trace in group.traces]
    target = _target_lines({value: f"target {value:g}" for value in target_losses(runs)}, log="type" in shown)
    seconds_axis = axis(clock, rangemode="tozero")
    several = any(len(group.traces) > 1 for group in groups)
    seeds = " Strong lines are means over seeds, faint ones the single runs." if several else ""
    finite = [point for point in points if math.isfinite(point.loss)]
    charts = [
        Chart(
            name="loss-time",
            title="Loss against time",
            caption="The line that falls first wins: it has learnt as much in less time." + seeds,
            data=_lines(groups, "seconds", "loss"),
            layout=layout(
                height=380,
                xaxis=seconds_axis,
                yaxis=loss_axis,
                **target,
            ),
            legend="strategies",
            wide=True,
        ),
        Chart(
            name="loss-rounds",
            title="Loss against rounds",
            caption="The same loss, counted in steps instead of seconds: the price of leaving gradients out.",
            data=_lines(groups, "rounds", "loss"),
            layout=layout(height=320, xaxis=axis("rounds", rangemode="tozero"), yaxis=loss_axis, **target),
            legend="strategies",
        ),
    ]
    if any(point.accuracy is not None for point in finite):
        targets = {value: f"target {accuracy_text(value)}" for value in target_accuracies(runs)}
        charts.append(
            Chart(
                name="accuracy-time",
                title="Test accuracy against time",
                caption="Higher and further left is better. This is data the model was not trained on.",
                data=_lines(groups, "seconds", "accuracy"),
                layout=layout(
                    height=320,
                    xaxis=seconds_axis,
                    yaxis=axis("test accuracy", tickformat=".0%", range=[0, 1.03]),
                    **(_target_lines(targets, log=False, label="top") if targets else {}),
                ),
                legend="strategies",
            )
        )
    if any(point.test_loss is not None for point in finite):
        test_shown = _loss_range(groups, "test_loss")
        charts.append(
            Chart(
                name="test-loss-time",
                title="Test loss against time",
                caption="The mean loss on the same data as the accuracy. Where it rises while the training loss still "
                "falls, the model learns its training data by heart.",
                data=_lines(groups, "seconds", "test_loss"),
                layout=layout(
                    height=320,
                    xaxis=seconds_axis,
                    yaxis=axis("test loss" + (" (log scale)" if "type" in test_shown else ""), **test_shown),
                ),
                legend="strategies",
            )
        )
    return charts


def mean_evaluations(traces: Sequence[Trace]) -> list[Evaluation]:
    """Return the mean run: at every round that all runs evaluated, the mean time, losses and accuracy.

    >>> def run(seconds, loss):
    ...     return Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0,
    ...                  evaluations=(Evaluation(round=5, seconds=seconds, loss=loss, accuracy=0.5),))
    >>> mean_evaluations([run(1.0, 0.4), run(2.0, 0.6)])
    [Evaluation(round=5, seconds=1.5, loss=0.5, accuracy=0.5, test_loss=None)]
    """
    runs = [{point.round: point for point in _finite(trace)} for trace in traces]
    shared = sorted(set.intersection(*(set(run) for run in runs)))
    return [
        Evaluation(
            round=number,
            seconds=fmean(run[number].seconds for run in runs),
            loss=fmean(run[number].loss for run in runs),
            accuracy=_mean_or_none([run[number].accuracy for run in runs]),
            test_loss=_mean_or_none([run[number].test_loss for run in runs]),
        )
        for number in shared
    ]


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def _finite(trace: Trace) -> list[Evaluation]:
    return [point for point in trace.evaluations if math.isfinite(point.loss)]


def _lines(groups: Sequence[TraceGroup], x: str, y: str) -> list[Json]:
    lines = []
    for index, group in enumerate(groups):
        if len(group.traces) > 1:
            lines += [_line(index, thinned(_finite(trace)), x, y, faint=True) for trace in group.traces]
        points = thinned(mean_evaluations(group.traces))
        line = _line(index, points, x, y, faint=False)
        line["hovertext"] = [
            f"<b>{plot_text(group.label)}</b>, round {point.round:,}<br>{seconds_text(point.seconds)} s"
            f"<br>loss {loss_text(point.loss)}<br>test accuracy {percent_text(point.accuracy, 1)}"
            + ("" if point.test_loss is None else f"<br>test loss {loss_text(point.test_loss)}")
            for point in points
        ]
        lines.append(line)
    return lines


def _line(
    index: int,
    points: list[Evaluation],
    x: str,
    y: str,
    *,
    faint: bool,
) -> Json:
    line: Json = {
        "type": "scatter",
        "mode": "lines" if faint or len(points) > 60 else "lines+markers",
        "legendgroup": f"s{index}",
        "x": [DRAWN[x](point) for point in points],
        "y": [DRAWN[y](point) for point in points],
        "line": {"color": f"s{index}/0.28" if faint else f"s{index}", "width": 1 if faint else 2.4},
        "cliponaxis": True,
    }
    if faint:
        return {**line, "hoverinfo": "skip"}
    marker = {"symbol": symbol(index), "size": 6, "color": f"s{index}"}
    return {**line, "marker": marker, "hovertemplate": "%{hovertext}<extra></extra>"}


def _loss_range(groups: Sequence[TraceGroup], name: str) -> dict[str, Any]:
    """Return the axis of a loss that shows the runs that went well; one that diverged leaves it at the top."""
    traces = [trace for group in groups for trace in group.traces]
    sound = [trace for trace in traces if not trace.diverged] or traces
    found = [getattr(point, name) for trace in sound for point in _finite(trace)]
    losses = [loss for loss in found if loss is not None]
    if not losses:
        return {}
    low, high = min(losses), max(losses)
    if low > 0 and high / low > LOG_FROM_RATIO:
        return {
            "type": "log",
            "range": [math.log10(low) - 0.05, math.log10(high) + 0.05],
            **log_ticks(math.log10(low), math.log10(high), most_decades=4),
        }
    room = 0.05 * (high - low or abs(high) or 1.0)
    return {"range": [max(0.0, low - room) if low >= 0 else low - room, high + room]}


def _target_lines(names: Mapping[float, str], *, log: bool, label: str = "bottom") -> dict[str, Any]:
    """Return dashed lines with their names; `label` is the side of a name that touches its line."""
    targets = [target for target in names if target > 0 or not log]
    return {
        "shapes": [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": target,
                "y1": target,
                "line": {"color": "soft", "width": 1.2, "dash": "dash"},
            }
            for target in targets
        ],
        "annotations": [
            {
                "xref": "paper",
                "x": 1,
                "xanchor": "right",
                # On a log axis plotly wants lines in data units, but labels in powers of ten.
                "y": math.log10(target) if log else target,
                "yanchor": label,
                "text": names[target],
                "showarrow": False,
                "font": {"size": 11, "color": "soft"},
            }
            for target in targets
        ],
    }


def frontier_chart(groups: Sequence[TraceGroup]) -> Chart | None:
    """Return where every group ended, in time and loss, if a strategy ran with several values of a setting.

    A point's label is the value and the test accuracy; a faint line joins the points of a strategy.

    >>> def run(k, seconds):
    ...     trace = Trace(strategy="lgc", seed=0, workers=9, recipe={}, rounds_done=5, seconds=seconds,
    ...                   evaluations=(Evaluation(round=5, seconds=seconds, loss=0.7, accuracy=0.9),))
    ...     return TraceGroup(label=f"lgc k={k}", strategy="lgc", traces=(trace,))
    >>> chart = frontier_chart([run(5, 1.0), run(7, 2.0)])
    >>> [line["text"] for line in chart.data if "text" in line]
    [['k=5, 90.0 %'], ['k=7, 90.0 %']]
    >>> frontier_chart([run(5, 1.0)]) is None
    True
    """
    clocks = {group.traces[0].clock for group in groups}
    together: dict[str, list[tuple[float, float]]] = {}
    ends, rows = [], results(groups)
    for row in rows:
        if row.loss is not None and not row.stopped:
            together.setdefault(row.strategy, []).append((row.seconds, row.loss))
            ends.append(row)
    if len(clocks) > 1 or all(len(points) < 2 for points in together.values()):
        return None
    series = [
        Series(
            name=row.label,
            points=[(row.seconds, row.loss if row in ends else None)],
            labels=[", ".join(filter(None, [_value_of(row.label, row.strategy), _shown_accuracy(row.accuracy)]))],
        )
        for row in rows
    ]
    losses = [loss for points in together.values() for _, loss in points]
    chart = point_chart(
        "frontier",
        "Time and loss at the end",
        "Lower and further left is better. Labels are the setting that varies, and the test accuracy.",
        series,
        x=clock_words([trace for group in groups for trace in group.traces]),
        y="final training loss",
        log_y=max(losses) > LOG_FROM_RATIO * min(losses) > 0,
    )
    for points in together.values():
        line = {"color": "soft/0.5", "width": 1, "dash": "dot"}
        x, y = ([float(f"{value:.6g}") for value in column] for column in zip(*sorted(points), strict=True))
        chart.data.insert(0, {"type": "scatter", "mode": "lines", "x": x, "y": y, "line": line, "hoverinfo": "skip"})
    return replace(chart, legend="strategies", keys=())


def _value_of(label: str, strategy: str) -> str:
    return label.removeprefix(strategy).strip() or strategy


def _shown_accuracy(accuracy: float | None) -> str:
    return "" if accuracy is None else percent_text(accuracy, 1)
