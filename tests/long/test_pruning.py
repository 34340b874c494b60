"""Training with each policy of pruning, at toy size."""

from __future__ import annotations

import dataclasses
import json

import pytest

from experiments.core.story import plain
from experiments.papers.pruning.plateaus import run_curve
from experiments.papers.pruning.sample_losses import run_histories
from experiments.papers.pruning.training import FEWER_EPOCHS, POLICIES, TOY_SIZE, WHOLE, run_training


def trained(policy, *, model="pooled-cnn", seed=1, **changes):
    size = dataclasses.replace(TOY_SIZE, **changes)
    return run_training({"size": size.document, "model": model, "policy": policy, "seed": seed})


def test_a_run_sees_what_its_policy_hands_out_and_goes_the_same_way_again():
    runs = {policy: trained(policy) for policy in POLICIES}
    assert runs[WHOLE]["samples"] == TOY_SIZE.images * TOY_SIZE.epochs
    assert runs[FEWER_EPOCHS]["samples"] == runs[WHOLE]["samples"] * 0.7
    for policy, found in runs.items():
        assert found["samples"] == found["steps"] * TOY_SIZE.batch
        assert len(found["accuracies"]) == POLICIES[policy].epochs(TOY_SIZE)
        assert 0 < found["sampling_seconds"] < found["cpu_seconds"]
        if POLICIES[policy].sampler:
            assert found["samples"] < runs[WHOLE]["samples"]
    again = trained("info-batch")
    assert (again["accuracies"], again["samples"]) == (
        runs["info-batch"]["accuracies"],
        runs["info-batch"]["samples"],
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_that_diverges_has_no_figures(policy):
    found = plain(trained(policy, model="lenet", rate=1e30))
    figures = set(found) - {"accuracies", "settings"}
    assert {name: found[name] for name in figures} == dict.fromkeys(figures)


def test_a_training_that_diverges_has_a_curve_and_losses_of_the_same_lengths_without_values():
    size = dataclasses.replace(TOY_SIZE, rate=1e30)
    settings = {"size": size.document, "model": "lenet", "seed": 200}
    curve = plain(run_curve(settings))
    assert curve["losses"][0] > 0
    assert curve["losses"][1:] == curve["accuracies"][1:] == [None] * size.epochs
    histories = plain(run_histories({**settings, "watched": 3}))
    assert json.loads(json.dumps(histories)) == {"losses": [[None] * size.epochs] * 3}
