"""What the pipeline benchmarks cut: a model by its description, what its layers cost, and plans with a given cut.

    alike, 2 stages          x + offset ──> narrow ─> wide ─> ... ─> wide ─> narrow │ narrow ─> wide ─> ... ─> narrow
                                            └──────────── stage 0 ────────────────┘ └────────── stage 1 ───────────┘

The stages of `alike` are the same layers, so they take equally long; what crosses is small beside what they compute.
The offset is trained, so that backward of the first layer computes the gradient of its inputs as all others do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.models import build_model
from paceline.pipeline.devices import Device
from paceline.pipeline.graph import ModelGraph
from paceline.pipeline.measuring import OnRound, measure
from paceline.pipeline.placement import priced
from paceline.pipeline.plan import Batch, Plan
from paceline.pipeline.profile import Profile
from paceline.pipeline.schedules import in_flight

ALIKE = "alike"
CLASSES = 10
IMAGE = (3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and the samples of a micro-batch; sizes are of `alike` only, `side` of images only."""

    model: str
    microbatch: int
    stages: int = 2
    narrow: int = 64
    wide: int = 512
    depth: int = 40
    side: int = IMAGE[1]
    seed: int = 0

    def built(self) -> nn.Module:
        """The model, the same in every process."""
        torch.manual_seed(self.seed)
        if self.model != ALIKE:
            return build_model(self.model, input_shape=(IMAGE[0], self.side, self.side), classes=CLASSES)
        layers: list[nn.Module] = [Offset(self.narrow)]
        for _ in range(self.stages):
            layers += self._stage()
        return nn.Sequential(*layers)

    def _stage(self) -> list[nn.Module]:
        widths = [self.narrow, *[self.wide] * (self.depth + 1), self.narrow]
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            linear = nn.Linear(inputs, outputs)
            nn.init.kaiming_normal_(linear.weight)  # else numbers fade with depth, and become slow to compute with
            layers += [linear, nn.ReLU()]
        return layers

    def cuts(self, chunks: int = 1) -> tuple[int, ...]:
        """Where pieces of `alike` are equal: the offset belongs to the first."""
        layers, pieces = 2 * (self.depth + 2) * self.stages, self.stages * chunks
        return tuple(1 + round(number * layers / pieces) for number in range(1, pieces))

    def sized(self, microbatch: int | None, seed: int) -> Subject:
        """The same with another micro-batch, if one is given, and another seed."""
        return dataclasses.replace(self, microbatch=microbatch or self.microbatch, seed=seed)

    def batch(self, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs and classes."""
        draws, samples = torch.Generator().manual_seed(self.seed), microbatches * self.microbatch
        shape = (self.narrow,) if self.model == ALIKE else (IMAGE[0], self.side, self.side)
        inputs = torch.randn(samples, *shape, generator=draws)
        return inputs, torch.randint(CLASSES, (samples,), generator=draws)


class Offset(nn.Module):
    """Adds what is trained to its inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return inputs + self.offset


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """A model, its layers, and what they cost with one thread."""

    subject: Subject
    graph: ModelGraph
    inputs: tuple[torch.Tensor, ...]
    profile: Profile

    def plan(
        self, cuts: Sequence[int], *, stages: int, microbatches: int, schedule: str = "1f1b", chunks: int = 1
    ) -> Plan:
        """The plan with this cut, on devices alike and links that cost nothing."""
        placement = priced(
            self.profile,
            cuts,
            (Device(),) * stages,
            microbatches=microbatches,
            in_flight=in_flight(schedule, stages, microbatches, chunks),
            chunks=chunks,
        )
        return Plan(
            model=self.subject.model,
            profile=self.profile,
            placement=placement,
            batch=Batch(
                samples=microbatches * self.subject.microbatch,
                shapes=tuple(tuple(each.shape) for each in self.inputs),
                dtypes=tuple(str(each.dtype).removeprefix("torch.") for each in self.inputs),
            ),
            microbatches=microbatches,
            schedule=schedule,
            fingerprint=self.graph.fingerprint,
        )


def measured(subject: Subject, *, repeats: int, on_round: OnRound = lambda done, of: None) -> Measured:
    """Build, trace and measure, with one thread."""
    model, (inputs, _) = subject.built(), subject.batch(1)
    graph = ModelGraph(model, (inputs,))
    with one_thread():
        profile = measure(model, (inputs,), graph=graph, repeats=repeats, seconds=120.0, on_round=on_round)
    return Measured(subject=subject, graph=graph, inputs=(inputs,), profile=profile)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """What is computed within is computed with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
