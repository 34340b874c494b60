"""The page of `paceline plan pipeline`: it holds the plan and its figures, stays small, and nothing breaks it."""

from __future__ import annotations

import dataclasses
import html
import json
import re

import pytest

from paceline.analysis.pipeline_plan import plan_document
from paceline.pipeline.devices import Device
from paceline.pipeline.timing import Span, Timeline
from paceline.quantities import duration_text, size_text
from paceline.reports.pipeline_charts import (
    MOST_LANES,
    MOST_SPANS,
    balance_chart,
    choice_chart,
    layer_chart,
    memory_chart,
    step_chart,
)
from paceline.reports.pipeline_page import pipeline_page
from tests.reports.pipeline_plans import COSTS, made_plan
from tests.reports.test_report_page import figures

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{ title }}"


def rows_of(page: str, card: str) -> list[list[str]]:
    """The cells of a card's table."""
    (section,) = re.findall(rf'<section class="card {card}">(.*?)</section>', page, re.DOTALL)
    body = section.split("<tbody>")[1]
    return [
        [html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]
        for row in re.findall("<tr>(.*?)</tr>", body)
    ]


def drawn(page: str) -> dict:
    return figures(page)


def scaled(chart, spans) -> set[tuple]:
    """Spans as a panel's bars show them, in the chart's unit."""
    unit = {"ms": 1e-3, "s": 1.0, "us": 1e-6}[_unit(chart)]
    return {(span.device, span.microbatch, _near(span.begin / unit), _near(span.seconds / unit)) for span in spans}


def _unit(chart) -> str:
    titles = [part["title"]["text"] for name, part in chart.layout.items() if name.startswith("xaxis")]
    return next(title.split()[0] for title in titles if title)


def _near(value: float) -> str:
    return f"{value:.4g}"


def test_the_page_holds_every_stage_and_schedule_with_the_plans_figures() -> None:
    plan = made_plan(memory_bytes=180_000)
    page = pipeline_page(plan, conditions=["32 <samples>"])
    stages = rows_of(page, "stages")
    assert len(stages) == plan.stages
    for row, piece in zip(stages, plan.placement.pieces, strict=True):
        layers = plan.profile.layers[piece.first : piece.last]
        assert row[0] == str(piece.index)
        assert layers[0].name in row[1]
        assert layers[-1].name in row[1]
        assert row[2] == duration_text(piece.forward_seconds)
        assert row[7] == duration_text(piece.seconds)
        assert row[8] == size_text(piece.memory_bytes)
    assert any(prediction.why_not for prediction in plan.predictions)  # interleaved holds too much
    assert not all(prediction.why_not for prediction in plan.predictions)
    for row, prediction in zip(rows_of(page, "schedules"), plan.predictions, strict=True):
        assert row[0].split()[0] == prediction.schedule
        assert ("this plan" in row[0]) == (prediction.schedule == plan.schedule)
        if prediction.why_not:
            assert row[-1] == prediction.why_not
        else:
            shares = (prediction.idle, prediction.slots, prediction.lecture)
            assert row[1] == duration_text(prediction.step_seconds)
            assert row[2:5] == [f"{100 * share:.0f} %" for share in shares]
            assert row[5] == size_text(prediction.most_bytes)
    said = page.replace("\u00a0", " ")
    assert f"<h1>net in 3 stages: {duration_text(plan.timeline.step_seconds)} a step" in said
    assert "<li>32 &lt;samples&gt;</li>" in page
    assert plan.advice.sentence[1:] in said
    assert "torchrun --nproc-per-node 3" in page


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1)])
def test_every_span_of_every_schedule_is_drawn_once_and_where_it_is(schedule, chunks) -> None:
    plan = made_plan(schedule=schedule, chunks=chunks, microbatches=6)
    chart = step_chart(plan)
    possible = [each.schedule for each in plan.predictions if not each.why_not]
    assert len(possible) == 4
    for panel, name in enumerate([schedule, *(each for each in possible if each != schedule)]):
        bars = [item for item in chart.data if item["xaxis"] == ("x" if not panel else f"x{panel + 1}")]
        found = [
            (device, int(text), _near(begin), _near(length))
            for item in bars
            for device, text, begin, length in zip(item["y"], item["text"], item["base"], item["x"], strict=True)
        ]
        spans = plan.revised(schedule=name).timeline.spans if name != schedule else plan.timeline.spans
        assert len(found) == len(spans)
        assert set(found) == scaled(chart, spans)


def test_cuts_layers_memory_and_choices_are_drawn_where_the_plan_has_them() -> None:
    plan = made_plan(memory_bytes=400_000, speeds=(1.0, 2.0, 0.5))
    chart = layer_chart(plan)
    heights = [sum(item["y"][place] for item in chart.data) for place in range(len(COSTS))]
    assert heights == pytest.approx([1e3 * layer.seconds for layer in plan.profile.layers], rel=1e-4)
    lines = [shape for shape in chart.layout["shapes"] if shape["type"] == "line"]
    assert [line["x0"] + 0.5 for line in lines if line["line"]["dash"] == "solid"] == list(plan.cuts)
    assert [line["x0"] + 0.5 for line in lines if line["line"]["dash"] == "dot"] == list(plan.even.cuts)
    mine, even = balance_chart(plan).data
    assert mine["y"] == pytest.approx([1e3 * piece.seconds for piece in plan.placement.pieces], rel=1e-4)
    assert even["y"] == pytest.approx([1e3 * piece.seconds for piece in plan.even.pieces], rel=1e-4)
    memory = memory_chart(plan)
    assert memory.data[0]["y"] == pytest.approx([needed / 1e3 for needed in plan.placement.device_bytes], rel=1e-4)
    assert {shape["y0"] for shape in memory.layout["shapes"]} == {400.0}
    (line,) = choice_chart(plan).data
    assert line["y"] == pytest.approx([1e3 * choice.step_seconds for choice in plan.advice.choices], rel=1e-4)


def test_nothing_from_outside_is_read_as_html() -> None:
    plan = made_plan([HOSTILE] * len(COSTS), model=HOSTILE, notes=(HOSTILE,))
    named = dataclasses.replace(plan.placement, devices=(Device(name=HOSTILE),) * 3)
    recipe = {"model": {"name": HOSTILE}}
    plan = dataclasses.replace(plan, placement=named)
    page = pipeline_page(plan, title=HOSTILE, plan_file=HOSTILE, conditions=[HOSTILE], recipe=recipe)
    ours = pipeline_page(made_plan())
    assert page.count("<script") == ours.count("<script")
    assert "<img" not in page
    assert "default-src 'none'" in page
    assert page.count("&lt;/script&gt;&lt;script&gt;") > 10
    assert "{{ title }}" in page  # not filled in a second time
    names = [text for item in drawn(page)["layers"]["data"] for text in item["hovertext"]]
    assert all("&lt;img src=x" in text and "<img" not in text for text in names)
    assert all("<" not in text for text in drawn(page)["layers"]["layout"]["xaxis"]["ticktext"])


def test_a_large_pipeline_is_drawn_in_part_and_says_so() -> None:
    plan, stages = made_plan(), 2 * MOST_LANES
    rows = tuple(
        tuple(Span(device, device, "F", number, 0.001 * number, 0.001 * (number + 1)) for number in range(1000))
        for device in range(stages)
    )
    large = dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, devices=(Device(),) * stages))
    vars(large).update(timeline=Timeline(rows=rows), alternatives={plan.schedule: large})
    chart = step_chart(large)
    shown = [len(item["x"]) for item in chart.data]
    assert MOST_SPANS - MOST_LANES <= sum(shown) <= MOST_SPANS
    assert {device for item in chart.data for device in item["y"]} == set(range(MOST_LANES))
    assert f"the first {MOST_LANES} of {stages} devices" in chart.caption
    assert "the first 500 ms" in chart.caption


def test_without_equal_parts_or_other_choices_the_page_does_without_them() -> None:
    plan = made_plan()
    vars(plan).update(even=None, advice=dataclasses.replace(plan.advice, choices=plan.advice.choices[:1]))
    page = pipeline_page(plan)
    assert "chart-choices" not in page
    assert "<h2>Notes</h2>" not in page
    assert "<h2>Recipe</h2>" not in page
    assert "cannot be cut into equal numbers of layers" in page
    assert all(
        shape["line"]["dash"] != "dot" for shape in drawn(page)["layers"]["layout"]["shapes"] if "dash" in shape["line"]
    )


def test_the_document_is_the_plan_in_plain_values() -> None:
    plan = made_plan(schedule="interleaved", chunks=2, microbatches=6)
    document = json.loads(json.dumps(plan_document(plan), allow_nan=False))
    assert document["cuts"] == list(plan.cuts)
    assert document["pieces"] == [dataclasses.asdict(piece) for piece in plan.placement.pieces]
    for found, prediction in zip(document["schedules"], plan.predictions, strict=True):
        assert found["name"] == prediction.schedule
        assert {key: found[key] for key in dataclasses.asdict(prediction) if key != "schedule"} == {
            key: value for key, value in dataclasses.asdict(prediction).items() if key != "schedule"
        }
    whole = plan.microbatches * sum(layer.seconds for layer in plan.profile.layers)
    assert document["speedup"] == pytest.approx(whole / plan.timeline.step_seconds)
