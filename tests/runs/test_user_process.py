"""A script's process stays as the script has it; processes of paceline's own commands are tuned for what they do."""

from __future__ import annotations

import resource

import pytest

import paceline
from paceline import Recipe
from paceline.cli import main
from paceline.drivers.served import transport
from paceline.processes import Processes
from paceline.runs import cluster
from paceline.runs.forked_workers import run_workers
from tests.runs.test_event_loops import serve


@pytest.fixture
def tuned(monkeypatch):
    """What malloc was told, in this process."""
    found = []
    monkeypatch.setattr(transport, "_set_malloc", found.append)
    return found


@pytest.fixture
def few_files():
    """A limit of open files that a server would raise, if it may."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = (min(900, before[0]), before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, low)
    yield low
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_script_that_serves_and_works_keeps_its_malloc_and_its_limits(tuned, few_files, tmp_path):
    outcome, _ = serve(tmp_path)
    assert outcome.finished
    assert tuned == []
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == few_files


def test_the_processes_of_a_command_are_tuned(tuned, few_files, tmp_path, monkeypatch):
    def serve_recipe(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "serve_recipe", serve_recipe)
    assert main(["serve", "--listen", "127.0.0.1:0", "--out", str(tmp_path / "run")]) == 130
    assert len(tuned) == 1
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few_files[0] or few_files[0] == few_files[1]


def test_so_are_the_workers_that_a_command_starts(tuned):
    def look(number):
        if len(tuned) != 1:
            raise AssertionError("this worker's process is not tuned")

    group = Processes()
    group.fork(lambda: run_workers([0, 1], look))  # it changes how its process hears signals
    assert group.wait(60) == [0]


def test_a_race_is_run_once(tmp_path):
    race = paceline.Race(Recipe(rounds=5), ["full"], timing_only=True)
    assert [progress.round for _, progress in race] == [1, 2, 3, 4, 5]
    with pytest.raises(paceline.PacelineError, match="make another Race"):
        iter(race)
    assert [result.rounds for result in race.results] == [5]
    begun = paceline.Race(Recipe(rounds=5), ["full"], timing_only=True)
    next(iter(begun))
    with pytest.raises(paceline.PacelineError, match="was run already, or begun"):
        list(begun)
