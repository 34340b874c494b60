"""What all six kinds of page share: one small file, nothing from outside, and text stays text."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from paceline.diagnosis import diagnose_timings, timings_of
from paceline.reports import report_html
from paceline.reports.codec_page import CodecPoint, codec_page
from paceline.reports.diagnosis_page import diagnosis_page
from paceline.reports.page import _templates
from paceline.reports.pipeline_page import pipeline_page
from paceline.reports.pruning_page import MOST_IMAGES, pruning_page, shown_samples
from paceline.reports.ratio_page import MOST_BARS, RatioBar, ratio_page
from paceline.reports.table import PlainTable
from paceline.traces.recorded_run import read_run
from tests.diagnosis.recordings import Delay, watched
from tests.reports.pipeline_plans import made_plan
from tests.reports.race_traces import race
from tests.reports.test_pruning_page import record_of
from tests.reports.test_report_page import HOSTILE, figures, own_part

MOST_BYTES = 1_500_000


def codecs(name: str = "qsgd", *, large: bool = True) -> str:
    number = 60 if large else 6
    points = [CodecPoint(label=f"{name} {n}", family=name, bits=1.0 + n, error=0.01) for n in range(number)]
    table = PlainTable(title=name, headings=[name], rows=[[name]] * 60, caption=name)
    return codec_page(points, [table, table], headline=name, conditions=[name])


def pipeline(name: str = "net", *, large: bool = True) -> str:
    size = {"stages": 12, "microbatches": 160} if large else {"stages": 3, "microbatches": 4}
    plan = made_plan([f"{name}.{number}" for number in range(12)], model=name, **size)
    return pipeline_page(plan, title=name, conditions=[name], recipe={name: name})


def pruning(name: str = "cat", *, large: bool = True) -> str:
    record = replace(record_of(3000, 10, wrong=range(0, 300, 7)), classes=(name,) * 10)
    noise = np.random.default_rng(0)
    most = MOST_IMAGES if large else 2
    images = {number: noise.normal(size=(3, 64, 64)) for number in shown_samples(record, most=most).numbers}
    return pruning_page(record, images, title=name, most=most, notes=[name])


def ratios(name: str = "fc", *, large: bool = True) -> str:
    course = tuple((step, 1.0 + step) for step in range(300 if large else 3))
    numbers = range(MOST_BARS if large else 5)
    bars = [RatioBar(name=f"{name}{n}", kind="weight", ratio=1.0 + n, course=course) for n in numbers]
    table = PlainTable(title=name, headings=[name], rows=[[name]] * MOST_BARS, caption=name)
    return ratio_page(bars, table, title=name, headline=name, sentences=[name], conditions=[name])


def run(name: str = "paceline race", *, large: bool = True) -> str:
    return report_html(race(seeds=2, workers=16, rounds=200) if large else race(rounds=3), title=name)


def diagnosis(name: str = "node-7", *, large: bool = True) -> str:
    ranks, steps = (32, 1_500) if large else (4, 60)
    hosts = [name if rank > 1 else "other" for rank in range(ranks)]
    slow = [Delay(rank=rank) for rank in range(2, ranks)] if not large else [Delay(rank=3, probability=0.3)]
    with tempfile.TemporaryDirectory() as folder:
        recorded = read_run(watched(Path(folder), ranks, steps, seed=7, hosts=hosts, delays=slow))
    timings = timings_of(recorded)
    return diagnosis_page(diagnose_timings(recorded, timings), timings)


PAGES: dict[str, Callable[..., str]] = {
    "run": run,
    "codecs": codecs,
    "pipeline": pipeline,
    "pruning": pruning,
    "ratios": ratios,
    "diagnosis": diagnosis,
}
LARGE = {name: cache(make) for name, make in PAGES.items()}
# What looks at a large page is on one tester: each tester would make the page again, and that of diagnosis takes long.
PAGE = {name: pytest.param(name, marks=pytest.mark.xdist_group(f"page of {name}")) for name in PAGES}


@pytest.mark.parametrize("name", PAGE.values())
def test_a_large_page_is_small(name: str) -> None:
    assert 20_000 < len(LARGE[name]().encode()) < MOST_BYTES


@pytest.mark.parametrize("name", PAGE.values())
def test_a_page_names_nothing_outside_itself(name: str) -> None:
    own = re.sub("data:image/png;base64,[A-Za-z0-9+/=]*", "", own_part(LARGE[name]()))
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(|<link|<iframe|<object|<embed|fetch\(|XMLHttp", own, re.I)
    assert "default-src 'none'" in own
    assert "connect-src" not in own


@pytest.mark.parametrize("name", PAGES)
def test_a_name_that_is_html_or_a_template_stays_text(name: str) -> None:
    page = own_part(PAGES[name](HOSTILE, large=False))
    assert "<script>window.hacked" not in page
    assert "<img src=x" not in page
    assert "{{ 7 * 7 }}{% raw %}" in page
    assert page.count("<script") == page.count("</script>") == (0 if name == "pruning" else 3)


def test_templates_escape_by_themselves_and_refuse_what_is_not_there() -> None:
    assert _templates(None).from_string("{{ name }}").render(name="<b>") == "&lt;b&gt;"
    with pytest.raises(Exception, match="'name' is undefined"):
        _templates(None).from_string("{{ name }}").render()


@pytest.mark.parametrize("name", [page for name, page in PAGE.items() if name != "pruning"])
def test_every_chart_is_of_a_kind_that_the_bundle_draws(name: str) -> None:
    kinds = {item["type"] for chart in figures(LARGE[name]()).values() for item in chart["data"]}
    assert kinds
    assert kinds <= {"bar", "scatter"}
