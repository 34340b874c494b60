"""The charts of a plan: the step in time, where the model is cut and how even that is, memory, and micro-batches.

The step is drawn under every schedule: one lane per device, one panel per schedule, one time axis for all.

1f1b         0  F0F1F2....B0F3B1..B2..B3      the plan's own schedule comes first
             1  ..F0F1..B0F2B1F3B2..B3..
             2  ....F0B0F1B1F2B2F3B3....
zero-bubble  0  ...                           a shorter panel is a faster step
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.pipeline.placement import Piece
from paceline.pipeline.plan import Plan
from paceline.pipeline.profile import Layer
from paceline.pipeline.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from paceline.pipeline.timing import Span, Timeline
from paceline.quantities import duration_text, percent_text, size_text, size_unit, time_unit
from paceline.reports.chart import Chart, Json, axis, layout, plot_text
from paceline.terminal import shortened

MOST_LAYERS = 2_000
MOST_NAMED = 30  # layers that all have their name at the axis; beyond, the first of each piece has
MOST_LABELS = 16  # pieces that have their time above them
NAME_ROOM = 20
PARTS = (
    ("forward", "forward_seconds", "forward"),
    ("backward", "input_seconds", "gradient of inputs"),
    ("weights", "weight_seconds", "gradient of weights"),
)
"""The token of a colour, the field of a layer, and what both stand for."""
HATCH: Json = {"shape": "/", "size": 5, "solidity": 0.2, "fillmode": "overlay", "fgcolor": "card", "fgopacity": 0.9}
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


# -- the step in time --------------------------------------------------------------------------------------------------


def step_chart(plan: Plan) -> Chart:
    """Draw the step in time, under every schedule that can be carried out."""
    possible = [other for other in plan.alternatives.values() if isinstance(other, Plan)]
    shown = sorted(possible, key=lambda other: other is not plan)
    lanes = min(MOST_LANES, plan.stages)
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
    for panel, other in enumerate(shown):
        data += _panel(other, panel, lanes, end, scale)
        _add_axes(figure, panel, len(shown), lanes, pixels, reach=end / scale, unit=unit)
        figure["annotations"] += [_title(other, panel, chosen=other is plan), *_shares(other.timeline, panel, lanes)]
        figure["shapes"].append(_finish(other.timeline, panel, scale))
    return Chart(
        name="steps",
        title="A step in time",
        caption=_step_caption(plan, shown, lanes, end),
        data=data,
        layout=figure,
        wide=True,
    )


def _end(shown: Sequence[Plan], lanes: int) -> float:
    """Return up to when steps are drawn: to the end of the longest, or as far as there are not too many spans."""
    longest = max(other.timeline.step_seconds for other in shown)
    each = MOST_SPANS // len(shown)
    for other in shown:
        begins = sorted(span.begin for span in other.timeline.spans if span.device < lanes)
        if len(begins) > each:
            longest = min(longest, begins[each])
    return longest


def _panel(plan: Plan, panel: int, lanes: int, end: float, scale: float) -> list[Json]:
    spans: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for span in plan.timeline.spans:
        if span.device < lanes and (span.begin < end or end == 0):
            spans[span.kind].append(span)
    return [_bars(kind, its, panel, scale, plan=plan) for kind, its in spans.items() if its]


def _bars(kind: str, spans: Sequence[Span], panel: int, scale: float, *, plan: Plan) -> Json:
    name, token = KINDS[kind]
    colour: str | list[str] = token
    if plan.chunks > 1:  # the pieces of a device take turns: every other one is paler
        colour = [f"{token}/{PALER}" if span.piece // plan.stages % 2 else token for span in spans]
    marker: Json = {"color": colour, "line": {"width": 1, "color": "card"}}
    if kind == WEIGHT_GRADIENT:  # what the colour says, once more
        marker["pattern"] = HATCH
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "base": [_rounded(span.begin / scale, 7) for span in spans],
        "x": [_rounded(span.seconds / scale, 7) for span in spans],
        "y": [span.device for span in spans],
        "width": 0.82,
        "marker": marker,
        "text": [str(span.microbatch) for span in spans],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"size": 10, "color": "ink" if kind == WEIGHT_GRADIENT else "card"},
        "hovertext": [_hover(name, span, several=plan.chunks > 1) for span in spans],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "xaxis": _axis_name("x", panel),
        "yaxis": _axis_name("y", panel),
    }


def _hover(name: str, span: Span, *, several: bool) -> str:
    piece = f", piece {span.piece}" if several else ""
    return (
        f"<b>micro-batch {span.microbatch}</b>, {name}<br>device {span.device}{piece}"
        f"<br>{duration_text(span.seconds)}, from {duration_text(span.begin)} to {duration_text(span.end)}"
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


def _title(plan: Plan, panel: int, *, chosen: bool) -> Json:
    mark = " (this plan)" if chosen else ""
    figures = f"{duration_text(plan.timeline.step_seconds)} a step, {percent_text(plan.timeline.idle)} idle"
    return {
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": f"{_axis_name('y', panel)} domain",
        "y": 1,
        "yanchor": "bottom",
        "text": f"<b>{plot_text(plan.schedule)}</b>{mark}   {figures}",
        "showarrow": False,
        "font": {"size": 13, "color": "ink"},
    }


def _shares(timeline: Timeline, panel: int, lanes: int) -> list[Json]:
    """Write the idle share of each device beside its lane."""
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
        for lane, share in enumerate(timeline.idle_shares[:lanes])
    ]


def _finish(timeline: Timeline, panel: int, scale: float) -> Json:
    """Draw the line at which the step is over."""
    at = _rounded(timeline.step_seconds / scale, 7)
    line: Json = {"color": "soft", "width": 1.2, "dash": "dot"}
    place = {"xref": _axis_name("x", panel), "yref": f"{_axis_name('y', panel)} domain"}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line, **place}


def _step_caption(plan: Plan, shown: Sequence[Plan], lanes: int, end: float) -> str:
    caption = "Predicted from what was measured, every schedule with the best cut for it, all on one time axis: the "
    caption += "shorter, the faster. Numbers are micro-batches; at the right, the share of the step in which a device "
    caption += "is idle."
    if any(other.chunks > 1 for other in shown):
        caption += " Paler: a device's second piece."
    if lanes < plan.stages:
        caption += f" Shown are the first {lanes} of {plan.stages} devices."
    if any(other.timeline.step_seconds > end for other in shown):
        caption += f" Shown are the first {duration_text(end)}."
    return caption


def _axis_name(letter: str, panel: int) -> str:
    return letter if panel == 0 else f"{letter}{panel + 1}"


# -- where the model is cut --------------------------------------------------------------------------------------------


def layer_chart(plan: Plan) -> Chart:
    """Draw what each layer takes, with the cuts, and those into equal numbers of layers."""
    layers = plan.profile.layers[:MOST_LAYERS]
    unit, scale = time_unit(max(layer.seconds for layer in layers))
    data = [_stack(*part, layers, scale) for part in PARTS]
    bands = [_band(piece) for piece in plan.placement.pieces if piece.index % 2 and piece.first < len(layers)]
    cuts = [_cut(at, "ink", "solid") for at in plan.cuts if at < len(layers)]
    even = [_cut(at, "dropped", "dot") for at in (plan.even.cuts if plan.even else ()) if at < len(layers)]
    return Chart(
        name="layers",
        title="Where the model is cut",
        caption=_layer_caption(plan, len(layers)),
        data=data,
        layout=layout(
            height=400,
            barmode="stack",
            bargap=0.12,
            shapes=[*bands, *even, *cuts],
            annotations=_band_labels(plan, len(layers)),
            margin={"l": 8, "r": 12, "t": 44, "b": 8},
            xaxis=axis(
                "", range=[-0.5, len(layers) - 0.5], showgrid=False, tickangle=-40, **_layer_ticks(plan, layers)
            ),
            yaxis=axis(f"{unit} for a micro-batch", fixedrange=True),
        ),
        wide=True,
    )


def _stack(token: str, field: str, name: str, layers: Sequence[Layer], scale: float) -> Json:
    marker: Json = {"color": token, "line": {"width": 0}}
    if token == "weights":  # what the colour says, once more
        marker["pattern"] = HATCH
    return {
        "type": "bar",
        "name": name,
        "x": list(range(len(layers))),
        "y": [_rounded(getattr(layer, field) / scale) for layer in layers],
        "marker": marker,
        "hovertext": [_layer_hover(number, layer) for number, layer in enumerate(layers)],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _layer_hover(number: int, layer: Layer) -> str:
    kind = f", {plot_text(layer.kind)}" if layer.kind else ""
    return (
        f"<b>{plot_text(layer.name)}</b>{kind}<br>layer {number}: {duration_text(layer.seconds)}"
        f"<br>forward {duration_text(layer.forward_seconds)}, gradient of inputs {duration_text(layer.input_seconds)}, "
        f"of weights {duration_text(layer.weight_seconds)}<br>keeps {size_text(layer.activation_bytes)} for backward"
    )


def _layer_ticks(plan: Plan, layers: Sequence[Layer]) -> Json:
    places = list(range(len(layers)))
    if len(layers) > MOST_NAMED:
        places = [piece.first for piece in plan.placement.pieces if piece.first < len(layers)]
    names = [plot_text(shortened(layers[place].name, NAME_ROOM)) for place in places]
    return {"tickvals": places, "ticktext": names}


def _band(piece: Piece) -> Json:
    line = {"width": 0}
    place: Json = {"xref": "x", "yref": "paper", "x0": piece.first - 0.5, "x1": piece.last - 0.5, "y0": 0, "y1": 1}
    return {"type": "rect", "layer": "below", "fillcolor": "waiting/0.55", "line": line, **place}


def _cut(at: int, colour: str, dash: str) -> Json:
    line: Json = {"color": colour, "width": 1.6, "dash": dash}
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": at - 0.5,
        "x1": at - 0.5,
        "y0": 0,
        "y1": 1,
        "line": line,
    }


def _band_labels(plan: Plan, layers: int) -> list[Json]:
    if len(plan.placement.pieces) > MOST_LABELS:
        return []
    noun = "piece" if plan.chunks > 1 else "stage"
    return [
        {
            "xref": "x",
            "x": (piece.first + min(piece.last, layers) - 1) / 2,
            "yref": "paper",
            "y": 1,
            "yanchor": "bottom",
            "showarrow": False,
            "text": f"{noun} {piece.index}<br>{duration_text(piece.forward_seconds + piece.backward_seconds)}",
            "font": {"size": 12, "color": "ink" if piece is plan.placement.slowest else "soft"},
        }
        for piece in plan.placement.pieces
        if piece.first < layers
    ]


def _layer_caption(plan: Plan, shown: int) -> str:
    caption = "What each layer takes for one micro-batch on a device of speed 1, in the order of the model; above, "
    caption += f"what each {'piece' if plan.chunks > 1 else 'stage'} computes for on its device."
    caption += " Full lines are the cuts." if plan.cuts else ""
    if plan.even and plan.cuts:
        caption += " Dotted lines would be those into equal numbers of layers."
    if shown < len(plan.profile.layers):
        caption += f" Shown are the first {shown:,} of {len(plan.profile.layers):,} layers."
    return caption


def balance_chart(plan: Plan) -> Chart:
    """Draw what each piece takes with its transfers, beside what it would take with equal numbers of layers."""
    even = plan.even.pieces if plan.even else ()
    unit, scale = time_unit(max(piece.seconds for piece in (*plan.placement.pieces, *even)))
    data = [_piece_bars(plan, plan.placement.pieces, "this cut", "used", scale)]
    if even:
        data.append(_piece_bars(plan, even, "equal numbers of layers", "gone", scale))
    noun = "piece" if plan.chunks > 1 else "stage"
    caption = f"What a micro-batch takes on each {noun}, with its transfers. The slowest sets the pace: dashed."
    return Chart(
        name="balance",
        title="How even the cut is",
        caption=caption if even else f"{caption} The model cannot be cut into equal numbers of layers.",
        data=data,
        layout=layout(
            height=320,
            barmode="group",
            bargap=0.3,
            shapes=[_level(plan.placement.slowest.seconds / scale)],
            xaxis=axis(noun, showgrid=False, **_few_ticks(len(plan.placement.pieces))),
            yaxis=axis(f"{unit} for a micro-batch", rangemode="tozero", fixedrange=True),
        ),
    )


def _piece_bars(plan: Plan, pieces: Sequence[Piece], name: str, token: str, scale: float) -> Json:
    return {
        "type": "bar",
        "name": name,
        "x": [piece.index for piece in pieces],
        "y": [_rounded(piece.seconds / scale) for piece in pieces],
        "marker": {"color": token, "line": {"width": 0}},
        "hovertext": [f"<b>{name}</b><br>{_piece_hover(plan, piece)}" for piece in pieces],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _piece_hover(plan: Plan, piece: Piece) -> str:
    first, last = (plot_text(shortened(plan.profile.layers[at].name, 40)) for at in (piece.first, piece.last - 1))
    return (
        f"device {piece.device}, {piece.last - piece.first} layers<br>{first} … {last}<br>"
        f"{duration_text(piece.seconds)}: forward {duration_text(piece.forward_seconds)}, "
        f"backward {duration_text(piece.backward_seconds)}, transfers {duration_text(piece.transfer_seconds)}"
    )


def memory_chart(plan: Plan) -> Chart:
    """Draw what each device must hold, and its limit if it has one."""
    devices, needed, numbers = plan.placement.devices, plan.placement.device_bytes, list(range(plan.stages))
    limits = {number: device.memory_bytes for number, device in enumerate(devices) if device.memory_bytes is not None}
    most = max((*limits.values(), *needed))
    unit, scale = size_unit(most)
    caption = "Weights, gradients, what the optimiser keeps, and the activations of all micro-batches that wait for "
    caption += f"their backward under {plan.schedule}. "
    return Chart(
        name="memory",
        title="What each device must hold",
        caption=caption + ("Red: the device's limit." if limits else "No limit was given."),
        data=[
            {
                "type": "bar",
                "name": "needed",
                "x": numbers,
                "y": [_rounded(bytes_ / scale) for bytes_ in needed],
                "width": 0.55,
                "marker": {"color": "used", "line": {"width": 0}},
                "hovertext": [_memory_hover(plan, number) for number in numbers],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        ],
        layout=layout(
            height=320,
            shapes=[_limit(number, limit / scale) for number, limit in limits.items()],
            xaxis=axis("device", showgrid=False, **_few_ticks(plan.stages)),
            yaxis=axis(unit, range=[0, 1.08 * most / scale or 1.0], fixedrange=True),
        ),
    )


def _memory_hover(plan: Plan, number: int) -> str:
    device = plan.placement.devices[number]
    name = f" ({plot_text(device.name)})" if device.name else ""
    limit = f" of {size_text(device.memory_bytes)}" if device.memory_bytes is not None else ""
    needed = size_text(plan.placement.device_bytes[number])
    return f"<b>device {number}</b>{name}<br>{needed}{limit}<br>speed {device.speed:g}"


def _limit(number: int, at: float) -> Json:
    line: Json = {"color": "dropped", "width": 2.5}
    return {"type": "line", "x0": number - 0.4, "x1": number + 0.4, "y0": at, "y1": at, "line": line}


def choice_chart(plan: Plan) -> Chart | None:
    """Draw the step for other numbers of micro-batches; None where there is only one."""
    choices, recommended, sentence = plan.advice.choices, plan.advice.recommended.microbatches, plan.advice.sentence
    if len(choices) < 2:
        return None
    unit, scale = time_unit(max(choice.step_seconds for choice in choices))

    marks = {plan.microbatches: "ink"} | {recommended: "backward"}
    numbers = [choice.microbatches for choice in choices]
    return Chart(
        name="choices",
        title="Into how many micro-batches",
        caption=f"{sentence[:1].upper()}{sentence[1:]}. Other sizes than the measured one are extrapolated.",
        data=[
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": list(range(len(choices))),
                "y": [_rounded(choice.step_seconds / scale) for choice in choices],
                "line": {"color": "used/0.6", "width": 2},
                "marker": {
                    "color": [marks.get(number, "used/0.6") for number in numbers],
                    "size": [13 if number in marks else 8 for number in numbers],
                    "line": {"color": "card", "width": 1.5},
                },
                "hovertext": [
                    f"<b>{choice.name} samples</b><br>{duration_text(choice.step_seconds)} a step, "
                    f"{percent_text(choice.idle)} idle"
                    for choice in choices
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "cliponaxis": False,
            }
        ],
        layout=layout(
            height=320,
            xaxis=axis(
                "micro-batches of samples",
                showgrid=False,
                tickvals=list(range(len(choices))),
                ticktext=[choice.name for choice in choices],
                range=[-0.3, len(choices) - 0.7],
            ),
            yaxis=axis(f"{unit} a step", rangemode="tozero", fixedrange=True),
        ),
    )


def _level(at: float) -> Json:
    line: Json = {"color": "ink", "width": 1.4, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": line}


def _few_ticks(number: int) -> Json:
    """Return ticks at whole numbers: at all of them where there is room."""
    step = -(-number // 16)
    return {"tickvals": list(range(0, number, step)), "range": [-0.6, number - 0.4]}


def _rounded(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")
