"""Gradients of all workers of a round in one pass.

The obvious way, `torch.func.vmap(grad(...))`, turns every layer into a grouped one and gains nothing on convolutions.
Here the samples of all workers lie one after the other, (workers * samples, ...), and run through the plain layers
together. Forward, and the gradient of the input, are computed once for everybody. Only the gradient of the weights is
kept apart, worker by worker, and is written straight into that worker's row of the gradient matrix:

    inputs   w0 w0 w0 w1 w1 w1         one big matrix product forward and for the inputs
    d weight [ row w0 ][ row w1 ]      one batched product, a result per worker

A model qualifies when every layer that owns parameters is one we know, it has no dropout, and one comparison with the
loop, on the first batches it sees, agrees (`engine.py`). All others go through `gradients.py`. The two agree but for
the rounding, which depends on the shape of the products: which one is taken is part of what makes a result the same to
the last bit, and depends on the model and on shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from paceline.workers.flat import FlatModel
from paceline.workers.gradients import Assignment, Gradients
from paceline.workers.losses import CrossEntropy, SampleLoss

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_DROPOUTS = (nn.modules.dropout._DropoutNd,)


class Rows:
    """Where a layer's weight gradients go: the same columns of every worker's row.

    >>> matrix = torch.zeros(2, 6)
    >>> Rows(matrix, {})._columns(2, (2, 2)).shape
    torch.Size([2, 2, 2])
    """

    def __init__(self, matrix: torch.Tensor, offsets: dict[nn.Parameter, int]) -> None:
        self.workers = len(matrix)
        self._matrix = matrix
        self._offsets = offsets

    def of(self, parameter: nn.Parameter | None) -> torch.Tensor | None:
        """Return a (workers, *shape) view to add gradients to; None for a parameter that is frozen, or not there."""
        if parameter is None or parameter not in self._offsets:
            return None
        return self._columns(self._offsets[parameter], tuple(parameter.shape))

    def _columns(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        size = int(torch.Size(shape).numel())
        return self._matrix[:, offset : offset + size].view(self.workers, *shape)


# -- layers ---------------------------------------------------------------------------------------------------------
#
# Weight and bias are arguments of each function although their gradients are not returned: with either frozen, autograd
# must still see that the other wants one, or it never calls `backward`.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, layer: nn.Linear, rows: Rows, weight: nn.Parameter, bias: nn.Parameter | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.layer, ctx.rows = layer, rows
        return F.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        layer, rows = ctx.layer, ctx.rows
        by_worker = upstream.reshape(rows.workers, -1, upstream.shape[-1])
        if (weight_rows := rows.of(layer.weight)) is not None:
            weight_rows.baddbmm_(by_worker.mT, inputs.reshape(rows.workers, -1, inputs.shape[-1]))
        if (bias_rows := rows.of(layer.bias)) is not None:
            bias_rows.add_(by_worker.sum(1))
        return (upstream @ layer.weight if ctx.needs_input_grad[0] else None), None, None, None, None


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, layer: nn.Conv2d, rows: Rows, weight: nn.Parameter, bias: nn.Parameter | None
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        ctx.layer, ctx.rows = layer, rows
        return F.conv2d(inputs, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        layer, rows = ctx.layer, ctx.rows
        upstream = upstream.contiguous()
        if (weight_rows := rows.of(layer.weight)) is not None:
            for row, x, up in zip(weight_rows, inputs.chunk(rows.workers), upstream.chunk(rows.workers), strict=True):
                row.add_(_conv_backward(up, x, layer, (False, True, False))[1])
        if (bias_rows := rows.of(layer.bias)) is not None:
            bias_rows.add_(upstream.view(rows.workers, -1, *upstream.shape[1:]).sum((1, 3, 4)))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        return _conv_backward(upstream, inputs, layer, (True, False, False))[0], None, None, None, None


def _conv_backward(
    upstream: torch.Tensor, inputs: torch.Tensor, layer: nn.Conv2d, wanted: tuple[bool, bool, bool]
) -> Any:
    return torch.ops.aten.convolution_backward(
        upstream,
        inputs,
        layer.weight,
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0, 0],
        layer.groups,
        wanted,
    )


class _Affine(torch.autograd.Function):
    """weight * normalised + bias, per channel (dimension 1)."""

    @staticmethod
    def forward(
        ctx: Any, normalised: torch.Tensor, layer: Any, rows: Rows, weight: nn.Parameter, bias: nn.Parameter
    ) -> torch.Tensor:
        ctx.save_for_backward(normalised)
        ctx.layer, ctx.rows = layer, rows
        shape = (1, -1, *(1,) * (normalised.dim() - 2))
        return torch.addcmul(bias.view(shape), normalised, weight.view(shape))

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        (normalised,) = ctx.saved_tensors
        layer, rows = ctx.layer, ctx.rows
        by_worker = (rows.workers, -1, upstream.shape[1], upstream[0, 0].numel())
        upstream_rows = upstream.reshape(by_worker)
        if (weight_rows := rows.of(layer.weight)) is not None:
            weight_rows.add_((upstream_rows * normalised.reshape(by_worker)).sum((1, 3)))
        if (bias_rows := rows.of(layer.bias)) is not None:
            bias_rows.add_(upstream_rows.sum((1, 3)))
        shape = (1, -1, *(1,) * (upstream.dim() - 2))
        return upstream * layer.weight.view(shape), None, None, None, None


Forward = Callable[[Any, torch.Tensor, Rows], torch.Tensor]


def _forward_of(function: Any) -> Forward:
    return lambda layer, inputs, rows: function.apply(inputs, layer, rows, layer.weight, layer.bias)


def _group_norm(layer: nn.GroupNorm, inputs: torch.Tensor, rows: Rows) -> torch.Tensor:
    return _affine(layer, F.group_norm(inputs, layer.num_groups, eps=layer.eps), rows)


def _affine(layer: Any, normalised: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Apply a normalisation layer's weight and bias, if it has them."""
    return normalised if layer.weight is None else _forward_of(_Affine)(layer, normalised, rows)


LAYERS: dict[type[nn.Module], Forward] = {
    nn.Linear: _forward_of(_Linear),
    nn.Conv2d: _forward_of(_Conv2d),
    nn.GroupNorm: _group_norm,
}


# -- the pass -------------------------------------------------------------------------------------------------------


class GroupedGradients:
    """Computes the gradients of several workers in one forward and one backward pass.

    >>> engine = GroupedGradients(nn.Linear(2, 3))
    >>> batch = Assignment(inputs=torch.ones(4, 2), targets=torch.tensor([0, 1, 2, 0]))
    >>> result = engine.compute(engine.model.parameters.clone(), engine.model.buffers, [batch, batch])
    >>> result.gradients.shape
    torch.Size([2, 9])
    """

    def __init__(self, module: nn.Module, loss: SampleLoss | None = None) -> None:
        reason = why_not_grouped(module)
        if reason:
            raise ValueError(f"this model's gradients cannot be computed in one pass: {reason}")
        self.model = FlatModel(module)
        self._loss = CrossEntropy() if loss is None else loss

    def compute(self, parameters: torch.Tensor, buffers: torch.Tensor, assignments: Sequence[Assignment]) -> Gradients:
        """Return the gradient of each assignment at the given parameters."""
        self.model.module.train()
        self.model.load(parameters, buffers)
        for parameter in self.model.offsets:
            parameter.grad = None
        matrix = torch.zeros(len(assignments), parameters.numel(), dtype=parameters.dtype)
        batch = _Batch(assignments, parameters.dtype)
        norms = _GroupedBatchNorms(self.model.module, batch)
        with _forwards(self.model.module, Rows(matrix, self.model.offsets), norms):
            losses = self._loss(self.model.module(batch.inputs), batch.targets)
            (losses * batch.weights).sum().backward()  # type: ignore[no-untyped-call]
        if any(parameter.grad is not None for parameter in self.model.offsets):
            raise RuntimeError("the model uses a weight outside its layer")  # autograd saw it, our layers did not
        rows = losses.detach().view(len(assignments), -1)
        seen = [row[: assignment.samples_done] for row, assignment in zip(rows, assignments, strict=True)]
        return Gradients.of(matrix, norms.buffers_after(self.model), seen)


class _Batch:
    """All workers' samples in a row, cut where no worker gets to; samples not done weigh nothing."""

    def __init__(self, assignments: Sequence[Assignment], kind: torch.dtype) -> None:
        sizes = {(len(assignment.inputs), assignment.blocks) for assignment in assignments}
        if len(sizes) != 1:
            raise ValueError(f"all workers of a pass need one batch size and one number of blocks (found {sizes})")
        ((batch_size, blocks),) = sizes
        self.workers = len(assignments)
        self.kind = kind
        self.blocks_done = [assignment.blocks_done for assignment in assignments]
        self.blocks = max(self.blocks_done)
        samples = batch_size // blocks * self.blocks
        self.inputs = torch.cat([assignment.inputs[:samples] for assignment in assignments])
        self.targets = torch.cat([assignment.targets[:samples] for assignment in assignments])
        weights = torch.zeros(self.workers, samples, dtype=kind)
        for row, assignment in zip(weights, assignments, strict=True):
            done = assignment.samples_done
            row[:done] = 1.0 / batch_size
            if assignment.weights is not None:
                row[:done] *= assignment.weights[:done]
        self.weights = weights.view(-1)


class _GroupedBatchNorms:
    """BatchNorm with the statistics of each worker's blocks, and running statistics per worker."""

    def __init__(self, module: nn.Module, batch: _Batch) -> None:
        self._batch = batch
        self._running: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        for part in module.modules():
            if isinstance(part, _BATCH_NORMS) and part.running_mean is not None and part.running_var is not None:
                rows = (batch.workers, 1)
                self._running[part] = part.running_mean.repeat(rows), part.running_var.repeat(rows)

    def forward(self, layer: Any, inputs: torch.Tensor, rows: Rows) -> torch.Tensor:
        parts = []
        for index, block in enumerate(inputs.chunk(self._batch.workers * self._batch.blocks)):
            worker, number = divmod(index, self._batch.blocks)
            means, variances = None, None
            if layer in self._running and number < self._batch.blocks_done[worker]:
                means, variances = (running[worker] for running in self._running[layer])
            parts.append(F.batch_norm(block, means, variances, None, None, True, layer.momentum, layer.eps))
        return _affine(layer, torch.cat(parts), rows)

    def buffers_after(self, model: FlatModel) -> torch.Tensor:
        """Return a row of buffers per worker."""
        columns = []
        for part in model.module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                columns.append(self._column(part, name, buffer))
        return torch.cat(columns, dim=1) if columns else torch.zeros(self._batch.workers, 0, dtype=self._batch.kind)

    def _column(self, part: nn.Module, name: str, buffer: torch.Tensor) -> torch.Tensor:
        if part in self._running and name in ("running_mean", "running_var"):
            return self._running[part][name == "running_var"]
        column = buffer.detach().reshape(1, -1).to(self._batch.kind).repeat(self._batch.workers, 1)
        if part in self._running and name == "num_batches_tracked":
            column += torch.tensor(self._batch.blocks_done).view(-1, 1)
        return column


@contextmanager
def _forwards(module: nn.Module, rows: Rows, norms: _GroupedBatchNorms) -> Iterator[None]:
    """Let every layer that owns parameters run its grouped forward, for the length of a pass."""
    changed = []
    try:
        for part in module.modules():
            forward = norms.forward if isinstance(part, _BATCH_NORMS) else LAYERS.get(type(part))
            if forward is not None:
                part.forward = _bind(forward, part, rows)
                changed.append(part)
        yield
    finally:
        for part in changed:
            del part.forward


def _bind(forward: Forward, part: nn.Module, rows: Rows) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda input: forward(part, input, rows)  # torch's own name: a model may pass it by keyword


def why_not_grouped(module: nn.Module) -> str | None:
    """Return why a model needs the loop; None if it does not.

    >>> why_not_grouped(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    'it has dropout'
    >>> why_not_grouped(nn.LSTM(2, 2))
    'it has a layer of type LSTM'
    """
    for part in module.modules():
        if isinstance(part, _DROPOUTS) and part.p > 0:
            return "it has dropout"
        if isinstance(part, _BATCH_NORMS) and part.momentum is None:
            return "it has batch norm with a cumulative average"
        if next(part.parameters(recurse=False), None) is None:
            continue
        if type(part) not in LAYERS and type(part) not in _BATCH_NORMS:
            return f"it has a layer of type {type(part).__name__}"
        if isinstance(part, nn.Conv2d) and (part.padding_mode != "zeros" or isinstance(part.padding, str)):
            return "it has a convolution with a padding we do not know"
    return None
