"""The test loss of real and simulated runs against a plain loop, and the files of before there was one."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline import Recipe, simulate
from paceline.data import load_dataset
from paceline.drivers.averaging.job import AveragingRecorder
from paceline.live.state import JournalState, TraceState
from paceline.loggers import Log
from paceline.optim import OptimizerSettings
from paceline.recipes.assembly import load_data, make_training
from paceline.runs.simulation import as_document
from paceline.traces import Evaluation, Trace, summarise
from paceline.traces.history import trace_of
from paceline.traces.journal import FORMAT, Evaluated, Resumed, RunBegan, line_of, record_from
from paceline.traces.journal_files import read_journal
from paceline.traces.run_status import RunStatus, StatusLog
from paceline.traces.trace_files import read_traces, write_traces
from paceline.training import Training, measure
from tests.live.journals import step

SMALL = Recipe(rounds=6).with_settings(
    cluster={"workers": 2}, data={"split": "iid"}, evaluate_every=3, evaluation_samples=100
)
POINT = Evaluation(round=5, seconds=1.5, loss=0.5, accuracy=0.75, test_loss=0.625)
TRACE = Trace(strategy="ssgd", seed=0, workers=2, recipe={}, rounds_done=5, seconds=2.0, evaluations=(POINT,))

OLD = Evaluated(at_seconds=1.5, round=5, loss=0.5, accuracy=0.75)
BEGAN = RunBegan(
    format=FORMAT, paceline="0.1.0", strategy="full", seed=0, workers=1, blocks=1, recipe={}, signature="", codec="none"
)


def plain_test_loss(recipe: Recipe, state: dict[str, torch.Tensor], samples: int) -> float:
    """The mean cross-entropy of the first samples of the test data, in one pass."""
    training = make_training(recipe, load_data(recipe))
    training.module.load_state_dict(state)
    training.module.eval()
    inputs, targets = (torch.cat(parts) for parts in zip(*training.dataset.test.parts(64, samples), strict=True))
    with torch.no_grad():
        return float(F.cross_entropy(training.module(inputs), targets))


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(("name", "on"), [("lgc", "server"), ("lgc", "ranks"), ("local-sgd", "server")])
def test_a_real_run_records_the_loss_on_the_test_data(name, on, tmp_path):
    strategy = {"on": on, "k": 2} if name == "lgc" else {}
    recipe = SMALL.with_strategy(name).with_settings(strategy=strategy)
    seen, logged = [], []
    log: Log = lambda figures, step: logged.append(figures)  # noqa: E731
    trained = paceline.train(recipe, out=tmp_path / "run", on_standing=seen.append, log=log)
    result, expected = trained.result, plain_test_loss(recipe, trained.result.state_dict, 100)
    assert result.test_loss == pytest.approx(expected, rel=1e-4)
    assert result.trace.evaluations[-1].test_loss == result.test_loss == seen[-1].test_loss
    assert all(point.test_loss > 0 for point in result.trace.evaluations)
    assert result.test_loss != result.loss
    assert any(figures.get("paceline/test_loss") == result.test_loss for figures in logged)
    (written,) = json.loads((tmp_path / "run" / "results.json").read_text())["results"]
    assert written["test_loss"] == result.test_loss
    split = written["time_split"]
    parts = sum(split[part] for part in ("compute_seconds", "network_seconds", "waiting_seconds"))
    assert parts == pytest.approx(split["workers"] * split["seconds"])
    if (tmp_path / "run" / "trace.jsonl").is_file():
        read = trace_of(read_journal(tmp_path / "run" / "trace.jsonl"))
    else:
        (read,) = read_traces(tmp_path / "run")
    assert read.evaluations == result.trace.evaluations


@pytest.mark.parametrize("name", ["full", "hpsgd"])
def test_a_simulated_run_does_too(name):
    recipe = SMALL.with_strategy(name)
    result = simulate(recipe)
    assert result.test_loss == pytest.approx(plain_test_loss(recipe, result.state_dict, 100), rel=1e-4)
    (document,) = as_document(recipe, [result])["results"]
    assert document["test_loss"] == result.test_loss


def test_the_test_data_pass_through_the_model_once():
    digits, calls = load_dataset("digits"), []
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    network.register_forward_hook(lambda module, inputs, outputs: calls.append(len(outputs)))
    training = Training(module=network, dataset=digits, shards=[], optimizer=OptimizerSettings(), total_steps=1)
    measured = measure(network, training)
    assert sum(calls) == len(digits.train) + len(digits.test)
    assert measured.test_loss is not None
    # A model that is too sure of what is wrong: its test loss is not finite, and nobody is told a number.
    with torch.no_grad():
        network[1].weight.mul_(math.inf)
    assert measure(network, training).test_loss is None


def test_a_regression_has_a_test_loss_and_no_accuracy():
    inputs = torch.arange(40.0).reshape(-1, 1) / 40
    train, test = (inputs, 2 * inputs), (inputs + 1, 2 * inputs)
    recipe = Recipe(rounds=3, target_loss=None).with_settings(data={"split": "iid"}, cluster={"workers": 2})
    result = simulate(recipe, data=(train, test), model=nn.Linear(1, 1), loss=F.mse_loss)
    model = nn.Linear(1, 1)
    model.load_state_dict(result.state_dict)
    assert result.accuracy is None
    assert result.test_loss == pytest.approx(F.mse_loss(model(test[0]), test[1]).item(), rel=1e-4)


# -- files of before ---------------------------------------------------------------------------------------------------


def test_a_journal_line_without_a_test_loss_says_nothing_of_it():
    assert record_from(line_of(OLD)) == OLD
    assert b"test_loss" not in line_of(OLD)
    new = replace(OLD, test_loss=0.625)
    assert record_from(line_of(new)) == new


def test_a_file_of_traces_without_test_losses_is_read(tmp_path: Path):
    written = write_traces(tmp_path, [TRACE])
    assert read_traces(tmp_path) == [TRACE]
    document = json.loads(gzip.decompress(written.read_bytes()))
    document["traces"][0]["evaluations"] = [each[:4] for each in document["traces"][0]["evaluations"]]
    written.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert read_traces(tmp_path) == [replace(TRACE, evaluations=(replace(POINT, test_loss=None),))]


def test_an_accuracy_that_nobody_measured_is_none_after_a_file_too(tmp_path: Path):
    guessless = replace(TRACE, evaluations=(replace(POINT, accuracy=None),))
    write_traces(tmp_path, [guessless])
    assert read_traces(tmp_path) == [guessless]


def test_a_checkpoint_without_test_losses_is_gone_on_from():
    recorder, older = AveragingRecorder(2), AveragingRecorder(2)
    recorder.evaluations.append(POINT)
    state = recorder.state_dict(0.0)
    again = AveragingRecorder(2)
    again.load_state_dict(state)
    assert again.evaluations == [POINT]
    older.load_state_dict(state | {"evaluations": [each[:4] for each in state["evaluations"]]})
    assert older.evaluations == [replace(POINT, test_loss=None)]


# -- who shows it ------------------------------------------------------------------------------------------------------


def test_the_live_page_has_its_figure_and_its_curve():
    assert TraceState(TRACE).figures()["test_loss"] == 0.625
    assert TraceState(TRACE).curves()["test_loss"] == [[1.5, 0.625]]
    state = JournalState()
    first = replace(OLD, test_loss=0.9)
    second = replace(first, at_seconds=2.5, round=9, test_loss=0.8)
    for record, found in ((BEGAN, None), (step(5, 1.4, fresh=[0]), None), (first, 0.9), (step(8, 2.4, fresh=[0]), 0.9)):
        state.take(record)
        assert state.figures()["test_loss"] == found
    state.take(second)
    assert state.curves()["test_loss"] == [[1.5, 0.9], [2.5, 0.8]]
    state.take(Resumed(at_seconds=3.0, version=6, reason="restarted"))
    assert state.figures()["test_loss"] == 0.9


def test_a_log_has_it_once_for_each_time_it_was_measured():
    logged = []
    status_log = StatusLog(lambda figures, step: logged.append(figures))
    status = RunStatus(round=1, rounds=9, seconds=1.0, loss=0.5, accuracy=0.8, test_loss=0.6, begun=True, workers=())
    for round_, test_loss in ((1, 0.6), (2, 0.6), (3, 0.7)):
        status_log.show(replace(status, round=round_, test_loss=test_loss))
    assert [figures.get("paceline/test_loss") for figures in logged] == [0.6, None, 0.7]


def test_a_run_that_diverged_has_none():
    assert summarise(TRACE).test_loss == 0.625
    assert summarise(replace(TRACE, diverged=True)).test_loss is None
