"""Optimisers and their schedules by name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

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


@pytest.mark.parametrize("share", [-0.5, 1.5, float("nan")])
def test_a_share_that_is_not_in_the_run_is_refused_with_what_was_given(share):
    with pytest.raises(ValueError, match="decay_at"):
        OptimizerSettings(decay_at=(share,))


def test_importing_the_package_does_not_import_torch():
    program = "import sys, paceline.optim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
