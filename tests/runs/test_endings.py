"""A run has one of three endings, whoever trains: it is finished, a signal stopped it, or its workers are gone.

finished            paceline.train returns; the command ends with 0
SIGINT, SIGTERM     KeyboardInterrupt; 130
all workers gone    an error with the first worker's reason; 1
"""

from __future__ import annotations

import os
import re
import signal

import pytest
from torch import nn

import paceline
from paceline import Recipe
from paceline.cli import main
from paceline.distributed import RankGoneError
from paceline.traces.journal import RunEnded
from paceline.traces.journal_files import read_journal

SMALL = Recipe(rounds=1_000_000).with_settings(
    cluster={"workers": 2}, data={"split": "iid"}, strategy={"k": 2}, evaluate_every=1000, target_loss=None
)
OPTIONS = ["--workers", "2", "--split", "iid", "--rounds", "1000000", "--target-loss", "none"]
LOSSES = """
from torch import nn

seen = [0]

def fails(outputs, targets):
    seen[0] += outputs.requires_grad  # not where the model is measured
    if seen[0] > 12:
        raise ZeroDivisionError("of my own")
    return nn.functional.cross_entropy(outputs, targets, reduction="none")
"""


@pytest.fixture(autouse=True)
def _own_losses(tmp_path, monkeypatch):
    (tmp_path / "endings_losses.py").write_text(LOSSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


class Failing:
    """A loss that fails in a worker's third batch, and never where the model is measured."""

    def __init__(self, how):
        self.how, self.seen = how, 0

    def __call__(self, outputs, targets):
        self.seen += outputs.requires_grad
        if self.seen > 12:
            self.how()
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


def divide():
    raise ZeroDivisionError("of my own")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("strategy", "how", "said"),
    [
        ("lgc", divide, r"worker [01]: ZeroDivisionError: of my own"),
        ("lgc", die, r"worker [01] was ended by SIGKILL"),
        ("async", divide, r"worker [01]: ZeroDivisionError: of my own"),
    ],
)
def test_a_script_whose_workers_all_crash_is_told_why_the_first_one_did(strategy, how, said, tmp_path):
    with pytest.raises(paceline.PacelineError, match=rf"^all 2 workers have ended: {said}") as caught:
        paceline.train(SMALL.with_strategy(strategy), loss=Failing(how), out=tmp_path / "run")
    ended = read_journal(tmp_path / "run" / "trace.jsonl").records[-1]
    assert isinstance(ended, RunEnded)
    assert ended.reason == str(caught.value)
    assert (tmp_path / "run" / "report.html").is_file()
    assert f"out='{tmp_path / 'run'}'" in caught.value.__notes__[0]


@pytest.mark.parametrize("strategy", ["lgc@ranks", "hpsgd"])
@pytest.mark.parametrize(("how", "said"), [(divide, "of my own"), (die, r"rank [01] was ended by SIGKILL")])
def test_so_is_one_whose_ranks_all_crash(strategy, how, said, tmp_path):
    with pytest.raises((ZeroDivisionError, RankGoneError), match=said):
        paceline.train(SMALL.with_strategy(strategy), loss=Failing(how), out=tmp_path / "run")


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("strategy", ["lgc", "lgc@ranks", "hpsgd"])
def test_the_command_ends_with_1_and_says_it_in_its_last_line(strategy, capfd):
    name, _, place = strategy.partition("@")
    words = ["train", "--strategy", name, *(["--on", place] if place else []), "--loss", "endings_losses:fails"]
    assert main([*words, *OPTIONS, "--out", "run"]) == 1
    last = capfd.readouterr().err.strip().splitlines()[-1]
    assert re.match(r"paceline: error: .*ZeroDivisionError: of my own", last), last


@pytest.mark.parametrize(
    ("strategy", "number"),  # ranks of a script end by SIGTERM as Python does: at once
    [("lgc", signal.SIGINT), ("lgc", signal.SIGTERM), ("lgc@ranks", signal.SIGINT), ("hpsgd", signal.SIGINT)],
)
def test_a_signal_stops_a_script_which_does_not_go_on_as_if_it_had_trained(strategy, number, tmp_path):
    def stop(status):
        if status.round >= 2:
            os.kill(os.getpid(), number)

    fine = Failing(divide)
    fine.seen = float("-inf")
    with pytest.raises(KeyboardInterrupt):
        paceline.train(SMALL.with_strategy(strategy), loss=fine, out=tmp_path / "run", on_standing=stop)
