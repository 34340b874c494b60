"""What the docs warn of is said when a run begins: once, and only where it holds."""

from __future__ import annotations

import logging

import pytest

import paceline
from paceline import Recipe
from paceline.cli import main
from paceline.runs import launch
from paceline.runs.launch import RanksToTrain, train_ranks
from paceline.runs.simulation import give_notices

HPSGD = ("--strategy", "hpsgd", "--workers", "3", "--worker.batch-size", "8", "--rounds", "1")
SKEWED = "drifts along each worker's own data"


def recipe(**settings):
    sections = {"cluster": {"workers": 3}, "worker": {"batch_size": 8}, "strategy": {"name": "hpsgd"}}
    for section, values in settings.items():
        sections[section] = sections.get(section, {}) | values
    return Recipe(rounds=1).with_settings(**sections)


def told(recwarn):
    return [str(each.message) for each in recwarn if SKEWED in str(each.message)]


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({}, 1),
        ({"data": {"split": "dirichlet"}}, 1),
        ({"data": {"split": "iid"}}, 0),
        ({"strategy": {"rebase": False}}, 0),
        ({"strategy": {"name": "local-sgd"}}, 0),
        ({"strategy": {"name": "diloco", "overlap": True}}, 1),
        ({"strategy": {"name": "lgc"}}, 0),
        ({"optimizer": {"momentum": 0.0}}, 0),
        ({"optimizer": {"name": "adam"}}, 0),
    ],
)
def test_simulate_says_what_averaging_does_on_skewed_data(settings, times, recwarn):
    paceline.simulate(recipe(**settings))
    assert len(told(recwarn)) == times


def test_race_says_it_once_for_all_seeds_and_not_where_nothing_is_trained(recwarn):
    paceline.Race(recipe(), strategies=["hpsgd", "local-sgd"], seeds=3)
    assert len(told(recwarn)) == 1
    recwarn.clear()
    paceline.Race(recipe(), strategies=["hpsgd"], timing_only=True)
    assert told(recwarn) == []


@pytest.mark.parametrize(
    ("workers", "delay", "times"),
    [
        (2, {}, 1),
        (3, {}, 0),
        (2, {"slow_workers": 1}, 0),
        (2, {"slow_factor": 1.0}, 0),
        (2, {"name": "pareto"}, 0),
    ],
)
def test_a_cluster_of_slow_workers_alone_is_named_once_with_both_settings(workers, delay, times, recwarn):
    slow = {"name": "slow-worker", "slow_workers": 2, "slow_factor": 3.0} | delay
    paceline.Race(recipe(cluster={"workers": workers}, delay=slow), ["lgc", "hpsgd"], seeds=2, timing_only=True)
    said = [str(each.message) for each in recwarn if "slow one" in str(each.message)]
    assert len(said) == times
    assert all("delay.slow_workers = 2, cluster.workers = 2" in each for each in said)


@pytest.mark.parametrize("inject", [True, False])
def test_a_real_run_names_slow_workers_only_where_they_are_slowed_down(inject, recwarn):
    slow = {"name": "slow-worker", "slow_workers": 3, "inject": inject}
    give_notices((recipe(delay=slow), None))
    assert len([each for each in recwarn if "slow one" in str(each.message)]) == inject


def test_a_command_says_it_in_a_line_of_its_own(tmp_path, capsys):
    assert main(["simulate", *HPSGD, "--out", str(tmp_path / "run"), "--json"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if SKEWED in line]
    assert [line.startswith("paceline: warning: hpsgd with momentum drifts") for line in lines] == [True]


@pytest.mark.parametrize(("rank", "workers", "lines"), [(0, 20, 1), (1, 20, 0), (0, 2, 0)])
def test_a_launch_of_another_number_of_ranks_is_said_by_one_of_them(
    rank, workers, lines, tmp_path, monkeypatch, caplog, recwarn
):
    monkeypatch.setattr(launch._RankWork, "train", lambda *_, **__: None)
    wanted = RanksToTrain(recipe=recipe(cluster={"workers": workers}), out=tmp_path / "run", resume=False)
    place = launch.launch.Place(rank=rank, world=2)
    train_ranks(wanted, place, on_standing=lambda standing: None, on_plan=lambda plan: None)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    said = "2 ranks were launched, so there are as many workers, not the 20 of the recipe"
    assert messages.count(said) == lines
    assert len(told(recwarn)) == (rank == 0)
