"""Every experiment at toy size: figures mean nothing, but all of it runs, is shown, and is kept."""

from __future__ import annotations

import importlib.util
import io
import json
from html import unescape

import pytest
from rich.console import Console

from experiments.core.pages import Told, page, series_of
from experiments.core.running import run_experiment
from paceline.terminal import WIDTH
from tests.experiments.telling import EXPERIMENTS, TOY, compute_here

NAMES = [name for name in EXPERIMENTS if name != "trainer" or importlib.util.find_spec("transformers")]


@pytest.fixture(scope="module", params=NAMES)
def ran(request, tmp_path_factory):
    """An experiment that was run at toy size, the folder with its outcomes, and the names of its jobs."""
    experiment, folder = EXPERIMENTS[request.param], tmp_path_factory.mktemp("experiments")
    with pytest.MonkeyPatch.context() as patched:
        computed = compute_here(patched)
        findings = run_experiment(experiment, TOY, folder)
    return Told(experiment=experiment, size=TOY, findings=findings), folder, computed


def test_none_is_skipped(ran):
    assert not ran[0].findings.skipped


def test_ours_stands_beside_the_paper_s(ran):
    told, _, _ = ran
    if told.experiment.of != "papers":
        return
    headings = [heading.lower() for table in told.findings.tables for heading in table.headings]
    assert any("paper" in heading for heading in headings)
    assert any("ours" in heading for heading in headings)
    assert told.findings.charts
    assert told.findings.remarks


def test_something_is_claimed_and_says_by_which_figures(ran):
    told, _, _ = ran
    claims = told.findings.claims
    assert claims or told.experiment.of != "papers"
    assert all(claim.text and claim.because for claim in claims)
    assert len({claim.text for claim in claims}) == len(claims)
    assert len(told.lines) == len(claims) + 1


def test_tables_are_of_text_and_fit_a_terminal(ran):
    told, _, _ = ran
    assert told.findings.tables
    for table in told.findings.tables:
        assert all(len(row) == len(table.headings) for row in table.rows)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
        shown = io.StringIO()
        Console(file=shown, width=WIDTH).print(table.rich())
        assert "…" not in shown.getvalue(), shown.getvalue()
        assert max(map(len, shown.getvalue().splitlines())) <= WIDTH


def test_results_are_plain_json(ran):
    told, _, _ = ran
    text = json.dumps(told.document, allow_nan=False)
    assert json.loads(text)["experiment"] == told.experiment.name


def test_the_page_shows_every_claim_and_names_each_chart_once(ran):
    told, _, _ = ran
    names = [chart.name for chart in told.findings.charts]
    assert len(set(names)) == len(names)
    html = unescape(page([told])).replace("\N{NO-BREAK SPACE}", " ")
    assert told.experiment.name in html
    for claim in told.findings.claims:
        assert claim.text in html
    for chart in told.findings.charts:
        json.dumps([chart.data, chart.layout], allow_nan=False)
        assert series_of(chart)  # else the page had no colours for it


def test_a_second_run_computes_nothing(ran, monkeypatch):
    told, folder, computed = ran
    assert len(set(computed)) == len(computed)
    if told.experiment.of == "timings":
        return
    again = compute_here(monkeypatch)
    findings = run_experiment(told.experiment, TOY, folder)
    assert again == []
    assert findings.claims == told.findings.claims
    assert findings.numbers == told.findings.numbers
