"""Where the model is cut and how even that is, what each device must hold, and what other micro-batches would give."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from paceline.quantities import percent_text
from paceline.reports.chart import Chart, Json, axis, layout, plot_text
from paceline.reports.pipeline_numbers import duration, shortened, size, size_unit, time_unit
from paceline.traces.pipeline_record import LayerRecord, PieceRecord, PipelineRecord

MOST_LAYERS = 2_000
MOST_NAMED = 30  # layers that all have their name at the axis; beyond, the first of each piece has
MOST_LABELS = 16  # pieces that have their time above them
NAME_ROOM = 20
PARTS = (("forward", "forward_seconds"), ("backward", "input_seconds"), ("weights", "weight_seconds"))
HATCH: Json = {"shape": "/", "size": 5, "solidity": 0.2, "fillmode": "overlay", "fgcolor": "card", "fgopacity": 0.9}
PART_WORDS = {"forward": "forward", "backward": "gradient of inputs", "weights": "gradient of weights"}


def layer_chart(record: PipelineRecord) -> Chart:
    """What each layer takes, with the cuts, and those into equal numbers of layers.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> layer_chart(empty_record()).data[0]["y"]
    [1.0]
    """
    layers = record.layers[:MOST_LAYERS]
    unit, scale = time_unit(max(layer.seconds for layer in layers))
    data = [_stack(token, field, layers, scale) for token, field in PARTS]
    bands = [_band(piece) for piece in record.pieces if piece.index % 2 and piece.first < len(layers)]
    cuts = [_cut(at, "ink", "solid") for at in record.cuts if at < len(layers)]
    even = [_cut(piece.first, "dropped", "dot") for piece in record.even[1:] if piece.first < len(layers)]
    return Chart(
        name="layers",
        title="Where the model is cut",
        caption=_layer_caption(record, len(layers)),
        data=data,
        layout=layout(
            height=400,
            barmode="stack",
            bargap=0.12,
            shapes=[*bands, *even, *cuts],
            annotations=_band_labels(record, len(layers)),
            margin={"l": 8, "r": 12, "t": 44, "b": 8},
            xaxis=axis(
                "", range=[-0.5, len(layers) - 0.5], showgrid=False, tickangle=-40, **_layer_ticks(record, layers)
            ),
            yaxis=axis(f"{unit} for a micro-batch", fixedrange=True),
        ),
        wide=True,
    )


def _stack(token: str, field: str, layers: Sequence[LayerRecord], scale: float) -> Json:
    marker: Json = {"color": token, "line": {"width": 0}}
    if token == "weights":  # what the colour says, once more
        marker["pattern"] = HATCH
    return {
        "type": "bar",
        "name": PART_WORDS[token],
        "x": list(range(len(layers))),
        "y": [_rounded(getattr(layer, field) / scale) for layer in layers],
        "marker": marker,
        "hovertext": [_layer_words(number, layer) for number, layer in enumerate(layers)],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _layer_words(number: int, layer: LayerRecord) -> str:
    kind = f", {plot_text(layer.kind)}" if layer.kind else ""
    return (
        f"<b>{plot_text(layer.name)}</b>{kind}<br>layer {number}: {duration(layer.seconds)}"
        f"<br>forward {duration(layer.forward_seconds)}, gradient of inputs {duration(layer.input_seconds)}, "
        f"of weights {duration(layer.weight_seconds)}<br>keeps {size(layer.activation_bytes)} for backward"
    )


def _layer_ticks(record: PipelineRecord, layers: Sequence[LayerRecord]) -> Json:
    places = list(range(len(layers)))
    if len(layers) > MOST_NAMED:
        places = [piece.first for piece in record.pieces if piece.first < len(layers)]
    names = [plot_text(shortened(layers[place].name, NAME_ROOM)) for place in places]
    return {"tickvals": places, "ticktext": names}


def _band(piece: PieceRecord) -> Json:
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


def _band_labels(record: PipelineRecord, layers: int) -> list[Json]:
    if len(record.pieces) > MOST_LABELS:
        return []
    word = "piece" if record.chunks > 1 else "stage"
    return [
        {
            "xref": "x",
            "x": (piece.first + min(piece.last, layers) - 1) / 2,
            "yref": "paper",
            "y": 1,
            "yanchor": "bottom",
            "showarrow": False,
            "text": f"{word} {piece.index}<br>{duration(piece.forward_seconds + piece.backward_seconds)}",
            "font": {"size": 12, "color": "ink" if piece is record.slowest else "soft"},
        }
        for piece in record.pieces
        if piece.first < layers
    ]


def _layer_caption(record: PipelineRecord, shown: int) -> str:
    said = "What each layer takes for one micro-batch on a device of speed 1, in the order of the model; above, what "
    said += f"each {'piece' if record.chunks > 1 else 'stage'} computes for on its device."
    said += " Full lines are the cuts." if record.cuts else ""
    if record.even and record.cuts:
        said += " Dotted lines would be those into equal numbers of layers."
    if shown < len(record.layers):
        said += f" Shown are the first {shown:,} of {len(record.layers):,} layers."
    return said


def balance_chart(record: PipelineRecord) -> Chart:
    """What each piece takes with its transfers, beside what it would take with equal numbers of layers.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> [item["name"] for item in balance_chart(empty_record()).data]
    ['this cut']
    """
    worst = max(piece.seconds for piece in (*record.pieces, *record.even))
    unit, scale = time_unit(worst)
    data = [_piece_bars(record, record.pieces, "this cut", "used", scale)]
    if record.even:
        data.append(_piece_bars(record, record.even, "equal numbers of layers", "gone", scale))
    word = "piece" if record.chunks > 1 else "stage"
    level = record.slowest.seconds / scale
    said = f"What a micro-batch takes on each {word}, with its transfers. The slowest sets the pace: dashed."
    return Chart(
        name="balance",
        title="How even the cut is",
        caption=said if record.even else f"{said} The model cannot be cut into equal numbers of layers.",
        data=data,
        layout=layout(
            height=320,
            barmode="group",
            bargap=0.3,
            shapes=[_level(level)],
            xaxis=axis(word, showgrid=False, **_few_ticks(len(record.pieces))),
            yaxis=axis(f"{unit} for a micro-batch", rangemode="tozero", fixedrange=True),
        ),
    )


def _piece_bars(record: PipelineRecord, pieces: Sequence[PieceRecord], name: str, token: str, scale: float) -> Json:
    return {
        "type": "bar",
        "name": name,
        "x": [piece.index for piece in pieces],
        "y": [_rounded(piece.seconds / scale) for piece in pieces],
        "marker": {"color": token, "line": {"width": 0}},
        "hovertext": [f"<b>{name}</b><br>{_piece_words(record, piece)}" for piece in pieces],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }


def _piece_words(record: PipelineRecord, piece: PieceRecord) -> str:
    first, last = (plot_text(shortened(record.layers[at].name, 40)) for at in (piece.first, piece.last - 1))
    transfer = piece.send_seconds + piece.return_seconds
    return (
        f"device {piece.device}, {piece.last - piece.first} layers<br>{first} … {last}<br>{duration(piece.seconds)}: "
        f"forward {duration(piece.forward_seconds)}, backward {duration(piece.backward_seconds)}, "
        f"transfers {duration(transfer)}"
    )


def memory_chart(record: PipelineRecord) -> Chart:
    """What each device must hold, and its limit if it has one.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> memory_chart(empty_record()).caption.endswith("No limit was given.")
    True
    """
    limits = [device.limit_bytes for device in record.devices if device.limit_bytes is not None]
    unit, scale = size_unit(max((*limits, *(device.memory_bytes for device in record.devices))))
    numbers = list(range(record.stages))
    data: list[Json] = [
        {
            "type": "bar",
            "name": "needed",
            "x": numbers,
            "y": [_rounded(device.memory_bytes / scale) for device in record.devices],
            "width": 0.55,
            "marker": {"color": "used", "line": {"width": 0}},
            "hovertext": [_memory_words(record, number) for number in numbers],
            "hovertemplate": "%{hovertext}<extra></extra>",
        }
    ]
    shapes = [
        _limit(number, device.limit_bytes / scale)
        for number, device in enumerate(record.devices)
        if device.limit_bytes is not None
    ]
    said = "Weights, gradients, what the optimiser keeps, and the activations of all micro-batches that wait for their "
    said += f"backward under {record.schedule}. "
    return Chart(
        name="memory",
        title="What each device must hold",
        caption=said + ("Red: the device's limit." if limits else "No limit was given."),
        data=data,
        layout=layout(
            height=320,
            shapes=shapes,
            xaxis=axis("device", showgrid=False, **_few_ticks(record.stages)),
            yaxis=axis(unit, range=[0, 1.08 * _most(record) / scale or 1.0], fixedrange=True),
        ),
    )


def _most(record: PipelineRecord) -> float:
    return max(max(device.memory_bytes, device.limit_bytes or 0) for device in record.devices)


def _memory_words(record: PipelineRecord, number: int) -> str:
    device = record.devices[number]
    name = f" ({plot_text(device.name)})" if device.name else ""
    limit = f" of {size(device.limit_bytes)}" if device.limit_bytes is not None else ""
    return f"<b>device {number}</b>{name}<br>{size(device.memory_bytes)}{limit}<br>speed {device.speed:g}"


def _limit(number: int, at: float) -> Json:
    line: Json = {"color": "dropped", "width": 2.5}
    return {"type": "line", "x0": number - 0.4, "x1": number + 0.4, "y0": at, "y1": at, "line": line}


def choice_chart(record: PipelineRecord) -> Chart | None:
    """The step for other numbers of micro-batches; None where there is only one.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> choice_chart(empty_record()) is None
    True
    """
    choices = record.choices
    if len(choices) < 2:
        return None
    unit, scale = time_unit(max(choice.step_seconds for choice in choices))

    def marked(place: int) -> dict[str, Any]:
        number = choices[place].microbatches
        colour = "backward" if number == record.recommended else "ink" if number == record.microbatches else "used/0.6"
        return {"color": colour, "size": 13 if number in (record.recommended, record.microbatches) else 8}

    marks = [marked(place) for place in range(len(choices))]
    return Chart(
        name="choices",
        title="Into how many micro-batches",
        caption=f"{record.advice[:1].upper()}{record.advice[1:]}. Other sizes than the measured one are extrapolated.",
        data=[
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": list(range(len(choices))),
                "y": [_rounded(choice.step_seconds / scale) for choice in choices],
                "line": {"color": "used/0.6", "width": 2},
                "marker": {
                    "color": [mark["color"] for mark in marks],
                    "size": [mark["size"] for mark in marks],
                    "line": {"color": "card", "width": 1.5},
                },
                "hovertext": [
                    f"<b>{choice.name} samples</b><br>{duration(choice.step_seconds)} a step, "
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
    """Whole numbers at the axis: all of them where there is room."""
    step = -(-number // 16)
    return {"tickvals": list(itertools.islice(range(number), 0, None, step)), "range": [-0.6, number - 0.4]}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
