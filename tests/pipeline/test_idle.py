"""The formulas of idle time against counted slots."""

import pytest

from paceline.pipeline.schedules import (
    counted_idle,
    lecture_idle,
    orders,
    why_not,
)
from paceline.pipeline.timing import PieceCost, slot_timeline, slots, timeline

NUMBERS = [(stages, microbatches) for stages in range(1, 9) for microbatches in range(1, 17)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_count_is_that_of_the_slots(name):
    for stages, microbatches in NUMBERS:
        if why_not(name, stages, microbatches) is None:
            step = slot_timeline(name, stages, microbatches)
            assert step.idle == pytest.approx(counted_idle(stages, microbatches))
            assert step.idle_shares == pytest.approx([counted_idle(stages, microbatches)] * stages)
            assert slots(name, stages, microbatches) == 2 * (stages - 1 + microbatches)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seconds", [(1.0, 0.0, 0.0), (1.0, 1.5, 0.5), (3.0, 0.25, 0.5)])
def test_the_count_holds_for_any_equal_costs(name, seconds):
    forward, inputs, weights = seconds
    cost = PieceCost(forward_seconds=forward, input_seconds=inputs, weight_seconds=weights)
    for stages, microbatches in NUMBERS:
        if why_not(name, stages, microbatches) is None:
            idle = timeline(orders(name, stages, microbatches), [cost] * stages).idle
            assert idle == pytest.approx(counted_idle(stages, microbatches))


def test_the_lecture_counts_one_of_two_triangles():
    """Its own sums: 2 (b/m) (1 + 2 + ... + k-1) idle slots of 2 (b + (k-1) b/m) k."""
    for stages, microbatches in NUMBERS:
        triangle = sum(range(stages))
        printed = 2 / microbatches * triangle / (2 * (1 + (stages - 1) / microbatches) * stages)
        assert lecture_idle(stages, microbatches) == pytest.approx(printed)
        assert 2 * lecture_idle(stages, microbatches) == pytest.approx(counted_idle(stages, microbatches))
        assert lecture_idle(stages, 1) == pytest.approx(2 * triangle / (2 * stages**2))


def test_without_pipelining_is_with_one_microbatch():
    for stages in range(1, 9):
        assert counted_idle(stages, 1) == pytest.approx(1 - 1 / stages)
        assert counted_idle(stages, 1) == pytest.approx(slot_timeline("gpipe", stages, 1).idle)
        assert lecture_idle(stages, 1) == pytest.approx((1 - 1 / stages) / 2)


def test_numbers_below_one_are_refused():
    for formula in (lecture_idle, counted_idle):
        with pytest.raises(ValueError, match=r"stages must be at least 1 \(stages=0\)"):
            formula(0, 1)
        with pytest.raises(ValueError, match=r"microbatches must be at least 1 \(microbatches=0\)"):
            formula(1, 0)
        with pytest.raises(ValueError, match=r"stages=-1"):
            formula(-1, 1)
