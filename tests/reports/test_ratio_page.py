"""The page of `paceline inspect rates`: every layer on it, nothing in it that a name could break."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

import paceline.reports
from paceline.reports.ratio_page import MOST_BARS, RatioBar, course_chart, ratio_chart, ratio_page
from paceline.reports.table import PlainTable
from tests.reports.test_report_page import figures

HOSTILE = "</script><img src=x onerror=alert(1)>.%{x}{{ title }}.weight"
BARS = [
    RatioBar(name="first.weight", kind="weight", ratio=8.0, course=((0, 8.0), (5, 2.0))),
    RatioBar(name="first.bias", kind="bias", ratio=0.0, remark="weights are 0", course=((0, 0.0), (5, 0.1))),
    RatioBar(name="norm.weight", kind="norm", ratio=40.0, course=((0, 40.0), (5, 30.0))),
    RatioBar(name="last.bias", kind="bias", ratio=3.0, course=((0, 3.0), (5, math.inf))),
    RatioBar(name=HOSTILE, kind="weight", ratio=0.5, limiting=True, course=((0, 0.5), (5, None))),
]


def page_of(bars, **more) -> str:
    table = PlainTable(title="Layers", headings=("layer",), rows=[(bar.name,) for bar in bars], caption="")
    return ratio_page(bars, table, title=HOSTILE, headline=HOSTILE, sentences=[HOSTILE], conditions=[HOSTILE], **more)


def charts_of(page: str) -> dict:
    return figures(page)


def test_every_layer_is_in_the_chart_and_in_the_table() -> None:
    page = page_of(BARS, rate=0.05)
    assert page.count('<th scope="row">') == len(BARS)
    figure = charts_of(page)["ratios"]
    assert len(figure["layout"]["yaxis"]["ticktext"]) == len(BARS)
    bars = [item for item in figure["data"] if item["type"] == "bar"]
    drawn = {number: x for bar in bars for number, x in zip(bar["y"], bar["x"], strict=True)}
    assert drawn == {0: 8.0, 2: 40.0, 3: 3.0, 4: 0.5}
    remarks = [note["text"] for note in figure["layout"]["annotations"]]
    assert remarks == ["weights are 0", "rate 0.05"]
    assert figure["layout"]["shapes"][0]["x0"] == 0.05


def test_colour_and_hatching_tell_weights_biases_and_the_limiting_one_apart() -> None:
    bars = {item["name"]: item["marker"] for item in charts_of(page_of(BARS))["ratios"]["data"] if "name" in item}
    looks = [
        (bars[group]["color"], bars[group].get("pattern", {}).get("shape"))
        for group in ("weights", "biases", "normalisation", "limits the rate")
    ]
    assert len({colour for colour, _ in looks}) == 4
    assert [hatch is None for _, hatch in looks] == [True, False, False, True]


def test_dots_are_where_the_last_moment_can_be_drawn() -> None:
    figure = ratio_chart(BARS)
    (dots,) = [item for item in figure.data if item["type"] == "scatter"]
    assert (dots["x"], dots["y"]) == ([2.0, 30.0], [0, 2])
    assert "after 5 steps" in figure.caption


def test_a_line_per_layer_of_weights_and_gaps_where_there_is_nothing_to_draw() -> None:
    course = course_chart(BARS)
    assert [line["y"] for line in course.data] == [[8.0, 2.0], [0.5, None]]  # the limiting one on top of the others
    assert course_chart([RatioBar(name="w", kind="weight", ratio=1.0)]) is None


def test_a_name_cannot_break_the_page() -> None:
    page = page_of(BARS)
    assert "<img" not in page
    assert page.count("</script>") == 3
    assert "default-src 'none'" in page
    assert not any("<img" in str(value) for value in charts_of(page)["ratios"]["layout"]["yaxis"]["ticktext"])


def test_of_very_many_layers_only_weights_are_drawn_and_the_table_has_all() -> None:
    bars = [
        RatioBar(name=f"{number}.{kind}", kind=kind, ratio=1.0 + number, limiting=(number, kind) == (0, "bias"))
        for number in range(MOST_BARS)
        for kind in ("weight", "bias")
    ]
    page = page_of(bars)
    labels = charts_of(page)["ratios"]["layout"]["yaxis"]["ticktext"]
    assert labels == ["0.weight", "0.bias", *(f"{number}.weight" for number in range(1, MOST_BARS))]
    assert f"{MOST_BARS - 1} biases and scales of normalisation are not drawn" in page
    assert page.count('<th scope="row">') == len(bars)


@pytest.mark.parametrize("ratio", [None, 0.0, math.inf])
def test_a_page_with_nothing_to_draw_is_still_a_page(ratio) -> None:
    page = page_of([RatioBar(name="w", kind="weight", ratio=ratio, remark="frozen")])
    assert charts_of(page)["ratios"]["layout"]["annotations"][0]["text"] == "frozen"


def test_no_two_pages_have_a_helper_each_for_the_same() -> None:
    bodies: dict[str, list[str]] = {}
    for path in Path(paceline.reports.__file__).parent.glob("*page.py"):
        for function in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(function, ast.FunctionDef):
                code = [part for part in function.body if not isinstance(getattr(part, "value", None), ast.Constant)]
                bodies.setdefault(ast.unparse(code), []).append(f"{path.name}: {function.name}")
    assert len(bodies) > 8
    assert [named for named in bodies.values() if len(named) > 1] == []
