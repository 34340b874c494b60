"""Pieces for micro-batches of any size, and the torch schedules that run them.

A rank traces the model itself, once for each size of micro-batch that comes along: that of the plan, and that of the
rest of a smaller batch. A trace with another fingerprint than the plan's is another model, and is refused. Pieces of
all sizes hold the same weights.

Every tensor that crosses is known from the trace, so torch infers nothing by running the model, and nobody sends
anything but tensors.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)

from paceline.drivers.pipelining.batches import Loss, Pass, as_tuple
from paceline.drivers.pipelining.ranks import PipelineRanks
from paceline.drivers.pipelining.stages import Stage, StageLog, without_content
from paceline.drivers.pipelining.torch_internals import can_split
from paceline.drivers.pipelining.weights import placeholders
from paceline.pipeline import PipelineError
from paceline.pipeline.graph import ModelGraph, cut_piece
from paceline.pipeline.plan import Plan
from paceline.pipeline.schedules import find, why_not
from paceline.pipeline.tracing import modes_kept

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
"""The schedules of torch by our names."""

MOST_SIZES, MOST_RUNNERS = 3, 6

Key = TypeVar("Key")
Made = TypeVar("Made")


class PipelineRunners:
    """The runners of a model cut by a plan: made when they are asked for, of which the last few are kept."""

    def __init__(self, model: nn.Module, plan: Plan, ranks: PipelineRanks) -> None:
        self.model, self.plan, self.ranks = model, plan, ranks
        self.log = StageLog()
        self.weights: dict[str, torch.Tensor] = {}
        self.size = int(plan.shapes[0][0])
        self.graph = self._trace(self.size)
        self._graphs: OrderedDict[int, ModelGraph] = OrderedDict()
        self._rows: list[int] | None = None
        self._runners: OrderedDict[tuple[int, int, bool], Runner] = OrderedDict()

    def _trace(self, size: int) -> ModelGraph:
        inputs = [
            torch.zeros((size, *shape[1:]), dtype=dtype, device=self.ranks.device)
            for shape, dtype in zip(self.plan.shapes, self.plan.dtypes, strict=True)
        ]
        # A trace also serves later steps, so it knows of gradients even where a prediction asks for it.
        with torch.inference_mode(False), torch.enable_grad(), placeholders(self.model, self.ranks.device):
            try:
                graph = ModelGraph(self.model, tuple(inputs))
            except PipelineError as error:
                shapes = [list(each.shape) for each in inputs]
                raise PipelineError(f"with inputs {shapes}, as the plan has them: {error}") from error
        if graph.fingerprint == self.plan.fingerprint:
            return graph
        if size == self.size:
            raise PipelineError("the plan was made for another model: traced here, layers, tensors or weights differ")
        why = "".join(f": {note}" for note in graph.notes if note not in self.graph.notes)[:200]
        raise PipelineError(
            f"with {size} samples the model does something else than with {self.size}{why}; "
            "let the data loader leave out the rest of an epoch (drop_last=True)"
        )

    @property
    def planned(self) -> Pass:
        """The pass that the plan was made for."""
        return Pass(first=0, count=int(self.plan.microbatches), size=self.size)

    def hold_weights(self, weights: dict[str, torch.Tensor], name_of: dict[str, str]) -> None:
        """Let pieces hold these weights: a trace may have seen placeholders, or weights that are elsewhere now."""
        self.weights = {name: weights[real] for name, real in name_of.items() if real in weights}
        self.graph.attributes.update(self._known(self.graph))

    def _known(self, graph: ModelGraph) -> dict[str, torch.Tensor]:
        return {name: self.weights[name] for name in graph.attributes if name in self.weights}

    def tensor_sizes(self, parts: Sequence[Pass]) -> dict[str, str]:
        """Return hashes of all tensors' sizes in these passes, which must be the same on all ranks."""
        return {f"tensor sizes for {part.size} samples": _sizes(self._sized(part.size)) for part in parts}

    def output_rows(self) -> list[int]:
        """Return how many rows each output has for each sample; PipelineError if that is not certain.

        [samples, ...] is one. [samples * 5, ...] is five if another number of samples shows it: 10 rows for 2 samples
        may be anything.
        """
        if self._rows is None:
            here = [_shape(node) for node in self.graph.outputs]
            clear = all(shape[:1] == (self.size,) and self.size not in shape[1:] for shape in here)
            self._rows = [1] * len(here) if clear else self._rows_by_trace(here, self.size + 1)
        return self._rows

    def _rows_by_trace(self, here: Sequence[tuple[int, ...]], other: int) -> list[int]:
        """Return the same as a trace with another number of samples shows it."""
        try:
            there = [_shape(node) for node in self._sized(other).outputs]
            counts = [shape[0] // self.size for shape in here]
            wanted = [
                [(count * samples, *shape[1:]) for count, shape in zip(counts, here, strict=True)]
                for samples in (self.size, other)
            ]
            if [here, there] == wanted and all(counts):
                return counts
            why = f"{[list(shape) for shape in here]} with {self.size} samples, {list(map(list, there))} with {other}"
        except (PipelineError, IndexError) as error:
            why = str(error) or "a number alone"
        raise PipelineError(
            "predict puts the outputs of micro-batches one after the other, so every output's first dimension must be "
            f"the samples, or so many rows for each: let the model return it so (outputs: {why})"
        )

    def runner(self, part: Pass, *, trains: bool) -> Runner:
        """Return what runs a pass."""
        key = (part.count, part.size, trains)
        made = self._runners.get(key)
        if made is None:
            made = self._runners[key] = Runner(self, self._sized(part.size), part.count, trains=trains)
        return _newest(self._runners, key, MOST_RUNNERS)

    def _sized(self, size: int) -> ModelGraph:
        if size == self.size:
            return self.graph
        if size not in self._graphs:
            try:
                graph = self._trace(size)
            except PipelineError:
                raise
            except Exception as error:
                raise PipelineError(f"the model cannot be traced with {size} samples: {error}") from error
            graph.attributes.update(self._known(graph))
            self._graphs[size] = graph
        return _newest(self._graphs, size, MOST_SIZES)


def _sizes(graph: ModelGraph) -> str:
    """Return a hash of what all tensors between layers are, and which weights are trained."""
    values = [*graph.inputs, *(value.node for value in graph.values), *graph.outputs]
    lines = [f"{node.name} {_size(node.meta.get('val'))}" for node in values]
    lines += [f"{weight.name} {weight.trained}" for weight in graph.weights]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _size(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{tuple(value.shape)} {value.dtype} {value.requires_grad}"


def _newest(kept: OrderedDict[Key, Made], key: Key, most: int) -> Made:
    """Return what is kept under a key, now the last to be let go of."""
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
    return kept[key]


class Runner:
    """This rank's pieces under one of torch's schedules, for so many micro-batches of one size."""

    def __init__(self, runners: PipelineRunners, graph: ModelGraph, count: int, *, trains: bool) -> None:
        plan, ranks = runners.plan, runners.ranks
        self._count, self._log = count, runners.log
        name = plan.schedule if trains and why_not(plan.schedule, plan.stages, count, plan.chunks) is None else "gpipe"
        ends = [0, *plan.cuts, len(graph.layers)]
        numbers = range(ranks.stage, len(ends) - 1, plan.stages)
        self._stages = []
        for number in numbers:
            piece = cut_piece(graph, ends[number], ends[number + 1])
            piece.module.training = trains  # of its operations; modules taken whole are in their own modes
            given = graph.outputs if number == len(ends) - 2 else [value.node for value in piece.gives]
            self._stages.append(
                Stage(
                    piece,
                    number,
                    len(ends) - 1,
                    outputs=without_content(node.meta["val"] for node in given),
                    device=ranks.device,
                    group=ranks.row,
                    log=self._log,
                    splits=not trains or not find(name).splits_backward or can_split(piece),
                )
            )
        self._weight, self._targets = 1.0, list[Any]()
        self._loss_function: Loss | None = None
        several = plan.chunks > 1
        kind: Any = ScheduleLoopedBFS if several and name == "gpipe" else SCHEDULES[name]
        takes_list = several or name in ("interleaved", "zero-bubble")
        loss = {"loss_fn": self._loss} if trains else {}
        with _quiet():
            self._schedule: Any = kind(
                self._stages if takes_list else self._stages[0], n_microbatches=count, scale_grads=False, **loss
            )

    def train(
        self, inputs: tuple[torch.Tensor, ...], targets: list[Any], loss_function: Loss | None, weight: float
    ) -> float:
        """Run all micro-batches forward and backward; return the weighted sum of their losses, where the last stage is.

        `inputs` are of the first stage, and `targets`, one for each micro-batch, of the last.
        """
        self._loss_function, self._targets, self._weight = loss_function, targets, weight
        losses: list[torch.Tensor] = []
        places = torch.arange(self._count) if targets else None
        try:
            with _quiet():
                self._schedule.step(*inputs, target=places, losses=losses, return_outputs=False)
            return sum(float(loss.detach()) for loss in losses)
        finally:
            self._loss_function, self._targets = None, []
            self._clear()

    def predict(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Run all micro-batches forward alone; return what the model returns, where the last stage is."""
        try:
            with _quiet(), torch.no_grad(), modes_kept(*(stage.submod for stage in self._stages)):
                for stage in self._stages:
                    stage.submod.eval()
                return self._schedule.eval(*inputs)
        finally:
            self._clear()

    def _clear(self) -> None:
        for stage in self._stages:
            stage.clear()

    def _loss(self, output: Any, place: torch.Tensor) -> torch.Tensor:
        number = int(place)
        try:
            if self._loss_function is None:
                raise PipelineError("the last stage must be given a loss function")
            loss = self._loss_function(output, self._targets[number])
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise PipelineError(f"the loss function must return one number (it returns {shape})")
            if not loss.requires_grad and any(each.requires_grad for each in as_tuple(output, "outputs")):
                raise PipelineError("the loss function must return a loss with a gradient (it returns a detached one)")
        except Exception as error:
            error.add_note(f"in the loss function, of micro-batch {number}")
            self._log.error = error
            raise
        return loss.reshape(()) * self._weight


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch, which logs a whole schedule where it fails; our errors say which rank, and why."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
