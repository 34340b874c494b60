"""A plan as text for a terminal: a table of the pieces, a picture of the step, every schedule, and advice.

The text has 80 columns. Names of layers are shortened in the middle; everything else is written in full. The picture of
a step has a line for each device, and a cell for each bit of time:

    device  0                          12 slots  idle
         0  000111222······▓▓▓333▓▓▓···▓▓▓···▓▓▓  33 %
         1  ···000111···▓▓▓222▓▓▓333▓▓▓···▓▓▓···  33 %
         2  ······000▓▓▓111▓▓▓222▓▓▓333▓▓▓······  33 %

    0-9 forward of that micro-batch   ▓ backward   · idle

A digit is forward of that micro-batch (its last digit, if there are more than ten), a dark block backward or the
gradient of the inputs, a light one the gradient of the weights. A cell that has several of them shows what fills most
of it: forward, backward, weights and idle are weighed first, and then one micro-batch's forward against another's.
Where every span is a whole number of the shortest, cells are parts of that, and the picture is regular.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.pipeline.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from paceline.pipeline.timing import Span, Timeline
from paceline.quantities import counted, duration_text, percent_text, size_text
from paceline.terminal import coloured, legend, paragraphs, text_table

if TYPE_CHECKING:
    from paceline.pipeline.plan import Plan

LEAST_NAME = 18
LEAST_WIDTH = 40
BLOCKS = {BACKWARD: "▓", WEIGHT_GRADIENT: "░", "idle": "·"}
ASCII = {BACKWARD: "#", WEIGHT_GRADIENT: "-", "idle": "."}
COLOURS = {FORWARD: "36", BACKWARD: "32", WEIGHT_GRADIENT: "33", "idle": "2"}  # cyan, green, yellow, faint
UNITS = ("seconds", "slots")
DEVICE, IDLE = "device", "idle"
EVEN = 1e-6  # by how much of the shortest span another may miss a whole number of it
IDLE_COLUMNS = (
    "idle: predicted; slots: counted, if all pieces took equally long; formula: (1/2)(1 - m/(k-1+m)) for k stages and "
    "m micro-batches, half of gpipe's count; memory: of the fullest device"
)


def describe(plan: Plan, *, width: int = 80, ascii_only: bool = False, colour: bool = False) -> str:
    """Return the whole text; no line is longer than `width`, which must be 80 at least: the tables need as much."""
    parts = [
        textwrap.wrap(headline(plan), width),
        stage_table(plan, width=width, ascii_only=ascii_only),
        textwrap.wrap(balance(plan), width),
        [draw(plan.timeline, width=width, ascii_only=ascii_only, colour=colour)],
        schedule_table(plan, width=width),
        [line for sentence in remarks(plan) for line in textwrap.wrap(sentence, width)],
    ]
    return paragraphs(parts)


def headline(plan: Plan) -> str:
    """Return what is planned and the step that it comes to, in a sentence."""
    per_device = f", {plan.chunks} pieces on each" if plan.chunks > 1 else ""
    return (
        f"{plan.model}: {counted(len(plan.profile.layers), 'layer')} on {counted(plan.stages, 'device')}{per_device}, "
        f"{counted(plan.microbatches, 'micro-batch')} of {counted(plan.batch.microbatch, 'sample')}, {plan.schedule}: "
        f"{duration_text(plan.timeline.step_seconds)} a step, {percent_text(plan.timeline.idle)} idle"
    )


def stage_table(plan: Plan, *, width: int = 80, ascii_only: bool = False) -> list[str]:
    """Return a line for each piece: its layers, and per micro-batch its seconds and what it sends; its memory."""
    dots = "..." if ascii_only else "…"
    several = plan.chunks > 1
    rows = [[*(["piece", "device"] if several else ["stage"]), "layers", "forward", "backward", "sends", "memory"]]
    for piece in plan.placement.pieces:
        layers = plan.profile.layers[piece.first : piece.last]
        name = layers[0].name if len(layers) == 1 else f"{layers[0].name} {dots} {layers[-1].name} ({len(layers)})"
        rows.append(
            [
                *([str(piece.index), str(piece.device)] if several else [str(piece.index)]),
                name,
                duration_text(piece.forward_seconds),
                duration_text(piece.backward_seconds),
                size_text(piece.sent_bytes) if piece.sent_bytes else "-",
                size_text(piece.memory_bytes),
            ]
        )
    align = ">><>>>>" if several else "><>>>>"
    return text_table(rows, align=align, elastic=align.index("<"), shortest=LEAST_NAME, width=width, dots=dots)


def balance(plan: Plan) -> str:
    """Return sentences on the slowest piece: if it could be faster, what equal counts would give, how times vary."""
    slowest = plan.placement.slowest
    noun = "piece" if plan.chunks > 1 else "stage"
    limited = any(device.memory_bytes is not None for device in plan.placement.devices)
    fitting = " that fits" if limited else ""
    text = (
        f"The slowest {noun} is {slowest.index}: {duration_text(slowest.seconds)} for a micro-batch with its transfers"
        f"{f', and no cut{fitting} has a faster one' if plan.placement.proven else ''}."
    )
    even = plan.even
    if even is not None and not even.fits:
        text += " Equal numbers of layers would not fit."
    elif even is not None and slowest.seconds > 0 and len(plan.placement.pieces) > 1:
        more = percent_text(even.slowest.seconds / slowest.seconds - 1)
        text += f" With equal numbers of layers it would take {duration_text(even.slowest.seconds)}, {more} more."
    if plan.certainty.spread > 0:
        text += (
            f" Times are the least of each layer's, of which the median is {percent_text(plan.certainty.spread)} above."
        )
    return text


def schedule_table(plan: Plan, *, width: int = 80) -> list[str]:
    """Return a line for each schedule: the step, three idle shares that the last lines explain, memory."""
    lines = [f"{'schedule':<13}  {'step':>8}  {'idle':>5}  {'slots':>5}  {'formula':>7}  {'memory':>9}"]
    for each in plan.predictions:
        name = f"{each.schedule}{' *' if each.schedule == plan.schedule else ''}"
        if each.why_not:
            lines += textwrap.wrap(f"{name:<13}  {each.why_not}", width, subsequent_indent=" " * 15)
            continue
        shares = f"{percent_text(each.idle):>5}  {percent_text(each.slots):>5}  {percent_text(each.lecture):>7}"
        lines.append(f"{name:<13}  {duration_text(each.step_seconds):>8}  {shares}  {size_text(each.most_bytes):>9}")
    return [*lines, *textwrap.wrap(IDLE_COLUMNS, width)]


def remarks(plan: Plan) -> list[str]:
    """Return the advice on micro-batches, and the notes of the placement and of the profile."""
    return [f"Advice: {plan.advice.sentence}.", *(f"Note: {note}." for note in plan.notes)]


# -- the picture of a step ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """The number of cells of a line, and the seconds of each."""

    cells: int
    cell_seconds: float


def draw(
    timeline: Timeline, width: int = 80, colour: bool = False, *, ascii_only: bool = False, unit: str = "seconds"
) -> str:
    """Return the picture of a step, never wider than `width`; with `colour`, kinds are coloured by ANSI codes as well.

    `ascii_only` is for streams that cannot encode the blocks. `unit` is "slots" for timelines of slots.

    >>> from paceline.pipeline.timing import slot_timeline
    >>> print(draw(slot_timeline("1f1b", stages=3, microbatches=4), width=56, ascii_only=True, unit="slots"))
    device  0                          12 slots  idle
         0  000111222......###333###...###...###  33 %
         1  ...000111...###222###333###...###...  33 %
         2  ......000###111###222###333###......  33 %
    <BLANKLINE>
    0-9 forward of that micro-batch   # backward   . idle
    """
    if width < LEAST_WIDTH:
        raise ValueError(f"width must be at least {LEAST_WIDTH} columns (width={width})")
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)} (unit={unit!r})")
    marks = ASCII if ascii_only else BLOCKS
    colours = {mark: COLOURS[kind] for kind, mark in marks.items()}
    label = max(len(DEVICE), len(str(timeline.devices - 1)))
    scale = _scale(timeline, width - label - 4 - max(len(IDLE), len("100 %")))
    lines = [f"{DEVICE:>{label}}  {_axis(timeline.step_seconds, scale.cells, unit)}  {IDLE}"]
    for device, (row, idle) in enumerate(zip(timeline.rows, timeline.idle_shares, strict=True)):
        cells = "".join(marks.get(shown, shown) for shown in _cells(row, scale))
        cells = coloured(cells, lambda cell: colours.get(cell, COLOURS[FORWARD])) if colour else cells
        lines.append(f"{device:>{label}}  {cells}  {percent_text(idle):>4}")
    return "\n".join([*lines, "", *legend(_legend_parts(timeline, scale, marks, unit), width)])


def _scale(timeline: Timeline, room: int) -> _Scale:
    step = timeline.step_seconds
    if not step > 0:
        return _Scale(cells=1, cell_seconds=1.0)
    lengths = sorted({span.seconds for span in timeline.spans if span.seconds > 0})
    shortest = lengths[0]
    for_each = math.floor(room * shortest / step * (1 + EVEN))
    times = {span.begin for span in timeline.spans} | set(lengths)
    if for_each and all(abs(time / shortest - round(time / shortest)) < EVEN for time in times):
        return _Scale(cells=round(step / shortest) * for_each, cell_seconds=shortest / for_each)
    return _Scale(cells=room, cell_seconds=step / room)


def _cells(row: Sequence[Span], scale: _Scale) -> list[str]:
    """Return what each cell shows: a forward's digit, B, W or "idle"."""
    filled: list[dict[str, dict[str, float]]] = [defaultdict(lambda: defaultdict(float)) for _ in range(scale.cells)]
    for span in row:
        kind = BACKWARD if span.kind == INPUT_GRADIENT else span.kind
        shown = str(span.microbatch % 10) if kind == FORWARD else kind
        begin, end = span.begin / scale.cell_seconds, span.end / scale.cell_seconds
        for cell in range(math.floor(begin), min(math.ceil(end), scale.cells)):
            filled[cell][kind][shown] += max(0.0, min(end, cell + 1) - max(begin, cell))
    return [_most(kinds) for kinds in filled]


def _most(kinds: dict[str, dict[str, float]]) -> str:
    """Return what fills most of a cell.

    >>> _most({"F": {"0": 0.2, "1": 0.3}, "B": {"B": 0.4}}), _most({"B": {"B": 0.4}})
    ('1', 'idle')
    """
    shares = {kind: sum(parts.values()) for kind, parts in kinds.items()}
    kind = max(shares, key=lambda one: shares[one], default="idle")
    if kind == "idle" or shares[kind] < 1 - sum(shares.values()):
        return "idle"
    return max(kinds[kind], key=lambda shown: kinds[kind][shown])


def _axis(step: float, cells: int, unit: str) -> str:
    """Return an axis from 0 to the end of the step, or the end alone where there is no room."""
    end = f"{step:g} slots" if unit == "slots" else duration_text(step, trim=True)
    return f"0{end:>{cells - 1}}" if cells > len(end) + 1 else f"{end:>{cells}}"


def _legend_parts(timeline: Timeline, scale: _Scale, marks: dict[str, str], unit: str) -> list[str]:
    kinds = {span.kind for span in timeline.spans}
    most = max((span.microbatch for span in timeline.spans), default=0)
    parts = ["0-9 forward of that micro-batch" if most < 10 else "0-9 forward, its last digit"]
    if BACKWARD in kinds:
        parts.append(f"{marks[BACKWARD]} backward")
    if INPUT_GRADIENT in kinds:
        parts.append(f"{marks[BACKWARD]} gradient of inputs")
    if WEIGHT_GRADIENT in kinds:
        parts.append(f"{marks[WEIGHT_GRADIENT]} of weights")
    parts.append(f"{marks['idle']} idle")
    shortest = min((span.seconds for span in timeline.spans if span.seconds > 0), default=scale.cell_seconds)
    if unit != "slots":
        parts.append(f"a cell is {duration_text(scale.cell_seconds, trim=True)}")
    if shortest < scale.cell_seconds * (1 - EVEN):
        parts.append("a cell shows what fills most of it")
    return parts
