"""One training with a large batch: a plain loop, as the experiments on LARS and `benchmarks large-batch` need it.

    training images ──> batches of B, in parts (paceline.Accumulate) ──> SGD or LARS, warm-up, then (1 - s)^2
    held-out images     choose rates                      measured at the end
    test images         are what tables show              measured at the end, and at `points` moments with the losses

Laboratory size: a small CNN with and without batch normalisation, and the first 16,384 images of Fashion-MNIST,
averaged to 14x14 pixels. At a batch of 8,192 a run of 64 epochs has 128 steps, where the paper's has 15,600.

Nothing here depends on anything but its settings: the order of the images, their augmentation and the initial weights
follow from the seed and the place alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from paceline.data import (
    Augmentation,
    DatasetError,
    ExtendedAugmentation,
    NoAugmentation,
    PadCropFlip,
    Samples,
    load_dataset,
)
from paceline.models import build_model
from paceline.models.googlenet import Inception, Widths, googlenet
from paceline.models.layers import classifier, convolution, initialise
from paceline.optim.accumulate import Accumulate
from paceline.optim.lars import LARS
from paceline.optim.ratios import layer_ratios
from paceline.optim.schedules import warmup_poly
from paceline.randomness import torch_generator

WITH_SGD, WITH_LARS = "SGD", "LARS"
OPTIMIZERS = (WITH_SGD, WITH_LARS)
EVALUATED_AT_ONCE = 1000
MOST_MEASURED = 5_000  # training images whose loss is measured for a point of a curve

# -- networks ----------------------------------------------------------------------------------------------------------


def small_cnn(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build a small AlexNet: two convolutions that halve each side, three linear layers, no normalisation.

    >>> len(list(small_cnn(input_shape=(1, 14, 14), classes=10).parameters()))
    10
    """
    return _network(input_shape, classes, normalised=False)


def small_cnn_bn(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build a small AlexNet-BN: the same with batch normalisation after each convolution, which then has no bias.

    >>> len(list(small_cnn_bn(input_shape=(1, 14, 14), classes=10).parameters()))
    12
    """
    return _network(input_shape, classes, normalised=True)


def _network(input_shape: tuple[int, int, int], classes: int, *, normalised: bool) -> nn.Module:
    channels, height, width = input_shape
    model = nn.Sequential(
        nn.Conv2d(channels, 8, 5, stride=2, padding=2, bias=not normalised),
        nn.BatchNorm2d(8) if normalised else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=not normalised),
        nn.BatchNorm2d(16) if normalised else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * math.ceil(height / 4) * math.ceil(width / 4), 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
    initialise(model)
    return model


def small_googlenet(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build a small GoogLeNet: a stem that halves each side, three inception modules, no normalisation.

    >>> small_googlenet(input_shape=(1, 14, 14), classes=10)(torch.zeros(2, 1, 14, 14)).shape
    torch.Size([2, 10])
    """
    widths = (Widths(8, 8, 12, 4, 6, 6), Widths(12, 8, 16, 4, 8, 8), Widths(16, 12, 24, 6, 12, 12))
    layers: list[nn.Module] = [nn.Sequential(convolution(input_shape[0], 16, 5, stride=2, bias=True), nn.ReLU())]
    channels = 16
    for index, width in enumerate(widths):
        if index == 1:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        layers.append(Inception(channels, width, norm="none"))
        channels = width.total
    model = nn.Sequential(*layers, classifier(channels, classes))
    initialise(model)
    return model


def plain_googlenet(*, input_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build GoogLeNet without normalisation, which the LARS paper's table 6 trains.

    >>> len(plain_googlenet(input_shape=(1, 8, 8), classes=10))
    13
    """
    model = googlenet(input_shape=input_shape, classes=classes, norm="none")
    initialise(model)
    return model


OWN_MODELS = {
    "small-cnn": small_cnn,
    "small-cnn-bn": small_cnn_bn,
    "small-googlenet": small_googlenet,
    "plain-googlenet": plain_googlenet,
}


def model_location(name: str) -> str:
    """Return what `build_model` calls one of ours; other names are its own.

    >>> model_location("small-cnn"), model_location("lenet")
    ('paceline.reproduce.large_batch_training:small_cnn', 'lenet')
    """
    own = OWN_MODELS.get(name)
    return f"{own.__module__}:{own.__name__}" if own else name


# -- images ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImageChoice:
    """Which images are trained on: the first `images`; the last `held_out` of the training images are for tuning.

    >>> ImageChoice().images
    16384
    """

    data: str = "fashion-mnist"
    shrink: int = 2  # images are averaged over squares of so many pixels
    images: int = 16_384
    held_out: int = 10_000


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageParts:
    """Who sees what: runs train on `training`; rates are chosen by `held_out`; tables show `test`.

    >>> load_parts(ImageChoice(data="digits", shrink=1, images=512, held_out=512)).classes
    10
    """

    training: Samples
    held_out: Samples
    test: Samples
    input_shape: tuple[int, int, int]
    classes: int


@lru_cache(maxsize=1)
def load_parts(choice: ImageChoice) -> ImageParts:
    """Load the images, once per process; nothing is ever fetched.

    >>> load_parts(ImageChoice(data="digits", shrink=2, images=512, held_out=512)).input_shape
    (1, 4, 4)
    """
    try:
        whole = load_dataset(choice.data, download=False)
    except DatasetError as error:
        hint = f"; Debian has them: apt-get install dataset-{choice.data}" if choice.data == "fashion-mnist" else ""
        raise ValueError(f"{error}{hint}") from error
    if choice.images + choice.held_out > len(whole.train):
        raise ValueError(
            f"images and held_out must be at most the {len(whole.train)} training images of {choice.data} "
            f"(images={choice.images}, held_out={choice.held_out})"
        )
    training = _shrunk(whole.train, choice, slice(choice.images))
    return ImageParts(
        training=training,
        held_out=_shrunk(whole.train, choice, slice(len(whole.train) - choice.held_out, None)),
        test=_shrunk(whole.test, choice, slice(None)),
        input_shape=(training.inputs.shape[1], training.inputs.shape[2], training.inputs.shape[3]),
        classes=whole.classes,
    )


def _shrunk(samples: Samples, choice: ImageChoice, which: slice) -> Samples:
    inputs = avg_pool2d(samples.inputs[which], choice.shrink)
    return Samples(inputs=inputs.contiguous(memory_format=torch.channels_last), targets=samples.targets[which])


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LargeBatchRun:
    """One training, as plain settings.

    `warmup` is a share of the steps. LARS has a trust coefficient that suits rates below 1: a layer moves by rate *
    trust of its length, and what is not scaled (biases, scales of normalisation) takes the rate as it is. With
    `scale_all` those are scaled too, as in the paper, and its rates of 2 to 40 with trust 0.001 can be borne. `points`
    is at how many moments the losses, the test accuracy and the layers' ratios are noted.

    >>> LargeBatchRun(batch=512, rate=0.1, epochs=2, choice=ImageChoice(images=1100)).steps
    4
    """

    choice: ImageChoice = ImageChoice()
    model: str = "small-cnn"
    optimizer: str = WITH_SGD
    batch: int
    rate: float
    epochs: int = 64
    seed: int = 0
    part: int = 1024  # larger batches are taken in parts of so many
    momentum: float = 0.9
    weight_decay: float = 5e-4
    trust_coefficient: float = 0.1
    scale_all: bool = False
    warmup: float = 0.1
    decay_from: Literal["warmup", "start"] = "warmup"
    augment: Literal["none", "minimal", "extended"] = "none"
    points: int = 0

    @property
    def steps(self) -> int:
        """The steps of the run: whole batches alone, so an epoch leaves out what does not fill one."""
        return self.epochs * (self.choice.images // self.batch)


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """What a run was after so many epochs: losses by the model as it is evaluated, and the test accuracy in per cent.

    `ratios` are |w| / |gradient| of the weights, by the last gradient before; `train_loss` is over the first images.

    >>> CurvePoint(epoch=1, train_loss=0.5, test_loss=0.6, accuracy=80.0, ratios={}).gap
    0.1
    """

    epoch: int
    train_loss: float
    test_loss: float
    accuracy: float
    ratios: dict[str, float]

    @property
    def gap(self) -> float:
        """How much higher the test loss is."""
        return round(self.test_loss - self.train_loss, 9)


@dataclass(frozen=True, kw_only=True)
class LargeBatchEnding:
    """What a run came to: accuracies in per cent, which are None where it diverged.

    >>> LargeBatchEnding(held_out=None, accuracy=None, training_loss=None, seconds=1.0).curve
    ()
    """

    held_out: float | None
    accuracy: float | None
    training_loss: float | None  # mean over the last epoch
    seconds: float
    first_ratios: dict[str, float] | None = None
    curve: tuple[CurvePoint, ...] = ()


def train(run: LargeBatchRun, *, measured: tuple[str, ...] = ("held_out", "test")) -> LargeBatchEnding:
    """Carry out one run; it ends early if its loss is no longer finite.

    >>> few = ImageChoice(data="digits", shrink=1, images=512, held_out=256)
    >>> ending = train(LargeBatchRun(choice=few, batch=128, rate=0.1, epochs=2, optimizer="LARS", points=2))
    >>> [point.epoch for point in ending.curve], ending.accuracy == ending.curve[-1].accuracy
    ([1, 2], True)
    """
    started = time.perf_counter()
    parts, images = load_parts(run.choice), run.choice.images
    model = build_model(model_location(run.model), input_shape=parts.input_shape, classes=parts.classes, seed=run.seed)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = _optimizer(run, model)
    schedule = warmup_poly(
        optimizer,
        warmup_steps=round(run.warmup * run.steps),
        total_steps=run.steps,
        decay_from=run.decay_from,
    )
    accumulate = Accumulate(model, steps=math.ceil(run.batch / run.part))
    vary, moments = _augmentation(run), point_epochs(run)
    curve: list[CurvePoint] = []
    first_ratios, ratios = None, dict[str, float]()
    epoch_loss = 0.0
    for epoch in range(run.epochs):
        order = torch.randperm(images, generator=torch_generator(run.seed, "order", epoch))
        drawn = torch_generator(run.seed, "augment", epoch)
        epoch_loss, steps_left = 0.0, images // run.batch
        for inputs, targets in accumulate(_batches(parts.training, order, run.batch, run.part)):
            loss = cross_entropy(model(vary(inputs, drawn)), targets)
            accumulate.backward(loss)
            epoch_loss += loss.item() * len(targets)
            if not math.isfinite(epoch_loss):
                return LargeBatchEnding(
                    held_out=None,
                    accuracy=None,
                    training_loss=None,
                    seconds=time.perf_counter() - started,
                    first_ratios=first_ratios,
                    curve=tuple(curve),
                )
            if accumulate.ready:
                steps_left -= 1
                if run.points and (first_ratios is None or (steps_left == 0 and epoch + 1 in moments)):
                    ratios = weight_ratios(model)
                    first_ratios = first_ratios or ratios
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if epoch + 1 in moments:
            curve += _point(model, parts, epoch + 1, ratios)
            model.train()
    found = {name: accuracy(model, getattr(parts, name)) for name in measured}
    seen = images // run.batch * run.batch
    return LargeBatchEnding(
        held_out=found.get("held_out"),
        accuracy=found.get("test"),
        training_loss=epoch_loss / seen,
        seconds=time.perf_counter() - started,
        first_ratios=first_ratios,
        curve=tuple(curve),
    )


def point_epochs(run: LargeBatchRun) -> set[int]:
    """Return after which epochs a point of the curve is taken: the last, and as many before it as were asked for.

    >>> sorted(point_epochs(LargeBatchRun(batch=128, rate=0.1, epochs=10, points=4)))
    [2, 5, 8, 10]
    """
    return {max(1, round((index + 1) * run.epochs / run.points)) for index in range(run.points)}


def weight_ratios(model: nn.Module) -> dict[str, float]:
    """Return |w| / |gradient| of every weight that has both, by its name.

    >>> layer = nn.Linear(1, 1)
    >>> _ = nn.init.ones_(layer.weight)
    >>> layer(torch.full((1, 1), 2.0)).sum().backward()
    >>> weight_ratios(layer)
    {'weight': 0.5}
    """
    rows = layer_ratios(model).only("weight")
    return {row.name: float(row.ratio) for row in rows if row.counts and row.ratio is not None}


def _point(model: nn.Module, parts: ImageParts, epoch: int, ratios: dict[str, float]) -> list[CurvePoint]:
    """Return a point of the curve; none where a loss is no number."""
    train_loss, _ = loss_and_accuracy(model, parts.training, most=MOST_MEASURED)
    test_loss, right = loss_and_accuracy(model, parts.test)
    if not (math.isfinite(train_loss) and math.isfinite(test_loss)):
        return []
    return [CurvePoint(epoch=epoch, train_loss=train_loss, test_loss=test_loss, accuracy=right, ratios=ratios)]


def _augmentation(run: LargeBatchRun) -> Augmentation:
    if run.augment == "none":
        return NoAugmentation()
    shift = max(1, load_parts(run.choice).input_shape[1] // 8)  # as 4 pixels are of 32
    return PadCropFlip(padding=shift) if run.augment == "minimal" else ExtendedAugmentation()


def _optimizer(run: LargeBatchRun, model: nn.Module) -> torch.optim.Optimizer:
    if run.optimizer == WITH_LARS:
        return LARS(
            model.parameters(),
            lr=run.rate,
            momentum=run.momentum,
            weight_decay=run.weight_decay,
            trust_coefficient=run.trust_coefficient,
            exclude_bias_and_norm=not run.scale_all,
        )
    return torch.optim.SGD(
        model.parameters(), lr=run.rate, momentum=run.momentum, weight_decay=run.weight_decay, fused=True
    )


def _batches(samples: Samples, order: Tensor, batch: int, part: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield whole batches in this order, each in equal parts but for its last."""
    for chosen in torch.split(order[: len(order) // batch * batch], batch):
        for piece in torch.split(chosen, part):
            yield samples.inputs[piece], samples.targets[piece]


def accuracy(model: nn.Module, samples: Samples) -> float:
    """Return the per cent of the images that are classified rightly, with the statistics of training.

    >>> images = Samples(inputs=torch.tensor([[0.0, 1.0], [1.0, 0.0]]), targets=torch.tensor([1, 1]))
    >>> accuracy(nn.Identity(), images)
    50.0
    """
    return loss_and_accuracy(model, samples)[1]


@torch.inference_mode()
def loss_and_accuracy(model: nn.Module, samples: Samples, *, most: int | None = None) -> tuple[float, float]:
    """Return the mean loss of the first images, and the per cent that are classified rightly.

    >>> images = Samples(inputs=torch.zeros(4, 2), targets=torch.tensor([0, 0, 0, 1]))
    >>> loss, right = loss_and_accuracy(nn.Identity(), images)
    >>> round(loss, 3), right
    (0.693, 75.0)
    """
    model.eval()
    losses, right, count = 0.0, 0, 0
    for inputs, targets in samples.parts(EVALUATED_AT_ONCE, most=most):
        scores = model(inputs)
        losses += float(cross_entropy(scores, targets, reduction="sum"))
        right += int((scores.argmax(1) == targets).sum())
        count += len(targets)
    return losses / count, 100 * right / count


def run_large_batch(settings: Any) -> dict[str, Any]:
    """Carry out the run that the settings describe, as a job of an experiment: plain values in, plain values out.

    >>> few = {"data": "digits", "shrink": 1, "images": 512, "held_out": 256}
    >>> found = run_large_batch({"choice": few, "batch": 128, "rate": 0.1, "epochs": 1, "points": 1})
    >>> sorted(found), found["curve"][0]["epoch"]
    (['accuracy', 'curve', 'first_ratios', 'held_out', 'training_loss'], 1)
    """
    given = dict(settings)
    ending = train(LargeBatchRun(**{**given, "choice": ImageChoice(**given["choice"])}))
    return {
        "held_out": ending.held_out,
        "accuracy": ending.accuracy,
        "training_loss": ending.training_loss,
        "first_ratios": ending.first_ratios,
        "curve": [vars(point) for point in ending.curve],
    }
