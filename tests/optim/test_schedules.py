"""Rates for large batches: the line and the polynomial in closed form, saved half-way, for groups, without warnings."""

from __future__ import annotations

import copy
import json
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LARS
from paceline.optim import DECAY_FROM
from paceline.optim.schedules import RULES, scale_lr, warmed_up, warmup_poly
from tests.oracles import strategies as reference


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def optimizer_of(*rates, make=torch.optim.SGD):
    return make([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=1.0)


def rates_of(optimizer, schedule, steps):
    """The rate of every group at each of so many steps."""
    found = []
    for _ in range(steps):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return found


def expected_rate(lr, step, *, warmup_steps, total_steps, power, decay_from="warmup"):
    return reference.warm_rate(step, lr=lr, warmup=warmup_steps, steps=total_steps, power=power, decay_from=decay_from)


@st.composite
def courses(draw):
    total_steps = draw(st.integers(1, 40))
    return {
        "warmup_steps": draw(st.integers(0, total_steps - 1)),
        "total_steps": total_steps,
        "power": draw(st.sampled_from([0.5, 1, 2, 3.7])),
        "decay_from": draw(st.sampled_from(DECAY_FROM)),
    }


@settings(max_examples=60)
@given(course=courses(), rates=st.lists(st.floats(1e-3, 50), min_size=1, max_size=3))
def test_every_groups_rate_rises_in_a_line_and_falls_as_a_polynomial_to_zero(course, rates):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = optimizer_of(*rates)
        found = rates_of(optimizer, warmup_poly(optimizer, **course), course["total_steps"] + 3)
    for step, of_groups in enumerate(found):
        expected = [expected_rate(lr, step, **course) for lr in rates]
        assert of_groups == pytest.approx(expected, rel=1e-9, abs=1e-12)
    if course["decay_from"] == "warmup":
        assert found[course["warmup_steps"]] == pytest.approx(rates)  # the peak is reached, once
    assert all(rate == 0 for of_groups in found[course["total_steps"] :] for rate in of_groups)


@settings(max_examples=60)
@given(course=courses())
def test_after_the_warm_up_the_two_ways_to_count_the_decay_differ_by_one_factor(course):
    optimizers = {way: optimizer_of(2.0) for way in DECAY_FROM}
    warmup, total, power = course["warmup_steps"], course["total_steps"], course["power"]
    ways = {
        way: [rate for (rate,) in rates_of(each, warmup_poly(each, **course | {"decay_from": way}), total)]
        for way, each in optimizers.items()
    }
    times = 1 / (1 - warmup / total) ** power
    assert ways["warmup"][:warmup] == ways["start"][:warmup]
    assert ways["warmup"][warmup:] == pytest.approx([times * rate for rate in ways["start"][warmup:]], rel=1e-9)
    assert ways["start"][warmup:] == pytest.approx(
        [2.0 * (1 - step / total) ** power for step in range(warmup, total)], rel=1e-9
    )  # Algorithm 1, as if there had been no warm-up


@settings(max_examples=25)
@given(course=courses(), stop=st.integers(0, 40))
def test_a_schedule_that_is_saved_and_loaded_goes_on_as_if_undisturbed(course, stop):
    stop, optimizer, again = min(stop, course["total_steps"]), optimizer_of(2.0, 3.0), optimizer_of(2.0, 3.0)
    schedule, resumed = warmup_poly(optimizer, **course), warmup_poly(again, **course)
    rates_of(optimizer, schedule, stop)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict(), default=plain)))
    left = course["total_steps"] + 2 - stop
    assert rates_of(again, resumed, left) == rates_of(optimizer, schedule, left)


def plain(value):
    """A Counter is no JSON; nothing else of a schedule may be none."""
    raise TypeError(f"{value!r} is not plain")


@pytest.mark.parametrize("shape", [(), (1,)], ids=["no dimension", "one"])
def test_a_rate_in_a_tensor_is_changed_in_place(shape):
    rate = torch.full(shape, 2.0, dtype=torch.float64)
    optimizer = LARS([torch.nn.Parameter(torch.ones(1))], lr=rate, weight_decay=0.0005)
    course = {"warmup_steps": 3, "total_steps": 9, "power": 2}
    found = rates_of(optimizer, warmup_poly(optimizer, **course), 11)
    assert found == [pytest.approx([expected_rate(2.0, step, **course)]) for step in range(11)]
    assert optimizer.param_groups[0]["lr"] is rate


def test_after_the_warm_up_another_schedule_begins_with_its_first_step():
    optimizer = optimizer_of(8.0)
    schedule = warmed_up(optimizer, 3, lambda: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))
    assert [rate for (rate,) in rates_of(optimizer, schedule, 9)] == pytest.approx([2, 4, 6, 8, 8, 4, 4, 2, 2])


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"total_steps": 0}, r"total_steps must be at least 1 \(total_steps=0\)"),
        ({"warmup_steps": -1}, r"at least 0 and below total_steps \(warmup_steps=-1, total_steps=10\)"),
        ({"warmup_steps": 10}, r"at least 0 and below total_steps \(warmup_steps=10, total_steps=10\)"),
        ({"power": 0}, r"power must be above 0 and finite \(power=0\)"),
        ({"power": math.inf}, r"power must be above 0 and finite \(power=inf\)"),
        ({"power": math.nan}, r"power must be above 0 and finite \(power=nan\)"),
        ({"decay_from": "begin"}, r"unknown decay_from 'begin'; choose from warmup, start"),
    ],
)
def test_a_course_that_cannot_be_is_refused_and_leaves_the_rate_alone(chosen, words):
    optimizer = optimizer_of(2.0)
    with pytest.raises(ValueError, match=words):
        warmup_poly(optimizer, **{"warmup_steps": 2, "total_steps": 10} | chosen)
    assert optimizer.param_groups[0]["lr"] == 2.0


# -- a rate for another batch ---------------------------------------------------------------------------------------

sizes, rules = st.integers(1, 10**6), st.sampled_from(RULES)


@given(lr=st.floats(0, 100), batches=st.tuples(sizes, sizes, sizes), rule=rules)
def test_scaling_there_and_on_is_scaling_at_once_and_back_is_nothing(lr, batches, rule):
    first, second, third = batches
    assert scale_lr(lr, first, first, rule) == lr
    there = scale_lr(lr, first, second, rule)
    assert scale_lr(there, second, third, rule) == pytest.approx(scale_lr(lr, first, third, rule))
    assert scale_lr(there, second, first, rule) == pytest.approx(lr)


@given(lr=st.floats(1e-3, 100), batch=st.integers(1, 10**4), times=st.integers(1, 100))
def test_linear_goes_with_the_batch_and_sqrt_with_its_root(lr, batch, times):
    assert scale_lr(lr, batch, times * batch) == pytest.approx(lr * times)
    assert scale_lr(lr, batch, times * batch, rule="sqrt") == pytest.approx(lr * math.sqrt(times))


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        ({"rule": "cubic"}, r"rule must be one of linear, sqrt \(rule='cubic'\)"),
        ({"base_batch": 0}, r"base_batch must be at least 1 \(base_batch=0\)"),
        ({"batch": -3}, r"batch must be at least 1 \(batch=-3\)"),
        ({"base_lr": -1.0}, r"base_lr must be at least 0 and finite \(base_lr=-1.0\)"),
        ({"base_lr": math.nan}, r"base_lr must be at least 0 and finite \(base_lr=nan\)"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(given_, words):
    with pytest.raises(ValueError, match=words):
        scale_lr(**{"base_lr": 0.1, "base_batch": 256, "batch": 512} | given_)
