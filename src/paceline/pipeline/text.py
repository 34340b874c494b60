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
from itertools import groupby
from typing import TYPE_CHECKING

from paceline.pipeline.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from paceline.pipeline.timing import Span, Timeline
from paceline.pipeline.words import duration, size

if TYPE_CHECKING:
    from paceline.pipeline.placement import Piece
    from paceline.pipeline.plan import Plan, Prediction

LEAST_NAME = 18
LEAST_WIDTH = 40
BLOCKS = {BACKWARD: "▓", WEIGHT_GRADIENT: "░", "idle": "·"}
ASCII = {BACKWARD: "#", WEIGHT_GRADIENT: "-", "idle": "."}
COLOURS = {FORWARD: "36", BACKWARD: "32", WEIGHT_GRADIENT: "33", "idle": "2"}  # cyan, green, yellow, faint
UNITS = ("seconds", "slots")
DEVICE, IDLE = "device", "idle"
GLUE = "\N{NO-BREAK SPACE}"  # keeps a mark and its meaning on one line of the legend
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
    return "\n\n".join("\n".join(part) for part in parts if part)


def headline(plan: Plan) -> str:
    """Return what is planned and the step that it comes to, in a sentence."""
    per_device = f", {plan.chunks} pieces on each" if plan.chunks > 1 else ""
    return (
        f"{plan.model}: {len(plan.profile.layers)} layers on {_many(plan.stages, 'device')}{per_device}, "
        f"{_many(plan.microbatches, 'micro-batch')} of {_many(plan.batch.microbatch, 'sample')}, {plan.schedule}: "
        f"{duration(plan.timeline.step_seconds)} a step, {_percent(plan.timeline.idle)} idle"
    )


def stage_table(plan: Plan, *, width: int = 80, ascii_only: bool = False) -> list[str]:
    """Return a line for each piece: its layers, and per micro-batch its seconds and what it sends; its memory."""
    several = plan.chunks > 1
    heads = [*(("piece", "device") if several else ("stage",)), "layers", "forward", "backward", "sends", "memory"]
    rows = [heads, *(_row(plan, piece, several=several, ascii_only=ascii_only) for piece in plan.placement.pieces)]
    names = len(heads) - 5
    others = [max(len(row[column]) for row in rows) for column in range(len(heads)) if column != names]
    room = max(LEAST_NAME, width - sum(others) - 2 * len(others))
    wide = min(room, max(len(row[names]) for row in rows))
    widths, lines = [*others[:names], wide, *others[names:]], []
    for row in rows:
        row[names] = _shortened(row[names], wide, ascii_only=ascii_only).ljust(wide)
        lines.append("  ".join(cell.rjust(room) for cell, room in zip(row, widths, strict=True)))
    return lines


def _row(plan: Plan, piece: Piece, *, several: bool, ascii_only: bool) -> list[str]:
    layers = plan.profile.layers[piece.first : piece.last]
    dots = "..." if ascii_only else "…"
    name = layers[0].name if len(layers) == 1 else f"{layers[0].name} {dots} {layers[-1].name} ({len(layers)})"
    return [
        *([str(piece.index), str(piece.device)] if several else [str(piece.index)]),
        name,
        duration(piece.forward_seconds),
        duration(piece.backward_seconds),
        size(piece.sent_bytes) if piece.sent_bytes else "-",
        size(piece.memory_bytes),
    ]


def balance(plan: Plan) -> str:
    """Return sentences on the slowest piece: whether it could be faster, and what equal numbers of layers would give."""
    slowest = plan.placement.slowest
    noun = "piece" if plan.chunks > 1 else "stage"
    limited = any(device.memory_bytes is not None for device in plan.placement.devices)
    fitting = " that fits" if limited else ""
    text = (
        f"The slowest {noun} is {slowest.index}: {duration(slowest.seconds)} for a micro-batch with its transfers"
        f"{f', and no cut{fitting} has a faster one' if plan.placement.proven else ''}."
    )
    even = plan.even
    if even is not None and not even.fits:
        text += " Equal numbers of layers would not fit."
    elif even is not None and slowest.seconds > 0 and len(plan.placement.pieces) > 1:
        more = even.slowest.seconds / slowest.seconds - 1
        text += f" With equal numbers of layers it would take {duration(even.slowest.seconds)}, {_percent(more)} more."
    return text


def schedule_table(plan: Plan, *, width: int = 80) -> list[str]:
    """Return a line for each schedule: the step, three idle shares that the last lines explain, memory."""
    lines = [f"{'schedule':<13}  {'step':>8}  {'idle':>5}  {'slots':>5}  {'formula':>7}  {'memory':>9}"]
    for prediction in plan.predictions:
        lines += _schedule_row(prediction, width, chosen=prediction.schedule == plan.schedule)
    return [*lines, *textwrap.wrap(IDLE_COLUMNS, width)]


def _schedule_row(prediction: Prediction, width: int, *, chosen: bool) -> list[str]:
    name = f"{prediction.schedule}{' *' if chosen else ''}"
    if prediction.why_not:
        return textwrap.wrap(f"{name:<13}  {prediction.why_not}", width, subsequent_indent=" " * 15)
    figures = (
        f"{duration(prediction.step_seconds):>8}  {_percent(prediction.idle):>5}  {_percent(prediction.slots):>5}  "
        f"{_percent(prediction.lecture):>7}  {size(prediction.most_bytes):>9}"
    )
    return [f"{name:<13}  {figures}"]


def remarks(plan: Plan) -> list[str]:
    """Return the advice on micro-batches, and the notes of the placement and of the profile."""
    notes = [f"Note: {note}." for note in (*plan.placement.notes, *plan.profile.notes)]
    return [f"Advice: {plan.advice.sentence}.", *notes]


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _shortened(text: str, room: int, *, ascii_only: bool) -> str:
    if len(text) <= room:
        return text
    dots = "..." if ascii_only else "…"
    front = (room - len(dots)) // 2
    return text[:front] + dots + text[len(text) - (room - front - len(dots)) :]


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
    label = max(len(DEVICE), len(str(timeline.devices - 1)))
    scale = _scale(timeline, width - label - 4 - max(len(IDLE), len("100 %")))
    lines = [f"{DEVICE:>{label}}  {_axis(timeline.step_seconds, scale.cells, unit)}  {IDLE}"]
    for device, (row, idle) in enumerate(zip(timeline.rows, timeline.idle_shares, strict=True)):
        cells = _paint(_cells(row, scale), marks, colour=colour)
        lines.append(f"{device:>{label}}  {cells}  {100 * idle:2.0f} %")
    legend = _legend(timeline, scale, marks, unit)
    wrapped = textwrap.wrap(legend, width, break_on_hyphens=False)
    return "\n".join([*lines, "", *(line.replace(GLUE, " ").rstrip() for line in wrapped)])


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


def _paint(cells: Sequence[str], marks: dict[str, str], *, colour: bool) -> str:
    if not colour:
        return "".join(marks.get(cell, cell) for cell in cells)
    runs = groupby(cells, key=lambda cell: cell if cell in COLOURS else FORWARD)
    return "".join(
        f"\x1b[{COLOURS[kind]}m{''.join(marks.get(cell, cell) for cell in run)}\x1b[0m" for kind, run in runs
    )


def _axis(step: float, cells: int, unit: str) -> str:
    """Return an axis from 0 to the end of the step, or the end alone where there is no room."""
    end = _time(step, unit)
    return f"0{end:>{cells - 1}}" if cells > len(end) + 1 else f"{end:>{cells}}"


def _time(value: float, unit: str) -> str:
    """Return a time with three digits.

    >>> _time(0.01234, "seconds"), _time(12.0, "slots")
    ('12.3 ms', '12 slots')
    """
    if unit == "slots":
        return f"{value:g} slots"
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {name}" if value < 999.5 * factor else f"{value / factor:.0f} {name}"
    return f"{value / 1e-6:.3g} us"


def _legend(timeline: Timeline, scale: _Scale, marks: dict[str, str], unit: str) -> str:
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
        parts.append(f"a cell is {_time(scale.cell_seconds, unit)}")
    if shortest < scale.cell_seconds * (1 - EVEN):
        parts.append("a cell shows what fills most of it")
    return f"{GLUE * 2} ".join(part.replace(" ", GLUE) for part in parts)
