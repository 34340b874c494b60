"""A step as a picture for the terminal: a line for each device, a cell for each bit of time.

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

from paceline.pipeline.schedules import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from paceline.pipeline.timing import Span, Timeline

LEAST_WIDTH = 40
BLOCKS = {BACKWARD: "▓", WEIGHT_GRADIENT: "░", "idle": "·"}
ASCII = {BACKWARD: "#", WEIGHT_GRADIENT: "-", "idle": "."}
COLOURS = {FORWARD: "36", BACKWARD: "32", WEIGHT_GRADIENT: "33", "idle": "2"}  # cyan, green, yellow, faint
UNITS = ("seconds", "slots")
DEVICE, IDLE = "device", "idle"
EVEN = 1e-6  # by how much of the shortest span another may miss a whole number of it


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """How many cells a line has, and how much time each is."""

    cells: int
    cell_seconds: float


def draw(
    timeline: Timeline, width: int = 80, colour: bool = False, *, ascii_only: bool = False, unit: str = "seconds"
) -> str:
    """The picture, never wider than `width`; with `colour`, kinds are coloured by ANSI codes as well.

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
    lines = [f"{DEVICE:>{label}}  {_axis(timeline.step_seconds, scale.cells, unit, ascii_only=ascii_only)}  {IDLE}"]
    for device, (row, idle) in enumerate(zip(timeline.rows, timeline.idle_shares, strict=True)):
        cells = _paint(_cells(row, scale), marks, colour=colour)
        lines.append(f"{device:>{label}}  {cells}  {_percent(idle)}")
    legend = _legend(timeline, scale, marks, unit, ascii_only=ascii_only)
    wrapped = textwrap.wrap(legend, width, break_on_hyphens=False)
    return "\n".join([*lines, "", *(line.replace(GLUE, " ").rstrip() for line in wrapped)])


GLUE = "\N{NO-BREAK SPACE}"  # keeps a mark and its meaning on one line of the legend


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
    """What each cell shows: a forward's digit, B, W or "idle"."""
    filled: list[dict[str, dict[str, float]]] = [defaultdict(lambda: defaultdict(float)) for _ in range(scale.cells)]
    for span in row:
        kind = BACKWARD if span.kind == INPUT_GRADIENT else span.kind
        shown = str(span.microbatch % 10) if kind == FORWARD else kind
        begin, end = span.begin / scale.cell_seconds, span.end / scale.cell_seconds
        for cell in range(math.floor(begin), min(math.ceil(end), scale.cells)):
            filled[cell][kind][shown] += max(0.0, min(end, cell + 1) - max(begin, cell))
    return [_most(kinds) for kinds in filled]


def _most(kinds: dict[str, dict[str, float]]) -> str:
    """What fills most of a cell.

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


def _axis(step: float, cells: int, unit: str, *, ascii_only: bool) -> str:
    """From 0 to the end of the step, or the end alone where there is no room."""
    end = _told(step, unit, ascii_only=ascii_only)
    return f"0{end:>{cells - 1}}" if cells > len(end) + 1 else f"{end:>{cells}}"


def _told(value: float, unit: str, *, ascii_only: bool) -> str:
    """A time with three digits.

    >>> _told(0.01234, "seconds", ascii_only=True), _told(12.0, "slots", ascii_only=True)
    ('12.3 ms', '12 slots')
    """
    if unit == "slots":
        return f"{value:g} slots"
    for factor, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= factor:
            return f"{value / factor:.3g} {name}" if value < 999.5 * factor else f"{value / factor:.0f} {name}"
    return f"{value / 1e-6:.3g} us"


def _percent(share: float) -> str:
    return f"{100 * share:2.0f} %"


def _legend(timeline: Timeline, scale: _Scale, marks: dict[str, str], unit: str, *, ascii_only: bool) -> str:
    kinds = {span.kind for span in timeline.spans}
    told = ["0-9 forward of that micro-batch" if _microbatches(timeline) <= 10 else "0-9 forward, its last digit"]
    if BACKWARD in kinds:
        told.append(f"{marks[BACKWARD]} backward")
    if INPUT_GRADIENT in kinds:
        told.append(f"{marks[BACKWARD]} gradient of inputs")
    if WEIGHT_GRADIENT in kinds:
        told.append(f"{marks[WEIGHT_GRADIENT]} of weights")
    told.append(f"{marks['idle']} idle")
    shortest = min((span.seconds for span in timeline.spans if span.seconds > 0), default=scale.cell_seconds)
    if unit != "slots":
        told.append(f"a cell is {_told(scale.cell_seconds, unit, ascii_only=ascii_only)}")
    if shortest < scale.cell_seconds * (1 - EVEN):
        told.append("a cell shows what fills most of it")
    return f"{GLUE * 2} ".join(part.replace(" ", GLUE) for part in told)


def _microbatches(timeline: Timeline) -> int:
    return max((span.microbatch for span in timeline.spans), default=0) + 1
