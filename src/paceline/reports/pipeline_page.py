"""The page of `paceline plan`: where a model is cut, what a step will take, and how to run it, in one file.

    headline, four figures
    stages                    a table
    a step in time            every schedule on one time axis
    schedules                 a table: the step, its idle shares, memory, or why not
    where the model is cut    layer by layer
    how even that is          |  what each device must hold
    how many micro-batches    |  how to run it
    notes, the recipe

Names of layers and models come from users: every text goes through `escape`, or `plot_text` for figures.
"""

from __future__ import annotations

import json
from html import escape
from string import Template

from plotly.offline import get_plotlyjs

from paceline.quantities import percent_text
from paceline.reports.chart import PAGE_COLOURS, Chart, Scheme
from paceline.reports.page import asset, chart_card, colour_variables, prose, recipe_text, safe_json
from paceline.reports.pipeline_charts import balance_chart, choice_chart, layer_chart, memory_chart
from paceline.reports.pipeline_numbers import duration, size
from paceline.reports.pipeline_tables import schedule_table, stage_table
from paceline.reports.pipeline_timeline import step_chart
from paceline.reports.table import PlainTable
from paceline.traces.pipeline_record import PipelineRecord

COLOURS: dict[Scheme, dict[str, str]] = {
    "light": {**PAGE_COLOURS["light"], "forward": "#0072b2", "backward": "#00886a", "weights": "#d98e00"},
    "dark": {**PAGE_COLOURS["dark"], "forward": "#56a9e4", "backward": "#2cc79b", "weights": "#f0b23e"},
}
KEYS: dict[str, tuple[tuple[str, str], ...]] = {
    "steps": (
        ("forward", "forward"),
        ("backward", "backward, or gradient of inputs"),
        ("weights", "gradient of weights"),
    ),
    "layers": (("forward", "forward"), ("backward", "gradient of inputs"), ("weights", "gradient of weights")),
    "balance": (("used", "this cut"), ("share", "equal numbers of layers")),
    "choices": (("ink-dot", "this plan"), ("backward-dot", "recommended")),
}
"""Chart -> the key above it: the class of a swatch, and what it stands for."""


def pipeline_page(record: PipelineRecord, *, title: str = "paceline plan", plan_file: str = "plan.json") -> str:
    """The page as text; the same record gives the same text.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> "<h1>fc in 1 stage: 3.00\\u00a0s a step, 0\\u00a0% idle</h1>" in pipeline_page(empty_record())
    True
    """
    charts = [step_chart(record), layer_chart(record), balance_chart(record), memory_chart(record)]
    choices = choice_chart(record)
    small = [*charts[2:], *([choices] if choices is not None else [])]
    drawn = {chart.name: {"data": chart.data, "layout": chart.layout} for chart in (*charts[:2], *small)}
    return Template(asset("pipeline.html")).substitute(
        title=escape(title),
        headline=prose(headline(record)),
        said="".join(f"<p>{prose(sentence)}</p>" for sentence in record.said),
        conditions="".join(f"<li>{escape(phrase)}</li>" for phrase in record.conditions),
        tiles=_tiles(record),
        stages=_table_card(stage_table(record), "pieces" if record.chunks > 1 else "stages"),
        steps=_card(charts[0], record),
        schedules=_table_card(schedule_table(record), "schedules"),
        charts="\n".join(
            [_card(charts[1], record), *(_card(chart, record) for chart in small), _running(record, plan_file)]
        ),
        notes=_notes(record),
        recipe=_recipe(record),
        style=colour_variables(COLOURS) + asset("page.css"),
        data=safe_json({"charts": drawn, "colours": COLOURS}),
        plotly=get_plotlyjs(),
        script=asset("page.js"),
    )


def headline(record: PipelineRecord) -> str:
    """What the plan comes to, in a line.

    >>> from paceline.traces.pipeline_record import empty_record
    >>> headline(empty_record())
    'fc in 1 stage: 3.00 s a step, 0 % idle'
    """
    chosen = record.chosen
    return (
        f"{record.model} in {_many(record.stages, 'stage')}: {duration(chosen.step_seconds)} a step, "
        f"{percent_text(chosen.idle)} idle"
    )


def _tiles(record: PipelineRecord) -> str:
    chosen, slowest = record.chosen, record.slowest
    word = "piece" if record.chunks > 1 else "stage"
    limit = min((device.limit_bytes for device in record.devices if device.limit_bytes is not None), default=None)
    parts = [
        (
            "Step",
            duration(chosen.step_seconds),
            f"{_many(record.microbatches, 'micro-batch')} of {_many(record.microbatch, 'sample')}, {chosen.name}",
        ),
        (
            "Idle",
            percent_text(chosen.idle),
            f"{percent_text(chosen.slots)} if all {word}s were equal; the lecture's figure is "
            f"{percent_text(chosen.lecture)}",
        ),
        (
            "Speed-up",
            f"{record.speedup:.2f}\u00d7",
            f"against one device, which would take {duration(record.one_device_seconds)} for the same micro-batches",
        ),
        (
            f"Slowest {word}",
            duration(slowest.seconds),
            f"{word} {slowest.index}, a micro-batch with its transfers"
            + ("; no cut that fits has a faster one" if record.proven else ""),
        ),
        (
            "Fullest device",
            size(chosen.most_bytes),
            f"of {size(limit)} that the smallest device has" if limit is not None else "no limit was given",
        ),
    ]
    return "\n".join(_tile(*part) for part in parts)


def _tile(name: str, figure: str, facts: str) -> str:
    number, _, unit = figure.partition(" ")
    small = f"<small>{escape(unit)}</small>" if unit else ""
    return (
        f'<div class="tile"><div class="tile-name">{escape(name)}</div>'
        f'<div class="tile-number">{escape(number)}{small}</div>'
        f'<div class="tile-facts">{prose(facts)}</div></div>'
    )


def _table_card(table: PlainTable, name: str) -> str:
    return f'<section class="card {name}"><h2>{escape(table.title)}</h2>\n{table.html()}</section>'


def _card(chart: Chart, record: PipelineRecord) -> str:
    """A chart's card, with a key to its colours above the chart."""
    keys = "".join(
        f'<span class="key"><i class="{kind.removesuffix("-dot")} {"dot" if kind.endswith("-dot") else "swatch"}"></i>'
        f"{escape(word)}</span>"
        for kind, word in _keys(chart, record)
    )
    return chart_card(chart, keys)


def _keys(chart: Chart, record: PipelineRecord) -> tuple[tuple[str, str], ...]:
    keys = KEYS.get(chart.name, ())
    if chart.name == "choices" and record.recommended == record.microbatches:
        return (("backward-dot", "this plan, and recommended"),)
    return keys if record.even or chart.name != "balance" else keys[:1]


def _running(record: PipelineRecord, plan_file: str) -> str:
    """How this plan is run: three lines of a script, and how it is started."""
    script = (
        f"plan = paceline.Plan.load({plan_file!r})\n"
        "pipe = paceline.Pipeline(model, plan)\n"
        "loss = pipe.step(inputs, targets, loss_function)"
    )
    start = f"torchrun --nproc-per-node {record.stages} train.py"
    chunks = f"\nchunks = {record.chunks}" if record.chunks > 1 else ""
    section = (
        f'[strategy]\nname = "full"\n\n[pipeline]\nstages = {record.stages}\nmicrobatches = {record.microbatches}\n'
        f'schedule = "{record.schedule}"{chunks}\nplan = {json.dumps(plan_file, ensure_ascii=False)}'
    )
    return (
        '<section class="card" aria-labelledby="title-running"><h2 id="title-running">How to run it</h2>'
        '<p class="caption">In a script of your own, then with as many processes as stages:</p>'
        f"<pre>{escape(script)}</pre><pre>{escape(start)}</pre>"
        '<p class="caption">Or in a recipe, with <code>paceline train</code>; the path is relative to the recipe:</p>'
        f"<pre>{escape(section)}</pre></section>"
    )


def _notes(record: PipelineRecord) -> str:
    if not record.notes:
        return ""
    items = "".join(f"<li>{prose(note[:1].upper() + note[1:])}.</li>" for note in record.notes)
    return f'<section class="card"><h2>Notes</h2><ul class="notes">{items}</ul></section>'


def _recipe(record: PipelineRecord) -> str:
    if not record.source:
        return ""
    return (
        '<section class="card"><h2>Recipe</h2><details><summary>Every setting, also those nobody typed</summary>'
        f"<pre>{escape(recipe_text(record.source))}</pre></details></section>"
    )


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")
