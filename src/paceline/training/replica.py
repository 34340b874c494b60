"""A worker's replica of the model, and how averages change it.

    replica  the parameters that this worker trains: the tensors of its own model
    shared   the model that all workers agree on; moves only when an average is merged
    base     what the replica was when its open window began; change of the window = replica - base

    hpsgd, at the first step boundary after average j is done (loop.py calls merge, then pack_change):

        merge        shared <- shared + weight * sum of what all sent in average j
        pack_change  change = replica - base, sent as average j + 1
                     replica, base <- shared            (the paper)
                     replica, base <- shared + change   (rebase)

    If the window is still shorter than `period`, it stays open: catch_up does replica <- shared + (replica - base),
    base <- shared.

Buffers (BatchNorm's statistics) travel as values, not as changes: a sum of late changes could make a variance negative.
A worker takes over their mean when it merges without an open window (in a flush, or where training waits). While it
trains on it keeps its own, which are newer; training itself does not read them. For every buffer, a worker

    sends    its values / N, and a flag: 1 if it has changed the buffer, else 0
    takes    the sum of the values if any flag is set; else the buffer stays as it is, to the bit (a mask, a table)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.codecs import Codec
from paceline.codecs.error_feedback import ErrorFeedback
from paceline.codecs.layout import UNIT
from paceline.codecs.machine_code import in_threads
from paceline.strategies.averaging import Averaging, Outer
from paceline.training.batches import Batches
from paceline.training.saved_state import check_tensor
from paceline.workers.gradients import accumulate

COUNTER = "num_batches_tracked"
KERNEL_ELEMENTS = 65_536  # a tensor of fewer is not worth a kernel's call
DIGITS, DIGIT_BASE = 3, 4096  # of a counter: sums over 4,096 workers are exact in float32, counts to 2^48 / workers


class Replica:
    """Parameters that train on their own between averages of their changes.

    >>> weight = torch.zeros(2)
    >>> from paceline.strategies.averaging import make_averaging
    >>> replica = Replica([weight], [], make_averaging("local-sgd"), workers=2)
    >>> message = torch.empty(replica.size)
    >>> _ = weight.add_(1.0)
    >>> replica.pack_change(message, scale=1.0, brings=True)
    >>> replica.merge(message + 3.0, weight=0.5, open_steps=0)
    >>> weight
    tensor([2., 2.])
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        member: Averaging,
        *,
        workers: int,
    ) -> None:
        self.dtype = message_dtype(parameters, buffers)
        self._parameters, self._buffers = Flat(parameters, self.dtype), Buffers(buffers, self.dtype, workers=workers)
        self.size = self._parameters.size + self._buffers.size
        self._overlap, self._rebase = member.overlap, member.rebase
        self._outer = OuterStep(member.outer, workers)
        device = parameters[0].device
        self.shared = self._parameters.read(torch.empty(self._parameters.size, dtype=self.dtype, device=device))
        self._base = self.shared.clone()
        self._spans = make_spans(parameters, self._base, self.shared)
        self._behind = False  # the shared model has moved, and the replica has not taken that over yet

    def pack_change(self, out: torch.Tensor, *, scale: float, brings: bool) -> None:
        """Close the window: write its change times `scale`, and the buffers, into `out`."""
        self._buffers.send(out[self._parameters.size :])
        change = out[: self._parameters.size]
        if not brings:
            change.zero_()
            return
        for span in self._spans:
            span.close_window(change, begin=self._overlap, ahead=self._rebase)
        if self._overlap:
            self._behind = False
        if scale != 1.0:
            change.mul_(scale)

    def merge(self, total: torch.Tensor, *, weight: float, open_steps: int) -> None:
        """Move the shared model. A replica without an open window takes it over now.

        One with an open window does so at the end of the same step boundary: in `pack_change` if the window is closed
        there, else in `catch_up`.
        """
        if weight:  # else nobody brought anything: only the buffers are to be made equal
            self._outer.move(self.shared, total[: self._parameters.size], weight)
        if open_steps:
            self._behind = True
        else:
            for span in self._spans:
                span.begin_window()
            self._behind = False
            self._buffers.take(total[self._parameters.size :])

    def catch_up(self) -> None:
        """Rebuild a replica whose window stays open: the shared model as it is now, plus the open window's change."""
        if self._behind:
            for span in self._spans:
                span.move_window()
            self._behind = False

    def state_dict(self) -> dict[str, Any]:
        """Return the shared model and the outer step's velocity; the replica itself is in the model's own state."""
        state = {"shared": self.shared, "base": self._base, **self._outer.state_dict()}
        return {name: tensor.clone() for name, tensor in state.items()}

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state that does not fit."""
        for name in ("shared", "base", *(["velocity"] if state.get("velocity") is not None else [])):
            check_tensor(name, state[name], self.shared)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; one that is refused changes nothing."""
        self.check(state)
        self.shared.copy_(state["shared"])
        self._base.copy_(state["base"])
        self._outer.load_state_dict(state, like=self.shared)
        self._behind = False


class WindowSpan:
    """Tensors whose numbers lie side by side in the flat vectors, from number `first` on, and their passes over memory.

    One large tensor of float32 on the CPU has kernels, which go over memory once (window_kernels.py); any others have
    torch's operations, in the same arithmetic.

    >>> weight, shared = torch.tensor([1.0, 3.0]), torch.tensor([10.0, 20.0])
    >>> span, change = WindowSpan([weight], 0, torch.ones(2), shared), torch.empty(2)
    >>> span.close_window(change, begin=True, ahead=True)
    >>> change, weight
    (tensor([0., 2.]), tensor([10., 22.]))
    """

    def __init__(self, tensors: Sequence[torch.Tensor], first: int, base: torch.Tensor, shared: torch.Tensor) -> None:
        self._flat = Flat(tensors, base.dtype)
        self._place = slice(first, first + self._flat.size)
        self._base, self._shared = base[self._place], shared[self._place]
        self._rounds = any(tensor.dtype is not base.dtype for tensor in tensors)  # writing to bfloat16 does
        self.has_kernels = len(tensors) == 1 and runs_kernels(tensors, base.dtype)

    def close_window(self, vector: torch.Tensor, *, begin: bool, ahead: bool) -> None:
        """Write the window's change into its place in a vector; `begin` the next, at the shared model or ahead of it.

        Ahead by the change, which is on its way then.
        """
        change, tensor = vector[self._place], self._array(written=begin)
        if tensor is not None:
            from paceline.training import window_kernels as kernels

            if begin:
                close = kernels.change_and_begin_ahead if ahead else kernels.change_and_begin_at_shared
                self._run(close, tensor, self._base.numpy(), self._shared.numpy(), change.numpy())
            else:
                self._run(kernels.write_change, tensor, self._base.numpy(), change.numpy())
            return
        self._flat.read(change).sub_(self._base)
        if begin:
            self._write(torch.add(self._shared, change, out=self._base) if ahead else self._base.copy_(self._shared))

    def begin_window(self) -> None:
        """Begin a window at the shared model."""
        self._write(self._base.copy_(self._shared))  # torch's copies are as quick as a kernel

    def move_window(self) -> None:
        """Let the open window have begun at the shared model, with the same change."""
        tensor = self._array(written=True)
        if tensor is None:
            opened = self._flat.read(torch.empty_like(self._base)).sub_(self._base)
            self._flat.write(torch.add(self._shared, opened, out=self._base))
            if self._rounds:
                self._flat.read(self._base).sub_(opened)
            else:
                self._base.copy_(self._shared)
            return
        from paceline.training import window_kernels as kernels

        self._run(kernels.move_open_window, tensor, self._base.numpy(), self._shared.numpy())

    def _write(self, base: torch.Tensor) -> None:
        self._flat.write(base)
        if self._rounds:  # a change is counted from what the parameters really are
            self._flat.read(base)

    def _array(self, *, written: bool) -> np.ndarray[Any, Any] | None:
        """Return the tensor as a kernel takes it; None if torch's operations are to be taken."""
        tensor, size = self._flat.tensors[0], self._flat.size
        # Asked at every pass: whoever sets .data may give a parameter other memory.
        fits = tensor.is_contiguous() and tensor.numel() == size
        if not (self.has_kernels and runs_kernels([tensor], self._base.dtype) and fits):
            return None
        if written:
            torch.autograd.graph.increment_version(tensor)  # as torch's own operations do
        return tensor.detach().view(-1).numpy()

    def _run(self, kernel: Callable[..., None], *arrays: np.ndarray[Any, Any]) -> None:
        in_threads(kernel, -(-self._flat.size // UNIT), UNIT, *arrays)


def make_spans(tensors: Sequence[torch.Tensor], base: torch.Tensor, shared: torch.Tensor) -> list[WindowSpan]:
    """Return spans that make up the flat vectors: each tensor that has kernels alone, others together.

    >>> vector = torch.zeros(4 + KERNEL_ELEMENTS)
    >>> [span.has_kernels for span in make_spans([vector[:1], vector[1:4], vector[4:]], vector, vector)]
    [False, True]
    """
    if not runs_kernels(tensors, base.dtype):
        return [WindowSpan(tensors, 0, base, shared)]
    runs: list[list[torch.Tensor]] = []
    for large, group in itertools.groupby(tensors, lambda tensor: runs_kernels([tensor], base.dtype)):
        run = list(group)
        runs += [[tensor] for tensor in run] if large else [run]
    firsts = itertools.accumulate((Flat(run, base.dtype).size for run in runs), initial=0)
    return [WindowSpan(run, first, base, shared) for run, first in zip(runs, firsts, strict=False)]


def runs_kernels(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether kernels pass over some of the tensors: all are plain float32 on the CPU, and one is large.

    `dtype` is that of the flat vectors.

    >>> runs_kernels([torch.zeros(KERNEL_ELEMENTS, dtype=torch.bfloat16)], torch.float32)
    False
    """
    plain = all(
        type(tensor) in (torch.Tensor, nn.Parameter) and tensor.dtype is torch.float32 and tensor.device.type == "cpu"
        for tensor in tensors
    )
    return plain and dtype is torch.float32 and any(tensor.numel() >= KERNEL_ELEMENTS for tensor in tensors)


class OuterStep:
    """Moves the shared model by a mean change, as `Outer` describes; keeps the velocity where there is momentum.

    >>> outer, model = OuterStep(Outer(rate=0.5), workers=2), torch.zeros(1)
    >>> outer.move(model, torch.tensor([8.0]), 0.5)
    >>> model
    tensor([2.])
    """

    def __init__(self, settings: Outer, workers: int) -> None:
        self._settings, self._momentum = settings, settings.momentum_of(workers)
        self._velocity: torch.Tensor | None = None

    def move(self, shared: torch.Tensor, total: torch.Tensor, weight: float) -> None:
        """Move the shared model by the step that the mean change `weight * total` comes to."""
        rate = self._settings.rate
        if self._momentum == 0.0:
            shared.add_(total, alpha=weight * rate)
            return
        if self._velocity is None:
            self._velocity = torch.zeros_like(shared)
        self._velocity.mul_(self._momentum).add_(total, alpha=weight)
        if self._settings.nesterov:
            shared.add_(total, alpha=weight * rate).add_(self._velocity, alpha=rate * self._momentum)
        else:
            shared.add_(self._velocity, alpha=rate)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the velocity, if there is one."""
        return {} if self._velocity is None else {"velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Any], *, like: torch.Tensor) -> None:
        """Go on from a `state_dict`."""
        velocity = state.get("velocity")
        if velocity is not None:
            check_tensor("velocity", velocity, like)
        self._velocity = None if velocity is None else velocity.to(like)


class GradientReplica:
    """Parameters that all workers move together, by the mean of their gradients.

    A worker that brings no gradient takes the step of the others all the same (`step`), and so stays equal to them.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> weight.grad = torch.ones(1)
    >>> replica = GradientReplica([weight], [], workers=2, step=lambda: None)
    >>> message = torch.empty(replica.size)
    >>> replica.pack_change(message, scale=1.0, brings=True)
    >>> replica.merge(message + 3.0, weight=0.5, open_steps=0)
    >>> weight.grad
    tensor([2.])
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        *,
        workers: int,
        step: Callable[[], object],
    ) -> None:
        self.dtype = message_dtype(parameters, buffers)
        self._parameters, self._buffers = list(parameters), Buffers(buffers, self.dtype, workers=workers)
        self._flat = Flat(self._parameters, self.dtype)
        self._counts_at = self._flat.size + self._buffers.size
        self.size = self._counts_at + len(self._parameters)
        self._step, self._brought = step, False

    @property
    def shared(self) -> torch.Tensor:
        """The model that all workers agree on: here, the parameters themselves."""
        device = self._parameters[0].device
        return self._flat.read(torch.empty(self._flat.size, dtype=self.dtype, device=device))

    @torch.no_grad()
    def pack_change(self, out: torch.Tensor, *, scale: float, brings: bool) -> None:
        """Write the gradient, the buffers, and which parameters have a gradient at all, into `out`."""
        self._buffers.send(out[self._flat.size : self._counts_at])
        self._brought = brings
        has = [brings and parameter.grad is not None for parameter in self._parameters]
        out[self._counts_at :] = torch.tensor(has, dtype=self.dtype)
        for part, parameter in zip(self._flat.parts(out), self._parameters, strict=True):
            if brings and parameter.grad is not None:
                part.copy_(parameter.grad)
            else:
                part.zero_()

    @torch.no_grad()
    def merge(self, total: torch.Tensor, *, weight: float, open_steps: int) -> None:
        """Give every parameter the mean gradient; a worker that brought none takes the step now."""
        self._buffers.take(total[self._flat.size : self._counts_at])
        if not weight:
            return
        held = [parameter.grad for parameter in self._parameters]
        counts = total[self._counts_at :].tolist()
        for part, parameter, count in zip(self._flat.parts(total), self._parameters, counts, strict=True):
            grad = parameter.grad
            if not count:  # no gradient anywhere: an optimiser leaves the parameter alone, and would decay a zero's
                parameter.grad = None
            elif self._brought and grad is not None and grad.is_contiguous() and grad.dtype is part.dtype:
                torch.mul(part, weight, out=grad)  # new memory would take longer than to multiply
            else:
                parameter.grad = part.mul(weight).to(parameter.dtype)
        if not self._brought:
            self._step()
            for parameter, grad in zip(self._parameters, held, strict=True):
                parameter.grad = grad

    def catch_up(self) -> None:
        """Do nothing: the parameters are the shared model."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: it is all in the model."""
        return {}

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state that does not fit; every one does."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""


def make_replica(
    parameters: Sequence[nn.Parameter],
    buffers: Sequence[torch.Tensor],
    member: Averaging,
    *,
    workers: int,
    step: Callable[[], object],
) -> Replica | GradientReplica:
    """Return the replica for what a member averages; `step` takes the optimiser's step.

    >>> type(make_replica([nn.Parameter(torch.zeros(1))], [], Averaging(name="x"), workers=2, step=list)).__name__
    'Replica'
    """
    if member.averages == "gradients":
        return GradientReplica(parameters, buffers, workers=workers, step=step)
    return Replica(parameters, buffers, member, workers=workers)


# -- buffers -----------------------------------------------------------------------------------------------------------


def averaged_buffers(module: nn.Module) -> list[torch.Tensor]:
    """Return the buffers that are averaged: floating ones that a checkpoint would hold, and BatchNorm's counter.

    >>> [tuple(buffer.shape) for buffer in averaged_buffers(nn.BatchNorm1d(3))]
    [(3,), (3,), ()]
    """
    kept = set(module.state_dict(keep_vars=True))
    return [
        buffer
        for name, buffer in module.named_buffers()  # each once, also where modules share it
        if name in kept and (buffer.is_floating_point() or name.rpartition(".")[2] == COUNTER)
    ]


class Buffers:
    """A worker's buffers: what of a model is not trained and yet learns, such as BatchNorm's statistics.

    Counters travel as digits, whose sums over workers are exact: float32 has no whole numbers beyond 2^24 but some.

    >>> mean, mask = torch.zeros(1), torch.tensor([-3e38])
    >>> buffers = Buffers([mean, mask], torch.float32, workers=2)
    >>> message = torch.empty(buffers.size)
    >>> _ = mean.add_(4.0)
    >>> buffers.send(message)
    >>> buffers.take(message)
    >>> mean, mask
    (tensor([2.]), tensor([-3.0000e+38]))
    """

    def __init__(self, buffers: Sequence[torch.Tensor], dtype: torch.dtype, *, workers: int) -> None:
        self._workers = workers
        self._flat = Flat([buffer for buffer in buffers if buffer.is_floating_point()], dtype)
        self._counts = Flat([buffer for buffer in buffers if not buffer.is_floating_point()], torch.int64)
        self._changed_at = self._flat.size + DIGITS * self._counts.size
        self._tensors = [*self._flat.tensors, *self._counts.tensors]
        self.size = self._changed_at + len(self._tensors)
        self._agreed = [buffer.detach().clone() for buffer in self._tensors]

    def send(self, out: torch.Tensor) -> None:
        """Fill `out`, of `size` elements, with what this worker has."""
        self._flat.read(out[: self._flat.size])
        out[: self._flat.size].div_(self._workers)
        for digit, row in enumerate(self._digits(out)):
            digits = self._read_counts(out.device).div(DIGIT_BASE**digit, rounding_mode="floor")
            row.copy_(digits if digit == DIGITS - 1 else digits.remainder(DIGIT_BASE))
        for number, pair in enumerate(zip(self._tensors, self._agreed, strict=True), start=self._changed_at):
            out[number] = torch.ne(*pair).any()  # stays on the device: no GPU is waited for

    @torch.no_grad()
    def take(self, total: torch.Tensor) -> None:
        """Take over the mean of the buffers that any worker has changed, from the sum of what all sent."""
        changes = total[self._changed_at :].unbind()
        sums = self._read_counts(total.device).zero_()
        for digit, row in enumerate(self._digits(total)):
            sums += row.to(torch.int64) * DIGIT_BASE**digit
        counts = (2 * sums + self._workers).div(2 * self._workers, rounding_mode="floor")
        means = [*self._flat.parts(total), *self._counts.parts(counts)]
        for buffer, agreed, mean, changed in zip(self._tensors, self._agreed, means, changes, strict=True):
            buffer.copy_(torch.where(changed != 0, mean.to(buffer.dtype), buffer))
            agreed.copy_(buffer)

    def _digits(self, message: torch.Tensor) -> torch.Tensor:
        return message[self._flat.size : self._changed_at].view(DIGITS, self._counts.size)

    def _read_counts(self, device: torch.device) -> torch.Tensor:
        return self._counts.read(torch.empty(self._counts.size, dtype=torch.int64, device=device))


# -- vectors -----------------------------------------------------------------------------------------------------------


class Flat:
    """Tensors of any shape and type, read and written as one vector.

    >>> flat = Flat([torch.ones(2, 2), torch.zeros(1, dtype=torch.int64)], torch.float32)
    >>> flat.read(torch.empty(5))
    tensor([1., 1., 1., 1., 0.])
    """

    def __init__(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        self.tensors, self.dtype = list(tensors), dtype
        self.size = sum(tensor.numel() for tensor in self.tensors)

    def parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the vector cut into views of the tensors' shapes."""
        cut = torch.split(vector[: self.size], [tensor.numel() for tensor in self.tensors])
        return [part.view(tensor.shape) for part, tensor in zip(cut, self.tensors, strict=True)]

    @torch.no_grad()
    def read(self, out: torch.Tensor) -> torch.Tensor:
        """Write the tensors into `out`, and return it."""
        for part, tensor in zip(self.parts(out), self.tensors, strict=True):
            part.copy_(tensor)
        return out

    @torch.no_grad()
    def write(self, vector: torch.Tensor) -> None:
        """Set the tensors from a vector; whole numbers are rounded."""
        for part, tensor in zip(self.parts(vector), self.tensors, strict=True):
            tensor.copy_(part if tensor.is_floating_point() else part.round())


def message_dtype(parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the type in which changes are added up: float32, or float64 if a parameter or a buffer has it.

    >>> message_dtype([torch.zeros(1, dtype=torch.bfloat16)], [])
    torch.float32
    """
    doubles = any(tensor.dtype is torch.float64 for tensor in (*parameters, *buffers))
    return torch.float64 if doubles else torch.float32


# -- local steps -------------------------------------------------------------------------------------------------------


def local_gradient(module: nn.Module, batches: Batches, *, worker: int, draw: int) -> float:
    """Leave the gradient of a worker's batch number `draw` in `.grad`; return the mean loss.

    >>> from paceline.data import load_dataset
    >>> from paceline.optim import OptimizerSettings
    >>> from paceline.training.training import Training
    >>> digits, network = load_dataset("digits"), nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> shards = torch.arange(400).split(100)
    >>> training = Training(module=network, dataset=digits, shards=shards, optimizer=OptimizerSettings(), total_steps=1)
    >>> local_gradient(network, Batches(training), worker=0, draw=0) > 0
    True
    """
    assignment = batches.assignment(worker=worker, draw=draw, blocks=1)
    module.train()
    module.zero_grad(set_to_none=True)
    torch.default_generator.manual_seed(assignment.seed)
    losses, _ = accumulate(module, assignment, batches.training.loss, parts=1)
    batches.judge(worker=worker, draw=draw, losses=losses)
    return float(losses.mean())


def check_codec(member: Averaging, codec: Codec) -> None:
    """Refuse a codec that a member's changes cannot travel by.

    >>> from paceline.codecs.naming import parse_codec
    >>> from paceline.strategies.averaging import make_averaging
    >>> check_codec(make_averaging("hpsgd", normalize=True), parse_codec("one-bit"))
    Traceback (most recent call last):
    ValueError: normalize does not go with error feedback: choose one of the two (codec=ErrorFeedback(OneBit()))
    """
    if member.normalize and isinstance(codec, ErrorFeedback):
        # What is held back would be of one window's scale, and be sent at the next one's.
        raise ValueError(f"normalize does not go with error feedback: choose one of the two (codec={codec!r})")
