"""What holds for every network of the table, with every normalisation it offers."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.models import MODELS, build_model

pytestmark = pytest.mark.slow

EVERY = [(name, norm) for name, entry in MODELS.items() for norm in entry.norms or (None,)]
GROUPED = ["vgg11", "resnet18", "resnet50", "wrn10", "alexnet-bn", "googlenet", "densenet121", "mobilenetv2"]
SHAPES = [(1, 28, 28), (3, 32, 32), (3, 64, 64), (2, 1, 1)]
TRAINED = [
    *((name, norm, (2, 7, 9)) for name, norm in EVERY),
    *((name, None, (1, 8, 8)) for name in MODELS if name not in ("vgg19", "resnet50", "resnet101", "wrn22")),
]
OWNERS = (nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)
CLASSES = 5


@pytest.mark.parametrize("name", MODELS)
def test_any_input_gives_one_score_per_class(name):
    with torch.device("meta"), torch.no_grad():  # shapes alone: no numbers are drawn or computed
        for shape in SHAPES:
            model = build_model(name, input_shape=shape, classes=CLASSES).eval()
            assert model(torch.empty(2, *shape)).shape == (2, CLASSES), shape


@pytest.mark.parametrize(("name", "norm", "shape"), TRAINED)
def test_every_parameter_gets_a_finite_gradient_and_nothing_is_drawn(name, norm, shape):
    model = build_model(name, input_shape=shape, classes=CLASSES, norm=norm).train()
    images = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    random_state = torch.get_rng_state()
    scores = model(images)
    assert scores.shape == (3, CLASSES)
    F.cross_entropy(scores, torch.tensor([0, 1, 4])).backward()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert 0 < float(scores.detach().std()) < 30
    for place, parameter in model.named_parameters():
        assert parameter.grad is not None, place
        assert bool(parameter.grad.isfinite().all()), place
    assert sum(float(parameter.grad.abs().sum()) for parameter in model.parameters()) > 0


@pytest.mark.parametrize("name", ["mlp", "lenet", "vgg11", "alexnet", "mobilenetv2"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 64, 64)])
def test_larger_images_run_for_real(name, shape):
    model = build_model(name, input_shape=shape, classes=CLASSES)
    model(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "norm"), EVERY)
def test_layers_are_of_the_kinds_that_workers_can_group(name, norm):
    """Parameters live in known layers, each used in one place; nothing is in place; nothing is random."""
    with torch.device("meta"):
        model = build_model(name, input_shape=(3, 32, 32), classes=CLASSES, norm=norm)
    assert isinstance(model, nn.Sequential)
    for place, layer in model.named_modules(remove_duplicate=False):
        assert isinstance(layer, OWNERS) or not list(layer.parameters(recurse=False)), place
        assert not getattr(layer, "inplace", False), place
        assert "Dropout" not in type(layer).__name__, place
    kinds = {type(layer) for layer in model.modules()} & {nn.BatchNorm2d, nn.GroupNorm}
    assert kinds == {"batch": {nn.BatchNorm2d}, "group": {nn.GroupNorm}}.get(norm, set())
    every_place = [layer for _, layer in model.named_modules(remove_duplicate=False)]
    assert len(every_place) == len(set(every_place))


@pytest.mark.parametrize("name", GROUPED)
def test_with_group_norm_a_sample_does_not_feel_its_batch(name):
    model = build_model(name, input_shape=(1, 8, 8), classes=CLASSES, norm="group").train()
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        together, alone = model(images), model(images[:1])
    torch.testing.assert_close(together[:1], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["mlp", "lenet", "vgg11", "alexnet-bn"])
def test_a_few_steps_learn_a_handful_of_images(name):
    model = build_model(name, input_shape=(1, 8, 8), classes=4).train()
    images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(8) % 4
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(10):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
