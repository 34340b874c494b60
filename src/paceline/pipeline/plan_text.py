"""A plan in words: a table of the pieces, a picture of the step, every schedule, and what could be better.

At 80 columns. Names of layers are shortened in the middle; everything else is told in full.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from paceline.pipeline.drawing import draw
from paceline.pipeline.words import duration, size

if TYPE_CHECKING:
    from paceline.pipeline.placement import Piece
    from paceline.pipeline.plan import Plan, Prediction

LEAST_NAME = 18


def describe(plan: Plan, *, width: int = 80, ascii_only: bool = False, colour: bool = False) -> str:
    """The whole text; no line is longer than `width`, which must be 80 at least: the tables need as much."""
    parts = [
        textwrap.wrap(headline(plan), width),
        stage_table(plan, width=width, ascii_only=ascii_only),
        textwrap.wrap(balance(plan), width),
        [draw(plan.timeline, width=width, ascii_only=ascii_only, colour=colour)],
        schedule_table(plan, width=width),
        [line for said in remarks(plan) for line in textwrap.wrap(said, width)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def headline(plan: Plan) -> str:
    """What goes through what."""
    per_device = f", {plan.chunks} pieces on each" if plan.chunks > 1 else ""
    return (
        f"{plan.model}: {len(plan.profile.layers)} layers on {_many(plan.stages, 'device')}{per_device}, "
        f"{_many(plan.microbatches, 'micro-batch')} of {_many(plan.batch.microbatch, 'sample')}, {plan.schedule}: "
        f"{duration(plan.timeline.step_seconds)} a step, {_percent(plan.timeline.idle)} idle"
    )


def stage_table(plan: Plan, *, width: int = 80, ascii_only: bool = False) -> list[str]:
    """One line for each piece: its layers, and per micro-batch its seconds and what it sends; its memory."""
    several = plan.chunks > 1
    heads = [*(("piece", "device") if several else ("stage",)), "layers", "forward", "backward", "sends", "memory"]
    rows = [heads, *(_row(plan, piece, several=several, ascii_only=ascii_only) for piece in plan.placement.pieces)]
    names = len(heads) - 5
    others = [max(len(row[column]) for row in rows) for column in range(len(heads)) if column != names]
    room = max(LEAST_NAME, width - sum(others) - 2 * len(others))
    wide = min(room, max(len(row[names]) for row in rows))
    lines = []
    for row in rows:
        row[names] = _shortened(row[names], wide, ascii_only=ascii_only).ljust(wide)
        cells = [row[column].rjust(size) for column, size in zip(_without(names, len(heads)), others, strict=True)]
        lines.append("  ".join([*cells[:names], row[names], *cells[names:]]))
    return lines


def _without(left_out: int, columns: int) -> list[int]:
    return [column for column in range(columns) if column != left_out]


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
    """The slowest piece, whether it could be faster, and what an even number of layers would give."""
    slowest = plan.placement.slowest
    what = "piece" if plan.chunks > 1 else "stage"
    limited = any(device.memory_bytes is not None for device in plan.placement.devices)
    fitting = " that fits" if limited else ""
    said = (
        f"The slowest {what} is {slowest.index}: {duration(slowest.seconds)} for a micro-batch with its transfers"
        f"{f', and no cut{fitting} has a faster one' if plan.placement.proven else ''}."
    )
    even = plan.even
    if even is not None and not even.fits:
        said += " Equal numbers of layers would not fit."
    elif even is not None and slowest.seconds > 0 and len(plan.placement.pieces) > 1:
        more = even.slowest.seconds / slowest.seconds - 1
        said += f" With equal numbers of layers it would take {duration(even.slowest.seconds)}, {_percent(more)} more."
    return said


def schedule_table(plan: Plan, *, width: int = 80) -> list[str]:
    """Every schedule: the step, the idle share as predicted, as counted in slots, as the lecture has it; memory."""
    lines = [f"{'schedule':<13}  {'step':>8}  {'idle':>5}  {'slots':>5}  {'lecture':>7}  {'memory':>9}"]
    for prediction in plan.predictions:
        lines += _schedule_row(prediction, width, chosen=prediction.schedule == plan.schedule)
    return [*lines, *textwrap.wrap(IDLE_WORDS, width)]


IDLE_WORDS = (
    "idle: predicted; slots: counted, if all pieces took equally long; lecture: its formula, half of gpipe's count; "
    "memory: of the fullest device"
)


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
    """Advice on micro-batches, and what the profile and the placement have to say."""
    said = [f"Advice: {plan.advice.sentence}."]
    return said + [f"Note: {note}." for note in (*plan.placement.notes, *plan.profile.notes)]


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _shortened(text: str, room: int, *, ascii_only: bool) -> str:
    if len(text) <= room:
        return text
    dots = "..." if ascii_only else "…"
    front = (room - len(dots)) // 2
    return text[:front] + dots + text[len(text) - (room - front - len(dots)) :]
