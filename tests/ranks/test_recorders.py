"""What ranks that average, and pipelines, keep of a run: bounded, however long it is, and its counts are whole."""

from __future__ import annotations

import pytest
import torch

from paceline.drivers.averaging.job import AveragingRecorder, worker_counts
from paceline.drivers.averaging.loop import MergedAverage
from paceline.drivers.pipelining.job import PipelineRecorder
from paceline.drivers.ranks import run as running
from paceline.events import Window
from paceline.reports import report_html

MOST = 40


def average(number):
    windows = (Window(steps=1), Window(steps=2))
    return MergedAverage(
        number=number, windows=windows, started=number, begun=number + 0.5, done=number + 0.75, merged=0
    )


def bytes_of(state):
    return sum(each.nbytes for each in state.values() if isinstance(each, torch.Tensor))


def test_a_long_run_of_averages_keeps_the_first_ones_counts_all_and_says_so(monkeypatch):
    monkeypatch.setattr(running, "MOST_WINDOWS", MOST)
    monkeypatch.setattr(running, "KEPT_WORKS", 10)
    recorder = AveragingRecorder(2)
    for number in range(15):
        recorder.add(average(number))
    again = AveragingRecorder(2)  # the launch is started again
    again.load_state_dict(recorder.state_dict(20.0))
    again.start_clock(0.0)
    for number in range(15, 100):
        again.add(average(number))
    state = again.state_dict(100.0)
    assert bytes_of(state) == 8 * (MOST * 3 + MOST // 2 * 3)
    assert (state["recorded"], state["brought"]) == (100, [100, 200])
    last = AveragingRecorder(2)
    last.load_state_dict(state)
    last.every_time = torch.stack([last.times()] * 2, dim=1)
    counts = worker_counts(last.brought, last.every_time, batch_samples=32)
    assert [each.used for each in counts] == [100, 200]
    trace = last.trace(strategy="hpsgd", seed=0, recipe={}, rounds_done=100, seconds=100.0, used=300)
    assert (len(trace.rounds), len(trace.works), trace.used) == (20, 10, 300)
    assert trace.missing[0] == "the times of the first 20 of 100 averages or steps of all ranks are kept"
    assert trace.missing[0][1:] in report_html([trace])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_long_run_of_pipelines_keeps_the_first_steps_and_counts_all(monkeypatch, replicas):
    monkeypatch.setattr(running, "MOST_WINDOWS", MOST)
    recorder = PipelineRecorder(stages=2, replicas=replicas)
    for step in range(100):
        recorder.add_step(step, step + 0.5)
    again = PipelineRecorder(stages=2, replicas=replicas)
    again.load_state_dict(recorder.state_dict(100.0))
    again.add_step(100, 101)
    assert again.steps == 101
    assert bytes_of(again.state_dict(101.0)) == 16 * MOST // replicas
