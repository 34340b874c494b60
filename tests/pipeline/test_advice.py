"""Which number of micro-batches: what is compared, what is recommended, and how it is told."""

import re

import pytest

from paceline.pipeline.advice import MOST_MICROBATCHES, advise
from paceline.pipeline.schedules import SCHEDULES, counted_idle, orders, why_not
from paceline.pipeline.timing import MessageCost, PieceCost, timeline

EVEN = [PieceCost(forward_seconds=1.0, input_seconds=1.0, weight_seconds=1.0)] * 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_divisors_that_the_schedule_accepts_are_compared(name):
    stages = 4 // SCHEDULES[name].chunks
    advice = advise(name, EVEN, batch_samples=36, microbatches=4)
    accepted = [number for number in range(1, 37) if 36 % number == 0 and why_not(name, stages, number) is None]
    assert [choice.microbatches for choice in advice.choices] == accepted
    assert all(choice.microbatches * choice.samples == 36 for choice in advice.choices)


def test_the_number_it_was_measured_with_is_the_plain_timeline():
    costs = [PieceCost(forward_seconds=0.1 * p + 1, input_seconds=1.0, weight_seconds=0.5) for p in range(3)]
    links = [MessageCost(forward_seconds=0.5, gradient_seconds=0.25)] * 2
    advice = advise(
        "1f1b", costs, links, batch_samples=24, microbatches=6, fixed_seconds=[0.3, 0.2, 0.1], latency_seconds=0.1
    )
    step = timeline(orders("1f1b", 3, 6), costs, links)
    assert advice.current.microbatches == 6
    assert advice.current.step_seconds == pytest.approx(step.step_seconds)
    assert advice.current.idle == pytest.approx(step.idle)


def test_without_a_fixed_part_the_work_is_the_same_and_only_idle_time_shrinks():
    advice = advise("gpipe", EVEN, batch_samples=64, microbatches=8)
    for choice in advice.choices:
        assert choice.idle == pytest.approx(counted_idle(4, choice.microbatches))
        assert choice.step_seconds * (1 - choice.idle) == pytest.approx(24.0)  # eight micro-batches of three seconds


def test_the_fixed_part_is_paid_for_every_microbatch():
    """A piece that costs nothing else: steps grow with the slots, and messages with their latency."""
    costs = [PieceCost(forward_seconds=1.0, input_seconds=1.0)] * 2
    slow = [MessageCost(forward_seconds=8.0, gradient_seconds=8.0)]
    advice = advise("gpipe", costs, batch_samples=8, microbatches=2, fixed_seconds=[2.0, 2.0])
    assert [choice.step_seconds for choice in advice.choices] == [2.0 * (1 + m) for m in (1, 2, 4, 8)]
    first = advise("gpipe", [PieceCost()] * 2, slow, batch_samples=4, microbatches=1, latency_seconds=4.0)
    assert [choice.step_seconds for choice in first.choices] == [m * (4 + 4 / m) + (4 + 4 / m) * m for m in (1, 2, 4)]


@pytest.mark.parametrize("good_enough", [0.0, 0.03, 0.2])
@pytest.mark.parametrize("fixed", [0.0, 0.1, 0.5])
def test_the_smallest_number_that_is_good_enough_is_recommended(good_enough, fixed):
    advice = advise("1f1b", EVEN, batch_samples=96, microbatches=8, fixed_seconds=[fixed] * 4, good_enough=good_enough)
    shortest = min(choice.step_seconds for choice in advice.choices)
    for choice in advice.choices:
        if choice.microbatches < advice.recommended.microbatches:
            assert choice.step_seconds > shortest * (1 + good_enough)
    assert advice.recommended.step_seconds <= shortest * (1 + good_enough)


def test_the_sentence_tells_what_would_be_saved():
    advice = advise("1f1b", EVEN, batch_samples=32, microbatches=4, fixed_seconds=[0.3] * 4)
    saved = 100 * (1 - advice.recommended.step_seconds / advice.current.step_seconds)
    told = re.fullmatch(
        r"4 micro-batches of 8: idle (\d+) %; (\d+) of (\d+) would take (\d+) % less time", advice.sentence
    )
    assert told is not None
    idle, number, samples, percent = map(int, told.groups())
    assert idle == round(100 * advice.current.idle)
    assert (number, samples) == (advice.recommended.microbatches, advice.recommended.samples)
    assert percent == round(saved) > 0


def test_the_sentence_when_nothing_is_better():
    alone = [PieceCost(forward_seconds=1.0)]
    assert advise("gpipe", alone, batch_samples=4, microbatches=1).sentence == (
        "1 micro-batch of 4: idle 0 %; no other number is predicted to be faster"
    )
    assert advise("gpipe", alone, batch_samples=4, microbatches=4).sentence == (
        "4 micro-batches of 1: idle 0 %; 1 of 4 would do as well (0 % more time)"
    )
    enough = advise("gpipe", EVEN, batch_samples=256, microbatches=128, good_enough=0.02)
    saved = 100 * (1 - min(choice.step_seconds for choice in enough.choices) / enough.current.step_seconds)
    assert enough.sentence == f"128 micro-batches of 2: idle 2 %; no other number saves more than {saved:.2g} %"


def test_a_huge_batch_is_not_simulated_sample_by_sample():
    advice = advise("gpipe", [PieceCost(forward_seconds=1.0)] * 2, batch_samples=2**40, microbatches=2)
    assert advice.choices[-1].microbatches == MOST_MICROBATCHES


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match=r"microbatches=5, batch_samples=32\); take one of 4, 8, 16, 32"):
        advise("1f1b", EVEN, batch_samples=32, microbatches=5)
    with pytest.raises(ValueError, match="no number does that 1f1b accepts"):
        advise("1f1b", EVEN, batch_samples=3, microbatches=4)
    with pytest.raises(ValueError, match="1f1b needs at least as many micro-batches as stages"):
        advise("1f1b", EVEN, batch_samples=32, microbatches=2)
    with pytest.raises(ValueError, match=r"costs for 2 pieces on each device \(pieces=3\)"):
        advise("interleaved", EVEN[:3], batch_samples=32, microbatches=2)
    with pytest.raises(ValueError, match=r"fixed_seconds must be given for each piece \(given=1, pieces=4\)"):
        advise("1f1b", EVEN, batch_samples=32, microbatches=4, fixed_seconds=[1.0])
    with pytest.raises(ValueError, match=r"latency_seconds=-1"):
        advise("1f1b", EVEN, batch_samples=32, microbatches=4, latency_seconds=-1)
    with pytest.raises(ValueError, match=r"batch_samples=0"):
        advise("1f1b", EVEN, batch_samples=0, microbatches=4)
