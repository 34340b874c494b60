"""Which networks the engines are measured on, and the round of work they are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from paceline.models import build_model
from paceline.randomness import torch_generator
from paceline.workers.gradients import Assignment

WORKERS = 10
BATCH_SIZE = 32
BLOCKS = 4
CLASSES = 10

DIGITS = (1, 8, 8)
CIFAR = (3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network on an input shape, the speed-up that is asked of the engine, and how often it is measured.

    The peer is left out where it takes minutes.
    """

    model: str
    input_shape: tuple[int, int, int]
    norm: str | None = None
    at_least: float = 1.0
    repeats: int = 3
    peer: bool = True

    @property
    def name(self) -> str:
        """The network and its normalisation."""
        return f"{self.model} {self.norm}" if self.norm else self.model

    def build(self) -> nn.Module:
        """The network, with seeded parameters."""
        return build_model(self.model, input_shape=self.input_shape, classes=CLASSES, norm=self.norm, seed=0)

    def assignments(self, *, workers: int, batch_size: int) -> list[Assignment]:
        """A batch of random samples for every worker, all blocks done."""
        made = []
        for worker in range(workers):
            generator = torch_generator(0, "benchmark", worker)
            inputs = torch.randn(batch_size, *self.input_shape, generator=generator)
            targets = torch.randint(CLASSES, (batch_size,), generator=generator)
            made.append(Assignment(inputs=inputs, targets=targets, blocks=BLOCKS, blocks_done=BLOCKS))
        return made


CASES = (
    Case(model="mlp", input_shape=DIGITS, at_least=1.5, repeats=100),
    Case(model="lenet", input_shape=DIGITS, at_least=1.5, repeats=50),
    Case(model="mlp", input_shape=CIFAR, repeats=30),
    Case(model="lenet", input_shape=CIFAR, repeats=20),
    Case(model="vgg11", norm="none", input_shape=CIFAR),
    Case(model="vgg11", norm="group", input_shape=CIFAR, peer=False),
    Case(model="vgg11", norm="batch", input_shape=CIFAR),
    Case(model="resnet18", norm="group", input_shape=CIFAR, repeats=2, peer=False),
    Case(model="resnet18", norm="batch", input_shape=CIFAR, repeats=2, peer=False),
    Case(model="mobilenetv2", norm="group", input_shape=CIFAR, repeats=2, peer=False),
    Case(model="mobilenetv2", norm="batch", input_shape=CIFAR, repeats=2, peer=False),
    Case(model="alexnet", input_shape=CIFAR, peer=False),
)
