"""The page of `paceline plan pipeline`: where a model is cut, what a step will take, and how to run it, in one file.

    headline, four figures
    stages                    a table
    a step in time            every schedule on one time axis
    schedules                 a table: the step, its idle shares, memory, or why not
    where the model is cut    layer by layer
    how even that is          |  what each device must hold
    how many micro-batches    |  how to run it
    notes, the recipe

Names of layers and models come from users: the template escapes every text, and `plot_text` those in figures.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.pipeline.placement import Piece
from paceline.pipeline.plan import Plan, Prediction
from paceline.pipeline.text import balance
from paceline.quantities import UNKNOWN, counted, duration_text, percent_text, size_text
from paceline.reports.chart import PAGE_COLOURS, Chart, Key, Scheme
from paceline.reports.page import Tile, page_html, recipe_text
from paceline.reports.pipeline_charts import balance_chart, choice_chart, layer_chart, memory_chart, step_chart
from paceline.reports.table import PlainTable

COLOURS: dict[Scheme, dict[str, str]] = {
    "light": {**PAGE_COLOURS["light"], "forward": "#0072b2", "backward": "#00886a", "weights": "#d98e00"},
    "dark": {**PAGE_COLOURS["dark"], "forward": "#56a9e4", "backward": "#2cc79b", "weights": "#f0b23e"},
}
KEYS: dict[str, tuple[Key, ...]] = {
    "steps": (
        Key(text="forward", swatch="forward"),
        Key(text="backward, or gradient of inputs", swatch="backward"),
        Key(text="gradient of weights", swatch="weights"),
    ),
    "layers": (
        Key(text="forward", swatch="forward"),
        Key(text="gradient of inputs", swatch="backward"),
        Key(text="gradient of weights", swatch="weights"),
    ),
    "balance": (Key(text="this cut", swatch="used"), Key(text="equal numbers of layers", swatch="share")),
    "choices": (Key(text="this plan", dot="ink"), Key(text="recommended", dot="backward")),
}
"""Chart -> the key above it."""


def pipeline_page(
    plan: Plan,
    *,
    title: str = "paceline plan pipeline",
    plan_file: str = "plan.json",
    conditions: Sequence[str] = (),
    recipe: Mapping[str, Any] | None = None,
) -> str:
    """Return the page as text; the same plan gives the same text.

    `conditions` are what was measured and how, `recipe` is the recipe's document, if there was one.
    """
    charts = [step_chart(plan), layer_chart(plan), balance_chart(plan), memory_chart(plan)]
    choices = choice_chart(plan)
    charts += [choices] if choices is not None else []
    return page_html(
        "pipeline.html",
        title=title,
        headline=headline(plan),
        sentences=[balance(plan)],
        conditions=conditions,
        figures=[replace(chart, keys=_keys(chart, plan)) for chart in charts],
        colours=COLOURS,
        tiles=_tiles(plan),
        stages=stage_table(plan),
        stages_kind="pieces" if plan.chunks > 1 else "stages",
        schedules=schedule_table(plan),
        running=_running(plan, plan_file),
        notes=[f"{note[:1].upper()}{note[1:]}." for note in plan.notes],
        recipe=recipe_text(recipe) if recipe else "",
    )


def headline(plan: Plan) -> str:
    """Return what the plan comes to, in a line."""
    step, idle = duration_text(plan.timeline.step_seconds), percent_text(plan.timeline.idle)
    return f"{plan.model} in {counted(plan.stages, 'stage')}: {step} a step, {idle} idle"


def _tiles(plan: Plan) -> list[Tile]:
    chosen = next(each for each in plan.predictions if each.schedule == plan.schedule)
    slowest, noun = plan.placement.slowest, "piece" if plan.chunks > 1 else "stage"
    limits = [device.memory_bytes for device in plan.placement.devices if device.memory_bytes is not None]
    parts = [
        (
            "Step",
            duration_text(chosen.step_seconds),
            f"{counted(plan.microbatches, 'micro-batch')} of {counted(plan.batch.microbatch, 'sample')}, "
            f"{plan.schedule}",
        ),
        (
            "Idle",
            percent_text(chosen.idle),
            f"{percent_text(chosen.slots)} if all {noun}s were equal; the formula (1/2)(1 - m/(k-1+m)) gives "
            f"{percent_text(chosen.lecture)}",
        ),
        (
            "Speed-up",
            f"{plan.speedup:.2f}\u00d7",
            f"against one device, which would take {duration_text(plan.one_device_seconds)} for the same micro-batches",
        ),
        (
            f"Slowest {noun}",
            duration_text(slowest.seconds),
            f"{noun} {slowest.index}, a micro-batch with its transfers"
            + ("; no cut that fits has a faster one" if plan.placement.proven else ""),
        ),
        (
            "Fullest device",
            size_text(chosen.most_bytes),
            f"of {size_text(min(limits))} that the smallest device has" if limits else "no limit was given",
        ),
    ]
    figures = [(name, *figure.partition(" "), facts) for name, figure, facts in parts]
    return [Tile(name=name, number=number, unit=unit, facts=(facts,)) for name, number, _, unit, facts in figures]


def _keys(chart: Chart, plan: Plan) -> tuple[Key, ...]:
    """Return the key to a chart's colours."""
    keys = KEYS.get(chart.name, ())
    if chart.name == "choices" and plan.advice.recommended.microbatches == plan.microbatches:
        return (Key(text="this plan, and recommended", dot="backward"),)
    return keys if plan.even or chart.name != "balance" else keys[:1]


def _running(plan: Plan, plan_file: str) -> dict[str, str]:
    """Return how this plan is run: three lines of a script, and how it is started."""
    script = (
        f"plan = paceline.Plan.load({plan_file!r})\n"
        "pipe = paceline.Pipeline(model, plan)\n"
        "loss = pipe.step(inputs, targets, loss_function)"
    )
    start = f"torchrun --nproc-per-node {plan.stages} train.py"
    chunks = f"\nchunks = {plan.chunks}" if plan.chunks > 1 else ""
    section = (
        f'[strategy]\nname = "full"\n\n[pipeline]\nstages = {plan.stages}\nmicrobatches = {plan.microbatches}\n'
        f'schedule = "{plan.schedule}"{chunks}\nplan = {json.dumps(plan_file, ensure_ascii=False)}'
    )
    return {"script": script, "start": start, "recipe": section}


# -- tables ------------------------------------------------------------------------------------------------------------


def stage_table(plan: Plan) -> PlainTable:
    """Return a row for each piece; the slowest is marked."""
    several = plan.chunks > 1
    heads = ("Gradient of inputs", "of weights", "Sends on", "Transfers", "In all", "Memory")
    first = ("Piece", "Device") if several else ("Stage",)
    return PlainTable(
        title="Pieces" if several else "Stages",
        headings=(*first, "Layers", "Forward", *heads),
        rows=[_piece_row(plan, piece, several=several) for piece in plan.placement.pieces],
        caption="Times and what is sent are of one micro-batch; memory is for all that wait at once. "
        "In bold: the slowest.",
        marked=frozenset({(plan.placement.slowest.index, len(first) + 6)}),
    )


def _piece_row(plan: Plan, piece: Piece, *, several: bool) -> tuple[str, ...]:
    layers = plan.profile.layers[piece.first : piece.last]
    names = layers[0].name if len(layers) == 1 else f"{layers[0].name} … {layers[-1].name}"
    return (
        str(piece.index),
        *((str(piece.device),) if several else ()),
        f"{names} ({len(layers)})",
        duration_text(piece.forward_seconds),
        duration_text(piece.input_seconds),
        duration_text(piece.weight_seconds),
        size_text(piece.sent_bytes) if piece.sent_bytes else UNKNOWN,
        duration_text(piece.transfer_seconds) if piece.transfer_seconds else UNKNOWN,
        duration_text(piece.seconds),
        size_text(piece.memory_bytes),
    )


def schedule_table(plan: Plan) -> PlainTable:
    """Return a row for each schedule; the shortest step is marked."""
    best = min(each.step_seconds for each in plan.predictions if not each.why_not)
    heads = ("Schedule", "Step", "Idle, predicted", "Idle slots", "Idle, formula", "Fullest device", "Pieces on each")
    refuses = any(each.why_not for each in plan.predictions)
    return PlainTable(
        title="Schedules",
        headings=(*heads, "Why not") if refuses else heads,
        rows=[_schedule_row(plan, each, why=(each.why_not,) if refuses else ()) for each in plan.predictions],
        caption="Each with the best cut for it. Predicted: from what was measured. Slots: counted, if all pieces took "
        "equally long. Formula: (1/2)(1 - m/(k-1+m)) for k stages and m micro-batches, which is half of gpipe's count. "
        "In bold: the shortest step.",
        marked=frozenset(
            (number, 1)
            for number, each in enumerate(plan.predictions)
            if not each.why_not and each.step_seconds == best
        ),
    )


def _schedule_row(plan: Plan, each: Prediction, *, why: tuple[str, ...]) -> tuple[str, ...]:
    name = f"{each.schedule} (this plan)" if each.schedule == plan.schedule else each.schedule
    other = plan.alternatives[each.schedule]
    if not isinstance(other, Plan):
        return (name, *(UNKNOWN,) * 6, *why)
    shares = (percent_text(share) for share in (each.idle, each.slots, each.lecture))
    return (name, duration_text(each.step_seconds), *shares, size_text(each.most_bytes), str(other.chunks), *why)
