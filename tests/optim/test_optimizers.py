"""Optimisers and their schedules by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from paceline import LARS
from paceline.optim import OPTIMIZERS, OptimizerSettings, make_optimizer


def rates(settings, total_steps):
    optimizer, schedule = make_optimizer(settings, [torch.nn.Parameter(torch.ones(1))], total_steps=total_steps)
    found = []
    for _ in range(total_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_listed_optimiser_takes_a_step_and_its_settings(name):
    weight = torch.nn.Parameter(torch.ones(3))
    settings = OptimizerSettings(name=name, lr=0.5, momentum=0.25, weight_decay=0.125)
    optimizer, _ = make_optimizer(settings, [weight], total_steps=1)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert bool((weight < 1).all())
    for setting in OPTIMIZERS[name][1]:
        assert optimizer.param_groups[0][setting] == getattr(settings, setting)


def test_the_rate_is_multiplied_at_each_share_of_the_run():
    found = rates(OptimizerSettings(lr=1.0, decay=0.5, decay_at=(0.5, 0.8)), total_steps=10)
    assert found == pytest.approx([1.0] * 5 + [0.5] * 3 + [0.25] * 2)


def test_shares_may_come_in_any_order_and_none_means_a_constant_rate():
    assert rates(OptimizerSettings(decay_at=(0.8, 0.5)), 10) == rates(OptimizerSettings(decay_at=(0.5, 0.8)), 10)
    assert set(rates(OptimizerSettings(lr=0.3), 10)) == {0.3}


def test_an_unknown_name_lists_the_choices():
    with pytest.raises(ValueError, match=r"unknown optimizer 'sdg'; did you mean 'sgd'\? choose from sgd, lars, adam"):
        OptimizerSettings(name="sdg")


def test_an_unknown_schedule_lists_the_choices():
    with pytest.raises(ValueError, match=r"unknown schedule 'polly'; did you mean 'poly'\? choose from steps, poly"):
        OptimizerSettings(schedule="polly")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_poly_the_rate_rises_over_the_warm_up_and_falls_to_zero(name):
    settings = OptimizerSettings(name=name, lr=8.0, schedule="poly", warmup=0.3, power=2)
    assert rates(settings, 10) == pytest.approx([2, 4, 6, *(8 * (1 - step / 7) ** 2 for step in range(7))])


def test_with_poly_the_fall_may_be_counted_from_the_start_of_the_run():
    settings = OptimizerSettings(lr=8.0, schedule="poly", warmup=0.3, power=2, decay_from="start")
    assert rates(settings, 10) == pytest.approx([2, 4, 6, *(8 * (1 - step / 10) ** 2 for step in range(3, 10))])


def test_steps_may_follow_a_warm_up_and_keep_their_shares_of_the_whole_run():
    settings = OptimizerSettings(lr=1.0, warmup=0.2, decay=0.5, decay_at=(0.5, 0.8))
    assert rates(settings, 10) == pytest.approx([1 / 3, 2 / 3] + [1.0] * 3 + [0.5] * 3 + [0.25] * 2)


@pytest.mark.parametrize("schedule", ["poly", "steps"])
@pytest.mark.parametrize("total_steps", [1, 2, 3])
def test_a_run_of_few_steps_has_at_least_one_at_the_full_rate(schedule, total_steps):
    assert max(rates(OptimizerSettings(lr=2.0, schedule=schedule, warmup=0.99), total_steps)) == pytest.approx(2.0)


REFUSED = [
    ({"warmup": 1.0}, r"warmup must be between 0 and 0.99 \(warmup=1.0\)"),
    ({"warmup": -0.1}, r"between 0 and 0.99 \(warmup=-0.1\)"),
    ({"warmup": float("nan")}, r"between 0 and 0.99 \(warmup=nan\)"),
    ({"warmup": 0.5, "decay_at": (0.4,)}, r"after the warm-up \(decay_at=\(0.4,\), warmup=0.5\)"),
    ({"schedule": "poly", "decay_at": (0.5,)}, r"decay_at goes with schedule = steps \(schedule=poly\)"),
    ({"decay_from": "start"}, r"decay_from goes with schedule = poly \(schedule=steps\)"),
    ({"decay_from": "begin"}, r"unknown decay from 'begin'; choose from warmup, start"),
    ({"nesterov": True, "momentum": 0.0}, r"nesterov needs momentum above 0 \(momentum=0\)"),
    ({"lr": "fast"}, r"lr must be a number \(lr='fast'\)"),
]


@pytest.mark.parametrize(("chosen", "words"), REFUSED, ids=[str(chosen) for chosen, _ in REFUSED])
def test_a_course_that_cannot_be_is_refused_with_its_range(chosen, words):
    with pytest.raises(ValueError, match=words):
        OptimizerSettings(**chosen)


def test_lars_by_name_is_lars_with_its_settings():
    layers = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))]
    own = {"lr": 8.0, "trust_coefficient": 0.25, "momentum": 0.5, "weight_decay": 0.125, "nesterov": True, "clip": True}
    settings = OptimizerSettings(name="lars", exclude_bias_and_norm=False, **own)
    found, _ = make_optimizer(settings, layers, total_steps=5)
    assert isinstance(found, LARS)
    assert found.defaults == LARS(layers, exclude_bias_and_norm=False, **own).defaults


@pytest.mark.parametrize("share", [-0.5, 1.5, float("nan")])
def test_a_share_that_is_not_in_the_run_is_refused_with_what_was_given(share):
    with pytest.raises(ValueError, match="decay_at"):
        OptimizerSettings(decay_at=(share,))


def test_importing_the_package_does_not_import_torch():
    program = "import sys, paceline.optim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
