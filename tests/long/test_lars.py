"""A run of the experiments on LARS: what is measured changes nothing, and settings mean what they say."""

from __future__ import annotations

import json

import pytest
import torch

from experiments.core.images import load_images
from experiments.core.networks import build_network
from experiments.papers.lars.run import run_large_batch
from paceline.randomness import torch_generator

FEW = {"data": "digits", "shrink": 1, "images": 512, "held_out": 256}
RUN = {"choice": FEW, "model": "small-cnn-bn", "batch": 128, "rate": 0.1, "epochs": 3, "part": 64}


def run(**changed):
    return run_large_batch({**RUN, **changed})


@pytest.mark.parametrize("optimizer", ["SGD", "LARS"])
def test_points_of_the_curve_change_nothing_of_the_run(optimizer):
    plain, watched = (run(optimizer=optimizer, points=points) for points in (0, 3))
    for figure in ("accuracy", "held_out", "training_loss"):
        assert plain[figure] == watched[figure]
    assert plain["curve"] == []
    assert plain["first_ratios"] is None
    assert [point["epoch"] for point in watched["curve"]] == [1, 2, 3]
    assert watched["curve"][-1]["accuracy"] == watched["accuracy"]


def test_the_first_ratios_are_those_of_the_initial_weights():
    """The slow way: build the network, take one gradient of the first batch, divide two norms."""
    found = run(model="small-cnn", epochs=1, part=128, points=1)["first_ratios"]
    parts = load_images(**FEW)
    model = build_network("small-cnn", input_shape=parts.input_shape, classes=parts.classes, seed=0)
    chosen = torch.randperm(512, generator=torch_generator(0, "order", 0))[:128]
    loss = torch.nn.functional.cross_entropy(model(parts.training.inputs[chosen]), parts.training.targets[chosen])
    loss.backward()
    for name, ratio in found.items():
        parameter = model.get_parameter(name)
        assert ratio == pytest.approx(float(parameter.detach().norm() / parameter.grad.norm()), rel=1e-3)
    assert len(found) == 5


@pytest.mark.parametrize("augment", ["minimal", "extended"])
def test_augmentation_changes_what_is_learned_and_the_seed_decides_it(augment):
    assert run(augment=augment) == run(augment=augment)
    assert run(augment=augment)["training_loss"] != run()["training_loss"]


@pytest.mark.parametrize(
    "change",
    [
        {"warmup": 0.5},
        {"decay_from": "start"},
        {"weight_decay": 0.1},
        {"momentum": 0.5},
        {"trust_coefficient": 0.01},
        {"scale_all": True},
        {"seed": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_arrives_in_the_run(change):
    assert run(optimizer="LARS", **change)["training_loss"] != run(optimizer="LARS")["training_loss"]


@pytest.mark.parametrize("optimizer", ["SGD", "LARS"])
def test_a_batch_in_parts_trains_like_the_batch_at_once(optimizer):
    parts, whole = (run(model="small-cnn", optimizer=optimizer, batch=256, part=part) for part in (96, 256))
    assert parts["training_loss"] == pytest.approx(whole["training_loss"], rel=1e-4)


def test_a_run_that_diverges_has_no_figures_and_is_plain_values():
    found = run_large_batch(json.loads(json.dumps({**RUN, "rate": 1e30, "points": 2})))
    assert found["accuracy"] is found["held_out"] is found["training_loss"] is None
    assert found["first_ratios"]
    json.dumps(found, allow_nan=False)


def test_images_held_out_change_no_run_and_nothing_that_a_table_shows():
    before, targets = run(points=1), load_images(**FEW).held_out.targets
    kept = targets.clone()
    targets.add_(1).remainder_(10)
    try:
        after = run(points=1)
    finally:
        targets.copy_(kept)
    assert after.pop("held_out") != before.pop("held_out")
    assert after == before
