"""The two tables of a plan: its pieces, and every schedule."""

from __future__ import annotations

from paceline.quantities import percent_text
from paceline.reports.pipeline_numbers import duration, size
from paceline.reports.table import PlainTable
from paceline.traces.pipeline_record import PieceRecord, PipelineRecord, ScheduleRecord

NOTHING = "-"


def stage_table(record: PipelineRecord) -> PlainTable:
    """One row for each piece; the slowest is marked.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> stage_table(empty_record()).rows
    [('0', 'fc (1)', '1.00 s', '1.00 s', '1.00 s', '-', '-', '3.00 s', '0 B')]
    """
    several = record.chunks > 1
    heads = ("Gradient of inputs", "of weights", "Sends on", "Transfers", "In all", "Memory")
    first = ("Piece", "Device") if several else ("Stage",)
    return PlainTable(
        title="Pieces" if several else "Stages",
        headings=(*first, "Layers", "Forward", *heads),
        rows=[_piece_row(record, piece, several=several) for piece in record.pieces],
        caption="Times and what is sent are of one micro-batch; memory is for all that wait at once. "
        "In bold: the slowest.",
        marked=frozenset({(record.slowest.index, len(first) + 6)}),
    )


def _piece_row(record: PipelineRecord, piece: PieceRecord, *, several: bool) -> tuple[str, ...]:
    layers = record.layers[piece.first : piece.last]
    names = layers[0].name if len(layers) == 1 else f"{layers[0].name} … {layers[-1].name}"
    transfers = piece.send_seconds + piece.return_seconds
    return (
        str(piece.index),
        *((str(piece.device),) if several else ()),
        f"{names} ({len(layers)})",
        duration(piece.forward_seconds),
        duration(piece.input_seconds),
        duration(piece.weight_seconds),
        size(piece.sent_bytes) if piece.sent_bytes else NOTHING,
        duration(transfers) if transfers else NOTHING,
        duration(piece.seconds),
        size(piece.memory_bytes),
    )


def schedule_table(record: PipelineRecord) -> PlainTable:
    """One row for each schedule; the shortest step is marked.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> schedule_table(empty_record()).rows
    [('1f1b (this plan)', '3.00 s', '0 %', '0 %', '0 %', '0 B', '1')]
    """
    steps = [each.step_seconds for each in record.schedules if not each.why_not]
    best = [not each.why_not and each.step_seconds == min(steps) for each in record.schedules]
    heads = ("Schedule", "Step", "Idle, predicted", "Idle slots", "Idle, lecture", "Fullest device", "Pieces on each")
    refuses = any(each.why_not for each in record.schedules)
    return PlainTable(
        title="Schedules",
        headings=(*heads, "Why not") if refuses else heads,
        rows=[_schedule_row(record, each, why=(each.why_not,) if refuses else ()) for each in record.schedules],
        caption="Each with the best cut for it. Predicted: from what was measured. Slots: counted, if all pieces took "
        "equally long. Lecture: its formula, which is half of gpipe's count. In bold: the shortest step.",
        marked=frozenset((number, 1) for number, is_best in enumerate(best) if is_best),
    )


def _schedule_row(record: PipelineRecord, schedule: ScheduleRecord, *, why: tuple[str, ...]) -> tuple[str, ...]:
    name = f"{schedule.name} (this plan)" if schedule is record.chosen else schedule.name
    if schedule.why_not:
        return (name, *(NOTHING,) * 6, *why)
    shares = (percent_text(share) for share in (schedule.idle, schedule.slots, schedule.lecture))
    return (name, duration(schedule.step_seconds), *shares, size(schedule.most_bytes), str(schedule.chunks), *why)
