"""What a report says of real runs: nothing of what only a simulation has, and everything about who was there."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import escape

from paceline.reports import report_html
from paceline.reports.report import MOST_ROWS, membership_changes, worker_table
from paceline.reports.results import group_traces, results
from paceline.reports.sentences import MOST_DROPPED, conditions, dropped_sentences, headline
from paceline.reports.timeline import segments, timeline_chart
from paceline.traces import Trace
from paceline.traces.records import NOT_YET, Absence
from paceline.traces.worker_counts import WorkerCounts
from tests.reports.race_traces import asynchronous, synchronous
from tests.reports.test_report_page import HOSTILE, own_part
from tests.reports.test_results_table import rendered

DELAY = {"name": "shifted-exponential", "persistence": 10, "inject": False}


def real(trace: Trace | None = None, **membership_changes: Any) -> Trace:
    """A run as if it were of a real cluster; `recipe` is put over the recipe it has."""
    trace = synchronous("lgc", rounds=20) if trace is None else trace
    recipe = {**trace.recipe, "delay": DELAY, "codec": {"name": "identity"}, **membership_changes.pop("recipe", {})}
    return replace(trace, clock="real", recipe=recipe, **membership_changes)


def away(worker: int, start: float, end: float | None, reason: str = "its connection was lost") -> Absence:
    return Absence(worker=worker, from_seconds=start, to_seconds=end, reason=reason)


def said(*traces: Trace) -> str:
    return "; ".join(conditions(group_traces(list(traces))))


def line_of(traces: list[Trace]) -> str:
    return headline(results(group_traces(traces)))


# -- conditions -----------------------------------------------------------------------------------------------------


def test_a_real_run_is_said_to_be_one_and_nothing_simulated_is_said_of_it() -> None:
    words = said(real())
    assert "real cluster, 10 workers" in words
    assert "wall-clock seconds since the first round began" in words
    for wrong in ("virtual", "late work", "delays", "persistence", "shifted", "codec", "simulated"):
        assert wrong not in words


def test_injected_delays_and_a_codec_are_named() -> None:
    words = said(real(recipe={"delay": {**DELAY, "inject": True}, "codec": {"name": "bfloat16"}}))
    assert "injected delays: shifted-exponential, persistence 10" in words
    assert "codec bfloat16" in words


def test_the_bytes_that_travelled_are_told_where_there_is_a_codec() -> None:
    coded = real(recipe={"codec": {"name": "qsgd"}}, sent_bytes=3_000_000, received_bytes=1_500_000)
    assert "codec qsgd (3.0 MB to workers, 1.5 MB back)" in said(coded)
    assert "codec qsgd (3.0 MB sent)" in said(replace(coded, strategy="lgc@ranks", received_bytes=0))


def test_delays_injected_in_some_runs_are_not_claimed_for_all() -> None:
    words = said(real(), real(recipe={"delay": {**DELAY, "inject": True}}))
    assert "injected delays: shifted-exponential, persistence 10 (not in all runs)" in words


def test_a_simulated_run_beside_a_real_one_keeps_its_own_words() -> None:
    simulated = replace(real(), clock="virtual")
    words = said(real(), simulated)
    assert "real cluster, 10 workers and simulated cluster, 10 workers" in words
    assert "virtual seconds and wall-clock seconds" in words
    assert "late work partial" in words
    assert "shifted-exponential delays" in words


@pytest.mark.parametrize("recipe", [{}, {"delay": 3, "codec": None, "data": [], "model": "x", "strategy": 1}])
def test_a_recipe_can_be_anything(recipe: dict[str, Any]) -> None:
    trace = replace(real(), recipe=recipe)
    assert "real cluster, 10 workers" in said(trace)
    assert report_html([trace])


def test_a_real_run_without_an_evaluation_still_trained() -> None:
    trace = real(evaluations=())
    assert "timing only" not in own_part(report_html([trace])).lower()
    assert "nothing was trained" not in " ".join(rendered([trace]))
    assert "digits" in said(trace)
    assert "nothing was trained" not in report_html([real(evaluations=(), works=(), rounds=())])


def test_the_table_says_which_clock_and_which_runs_were_stopped() -> None:
    lines = rendered([real(rounds_done=12)])
    words = " ".join(" ".join(lines).split())
    assert "wall-clock seconds since the first round began" in words
    assert "stopped early: lgc (12 of 20 rounds)" in words
    assert max(map(len, lines)) <= 80


def test_runs_of_the_same_seed_are_runs_and_not_seeds() -> None:
    assert said(real(), real()).endswith("2 runs, means")
    assert said(real(), real(seed=1)).endswith("2 seeds, means")


# -- real beside simulated ------------------------------------------------------------------------------------------


def test_a_real_run_and_its_simulation_are_two_rows() -> None:
    groups = group_traces([real(), replace(real(), clock="virtual")])
    assert [group.label for group in groups] == ["lgc real", "lgc simulated"]


def test_nothing_is_saved_against_the_other_clock() -> None:
    full = synchronous("full", rounds=20)
    rows = results(group_traces([full, real(), replace(real(), clock="virtual")]))
    assert [row.saved is None for row in rows] == [True, True, False]
    mixed = line_of([full, real()])
    assert "sooner" not in mixed
    assert "later" not in mixed


# -- the headline ---------------------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_did_not_finish() -> None:
    assert line_of([real(rounds_done=12)]).startswith("lgc stopped after 12 of 20 rounds")
    assert line_of([real()]).startswith("lgc finished 20 rounds in")


def test_a_run_that_was_stopped_saved_nothing_and_nothing_is_saved_against_it() -> None:
    full, lgc = real(synchronous("full", rounds=20)), real(rounds_done=3, seconds=0.1)
    rows = results(group_traces([full, lgc]))
    assert [row.saved for row in rows] == [None, None]
    page = own_part(report_html([full, lgc]))
    assert "lgc stopped after 3 of 20 rounds" in page
    assert "lgc finished" not in page
    rows = results(group_traces([replace(full, rounds_done=3), real()]))
    assert [row.saved for row in rows] == [None, None]
    assert headline(rows).startswith("lgc finished 20 rounds")


def test_a_run_that_diverged_was_not_stopped() -> None:
    assert line_of([real(rounds_done=3, diverged=True)]) == "lgc diverged: try a smaller learning rate"


def test_one_real_run_is_no_race() -> None:
    assert "<title>paceline race</title>" not in report_html([real()])
    assert "<title>paceline race</title>" in report_html([synchronous("full", rounds=3)])
    assert "<title>mine</title>" in report_html([real()], title="mine")


# -- the timeline ---------------------------------------------------------------------------------------------------


def bars(trace: Trace) -> list[dict[str, Any]]:
    chart = timeline_chart(group_traces([trace]))
    assert chart is not None
    return [item for item in chart.data if item["type"] == "bar"]


def hovers(trace: Trace, name: str | None = None) -> list[str]:
    return [text for item in bars(trace) if name in (None, item["name"]) for text in item["hovertext"]]


SECONDS = st.floats(0, 3, allow_subnormal=False)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(spans=st.lists(st.tuples(SECONDS, st.none() | SECONDS), max_size=5), worker=st.integers(0, 9))
def test_nobody_waits_while_gone_and_no_moment_is_drawn_twice(
    spans: list[tuple[float, float | None]], worker: int
) -> None:
    trace = synchronous("lgc", rounds=20)
    absences = tuple(away(worker, start, None if end is None else max(start, end)) for start, end in spans)
    found = segments(real(trace, absences=absences), worker)
    lane = sorted((bar.start_seconds, bar.end_seconds) for bar in found if not bar.beside)
    assert all(start < end <= trace.seconds + 1 for start, end in lane)
    assert all(before[1] <= after[0] for before, after in pairwise(lane))
    for bar in found:
        for absence in absences if bar.activity == "waiting" else ():
            until = trace.seconds if absence.to_seconds is None else absence.to_seconds
            assert bar.end_seconds <= absence.from_seconds or bar.start_seconds >= until or absence.from_seconds > until
    # Every moment of an absence in which no work is drawn is drawn as gone.
    for absence in absences:
        until = min(trace.seconds, trace.seconds if absence.to_seconds is None else absence.to_seconds)
        covered = sum(max(0.0, min(end, until) - max(start, absence.from_seconds)) for start, end in lane)
        assert covered == pytest.approx(max(0.0, until - absence.from_seconds))


def test_a_worker_that_had_a_new_model_and_went_did_not_wait_for_it() -> None:
    trace = synchronous("full", rounds=4)
    first, second = trace.rounds[:2]
    works = tuple(work for work in trace.works if work.worker != 0 or work.version in (0, 3))
    gone = away(0, second.closed_seconds, trace.rounds[3].opened_seconds)
    lane = segments(real(trace, works=works, absences=(gone,)), 0)
    waited = [bar for bar in lane if bar.activity == "waiting"]
    assert waited[0].end_seconds == pytest.approx(first.closed_seconds)
    assert all(bar.start_seconds >= gone.from_seconds for bar in waited[1:])


def test_the_reason_of_an_absence_is_on_hover_and_stays_text() -> None:
    texts = hovers(real(absences=(away(2, 0.0, None, HOSTILE),)), "gone")
    assert texts
    assert all(text.startswith("<b>worker 2</b> gone") and "&lt;/script&gt;" in text for text in texts)
    assert not any("<img" in text for text in texts)


def test_gone_is_in_the_legend_only_where_it_is_drawn() -> None:
    assert 'class="swatch gone"' in report_html([real(absences=(away(2, 0.0, None),))])
    assert 'class="swatch gone"' not in report_html([real()])


def test_workers_beyond_the_count_have_lanes() -> None:
    trace = synchronous("lgc", rounds=20)
    works = tuple(replace(work, worker=10**12) if work.worker == 9 else work for work in trace.works)
    chart = timeline_chart(group_traces([real(trace, works=works)]))
    assert chart is not None
    assert chart.layout["yaxis"]["ticktext"] == [*(f"w{worker}" for worker in range(10)), f"w{10**12}"]
    lanes = {lane for item in chart.data if item["type"] == "bar" for lane in item["y"]}
    assert 10 in lanes
    assert max(lanes) == 10


def test_asynchronous_bars_tell_of_steps_and_others_of_rounds() -> None:
    assert not any(re.search(r"\bround \d", text) for text in hovers(asynchronous(rounds=5)))
    assert all(", step " in text for text in hovers(asynchronous(rounds=5)))
    assert any(", round " in text for text in hovers(real()))


# -- who came and went ----------------------------------------------------------------------------------------------


def told(trace: Trace) -> list[tuple[float, str, str]]:
    return [(change.at_seconds, change.names, change.event) for change in membership_changes(trace)]


def test_comings_and_goings_are_told_in_order_and_workers_together() -> None:
    absences = (
        away(1, 0.0, 2.0, NOT_YET),
        away(2, 0.0, None, NOT_YET),
        *(away(worker, 3.0, 3.0, "the server was started again") for worker in (4, 3)),
        away(5, 1.0, None, "silent"),
        away(6, 9.0, None, "stopped by SIGTERM"),
    )
    assert told(real(absences=absences, ended="stopped by SIGTERM", rounds_done=3, seconds=8.0)) == [
        (0.0, "w2", "never joined"),
        (1.0, "w5", "gone: silent"),
        (2.0, "w1", "joined"),
        (3.0, "w3, w4", "gone: the server was started again"),
        (3.0, "w3, w4", "came back"),
        (8.0, "the run", "ended: stopped by SIGTERM"),
    ]


def test_a_run_with_everybody_there_has_no_such_section() -> None:
    goodbyes = tuple(away(worker, 9.0, None, "all rounds are done") for worker in range(10))
    assert "Who came and went" not in report_html([real(absences=goodbyes, ended="all rounds are done")])
    assert "Who came and went" not in report_html([synchronous("full", rounds=3)])


@pytest.mark.parametrize("count", [MOST_ROWS, MOST_ROWS + 1, 10 * MOST_ROWS])
def test_many_comings_and_goings_are_cut_and_the_page_says_so(count: int) -> None:
    page = own_part(report_html([real(absences=tuple(away(0, float(n), None, HOSTILE) for n in range(count)))]))
    section = page.split("Who came and went</h2>")[1].split("</section>")[0]
    assert section.count("<tr><td>") == MOST_ROWS
    assert ("more</p>" in section) == (count > MOST_ROWS)
    if count > MOST_ROWS:
        assert f"and {count - MOST_ROWS} more" in section
    assert escape(HOSTILE) in section
    assert "<img" not in section


# -- the table of workers -------------------------------------------------------------------------------------------

SLOW = WorkerCounts(
    worker=9, late=2, dropped=21, too_late=21, samples_late=40, samples_dropped=600, blocks=4, batch_samples=32
)
QUICK = WorkerCounts(worker=0, used=40, samples_used=1280, waited_seconds=1.25)


def test_each_worker_has_a_row_with_what_became_of_its_work() -> None:
    table = worker_table(group_traces([real(by_worker=(QUICK, SLOW))]))
    assert table is not None
    assert list(table.rows) == [
        ["w0", "1,280", "0", "0", "40", "0", "0", "1.25"],
        ["w9", "0", "40", "600", "0", "2", "21", "0.000"],
    ]
    assert table.warned == {1}
    assert sum(columns for _, columns in table.over) == len(table.headings) == len(table.rows[0])
    page = own_part(report_html([real(by_worker=(QUICK, SLOW))]))
    assert "<h2>Workers</h2>" in page
    assert "Worker 9 is mostly dropped" in " ".join(rendered([real(by_worker=(QUICK, SLOW))]))
    assert "Worker 9 is mostly dropped: 21 of its 23 gradients came too late." in page
    assert "more blocks than 4" in page


def test_nobody_is_named_where_work_is_used_and_a_simulation_has_no_such_table() -> None:
    assert "mostly dropped" not in report_html([real(by_worker=(QUICK, replace(SLOW, late=40)))])
    assert "<h2>Workers</h2>" not in report_html([synchronous("lgc", rounds=3)])


def test_samples_that_nobody_counted_are_not_told_as_none() -> None:
    table = worker_table(group_traces([real(by_worker=(WorkerCounts(worker=0, used=3),))]))
    assert table is not None
    assert table.rows[0] == ["w0", "-", "-", "-", "3", "0", "0", "0.000"]


def test_of_many_workers_those_that_were_dropped_most_are_shown_and_named() -> None:
    workers = tuple(
        WorkerCounts(worker=number, used=100 - number, dropped=number, too_late=number) for number in range(100)
    )
    trace = real(by_worker=workers, workers=100)
    table = worker_table(group_traces([trace]))
    assert table is not None
    assert [row[0] for row in table.rows] == [f"w{number}" for number in range(99, 99 - MOST_ROWS, -1)]
    assert f"The {MOST_ROWS} of 100 workers" in table.caption
    said = dropped_sentences(group_traces([trace]))
    assert said[0].startswith("Worker 99 is mostly dropped")
    assert said[-1] == f"So are {49 - MOST_DROPPED} more."
