"""One run of `large-batch`: a plain loop; large batches are taken in parts (`paceline.Accumulate`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

from benchmarks.large_batch_cases import TUNING, WITH_LARS, Ending, Size, Task, model_location
from paceline.data import Samples, load_dataset
from paceline.data.reading import DatasetError
from paceline.models import build_model
from paceline.optim.accumulate import Accumulate
from paceline.optim.lars import LARS
from paceline.optim.schedules import warmup_poly
from paceline.randomness import torch_generator

EVALUATED_AT_ONCE = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Who sees what: runs train on `training`; rates are chosen by `held_out`; the table shows `test`."""

    training: Samples
    held_out: Samples
    test: Samples
    input_shape: tuple[int, int, int]
    classes: int


@lru_cache(maxsize=1)
def load(size: Size) -> Parts:
    """The images, once per process; nothing is ever fetched."""
    try:
        whole = load_dataset(size.data, download=False)
    except DatasetError as error:
        hint = f"; Debian has them: apt-get install dataset-{size.data}" if size.data == "fashion-mnist" else ""
        raise ValueError(f"{error}{hint}") from error
    if size.images + size.held_out > len(whole.train):
        raise ValueError(
            f"images and held_out must be at most the {len(whole.train)} training images of {size.data} "
            f"(images={size.images}, held_out={size.held_out})"
        )
    training = _shrunk(whole.train, size, slice(size.images))
    return Parts(
        training=training,
        held_out=_shrunk(whole.train, size, slice(len(whole.train) - size.held_out, None)),
        test=_shrunk(whole.test, size, slice(None)),
        input_shape=(training.inputs.shape[1], training.inputs.shape[2], training.inputs.shape[3]),
        classes=whole.classes,
    )


def _shrunk(samples: Samples, size: Size, which: slice) -> Samples:
    inputs = avg_pool2d(samples.inputs[which], size.shrink)
    return Samples(inputs=inputs.contiguous(memory_format=torch.channels_last), targets=samples.targets[which])


def train(size: Size, task: Task) -> Ending:
    """Carry out one run; it ends early if its loss is no longer finite."""
    started = time.perf_counter()
    parts, batch = load(size), task.cell.batch
    model = build_model(
        model_location(size.model), input_shape=parts.input_shape, classes=parts.classes, seed=task.seed
    )
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = _optimizer(size, task, model)
    steps = size.steps(batch)
    schedule = warmup_poly(optimizer, warmup_steps=round(size.warmup * steps), total_steps=steps)
    accumulate = Accumulate(model, steps=math.ceil(batch / size.part))
    epoch_loss = 0.0
    for epoch in range(size.epochs):
        order = torch.randperm(size.images, generator=torch_generator(task.seed, "order", epoch))
        epoch_loss = 0.0
        for inputs, targets in accumulate(_batches(parts.training, order, batch, size.part)):
            loss = cross_entropy(model(inputs), targets)
            accumulate.backward(loss)
            epoch_loss += loss.item() * len(targets)
            if not math.isfinite(epoch_loss):
                return Ending(accuracy=None, training_loss=None, seconds=time.perf_counter() - started)
            if accumulate.ready:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    measured = accuracy(model, parts.held_out if task.phase == TUNING else parts.test)
    seen = size.images // batch * batch
    return Ending(accuracy=measured, training_loss=epoch_loss / seen, seconds=time.perf_counter() - started)


def _optimizer(size: Size, task: Task, model: torch.nn.Module) -> torch.optim.Optimizer:
    if task.cell.optimizer == WITH_LARS:
        return LARS(
            model.parameters(),
            lr=task.rate,
            momentum=size.momentum,
            weight_decay=size.weight_decay,
            trust_coefficient=size.trust_coefficient,
        )
    return torch.optim.SGD(
        model.parameters(), lr=task.rate, momentum=size.momentum, weight_decay=size.weight_decay, fused=True
    )


def _batches(samples: Samples, order: Tensor, batch: int, part: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches in this order, each in equal parts but for its last."""
    for chosen in torch.split(order[: len(order) // batch * batch], batch):
        for piece in torch.split(chosen, part):
            yield samples.inputs[piece], samples.targets[piece]


@torch.inference_mode()
def accuracy(model: torch.nn.Module, samples: Samples) -> float:
    """Per cent of the images that are classified rightly, with the statistics of training."""
    model.eval()
    pieces = zip(*(torch.split(each, EVALUATED_AT_ONCE) for each in (samples.inputs, samples.targets)), strict=True)
    right = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in pieces)
    return 100 * right / len(samples)
