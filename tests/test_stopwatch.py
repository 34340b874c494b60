"""A stopwatch counts what a thread does and waits for, and not what others do with its core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import stopwatch
from paceline.stopwatch import Stopwatch, TimedTurns, settled

BUSY = """
import os
parent = os.getppid()
print("on", flush=True)
while os.getppid() == parent:
    sum(range(10_000))
"""
DEADLINE_SECONDS = 60
needs_scheduler = pytest.mark.skipif(Stopwatch().clock != "scheduler", reason="the kernel has no schedstat")

seconds = st.floats(1e-6, 1e3)


def compute(processor_seconds):
    began = time.thread_time()
    while time.thread_time() - began < processor_seconds:
        sum(range(1000))


@pytest.fixture
def crowded_core():
    """This thread and a busy process on one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    other = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)  # it inherits the one core
    try:
        assert other.stdout.readline() == b"on\n"
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
        other.stdout.close()


@needs_scheduler
def test_others_on_the_core_do_not_count(crowded_core):
    """The core is shared, so the wall time is longer than the work; most of the difference is not counted."""
    watch, deadline = Stopwatch(), time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        wall, processor = time.perf_counter(), time.thread_time()
        watch.start()
        compute(0.1)
        counted = watch.stop()
        processor, wall = time.thread_time() - processor, time.perf_counter() - wall
        if wall > 1.3 * processor:  # else the other one had no turn
            assert counted - processor < (wall - processor) / 2
            return
    pytest.fail(f"the busy process had no turn in {DEADLINE_SECONDS} s")


@needs_scheduler
def test_sleep_counts_on_a_crowded_core(crowded_core):
    watch = Stopwatch()
    watch.start()
    time.sleep(0.05)
    assert watch.stop() >= 0.049


@needs_scheduler
def test_seconds_lie_between_processor_and_wall_time(crowded_core):
    watch = Stopwatch()
    for turn in range(50):
        wall = time.perf_counter()
        watch.start()
        processor = time.thread_time()
        compute(0.001 * (turn % 3))
        processor = time.thread_time() - processor
        counted = watch.stop()
        assert processor <= counted + 1e-4
        assert counted <= time.perf_counter() - wall


@needs_scheduler
def test_one_thread_does_not_measure_another():
    watch, found = Stopwatch(), []

    def measure():
        try:
            watch.start()
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert found == ["a stopwatch measures the thread that made it: make one in each thread that measures"]


@pytest.mark.parametrize("figures", [None, "0 0 0\n", "no figures\n", ""])
def test_a_machine_without_the_schedulers_figures(figures, tmp_path, monkeypatch):
    """Processor time then, unless the work may wait; wall time for that. Both still measure."""
    if figures is not None:
        (tmp_path / "schedstat").write_text(figures)
    monkeypatch.setattr(stopwatch, "SCHEDSTAT", str(tmp_path / "schedstat"))
    computing, waiting = Stopwatch(), Stopwatch(waits=True)
    assert (computing.clock, waiting.clock) == ("processor", "wall")
    for watch in (computing, waiting):
        watch.start()
    time.sleep(0.02)
    compute(0.01)
    assert computing.stop() >= 0.009
    assert waiting.stop() >= 0.029


def test_a_coarse_clock_is_not_used(monkeypatch):
    monkeypatch.setattr(stopwatch, "SCHEDSTAT", "/nowhere")
    monkeypatch.setattr(stopwatch, "FINE_SECONDS", 0.0)
    assert Stopwatch().clock == "wall"


def test_a_device_is_waited_for_at_both_ends():
    waited = []
    watch = Stopwatch(synchronise=lambda: waited.append(None))
    watch.start()
    assert len(waited) == 1
    assert watch.stop() >= 0
    assert (len(waited), watch.clock) == (2, "wall")


def test_no_files_are_left_open():
    def stopped():
        watch = Stopwatch()
        watch.start()
        watch.stop()
        watch.close()
        watch.close()

    stopped()
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        stopped()
        Stopwatch()  # closed when nobody holds it
    assert len(os.listdir("/dev/fd")) == before


@given(st.lists(seconds, min_size=1, max_size=20), seconds, st.floats(0.1, 10))
def test_the_least_never_rises_and_the_spread_has_no_unit(turns, another, factor):
    found = TimedTurns(turns=list(turns))
    least = found.least
    assert found.spread >= 0
    assert found.spread == pytest.approx(TimedTurns(turns=[factor * each for each in turns]).spread, abs=1e-6)
    found.add(another)
    assert found.least <= least


@given(st.lists(seconds, min_size=4, max_size=30))
def test_rounds_are_settled_once_nothing_changes(turns):
    leasts = [min(turns[: end + 1]) for end in range(len(turns))]
    assert settled([*leasts, *[leasts[-1]] * 3])
    assert not settled([*leasts, leasts[-1] / 2])
    assert not settled(leasts[:3])
