"""A model is cut into stages in three ways, its layers are measured, and the pieces are timed.

    equal counts   as many layers in every stage, which is what people do by hand
    torchgpipe     the block partition by measured time, as its authors state it
    ours           the exact cut

    alike, 2 stages          x + offset ──> narrow ─> wide ─> ... ─> wide ─> narrow │ narrow ─> wide ─> ... ─> narrow
                                            └──────────── stage 0 ────────────────┘ └────────── stage 1 ───────────┘

The stages of `alike` are the same layers, so they take equally long; what crosses is small beside what they compute.
The offset is trained, so that backward of the first layer computes the gradient of its inputs as all others do.

A piece is run by itself, as a device of a pipeline runs it: micro-batch after micro-batch, forward and then backward
with a gradient for each of its outputs, on the inputs that it has in the model. The cuts take turns, so that whatever
disturbs the machine disturbs all; of each piece the best time counts, and the median is kept beside it. One thread does
it all and waits for nothing, so its CPU time is its time on a machine with nothing else to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from experiments.core.cuts import balanced, equal_counts
from paceline.lookup import unknown
from paceline.models import build_model
from paceline.pipeline.devices import Device
from paceline.pipeline.graph import ModelGraph, PieceModule, cut_pieces
from paceline.pipeline.measuring import measure
from paceline.pipeline.placement import place, priced
from paceline.pipeline.plan import Batch, Plan
from paceline.pipeline.profile import Profile
from paceline.pipeline.schedules import in_flight

EQUAL, BLOCKS, OURS = "equal counts", "torchgpipe", "ours"
MICROBATCHES_IN_A_ROW = 2

ALIKE = "alike"
CLASSES = 10
IMAGE = (3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A subject is a model and the samples of a micro-batch; sizes are of `alike` only, `side` of images only.

    >>> Subject(model="alike", microbatch=8, stages=2, depth=1).cuts()
    (7,)
    """

    model: str
    microbatch: int
    stages: int = 2
    narrow: int = 64
    wide: int = 512
    depth: int = 40
    side: int = IMAGE[1]
    seed: int = 0

    def built(self) -> nn.Module:
        """Return the model, the same in every process."""
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
        """Return where pieces of `alike` are equal: the offset belongs to the first."""
        layers, pieces = 2 * (self.depth + 2) * self.stages, self.stages * chunks
        return tuple(1 + round(number * layers / pieces) for number in range(1, pieces))

    def sized(self, microbatch: int, seed: int) -> Subject:
        """Return the same subject with another micro-batch, if it is not 0, and another seed."""
        return dataclasses.replace(self, microbatch=microbatch or self.microbatch, seed=seed)

    def batch(self, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random inputs and classes."""
        draws, samples = torch.Generator().manual_seed(self.seed), microbatches * self.microbatch
        shape = (self.narrow,) if self.model == ALIKE else (IMAGE[0], self.side, self.side)
        inputs = torch.randn(samples, *shape, generator=draws)
        return inputs, torch.randint(CLASSES, (samples,), generator=draws)


def subjects_of(
    choices: Sequence[Subject], only: Sequence[str], microbatch: int = 0, seed: int = 0
) -> tuple[Subject, ...]:
    """Return the subjects whose models are named, all if none is, with another micro-batch (0: their own) and a seed.

    >>> subjects_of([Subject(model="lenet", microbatch=2)], ["vgg"])
    Traceback (most recent call last):
    ValueError: unknown network 'vgg'; choose from lenet
    """
    names = [each.model for each in choices]
    for name in only:
        if name not in names:
            raise unknown("network", name, names)
    return tuple(each.sized(microbatch, seed) for each in choices if not only or each.model in only)


class Offset(nn.Module):
    """A layer that adds a trained offset to its inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs with the offset added."""
        return inputs + self.offset


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """A model with its layers, and what these cost with one thread."""

    subject: Subject
    graph: ModelGraph
    inputs: tuple[torch.Tensor, ...]
    profile: Profile

    def plan(
        self, cuts: Sequence[int], *, stages: int, microbatches: int, schedule: str = "1f1b", chunks: int = 1
    ) -> Plan:
        """Return the plan with this cut, on devices alike and links that cost nothing."""
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


def measured(subject: Subject, *, repeats: int) -> Measured:
    """Build, trace and measure a model, with one thread."""
    model, (inputs, _) = subject.built(), subject.batch(1)
    graph = ModelGraph(model, (inputs,))
    with one_thread():
        profile = measure(model, (inputs,), graph=graph, repeats=repeats, seconds=120.0)
    return Measured(subject=subject, graph=graph, inputs=(inputs,), profile=profile)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- cuts, and their pieces -------------------------------------------------------------------------------------------


def three_cuts(found: Measured, stages: int, microbatches: int) -> dict[str, tuple[int, ...]]:
    """Return where each method cuts; all have the same layers, the same profile and the same cuts to choose from."""
    profile = found.profile
    ours = place(
        profile,
        (Device(),) * stages,
        microbatches=microbatches,
        in_flight=in_flight("1f1b", stages, max(microbatches, stages)),
    )
    return {
        EQUAL: equal_counts(len(profile.layers), stages, profile.bound),
        BLOCKS: balanced([layer.seconds for layer in profile.layers], stages, profile.bound),
        OURS: ours.cuts,
    }


@dataclass(kw_only=True)
class Timed:
    """One piece with its inputs, and the seconds that forward and backward of a micro-batch took."""

    piece: PieceModule
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    predicted_seconds: float
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Return the seconds of the micro-batch that was disturbed least."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Return the seconds that a micro-batch usually takes."""
        return statistics.median(self.seconds)

    def run(self) -> None:
        """Run some micro-batches, one after another; the first finds no gradients to add to, as in a step."""
        for weight in self.piece.module.parameters():
            weight.grad = None
        for _ in range(MICROBATCHES_IN_A_ROW):
            leaves = [_leaf(value) for value in self.inputs]
            began = time.thread_time()
            given = _as_tuple(self.piece.module(*leaves))
            pairs = [(value, grad) for value, grad in zip(given, self.outputs, strict=True) if value.requires_grad]
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
            self.seconds.append(time.thread_time() - began)
        for weight in self.piece.module.parameters():
            weight.grad = None


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A cut and its pieces."""

    method: str
    cuts: tuple[int, ...]
    pieces: tuple[Timed, ...]

    @property
    def predicted_seconds(self) -> float:
        """Return the seconds of the slowest piece, as the profile has it."""
        return max(piece.predicted_seconds for piece in self.pieces)

    @property
    def best(self) -> float:
        """Return the seconds of the slowest piece, each piece at its best."""
        return max(piece.best for piece in self.pieces)

    @property
    def median(self) -> float:
        """Return the seconds of the slowest piece, each piece as usual."""
        return max(piece.median for piece in self.pieces)

    def run(self) -> None:
        """Run all pieces, with one thread."""
        with one_thread():
            for piece in self.pieces:
                piece.run()


def prepared(found: Measured, method: str, cuts: Sequence[int]) -> Cut:
    """Return the pieces of a cut, with the inputs that they have in the model."""
    layers = found.profile.layers
    live, pieces = found.inputs, []
    for piece in cut_pieces(found.graph, cuts):
        taken = live
        with torch.no_grad():
            live = _as_tuple(piece.module(*taken))
        for value, described in zip(taken, piece.takes, strict=True):
            value.requires_grad_(described.needs_gradient)
        pieces.append(
            Timed(
                piece=piece,
                inputs=taken,
                outputs=tuple(torch.ones_like(value) for value in live),
                predicted_seconds=sum(layer.seconds for layer in layers[piece.begin : piece.end]),
            )
        )
    return Cut(method=method, cuts=tuple(cuts), pieces=tuple(pieces))


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _as_tuple(given: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (given,) if isinstance(given, torch.Tensor) else tuple(given)
