"""Without a terminal every long command writes a line every few seconds, and none is longer than 80 columns."""

from __future__ import annotations

import io
import itertools
import logging
import re

import pytest
from rich.console import Console

from paceline.cli.main import main
from paceline.cli.progress import RunBars, RunView, race_line, run_view, step_bar
from paceline.drivers.ranks.run import rank_status
from paceline.drivers.simulated.progress import Progress
from paceline.traces import run_status
from paceline.traces.run_status import LINE_SECONDS, PeriodicLines, RunStatus, StatusLines, WorkerStatus, status_line
from tests.cli.test_full_disk import COMMANDS

LINES = {
    "race": r"round of 3: full \d",
    "simulate": r"round of 3: lgc \d",
    "inspect": r"steps: \d of 2, ",
    "plan": r"predicting steps: ",
    "bench": r"identity.*: \d of \d+, ",
}


@pytest.mark.parametrize("command", LINES)
def test_a_command_without_a_terminal_tells_how_far_it_is(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_status, "LINE_SECONDS", 0.0)
    assert main([*COMMANDS[command], "--out", str(tmp_path / "out"), "--json"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert any(re.match(LINES[command], line) for line in told), told
    assert max(map(len, [line for line in told if re.match(LINES[command], line)])) <= 80


def console(*, terminal):
    return Console(file=io.StringIO(), force_terminal=terminal, width=80)


def status(round=3, **others):
    about = {"rounds": 9, "seconds": 1.5, "loss": 0.5, "accuracy": 0.8, "begun": True, "workers": ()}
    return RunStatus(round=round, **about | others)


def drawn(console):
    """What was written, by each kind of progress: a bar's, the bars of runs, the view of a run."""
    with step_bar(console, "replaying", total=5) as update:
        update(completed=2)
    with RunBars(console, ["lgc"], rounds=9) as bars:
        bars.show(0, Progress(round=3, seconds=0.2, loss=0.5))
    with RunView(console) as view:
        view.show(status())
    return console.file.getvalue()


def test_lines_are_for_those_who_see_no_bars(monkeypatch):
    monkeypatch.setattr(run_status, "LINE_SECONDS", 0.0)
    lines = ("replaying: 2 of 5", "round of 9: lgc 3 (loss 0.5000)", "round 3 of 9, ")
    assert all(line in drawn(console(terminal=False)) for line in lines)
    assert not any(line in drawn(console(terminal=True)) for line in lines)


def test_what_is_over_soon_needs_no_line():
    assert drawn(console(terminal=False)) == ""


def test_however_often_a_line_is_offered_one_is_written_every_few_seconds():
    written, clock = [], itertools.count(0, LINE_SECONDS / 4)
    lines = PeriodicLines(written.append, clock=clock.__next__)
    for number in range(41):
        lines.offer(lambda number=number: str(number))
    assert written == [str(number) for number in range(3, 41, 4)]


def test_a_rank_that_does_not_show_the_run_still_warns(monkeypatch):
    monkeypatch.setattr(run_status, "LINE_SECONDS", 0.0)
    silent = console(terminal=False)
    with RunView(silent, shown=False) as view:
        view.show(status())
        view.note("pipeline: 2 stages")
        logging.getLogger("paceline.rounds").warning("not finite")
    assert silent.file.getvalue() == "not finite\n"


@pytest.mark.parametrize("workers", [0, 3, 500])
def test_a_line_names_who_is_late_or_gone_and_stays_short(workers):
    standing = status(
        round=123_456,
        rounds=999_999,
        seconds=86_400.0,
        workers=[WorkerStatus(worker=n, last=("late", "dropped", "")[n % 3], alive=n % 3 < 2) for n in range(workers)],
    )
    written = []
    StatusLines(written.append, clock=iter([0.0, LINE_SECONDS, LINE_SECONDS]).__next__).show(standing)
    (line,) = written
    assert all((word in line) == (workers > 0) for word in ("late", "dropped", "gone"))
    assert len(line) <= 80
    assert "loss 0.5000, test 80.0%" in line
    assert "rounds/s" not in line  # not known yet


def test_a_line_and_a_lane_call_a_rank_a_rank_and_tell_late_from_dropped():
    ranks = [WorkerStatus(worker=1, last="late"), WorkerStatus(worker=2)]
    ranks[1].note_drop("its round had closed")
    found = rank_status(3, 9, 1.5, workers=ranks)
    assert status_line(found, 2.0) == "round 3 of 9, 1.5 s, 2.0 rounds/s; late: rank 1; dropped: rank 2"
    shown = console(terminal=False)
    shown.print(*run_view(found, 2.0))
    assert re.search(r"rank 2 +dropped +0 on time, 0 late, 1 dropped", shown.file.getvalue())


def test_a_race_of_many_lanes_is_one_line():
    names = [f"fastest-k {seed}" for seed in range(100)]
    line = race_line(names, [Progress(round=300, seconds=1.0, loss=0.1234) for _ in names], 300)
    assert len(line) <= 80
    assert re.search(r" and \d+ more$", line)
