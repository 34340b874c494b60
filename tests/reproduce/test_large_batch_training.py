"""The loop of large-batch training: what is measured changes nothing, and settings mean what they say."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from paceline.models import build_model
from paceline.reproduce.large_batch_training import (
    OWN_MODELS,
    ImageChoice,
    LargeBatchRun,
    load_parts,
    loss_and_accuracy,
    model_location,
    point_epochs,
    run_large_batch,
    train,
)

FEW = ImageChoice(data="digits", shrink=1, images=512, held_out=256)
RUN = LargeBatchRun(choice=FEW, model="small-cnn-bn", batch=128, rate=0.1, epochs=3, part=64)


@pytest.mark.parametrize("optimizer", ["SGD", "LARS"])
def test_points_of_the_curve_change_nothing_of_the_run(optimizer):
    plain, watched = (train(dataclasses.replace(RUN, optimizer=optimizer, points=points)) for points in (0, 3))
    assert (plain.accuracy, plain.held_out, plain.training_loss) == (
        watched.accuracy,
        watched.held_out,
        watched.training_loss,
    )
    assert plain.curve == ()
    assert [point.epoch for point in watched.curve] == [1, 2, 3]
    assert watched.curve[-1].accuracy == watched.accuracy


def test_the_first_ratios_are_those_of_the_initial_weights():
    """The slow way: build the network, take one gradient of the first batch, divide two norms."""
    ending = train(dataclasses.replace(RUN, model="small-cnn", epochs=1, part=128, points=1))
    parts = load_parts(FEW)
    model = build_model(model_location("small-cnn"), input_shape=parts.input_shape, classes=parts.classes, seed=0)
    from paceline.randomness import torch_generator

    chosen = torch.randperm(512, generator=torch_generator(0, "order", 0))[:128]
    loss = torch.nn.functional.cross_entropy(model(parts.training.inputs[chosen]), parts.training.targets[chosen])
    loss.backward()
    for name, ratio in ending.first_ratios.items():
        parameter = model.get_parameter(name)
        assert ratio == pytest.approx(float(parameter.detach().norm() / parameter.grad.norm()), rel=1e-3)
    assert len(ending.first_ratios) == 5


@pytest.mark.parametrize("augment", ["minimal", "extended"])
def test_augmentation_changes_what_is_learned_and_the_seed_decides_it(augment):
    varied = dataclasses.replace(RUN, augment=augment)
    assert train(varied).training_loss == train(varied).training_loss
    assert train(varied).training_loss != train(RUN).training_loss


@pytest.mark.parametrize(
    "change",
    [{"warmup": 0.5}, {"decay_from": "start"}, {"weight_decay": 0.1}, {"trust_coefficient": 0.01}, {"scale_all": True}],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_of_the_optimiser_arrives_there(change):
    run = dataclasses.replace(RUN, optimizer="LARS")
    assert train(dataclasses.replace(run, **change)).training_loss != train(run).training_loss


@pytest.mark.parametrize("name", OWN_MODELS)
def test_the_own_networks_follow_the_seed_and_take_any_image(name):
    first, again, other = (
        build_model(model_location(name), input_shape=(3, 9, 7), classes=4, seed=seed) for seed in (1, 1, 2)
    )
    weights = [next(iter(model.parameters())) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first(torch.zeros(2, 3, 9, 7)).shape == (2, 4)


def test_a_job_returns_plain_values_even_of_a_run_that_diverges():
    settings = {**dataclasses.asdict(RUN), "rate": 1e30, "points": 2}
    found = run_large_batch(json.loads(json.dumps(settings)))
    assert found["accuracy"] is None
    json.dumps(found, allow_nan=False)


def test_losses_and_accuracy_are_means_over_the_first_images():
    parts, model = load_parts(FEW), torch.nn.Flatten()
    loss, right = loss_and_accuracy(model, parts.test, most=100)
    scores, targets = parts.test.inputs[:100].flatten(1), parts.test.targets[:100]
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(scores, targets)), rel=1e-5)
    assert right == pytest.approx(100 * float((scores.argmax(1) == targets).double().mean()))
    assert math.isfinite(loss)


@pytest.mark.parametrize(("epochs", "points"), [(1, 16), (10, 3), (64, 16), (5, 5), (3, 0)])
def test_points_end_with_the_run_and_are_no_more_than_asked(epochs, points):
    found = point_epochs(dataclasses.replace(RUN, epochs=epochs, points=points))
    assert len(found) <= points
    assert all(1 <= epoch <= epochs for epoch in found)
    assert not points or epochs in found
