"""A step under every schedule: one lane per device, one panel per schedule, one time axis for all.

1f1b         0  F0F1F2....B0F3B1..B2..B3      the plan's own schedule comes first
             1  ..F0F1..B0F2B1F3B2..B3..
             2  ....F0B0F1B1F2B2F3B3....
zero-bubble  0  ...                           a shorter panel is a faster step
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.quantities import percent_text
from paceline.reports.chart import Chart, Json, axis, layout, plot_text
from paceline.reports.pipeline_charts import HATCH
from paceline.reports.pipeline_numbers import duration, time_unit
from paceline.traces.pipeline_record import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    PipelineRecord,
    ScheduleRecord,
    SpanRecord,
)

MOST_LANES = 32
MOST_SPANS = 16_000  # of all panels; a browser draws so many within a second
PALER = 0.62
MOST_SHARES = 16  # lanes beside which there is room for the idle share
BETWEEN_PANELS_PIXELS = 44
BELOW_PIXELS = 46
KINDS = {
    FORWARD: ("forward", "forward"),
    BACKWARD: ("backward", "backward"),
    INPUT_GRADIENT: ("gradient of inputs", "backward"),
    WEIGHT_GRADIENT: ("gradient of weights", "weights"),
}
"""Kind -> what it is called, and the token of its colour."""


def step_chart(record: PipelineRecord) -> Chart:
    """The step in time, under every schedule that can be carried out.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> [item["name"] for item in step_chart(empty_record()).data]
    ['forward', 'backward']
    """
    shown = sorted((each for each in record.schedules if not each.why_not), key=lambda each: each is not record.chosen)
    lanes = min(MOST_LANES, record.stages)
    end = _end(shown, lanes)
    unit, scale = time_unit(end)
    pixels = 18 if lanes <= 8 else 13 if lanes <= 16 else 9
    height = len(shown) * (lanes * pixels + BETWEEN_PANELS_PIXELS) + BELOW_PIXELS
    figure = layout(
        height=height,
        barmode="overlay",
        annotations=[],
        shapes=[],
        margin={"l": 8, "r": 46, "t": 0, "b": BELOW_PIXELS},
        uniformtext={"minsize": 8, "mode": "hide"},  # a number that does not fit into its bar is not drawn
    )
    data: list[Json] = []
    for panel, schedule in enumerate(shown):
        data += _panel(schedule, panel, lanes, end, scale)
        _add_axes(figure, panel, len(shown), lanes, pixels, reach=end / scale, unit=unit)
        figure["annotations"] += [_title(record, schedule, panel), *_shares(schedule, panel, lanes)]
        figure["shapes"].append(_finish(schedule, panel, scale))
    return Chart(
        name="steps",
        title="A step in time",
        caption=_caption(record, shown, lanes, end),
        data=data,
        layout=figure,
        wide=True,
    )


def _end(shown: Sequence[ScheduleRecord], lanes: int) -> float:
    """Up to when steps are drawn: to the end of the longest, or as far as there are not too many spans."""
    longest = max(schedule.step_seconds for schedule in shown)
    each = MOST_SPANS // len(shown)
    for schedule in shown:
        begins = sorted(span.begin for span in schedule.spans if span.device < lanes)
        if len(begins) > each:
            longest = min(longest, begins[each])
    return longest


def _panel(schedule: ScheduleRecord, panel: int, lanes: int, end: float, scale: float) -> list[Json]:
    spans: dict[str, list[SpanRecord]] = {kind: [] for kind in KINDS}
    for span in schedule.spans:
        if span.device < lanes and (span.begin < end or end == 0):
            spans[span.kind].append(span)
    return [_bars(kind, its, panel, scale, schedule=schedule) for kind, its in spans.items() if its]


def _bars(kind: str, spans: Sequence[SpanRecord], panel: int, scale: float, *, schedule: ScheduleRecord) -> Json:
    name, token = KINDS[kind]
    colour: str | list[str] = token
    if schedule.chunks > 1:  # the pieces of a device take turns: every other one is paler
        stages = len(schedule.idle_shares)
        colour = [f"{token}/{PALER}" if span.piece // stages % 2 else token for span in spans]
    marker: Json = {"color": colour, "line": {"width": 1, "color": "card"}}
    if kind == WEIGHT_GRADIENT:  # what the colour says, once more
        marker["pattern"] = HATCH
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [_rounded(span.begin / scale) for span in spans],
        "x": [_rounded((span.end - span.begin) / scale) for span in spans],
        "y": [span.device for span in spans],
        "width": 0.82,
        "marker": marker,
        "text": [str(span.microbatch) for span in spans],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"size": 10, "color": "ink" if kind == WEIGHT_GRADIENT else "card"},
        "hovertext": [_hover(name, span, several=schedule.chunks > 1) for span in spans],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "xaxis": _axis_name("x", panel),
        "yaxis": _axis_name("y", panel),
    }


def _hover(name: str, span: SpanRecord, *, several: bool) -> str:
    piece = f", piece {span.piece}" if several else ""
    return (
        f"<b>micro-batch {span.microbatch}</b>, {name}<br>device {span.device}{piece}"
        f"<br>{duration(span.end - span.begin)}, from {duration(span.begin)} to {duration(span.end)}"
    )


def _add_axes(figure: Json, panel: int, panels: int, lanes: int, pixels: int, *, reach: float, unit: str) -> None:
    lowest, share = panel == panels - 1, 1.0 / panels
    x_name, y_name = _axis_name("x", panel), _axis_name("y", panel)
    above = share * (BETWEEN_PANELS_PIXELS - 14) / (lanes * pixels + BETWEEN_PANELS_PIXELS)
    figure[f"xaxis{x_name[1:]}"] = axis(
        f"{unit} since the begin of the step" if lowest else "",
        range=[0, reach or 1.0],
        anchor=y_name,
        showgrid=False,
        showticklabels=lowest,
        **({} if panel == 0 else {"matches": "x"}),
    )
    figure[f"yaxis{y_name[1:]}"] = axis(
        domain=[max(0.0, 1.0 - (panel + 1) * share), 1.0 - panel * share - above],
        anchor=x_name,
        range=[lanes - 0.45, -0.6],
        tickvals=list(range(lanes)),
        ticktext=[f"device {device}" if lanes <= MOST_SHARES else str(device) for device in range(lanes)],
        showgrid=False,
        fixedrange=True,
    )


def _title(record: PipelineRecord, schedule: ScheduleRecord, panel: int) -> Json:
    mine = " (this plan)" if schedule is record.chosen else ""
    figures = f"{duration(schedule.step_seconds)} a step, {percent_text(schedule.idle)} idle"
    return {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": f"{_axis_name('y', panel)} domain",
        "y": 1,
        "yanchor": "bottom",
        "text": f"<b>{plot_text(schedule.name)}</b>{mine}   {figures}",
        "showarrow": False,
        "font": {"size": 13, "color": "ink"},
    }


def _shares(schedule: ScheduleRecord, panel: int, lanes: int) -> list[Json]:
    """How idle each device is, beside its lane."""
    if lanes > MOST_SHARES:
        return []
    place: Json = {
        "xref": "paper",
        "x": 1,
        "xanchor": "left",
        "yref": _axis_name("y", panel),
        "yanchor": "middle",
        "xshift": 4,
    }
    return [
        {**place, "y": lane, "text": percent_text(share), "showarrow": False, "font": {"size": 11, "color": "soft"}}
        for lane, share in enumerate(schedule.idle_shares[:lanes])
    ]


def _finish(schedule: ScheduleRecord, panel: int, scale: float) -> Json:
    """The line at which the step is over."""
    at = _rounded(schedule.step_seconds / scale)
    line: Json = {"color": "soft", "width": 1.2, "dash": "dot"}
    place = {"xref": _axis_name("x", panel), "yref": f"{_axis_name('y', panel)} domain"}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line, **place}


def _caption(record: PipelineRecord, shown: Sequence[ScheduleRecord], lanes: int, end: float) -> str:
    said = (
        "Predicted from what was measured, every schedule with the best cut for it, all on one time axis: the shorter, "
    )
    said += "the faster. Numbers are micro-batches; at the right, the share of the step in which a device is idle."
    if any(schedule.chunks > 1 for schedule in shown):
        said += " Paler: a device's second piece."
    if lanes < record.stages:
        said += f" Shown are the first {lanes} of {record.stages} devices."
    if any(schedule.step_seconds > end for schedule in shown):
        said += f" Shown are the first {duration(end)}."
    return said


def _axis_name(letter: str, panel: int) -> str:
    return letter if panel == 0 else f"{letter}{panel + 1}"


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")
