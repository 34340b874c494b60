"""A server in a script: it says how it goes, leaves the pages of a command, and ends at a senseless evaluation."""

from __future__ import annotations

import json
import logging
import re

import pytest
import torch

import paceline
from paceline.drivers.served.settings import EvaluateError
from paceline.runs.pages import shown_log
from paceline.traces import run_status
from tests.drivers.served.test_worker import batches, network, serving, work


def forget_handlers(monkeypatch):
    """As in a script that does not know of logging, no logger has a handler."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("paceline"), "handlers", [])


def trained(tmp_path, **options):
    served, model = network(), network()
    with serving(served, tmp_path, **options) as (address, ended), paceline.Worker(address, model) as worker:
        work(worker, model, batches(100))
    return address, ended


def test_a_plain_script_shows_its_address_joins_progress_and_report(tmp_path, monkeypatch, capsys):
    forget_handlers(monkeypatch)
    monkeypatch.setattr(run_status, "LINE_SECONDS", 0.0)
    address, _ = trained(tmp_path, evaluate=lambda module: (torch.tensor(0.5), 0.75))
    told = capsys.readouterr().err
    places = [
        told.index(f"server at {address}: waiting for 1 worker"),
        told.index("waiting for workers: 0 here"),
        told.index("worker 0 joined"),
        told.index("ends after 10 rounds: all rounds are done"),
        told.rindex("round 10 of 10, "),
        told.index(f"report: {tmp_path / 'run' / 'report.html'}"),
    ]
    assert places == sorted(places)
    assert "loss 0.5000, test 75.0%" in told
    assert "<script" in (tmp_path / "run" / "report.html").read_text()
    (result,) = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    assert (result["rounds"], result["loss"], result["accuracy"]) == (10, 0.5, 0.75)
    assert logging.getLogger("paceline").handlers == []  # as it was


def test_a_server_that_waits_says_how_long_it_will(tmp_path, monkeypatch, capsys):
    forget_handlers(monkeypatch)
    monkeypatch.setattr(run_status, "LINE_SECONDS", 0.0)
    trained(tmp_path, workers=2, limits=paceline.cluster.Limits(gather_seconds=3))
    told = capsys.readouterr().err
    assert re.search("waiting for workers: 1 here, begins without the others in [123] s\n", told)
    assert "begins with 1 of 2 workers" in told


@pytest.mark.parametrize("handled", ["", "paceline"])
def test_a_script_that_has_set_up_logging_decides_itself(handled, monkeypatch, capsys):
    forget_handlers(monkeypatch)
    seen = []
    handler = logging.Handler()
    handler.emit = seen.append
    logging.getLogger(handled).addHandler(handler)
    try:
        with shown_log():
            logging.getLogger("paceline.served").warning("once")
    finally:
        logging.getLogger(handled).removeHandler(handler)
    assert [record.getMessage() for record in seen] == ["once"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("returned", [0.53, None, (0.5,), (0.5, 0.6, 0.7, 0.8), "ab", {"loss": 0.5, "accuracy": 1}])
def test_a_senseless_evaluation_ends_the_run_at_once_and_frees_its_folder(returned, tmp_path):
    with serving(network(), tmp_path, evaluate=lambda module: returned) as (_, ended):
        pass  # nobody has to come for it
    (error,) = ended
    assert isinstance(error, EvaluateError)
    assert str(error).startswith("evaluate must return two numbers, the loss and the accuracy")
    assert f"it returned a {type(returned).__name__}: " in str(error)
    assert list(tmp_path.iterdir()) == []


def test_so_does_one_that_raises(tmp_path, caplog):
    with serving(network(), tmp_path, evaluate=lambda module: {}["no"]) as (_, ended):
        pass
    assert [type(error) for error in ended] == [EvaluateError]
    assert "evaluate raised KeyError: 'no'" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_later_one_ends_the_run_with_a_checkpoint(tmp_path):
    returned = iter([(0.5, 0.5), (0.5, 0.5), None, None, None])
    served, model = network(), network()
    often = {"rounds": 1000, "evaluate_every": 1, "evaluate": lambda module: next(returned)}
    with (
        serving(served, tmp_path, **often) as (address, ended),
        paceline.Worker(address, model, patience_seconds=0.1) as worker,
        pytest.raises(paceline.PacelineError, match="no server at"),  # it waits for the server to return
    ):
        work(worker, model, batches(1000))
    assert isinstance(ended[0], EvaluateError)
    assert sorted((tmp_path / "run").glob("checkpoint-*"))[-1].name != "checkpoint-00000000"
