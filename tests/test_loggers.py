"""Figures go to one log, `log(dict, step)`, whoever has them: servers and ranks, one like the other."""

from __future__ import annotations

import logging

import pytest

import paceline
from paceline.loggers import GuardedLog, LoggerError, check_log, every, named_log
from paceline.recipes.recipe import Recipe
from paceline.traces.journal import TRACE, StepRecord
from paceline.traces.journal_files import read_journal


def recipe(strategy):
    settings = {"cluster": {"workers": 2}, "data": {"split": "iid"}, "delay": {"inject": False}}
    return Recipe(rounds=12, evaluate_every=4).with_strategy(strategy).with_settings(**settings)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("strategy", ["lgc", "lgc@ranks", "hpsgd"])
def test_a_run_logs_what_it_came_to(strategy, tmp_path):
    logged = []
    trained = paceline.train(recipe(strategy), out=tmp_path / "run", log=lambda *given: logged.append(given))
    figures, step = logged[-1]
    assert step == trained.result.rounds if strategy != "hpsgd" else step == 12
    steps = [step for _, step in logged]
    assert steps == sorted(steps), "a logger takes steps in rising order"
    losses = [figures["paceline/loss"] for figures, _ in logged if "paceline/loss" in figures]
    assert losses[-1] == pytest.approx(trained.result.loss, rel=1e-6)
    assert figures["paceline/sent_bytes"] > 0
    assert figures["paceline/wait_seconds"] >= 0
    if strategy != "hpsgd":
        assert figures["paceline/used"] == sum(each.used for each in trained.result.trace.rounds)
        assert figures["paceline/late"] == sum(each.late for each in trained.result.trace.rounds)
        assert figures["paceline/k"] == 2
    assert all(isinstance(value, int | float) for value in figures.values())


@pytest.mark.usefixtures("forked_workers")
def test_a_log_that_fails_does_not_end_the_run(tmp_path, caplog):
    calls = []

    def failing(figures, step):
        calls.append(step)
        raise ConnectionError("the logger's server is away")

    with caplog.at_level(logging.WARNING, logger="paceline"):
        trained = paceline.train(recipe("lgc"), out=tmp_path / "run", log=failing)
    assert trained.outcome.finished
    assert len(calls) == 1
    assert [line for line in caplog.messages if "server is away" in line and "nothing is logged any more" in line]


def test_what_is_no_log_is_refused_before_anything_begins(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="log must be a function of figures and a step"):
        paceline.train(recipe("lgc"), out=tmp_path / "run", log="tensorboard")
    assert not (tmp_path / "run").exists()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_logs.py").write_text("number = 3\ndef log(figures, step): ...\n")
    with pytest.raises(LoggerError, match="names a int"):
        check_log("my_own_logs:number")
    assert named_log("my_own_logs:log", tmp_path).__name__ == "log"


def test_every_passes_on_some_and_begins_again_with_training():
    passed = []
    log = every(10, lambda figures, step: passed.append(step))
    for step in (3, 5, 12, 13, 30, 31, 2, 4, 12):
        log({}, step)
    assert passed == [3, 13, 30, 2, 12]
    with pytest.raises(ValueError, match=r"steps must be at least 1 \(steps=0\)"):
        every(0, print)


def test_a_log_that_is_none_costs_nothing():
    assert not GuardedLog(None)


@pytest.mark.usefixtures("forked_workers")
def test_a_server_counts_the_waits_of_those_who_were_in_time(tmp_path):
    """Of every round, from each fresh gradient's arrival to the step; a late gradient waits for nobody."""
    slow = {"delay": {"inject": True, "name": "slow-worker", "slow_factor": 3}, "cluster": {"workers": 3}}
    logged = []
    several = Recipe(rounds=20).with_strategy("lgc").with_settings(strategy={"k": 2}, **slow)
    trained = paceline.train(several, out=tmp_path / "run", log=lambda *given: logged.append(given))
    records = read_journal(trained.folder / TRACE).records
    steps = [record for record in records if isinstance(record, StepRecord)]
    arrivals = [each for record in records for each in getattr(record, "arrivals", ())]
    arrived = {(each.worker, each.version): each.at_seconds for each in arrivals}
    waited = 0.0
    for record in steps:
        waited += sum(record.at_seconds - arrived[worker, version] for worker, version in record.fresh)
    assert logged[-1][0]["paceline/wait_seconds"] == pytest.approx(waited, abs=1e-4)
    assert logged[-1][0]["paceline/late"] == sum(len(record.late) for record in steps)
