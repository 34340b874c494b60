"""The page: safe, self-contained, the same every time, and there for every kind of trace."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.reports import report_html, write_report
from paceline.reports.results import group_traces, results
from paceline.reports.sentences import further_sentences, headline
from paceline.reports.timeline import segments
from paceline.traces import Evaluation, Trace, Work
from tests.reports.race_traces import asynchronous, race, synchronous

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=hacked()>&\"'{{ 7 * 7 }}{% raw %}"


def own_part(page: str) -> str:
    """The page without what is packed: plotly's own script is not ours to judge; `figures` are the data."""
    return re.sub(r'(<script type="text/plain" id="\w+(?:-\w+)?">)[^<]*', r"\1", page)


def unpacked(page: str, name: str) -> str:
    """What the page's script unpacks."""
    found = re.search(rf'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    assert found
    return gzip.decompress(base64.b64decode(found.group(1))).decode()


def figures(page: str) -> dict[str, Any]:
    charts: dict[str, Any] = json.loads(unpacked(page, "report-data"))["charts"]
    return charts


def diverged() -> Trace:
    trace = synchronous("fastest-k", rounds=20)
    blown = Evaluation(round=15, seconds=2.0, loss=float("inf"), accuracy=float("nan"))
    return replace(trace, diverged=True, evaluations=(*trace.evaluations[:2], blown))


def bare(strategy: str = "full") -> Trace:
    return Trace(strategy=strategy, seed=0, workers=4, recipe={}, rounds_done=5, seconds=2.0, used=20)


def timing_only() -> list[Trace]:
    return [replace(trace, evaluations=()) for trace in race(rounds=10)]


EDGES = {
    "one trace": [synchronous("lgc", rounds=10)],
    "diverged": [synchronous("full", rounds=20), diverged()],
    "only diverged": [diverged()],
    "no evaluations": timing_only(),
    "no works": [replace(trace, works=()) for trace in race(rounds=10)],
    "nothing but counts": [bare("full"), bare("lgc")],
    "one worker": race(workers=1, rounds=10),
    "1000 workers": race(workers=1000, rounds=4),
    "only async": [asynchronous(rounds=10)],
    "one round": race(rounds=1),
    "work that never arrived": [
        replace(bare(), works=(Work(worker=0, version=0, started_seconds=0, finished_seconds=1, arrived_seconds=None),))
    ],
}


@pytest.mark.parametrize("traces", EDGES.values(), ids=EDGES.keys())
def test_every_kind_of_trace_has_a_page(traces: list[Trace]) -> None:
    page = report_html(traces)
    assert page.startswith("<!doctype html>")
    for text in (own_part(page), unpacked(page, "report-data") if "report-data" in page else ""):
        assert "NaN" not in text
        assert "Infinity" not in text
    for name in figures(page) if "report-data" in page else ():
        assert f'id="chart-{name}"' in page


def test_a_full_race_has_all_charts() -> None:
    assert list(figures(report_html(race(rounds=10)))) == [
        "loss-time",
        "loss-rounds",
        "accuracy-time",
        "time-split",
        "timeline",
        "arrivals",
    ]


def test_timing_only_has_no_curves_but_a_timeline() -> None:
    assert list(figures(report_html(timing_only()))) == ["time-split", "timeline", "arrivals"]


def test_hostile_names_recipes_and_reasons_stay_text() -> None:
    trace = synchronous("full", rounds=6)
    works = tuple(replace(work, reason=HOSTILE) for work in trace.works)
    recipe = {HOSTILE: HOSTILE, "strategy": {"name": HOSTILE, HOSTILE: [HOSTILE]}}
    whole = report_html([replace(trace, strategy=HOSTILE, recipe=recipe, works=works)], title=HOSTILE)
    page = own_part(whole)
    assert "<script>window.hacked" not in page
    assert "<img" not in page
    assert page.count("<script") == 3
    assert page.count("</script>") == 3
    for figure in figures(whole).values():
        assert "<img" not in json.dumps(figure)


def test_the_page_asks_the_network_for_nothing() -> None:
    page = report_html(race(rounds=6))
    own = own_part(page)
    assert not re.search(r"""(src|href|action|data|poster|srcset)\s*=\s*["']?\s*(https?:)?//""", own, re.I)
    assert not re.search(r"@import|url\(|<link|<iframe|<object|<embed|fetch\(|XMLHttpRequest", own, re.I)
    assert "default-src 'none'" in own
    assert re.search(r"script-src( 'sha256-[^']+'){2};", own)  # page.js, and the library that it unpacks
    # What npm has as plotly.js-basic-dist-min 4.1.1, unchanged.
    library = unpacked(page, "plotly")
    assert "* plotly.js (basic - minified) v4.1.1" in library
    assert hashlib.sha256(library.encode()).hexdigest().startswith("99784e3abfb07b14")


def test_the_same_traces_give_the_same_bytes(tmp_path: Path) -> None:
    first = write_report(race(seeds=2, rounds=6), tmp_path / "a.html")
    second = write_report(race(seeds=2, rounds=6), tmp_path / "b.html")
    assert first.read_bytes() == second.read_bytes()


def test_the_page_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    write_report([bare()], path)
    assert write_report([bare("lgc")], str(path)) == path
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    assert "lgc finished" in path.read_text(encoding="utf-8")


def test_conditions_are_on_the_page() -> None:
    page = report_html(race(rounds=6, late_work="complete"))
    assert "<li>late work complete</li>" in page
    assert "<li>virtual seconds</li>" in page


def test_panels_share_one_time_axis_and_full_shows_five_rounds() -> None:
    layout = figures(report_html(race(rounds=20)))["timeline"]["layout"]
    axes = [layout[name] for name in ("xaxis", "xaxis2", "xaxis3", "xaxis4")]
    assert len({tuple(axis["range"]) for axis in axes}) == 1
    assert [axis.get("matches") for axis in axes] == [None, "x", "x", "x"]
    titles = [note["text"] for note in layout["annotations"]]
    assert titles[0].startswith("<b>full</b>   5 rounds in")
    rounds_of_lgc = int(re.findall(r"(\d+) rounds", titles[2])[0])
    assert rounds_of_lgc > 5


def test_a_short_run_shows_its_warm_up_and_no_panel_is_empty() -> None:
    """Four rounds, three of them warm-up: the asynchronous run was once over before its window began."""
    layout = figures(report_html(race(workers=20, rounds=4)))["timeline"]["layout"]
    titles = [note["text"] for note in layout["annotations"]]
    assert titles[0].startswith("<b>full</b>   4 rounds in")
    assert titles[2].endswith("then done")
    assert titles[3].startswith("<b>async</b>   80 steps (4.0 rounds)")


def test_round_lines_are_inside_the_arrivals_chart() -> None:
    """With 1000 workers a round of full is longer than nearly every arrival."""
    figure = figures(report_html(EDGES["1000 workers"]))["arrivals"]
    lines = [item for item in figure["data"] if "legendgroup" in item]
    assert len(lines) == 3
    assert all(line["x"][0] < figure["layout"]["xaxis"]["range"][1] for line in lines)


def test_a_slow_worker_stands_out_where_workers_average() -> None:
    """The sum of all arrives at all at one time: what tells workers apart is when each has its part ready."""
    seconds = (1.0, 1.2, 3.0)
    works = tuple(
        Work(
            worker=worker,
            version=version,
            started_seconds=4.0 * version,
            finished_seconds=4.0 * version + own,
            arrived_seconds=4.0 * version + 4.0,
            sent_seconds=4.0 * version + 3.0,
        )
        for version in range(10)
        for worker, own in enumerate(seconds)
    )
    page = report_html([replace(bare("ssgd"), workers=3, averaged=True, works=works)])
    marks = [item for item in figures(page)["arrivals"]["data"] if item.get("mode") == "markers"]
    assert [mark["x"][0] for mark in marks] == list(seconds)
    assert "before its part of an average can leave" in page


def test_the_timeline_begins_after_the_warm_up() -> None:
    data = figures(report_html(race(rounds=20)))["timeline"]["data"]
    numbers = next(item for item in data if item.get("mode") == "text")
    assert numbers["text"][0] == "3"


def test_1000_workers_are_cut_to_16_lanes_and_the_page_says_so() -> None:
    page = report_html(EDGES["1000 workers"])
    assert "the first 16 of 1,000 workers" in page
    bars = [item for item in figures(page)["timeline"]["data"] if item["type"] == "bar"]
    assert max(worker for item in bars for worker in item["y"]) == 15
    assert len(own_part(page)) < 500_000


def test_bars_of_a_lane_cover_the_time_once_but_for_work_beside() -> None:
    """A conservation law: computing, flight and waiting add up to the time that passed."""
    for trace in (synchronous("full", rounds=9), synchronous("lgc", rounds=9)):
        for worker in range(trace.workers):
            bars = [bar for bar in segments(trace, worker) if not bar.beside]
            covered = sum(bar.end_seconds - bar.start_seconds for bar in bars)
            assert covered == pytest.approx(max(bar.end_seconds for bar in bars))


def test_whole_late_work_runs_beside_the_next_round() -> None:
    trace = synchronous("lgc", rounds=9, late_work="complete")
    beside = [bar for worker in range(10) for bar in segments(trace, worker) if bar.beside]
    assert beside
    assert {bar.activity for bar in beside} == {"late", "flight"}


def test_long_runs_are_thinned() -> None:
    trace = synchronous("full", rounds=5)
    points = tuple(Evaluation(round=n, seconds=n / 10, loss=1 / (n + 1), accuracy=0.5) for n in range(9000))
    line = figures(report_html([replace(trace, evaluations=points)]))["loss-time"]["data"][0]
    assert len(line["x"]) == 2000
    assert line["x"][-1] == 899.9


def test_seeds_are_faint_lines_and_one_mean() -> None:
    data = figures(report_html(race(seeds=3, rounds=10)))["loss-rounds"]["data"]
    full = [line for line in data if line["legendgroup"] == "s0"]
    assert [line["line"]["width"] for line in full] == [1, 1, 1, 2.4]
    assert full[3]["y"][0] == pytest.approx(sum(line["y"][0] for line in full[:3]) / 3, rel=1e-4)


TIMES = st.none() | st.floats(0.01, 100)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(st.tuples(TIMES, st.floats(0.01, 100), st.floats(0.001, 9)), min_size=2, max_size=5),
    st.booleans(),
)
def test_the_headline_names_who_was_first_at_the_target(
    runs: list[tuple[float | None, float, float]], with_a_baseline: bool
) -> None:
    """A law: the winner is the first at the target of those that nearly keep the baseline's loss, or else of all."""
    names = ["full" if with_a_baseline else "diloco", "lgc", "fastest-k", "async", "hpsgd"]
    traces = [
        replace(
            bare(name),
            seconds=seconds + (at or 0.0),
            recipe={"target_loss": 0.5},
            evaluations=(
                *([Evaluation(round=1, seconds=at, loss=0.5, accuracy=0.5)] if at is not None else []),
                Evaluation(round=5, seconds=seconds + (at or 0.0), loss=loss + (at is None), accuracy=0.9),
            ),
        )
        for name, (at, seconds, loss) in zip(names, runs, strict=False)
    ]
    rows = results(group_traces(traces))
    said = headline(rows)
    times = {row.label: row.seconds_to_target for row in rows if row.seconds_to_target is not None}
    if times:
        winner = said.split(" reached the target loss")[0]
        losses = {row.label: row.loss for row in rows}
        full = times.get("full", math.inf)
        keep = [name for name in times if losses[name] <= 1.05 * losses.get("full", math.inf) and times[name] < full]
        assert times[winner] == min(times[name] for name in keep or times)
    else:
        assert "target" not in said
    assert all(name in " ".join([said, *further_sentences(rows, 0.5)]) for name in times if with_a_baseline)


def test_without_a_target_the_headline_is_about_the_soonest_that_keeps_the_loss() -> None:
    traces = [replace(trace, recipe={**trace.recipe, "target_loss": None}) for trace in race()]
    rows = results(group_traces(traces))
    assert re.fullmatch(r"lgc finished \d+ % sooner than full, with a loss \d+ % higher", headline(rows))
    assert "fastest-k finished" in further_sentences(rows, None)[0]


def test_the_cost_of_being_first_is_told() -> None:
    rows = results(group_traces(race()))
    pattern = r"[\w-]+ reached the target loss \d+ % sooner than full, and ended with a loss \d+ % higher"
    assert re.fullmatch(pattern, headline(rows))
    said = further_sentences(rows, 0.5)
    assert re.match(r"[\w-]+ came to the target loss of 0.5 in [\d.]+ s, full in [\d.]+ s\.", said[0])
    assert all(f"{name} finished" in said[1] for name in ("fastest-k", "lgc", "async"))


def test_beside_runs_that_diverged_nobody_is_first() -> None:
    rows = results(group_traces([synchronous("full", rounds=20), diverged()]))
    assert headline(rows).startswith("full finished 20 rounds in")


def test_a_comparison_over_unequal_rounds_says_so() -> None:
    rows = results(group_traces([bare("full"), replace(bare("lgc"), rounds_done=3, seconds=1.0)]))
    assert headline(rows) == "lgc finished 50 % sooner than full (3 rounds against 5)"
