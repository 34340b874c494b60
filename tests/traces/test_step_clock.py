"""The clock of phases: all time is in one phase or in none, and a bucket that is done late belongs to its own step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.traces.step_clock import PHASES, StepClock

phases = st.sampled_from([*PHASES, "other"])


class Time:
    """A clock that goes on when it is told to."""

    now = 0.0

    def __call__(self):
        return self.now


@given(st.lists(st.lists(st.tuples(phases, st.none() | phases, st.integers(0, 9)), max_size=8), min_size=1, max_size=5))
def test_phases_and_what_is_in_none_add_up_to_the_step(script):
    time, written = Time(), []
    clock = StepClock(written.append, clock=time, processor=time)
    for step in script:
        for phase, counting, seconds in step:
            time.now += seconds
            clock.enter(phase, counting=counting)
        time.now += 1
        clock.end_step()
    assert [each.step for each in written] == list(range(len(script)))
    assert sum(each.seconds for each in written) == time.now
    for times, step in zip(written, script, strict=True):
        before = ["input", *(phase for phase, _, _ in step)]
        counted = [counting or phase for phase, (_, counting, _) in zip(before, step, strict=False)] + [before[-1]]
        took = [*(seconds for _, _, seconds in step), 1]
        for name in PHASES:
            expected = sum(seconds for phase, seconds in zip(counted, took, strict=True) if phase == name)
            assert getattr(times, f"{name}_seconds") == expected


@given(st.integers(1, 4), st.booleans())
def test_a_bucket_that_is_done_after_its_step_is_in_its_own_step(buckets, in_time):
    time, written = Time(), []
    clock = StepClock(written.append, clock=time, processor=time)
    marks = [clock.bucket_ready(number) for number in range(buckets)]
    time.now = 2.0
    clock.end_step()
    assert written == []
    if in_time:
        for mark in marks:
            mark()
    other = clock.bucket_ready(0)
    time.now = 3.0
    other()
    clock.end_step()
    assert [len(each.buckets) for each in written] == [buckets if in_time else 0, 1]
    assert written[1].buckets == ((0.0, 1.0),)


def test_of_several_passes_of_a_step_the_last_ones_buckets_are_kept():
    time, written = Time(), []
    clock = StepClock(written.append, clock=time, processor=time)
    for at in (1.0, 2.0):
        clock.begin_buckets()
        time.now = at
        mark = clock.bucket_ready(0)
        time.now += 0.25
        mark()
    clock.end_step()
    assert written[0].buckets == (pytest.approx((2.0, 2.25)),)
