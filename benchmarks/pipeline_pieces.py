"""The three cuts of a model, and what their pieces take when they are run.

A piece is run by itself, as a device of a pipeline runs it: micro-batch after micro-batch, forward and then backward
with a gradient for each of its outputs, on the inputs that it has in the model. The cuts take turns, so that whatever
disturbs the machine disturbs all; of each piece the best time counts, and the median is kept beside it. One thread does
it all and waits for nothing, so its CPU time is its time on a machine with nothing else to do.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.pipeline_models import Measured, one_thread
from paceline.pipeline.devices import Device
from paceline.pipeline.graph import PieceModule, cut_pieces
from paceline.pipeline.placement import place
from paceline.pipeline.schedules import in_flight
from paceline.reference_pipeline import balanced, equal_counts

EQUAL, BLOCKS, OURS = "equal counts", "torchgpipe", "ours"
MICROBATCHES_IN_A_ROW = 2


def three_cuts(found: Measured, stages: int, microbatches: int) -> dict[str, tuple[int, ...]]:
    """Where each method cuts: all of them the same layers, by the same profile, with the same cuts allowed."""
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
    """One piece with its inputs, and what it took: seconds of forward and backward of a micro-batch."""

    piece: PieceModule
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    predicted_seconds: float
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The least disturbed."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The usual."""
        return statistics.median(self.seconds)

    def run(self) -> None:
        """Some micro-batches, one after another; the first finds no gradients to add to, as in a step."""
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
        """The slowest piece, as the profile has it."""
        return max(piece.predicted_seconds for piece in self.pieces)

    @property
    def best(self) -> float:
        """The slowest piece, each at its best."""
        return max(piece.best for piece in self.pieces)

    @property
    def median(self) -> float:
        """The slowest piece, each as usual."""
        return max(piece.median for piece in self.pieces)


def prepared(found: Measured, method: str, cuts: Sequence[int]) -> Cut:
    """The pieces of a cut, with the inputs that they have in the model."""
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


def run_in_turns(cuts: Sequence[Cut], turns: int, on_turn: Callable[[], None] = lambda: None) -> None:
    """Run all pieces of all cuts, turn after turn; another cut begins each turn."""
    with one_thread():
        for turn in range(turns):
            for cut in itertools.islice(itertools.cycle(cuts), turn, turn + len(cuts)):
                for piece in cut.pieces:
                    piece.run()
            on_turn()


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _as_tuple(given: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (given,) if isinstance(given, torch.Tensor) else tuple(given)
