"""All workers' gradients in one pass against one worker after the other, for every network we build."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from paceline.models import build_model
from paceline.workers.engine import CheckedGradients, make_engine
from paceline.workers.flat import FlatModel
from paceline.workers.gradients import Assignment, LoopGradients
from paceline.workers.grouped import GroupedGradients

pytestmark = pytest.mark.slow

GREY, COLOUR = (1, 8, 8), (3, 16, 16)
NETWORKS = [
    ("mlp", None, GREY),
    ("lenet", None, GREY),
    ("vgg11", "batch", GREY),
    ("vgg11", "group", GREY),
    ("vgg11", "none", GREY),
    ("resnet18", "batch", GREY),
    ("resnet18", "group", GREY),
    ("wrn10", "batch", GREY),
    ("wrn10", "group", GREY),
    ("googlenet", "batch", GREY),
    ("googlenet", "none", GREY),
    ("densenet121", "batch", GREY),
    ("mobilenetv2", "batch", GREY),
    ("alexnet", None, COLOUR),
    ("alexnet-bn", "batch", COLOUR),
]


def assignments(shape, *, workers=2, batch_size=8, blocks=4, classes=10, seed=0):
    """One random batch per worker; the first is done completely, the others to a random block."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for worker in range(workers):
        done = blocks if worker == 0 else int(torch.randint(1, blocks + 1, (), generator=generator))
        made.append(
            Assignment(
                inputs=torch.randn(batch_size, *shape, generator=generator),
                targets=torch.randint(0, classes, (batch_size,), generator=generator),
                blocks=blocks,
                blocks_done=done,
            )
        )
    return made


def both(module, work):
    """The loop's result and the grouped one, from copies of one module."""
    loop, grouped = LoopGradients(copy.deepcopy(module)), GroupedGradients(copy.deepcopy(module))
    model = FlatModel(module)
    start = model.parameters.clone(), model.buffers
    return loop.compute(*start, work), grouped.compute(*start, work)


def apart(expected, found):
    """The largest distance of a worker's row, relative to the row's norm."""
    if expected.numel() == 0:
        return 0.0
    return float(((expected - found).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-12)).max())


@pytest.fixture
def double_precision():
    """Everything in float64, so that what is left between two results is a mistake and not rounding.

    In float32, blocks of two samples make deep BatchNorm networks so sensitive that two right answers differ by
    more than their size; a tolerance wide enough for that would let any mistake pass.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("name", "norm", "shape"), NETWORKS, ids=str)
def test_one_pass_gives_every_workers_gradient_buffers_and_loss(name, norm, shape):
    module = build_model(name, input_shape=shape, classes=10, norm=norm)
    work = assignments(shape, batch_size=4, blocks=2)  # of the second worker one block: time goes by the blocks
    assert [each.blocks_done for each in work] == [2, 1]
    expected, found = both(module, work)
    assert apart(expected.gradients, found.gradients) < 1e-9
    assert apart(expected.buffers, found.buffers) < 1e-6
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.loss_variances, expected.loss_variances, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_in_single_precision_they_differ_by_rounding_alone(name):
    module = build_model(name, input_shape=GREY, classes=10)
    expected, found = both(module, assignments(GREY, workers=4))
    assert apart(expected.gradients, found.gradients) < 1e-6
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=1e-6)


def small_network(**norm):
    layers = [nn.Conv2d(1, 6, 3, bias=True), nn.BatchNorm2d(6, **norm), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=3)]
    return nn.Sequential(*layers, nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(6 * 16, 10))


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "1.weight", "1.bias", "3.bias", "4.weight", "6.weight"])
def test_a_frozen_parameter_has_no_column_and_the_others_keep_theirs(frozen):
    module = small_network()
    module.get_parameter(frozen).requires_grad_(False)
    expected, found = both(module, assignments(GREY, workers=3))
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert found.gradients.shape == (3, trained)
    assert apart(expected.gradients, found.gradients) < 1e-12


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("frozen", ["0.weight", "2.weight", "5.weight"])
def test_a_frozen_weight_leaves_its_bias_a_gradient(frozen):
    """The bias of a frozen first layer was never asked for one: nothing told autograd that it wanted any."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 6, 3), nn.ReLU(), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 10)]
    module = nn.Sequential(*layers)
    module.get_parameter(frozen).requires_grad_(False)
    expected, found = both(module, assignments(GREY, workers=3))
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    before = names.index(frozen.replace("weight", "bias"))
    start = sum(module.get_parameter(name).numel() for name in names[:before])
    size = module.get_parameter(names[before]).numel()
    assert float(expected.gradients[:, start : start + size].norm()) > 1e-3, "the bias has a gradient to lose"
    assert apart(expected.gradients, found.gradients) < 1e-12


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("norm", [{"affine": False}, {"track_running_stats": False}, {"momentum": 0.5}], ids=str)
def test_every_kind_of_batch_norm_layer_is_known(norm):
    expected, found = both(small_network(**norm), assignments(GREY, workers=3))
    assert apart(expected.gradients, found.gradients) < 1e-12
    assert apart(expected.buffers, found.buffers) < 1e-6


@pytest.mark.usefixtures("double_precision")
def test_a_layer_that_is_called_twice_adds_both_gradients():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            return self.head(self.linear(torch.relu(self.linear(x.flatten(1)))))

    expected, found = both(Twice(), assignments(GREY, workers=3))
    assert apart(expected.gradients, found.gradients) < 1e-12


# -- models that must not be computed in one pass -----------------------------------------------------------------


class WeightUsedTwice(nn.Module):
    """Its layer's weight is used once more, behind the layer's back."""

    def __init__(self):
        super().__init__()
        self.linear, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(F.linear(torch.relu(self.linear(x.flatten(1))), self.linear.weight))


class MixesSamples(nn.Module):
    """What it says of a sample depends on the others of the batch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x):
        return self.linear((x - x.mean(0)).flatten(1))


class FoldsTheBatch(nn.Module):
    """Asks for the batch size it was built for, and fails with any other."""

    def __init__(self, batch_size):
        super().__init__()
        self.linear, self.batch_size = nn.Linear(64, 10), batch_size

    def forward(self, x):
        return self.linear(x.view(self.batch_size, 64))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args)


NOT_IN_ONE_PASS = [(WeightUsedTwice,), (MixesSamples,), (FoldsTheBatch, 8), (Recurrent,)]


@pytest.mark.parametrize("recipe", NOT_IN_ONE_PASS, ids=lambda recipe: recipe[0].__name__)
def test_a_model_that_does_not_qualify_gets_the_loops_gradients_in_every_round(recipe):
    module = seeded(*recipe)
    engine, loop = make_engine(module), LoopGradients(copy.deepcopy(module))
    start = loop.model.parameters.clone(), loop.model.buffers
    for seed in range(3):
        work = assignments(GREY, workers=3, blocks=1, seed=seed)
        assert torch.equal(engine.compute(*start, work).gradients, loop.compute(*start, work).gradients)


def test_dropout_goes_through_the_loop():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
    engine, loop = make_engine(module), LoopGradients(copy.deepcopy(module))
    start, work = (loop.model.parameters.clone(), loop.model.buffers), assignments(GREY, workers=3)
    torch.manual_seed(1)
    expected = loop.compute(*start, work).gradients
    torch.manual_seed(1)
    assert torch.equal(engine.compute(*start, work).gradients, expected)


def test_a_model_that_qualifies_is_compared_once_and_then_computed_in_one_pass():
    module = build_model("mlp", input_shape=GREY, classes=10)
    engine, loop = make_engine(module), LoopGradients(copy.deepcopy(module))
    start = loop.model.parameters.clone(), loop.model.buffers
    assert isinstance(engine, CheckedGradients)
    engine.compute(*start, assignments(GREY, workers=1))
    assert not engine.in_one_pass, "one worker's samples cannot be mixed up with another's: nothing was compared"
    for seed in range(2):
        work = assignments(GREY, workers=3, seed=seed)
        assert apart(loop.compute(*start, work).gradients, engine.compute(*start, work).gradients) < 1e-6
        assert engine.in_one_pass


def test_a_comparison_in_which_a_layer_had_no_gradient_yet_does_not_vouch_for_that_layer():
    """A head that begins at zero hides the body's gradient from the first comparison; it must not hide a mistake."""
    module = seeded(WeightUsedTwice)
    nn.init.zeros_(module.head.weight)
    engine, loop = make_engine(module), LoopGradients(copy.deepcopy(module))
    start, buffers = loop.model.parameters.clone(), loop.model.buffers
    engine.compute(start, buffers, assignments(GREY, workers=3, seed=0))
    moved = start + 0.1 * torch.randn(start.shape, generator=torch.Generator().manual_seed(5))
    work = assignments(GREY, workers=3, seed=1)
    expected, found = loop.compute(moved, buffers, work), engine.compute(moved, buffers, work)
    assert apart(expected.gradients, found.gradients) < 1e-6


def test_the_models_own_module_is_left_alone():
    module = small_network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    engine = make_engine(module)
    model = FlatModel(copy.deepcopy(module))
    engine.compute(model.parameters, model.buffers, assignments(GREY))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("network", ["plain", "batch norm"])
def test_batches_of_different_sizes_are_those_of_the_loop_and_alike_ones_still_share_a_pass(network):
    """Workers that have shares by their speed: some of one size, one of another, one that is alone with its own."""
    module = small_network() if network == "batch norm" else build_model("mlp", input_shape=GREY, classes=10)
    engine, loop = make_engine(module), LoopGradients(copy.deepcopy(module))
    start = loop.model.parameters.clone(), loop.model.buffers
    sizes = (16, 8, 12, 8, 16)
    for seed in range(2):
        work = [
            assignments(GREY, workers=len(sizes), batch_size=size, seed=seed)[place] for place, size in enumerate(sizes)
        ]
        expected, found = loop.compute(*start, work), engine.compute(*start, work)
        assert engine.in_one_pass
        assert apart(expected.gradients, found.gradients) < 1e-5
        assert apart(expected.buffers, found.buffers) < 1e-5
        torch.testing.assert_close(expected.losses, found.losses)
        torch.testing.assert_close(expected.loss_variances, found.loss_variances)
        assert [len(losses) for losses in found.sample_losses] == [each.samples_done for each in work]
        assert not engine.takes_one_pass(work)
        assert engine.takes_one_pass([work[0]] * 2)
