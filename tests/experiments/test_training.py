"""The loop of small runs, their networks and their images: what is asked arrives, and what diverges ends nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from experiments.core import images
from experiments.core.images import augmentation, load_images
from experiments.core.networks import NETWORKS, build_network
from experiments.core.training import Loop, loss_and_accuracy
from paceline.data import DatasetError, Samples
from paceline.optim.accumulate import Accumulate

SAMPLES = Samples(inputs=torch.arange(32.0).view(8, 1, 2, 2) / 32, targets=torch.arange(8) % 2)


def loop(*, lr=0.1, **parts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batches = parts.pop("batches", lambda epoch: torch.arange(8).split(2))
    if "parts_of_a_step" in parts:
        parts["accumulate"] = Accumulate(model, steps=parts.pop("parts_of_a_step"))
    return Loop(model=model, optimizer=optimizer, samples=SAMPLES, seed=0, batches=batches, **parts)


def weights(trained):
    return trained.model[1].weight.detach()


def test_a_step_hears_its_epoch_and_which_share_of_the_epoch_is_done():
    heard, after = [], []
    trained = loop(before_step=lambda *told: heard.append(told), after_step=lambda: after.append(1))
    trained.epoch(0)
    trained.epoch(1)
    assert heard == [(epoch, share) for epoch in (0, 1) for share in (0.0, 0.25, 0.5, 0.75)]
    assert len(after) == trained.steps == 8
    assert trained.seen == 16


def test_the_rate_that_is_set_before_a_step_is_the_rate_of_this_step():
    def stop(epoch, share):
        trained.optimizer.param_groups[0]["lr"] = 0.0

    trained = loop(before_step=stop)
    before = weights(trained).clone()
    assert trained.epoch(0) > 0
    assert torch.equal(weights(trained), before)


def test_parts_of_a_batch_are_one_step_with_the_same_gradient():
    whole = loop(batches=lambda epoch: torch.arange(8).split(4))
    parted = loop(parts_of_a_step=2)
    totals = [each.epoch(0) for each in (whole, parted)]
    assert parted.steps == whole.steps == 2
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    assert torch.allclose(weights(whole), weights(parted), atol=1e-6)


def test_a_share_counts_steps_and_not_parts():
    heard = []
    loop(parts_of_a_step=2, before_step=lambda epoch, share: heard.append(share)).epoch(0)
    assert heard == [0.0, 0.5]


def test_a_loss_for_each_sample_is_observed_and_weighed():
    heard = []

    def observe(losses):
        heard.append(losses.detach())
        return (losses * torch.tensor([2.0, 0.0])).mean()

    weighed = loop(observe=observe)
    weighed.epoch(0)
    assert [each.shape for each in heard] == [(2,)] * 4
    first = loop(batches=lambda epoch: [[0], [2], [4], [6]])
    first.epoch(0)
    assert torch.allclose(weights(weighed), weights(first), atol=1e-6)
    assert weighed.sampling.wall > 0


@pytest.mark.parametrize("observed", [False, True])
def test_a_run_that_diverges_is_nan_at_once_and_its_observer_hears_nothing_of_it(observed):
    heard = []

    def observe(losses):
        heard.append(losses.detach())
        return losses.mean()

    diverging = loop(lr=math.inf, observe=observe if observed else None)
    assert math.isnan(diverging.epoch(0))
    assert diverging.steps < 4
    assert all(losses.isfinite().all() for losses in heard)
    assert len(heard) == (diverging.steps if observed else 0)


def test_how_images_are_varied_follows_from_the_seed_and_the_epoch():
    drawn = []

    def vary(inputs, generator):
        drawn.append(float(torch.rand((), generator=generator)))
        return inputs

    for _ in range(2):
        trained = loop(vary=vary)
        trained.epoch(0)
        trained.epoch(1)
    assert drawn[:8] == drawn[8:]
    assert len(set(drawn)) == 8


def test_losses_and_accuracy_are_means_over_the_first_images():
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(3000, 10, generator=generator), torch.randint(10, (3000,), generator=generator)
    loss, right = loss_and_accuracy(nn.Identity(), Samples(inputs=inputs, targets=targets), most=2500)
    scores, wanted = inputs[:2500], targets[:2500]
    assert loss == pytest.approx(float(nn.functional.cross_entropy(scores, wanted)), rel=1e-5)
    assert right == pytest.approx(100 * float((scores.argmax(1) == wanted).double().mean()))


# -- networks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_follow_the_seed_and_take_any_image(name):
    first, again, other = (build_network(name, input_shape=(3, 9, 7), classes=4, seed=seed) for seed in (1, 1, 2))
    drawn = [next(iter(model.parameters())) for model in (first, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert first(torch.zeros(2, 3, 9, 7)).shape == (2, 4)


# -- images ------------------------------------------------------------------------------------------------------------


def test_images_held_out_are_neither_trained_on_nor_shown():
    parts = load_images("digits", images=512, held_out=512)
    seen = [{image.numpy().tobytes() for image in samples.inputs} for samples in (parts.training, parts.held_out)]
    assert [len(samples) for samples in (parts.training, parts.held_out)] == [512, 512]
    assert not seen[0] & seen[1]
    assert parts.test.inputs.data_ptr() not in (parts.training.inputs.data_ptr(), parts.held_out.inputs.data_ptr())


def test_images_are_averaged_over_squares_and_have_a_deviation_of_1_where_asked():
    plain, normalised = (load_images("digits", images=1000, shrink=2, normalise=each) for each in (False, True))
    assert plain.input_shape == (1, 4, 4)
    assert float(plain.training.inputs.std()) < 0.95
    assert float(normalised.training.inputs.std()) == pytest.approx(1.0, abs=1e-4)
    assert float(normalised.training.inputs.mean()) == pytest.approx(0.0, abs=1e-4)
    assert len(normalised.test) == len(plain.test)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"images": 1501}, r"images must be at most the 1500 training images of digits \(images=1501\)"),
        ({"images": 1000, "held_out": 501}, r"images and held_out must be .* \(images=1000, held_out=501\)"),
    ],
)
def test_more_images_than_there_are_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        load_images("digits", **asked)


@pytest.mark.parametrize(("data", "debian"), [("fashion-mnist", True), ("cifar10", False)])
def test_images_that_are_missing_are_refused_with_where_to_get_them(data, debian, monkeypatch):
    def missing(name, *, download):
        assert not download
        raise DatasetError(f"{name} is not there")

    monkeypatch.setattr(images, "load_dataset", missing)
    with pytest.raises(ValueError, match=r"is not there, or name another folder in \$PACELINE_DATA") as refused:
        load_images(data, images=10)
    assert ("apt-get install dataset-fashion-mnist" in str(refused.value)) == debian


@pytest.mark.parametrize("name", ["none", "minimal", "extended"])
def test_varied_images_have_the_size_that_they_had(name):
    plain = torch.rand(4, 1, 8, 8)
    varied = augmentation(name, 8)(plain, torch.Generator().manual_seed(0))
    assert varied.shape == plain.shape
    assert torch.equal(varied, plain) == (name == "none")
