"""How long batches keep a rank busy: waits and disturbances are left out, and a GPU is read later."""

from __future__ import annotations

import pytest
import torch

from paceline.drivers.balancing import hooks
from paceline.drivers.balancing.hooks import BatchTimes, replaced


class Stream:
    """A device that works off what it is given, one second for each event, when it is told to."""

    def __init__(self):
        self.recorded, self.done = 0, 0


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, on):
            assert on is stream
            stream.recorded += 1
            self.at = stream.recorded

        def query(self):
            return self.at <= stream.done

        def elapsed_time(self, end):
            assert end.query(), "the host would wait for the device"
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def test_on_a_gpu_times_are_read_when_the_device_has_come_there_and_nobody_waits(stream):
    times = BatchTimes(torch.device("cuda", 0))
    for _ in range(3):
        times.begin()  # events 1, 3, 5
        times.end_part()  # events 2, 4, 6
        times.end_batch(8)
    assert times.known() == []
    stream.done = 4
    assert times.known() == [(8, 1.0)]  # the first batch is nobody's measure
    stream.done = 6
    assert times.known() == [(8, 1.0)]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(hooks.time, "perf_counter", lambda: now[0])
    return now


def test_waits_are_left_out_and_disturbed_batches_do_not_count(clock):
    times = BatchTimes(torch.device("cpu"))
    times.end_batch(4)

    def batch(busy, wait, *, disturbed=False):
        times.begin()
        clock[0] += busy / 2
        times.wait(begins=True)
        clock[0] += wait
        times.wait(begins=False)
        clock[0] += busy / 2
        times.end_part()
        clock[0] += 100.0  # the other ranks
        if disturbed:
            times.disturb()
        times.end_batch(4)

    batch(2.0, 5.0)
    batch(3.0, 0.0, disturbed=True)
    batch(4.0, 1.0)
    assert times.known() == [(4, 2.0), (4, 4.0)]


def test_a_batch_of_several_passes_takes_as_long_as_all_of_them(clock):
    times = BatchTimes(torch.device("cpu"))
    times.end_batch(4)
    for seconds in (1.0, 2.0):
        times.begin()
        clock[0] += seconds
        times.end_part()
    times.end_batch(4)
    assert times.known() == [(4, 3.0)]


class Output:
    """What some models return: an object with tensors in it."""

    def __init__(self, logits, loss, name):
        self.logits, self.loss, self.name = logits, loss, name


def test_every_tensor_of_an_output_is_replaced_and_the_output_itself_is_not_changed():
    output = Output(torch.zeros(2), (torch.zeros(1), "words"), "gpt")
    found = replaced([output, {"x": torch.zeros(3)}, None, 7], lambda tensor: tensor + 1)
    assert torch.equal(found[0].logits, torch.ones(2))
    assert torch.equal(found[0].loss[0], torch.ones(1))
    assert (found[0].name, found[0].loss[1], found[2:]) == ("gpt", "words", [None, 7])
    assert torch.equal(output.logits, torch.zeros(2))
