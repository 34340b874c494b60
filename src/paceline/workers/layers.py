"""Layers that give each worker's gradient from one pass over all workers' samples.

Samples lie worker after worker: (workers * samples, ...). Forward, and the gradient of the input, are the
plain layer's, computed once for everybody. Only the gradient of the weights is kept apart, worker by worker,
and is written straight into that worker's row of the gradient matrix:

    inputs   w0 w0 w0 w1 w1 w1         one big matrix product forward and for the inputs
    d weight [ row w0 ][ row w1 ]      one batched product, a result per worker

Weight and bias are arguments of each function although their gradients are not returned: with either frozen, autograd
must still see that the other wants one, or it never calls `backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


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

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """A (workers, *shape) view to add gradients to; None for a frozen parameter."""
        offset = self._offsets.get(parameter)
        return None if offset is None else self._columns(offset, tuple(parameter.shape))

    def _columns(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        size = int(torch.Size(shape).numel())
        return self._matrix[:, offset : offset + size].view(self.workers, *shape)


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
        weight_rows = rows.of(layer.weight)
        if weight_rows is not None:
            weight_rows.baddbmm_(by_worker.mT, inputs.reshape(rows.workers, -1, inputs.shape[-1]))
        if layer.bias is not None and (bias_rows := rows.of(layer.bias)) is not None:
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
        weight_rows = rows.of(layer.weight)
        if weight_rows is not None:
            for row, x, up in zip(weight_rows, inputs.chunk(rows.workers), upstream.chunk(rows.workers), strict=True):
                row.add_(_conv_backward(up, x, layer, (False, True, False))[1])
        if layer.bias is not None and (bias_rows := rows.of(layer.bias)) is not None:
            bias_rows.add_(upstream.view(rows.workers, -1, *upstream.shape[1:]).sum((1, 3, 4)))
        wanted = ctx.needs_input_grad[0]
        return (
            (_conv_backward(upstream, inputs, layer, (True, False, False))[0] if wanted else None),
            None,
            None,
            None,
            None,
        )


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


def linear(layer: nn.Linear, inputs: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`nn.Linear` with a weight gradient per worker."""
    return _Linear.apply(inputs, layer, rows, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]


def conv2d(layer: nn.Conv2d, inputs: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`nn.Conv2d` with a weight gradient per worker."""
    return _Conv2d.apply(inputs, layer, rows, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]


def group_norm(layer: nn.GroupNorm, inputs: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`nn.GroupNorm` with weight and bias gradients per worker."""
    return affine(layer, F.group_norm(inputs, layer.num_groups, eps=layer.eps), rows)


def affine(layer: Any, normalised: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A normalisation layer's weight and bias, if it has them, with gradients per worker."""
    if layer.weight is None:
        return normalised
    return _Affine.apply(normalised, layer, rows, layer.weight, layer.bias)  # type: ignore[no-any-return, no-untyped-call]
