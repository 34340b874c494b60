"""Batches: checked before anything is computed, and cut into full micro-batches and the rest.

    plan: 4 micro-batches of 3              F F F F
    a batch of 12 samples                   4 of 3                  the plan's own schedule
    the last of an epoch, 8 samples         2 of 3, then 1 of 2     two passes, whose gradients add up

A pass has micro-batches of one size, because the pieces are traced for one. Every micro-batch weighs as many samples as
it has, so that the gradient is that of the whole batch however it is cut.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.pipeline import PipelineError

Tensors = torch.Tensor | tuple[torch.Tensor, ...] | list[torch.Tensor]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A number of micro-batches of one size, from sample `first` on."""

    first: int
    count: int
    size: int

    @property
    def samples(self) -> slice:
        return slice(self.first, self.first + self.count * self.size)


def passes(samples: int, size: int) -> list[Pass]:
    """Return how a batch goes through a pipeline for micro-batches of `size`.

    >>> passes(8, 3)
    [Pass(first=0, count=2, size=3), Pass(first=6, count=1, size=2)]
    >>> passes(2, 3)
    [Pass(first=0, count=1, size=2)]
    """
    full, rest = divmod(samples, size)
    found = [Pass(first=0, count=full, size=size)] if full else []
    return found + ([Pass(first=full * size, count=1, size=rest)] if rest else [])


def as_tuple(tensors: Any, name: str) -> tuple[torch.Tensor, ...]:
    """Return a tensor or several, as a tuple.

    >>> as_tuple(3, "inputs")
    Traceback (most recent call last):
    paceline.pipeline.PipelineError: inputs must be a tensor or a tuple of tensors (int)
    """
    every = tuple(tensors) if isinstance(tensors, tuple | list) else (tensors,)
    for each in every:
        if not isinstance(each, torch.Tensor):
            raise PipelineError(f"{name} must be a tensor or a tuple of tensors ({type(each).__name__})")
    return every


def count_inputs(inputs: Any, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> int:
    """Return how many samples the inputs have; PipelineError if they are not what the plan was made for.

    >>> count_inputs(torch.ones(8, 4), [(2, 4)], [torch.float32])
    8
    >>> count_inputs(torch.ones(8, 5), [(2, 4)], [torch.float32])
    Traceback (most recent call last):
    paceline.pipeline.PipelineError: inputs must be [samples, 4], as the plan says (this is [8, 5])
    """
    every = as_tuple(inputs, "inputs")
    if len(every) != len(shapes):
        raise PipelineError(f"the model takes {len(shapes)} inputs (given: {len(every)})")
    for number, (given, shape, dtype) in enumerate(zip(every, shapes, dtypes, strict=True)):
        name = "inputs" if len(every) == 1 else f"input {number}"
        if given.dim() != len(shape) or list(given.shape[1:]) != list(shape[1:]):
            wanted = ", ".join(["samples", *map(str, shape[1:])])
            raise PipelineError(f"{name} must be [{wanted}], as the plan says (this is {list(given.shape)})")
        if given.dtype is not dtype:
            raise PipelineError(f"{name} must be {dtype}, as the plan says (this is {given.dtype})")
    return _count(every, "inputs")


def count_targets(targets: Any) -> int:
    """Return how many samples the targets are for.

    >>> count_targets(torch.zeros(3, dtype=torch.long))
    3
    """
    return _count(as_tuple(targets, "targets"), "targets")


def _count(tensors: Sequence[torch.Tensor], name: str) -> int:
    counts = {len(each) if each.dim() else 0 for each in tensors}
    if len(counts) > 1:
        raise PipelineError(f"{name} must all have the same number of samples ({', '.join(map(str, sorted(counts)))})")
    samples = counts.pop()
    if not samples:
        raise PipelineError(f"{name} must have at least one sample (samples=0)")
    return samples


def sums_of(loss_function: Any) -> bool:
    """Whether a loss function adds up over samples; else it is the mean.

    That is what its `reduction` says, also in a partial or of a bound method's object. Nobody can see through a lambda
    or a function of your own: they must be means, or have `reduction = "sum"` set.

    >>> mse = torch.nn.functional.mse_loss
    >>> sums_of(torch.nn.MSELoss(reduction="sum")), sums_of(mse), sums_of(functools.partial(mse, reduction="sum"))
    (True, False, True)
    """
    if not callable(loss_function):
        raise PipelineError(f"loss_function must be callable ({type(loss_function).__name__})")
    reduction = _reduction_of(loss_function)
    if not isinstance(reduction, str) or reduction not in ("mean", "sum"):
        raise PipelineError(f"the loss must be a mean or a sum over samples (reduction={reduction!r})")
    return reduction == "sum"


def _reduction_of(loss_function: Any) -> Any:
    while True:
        if isinstance(loss_function, functools.partial):
            if "reduction" in loss_function.keywords:
                return loss_function.keywords["reduction"]
            loss_function = loss_function.func
        elif isinstance(loss_function, types.MethodType):
            loss_function = loss_function.__self__
        else:
            return getattr(loss_function, "reduction", "mean")
