"""The loss of each sample: of a listed name, or a user's own.

Training needs a loss per sample, not only their mean: samples are weighed (pruning), and the spread of their losses is
what `k = "auto"` learns from. So a loss here maps outputs and targets of n samples to n numbers:

    cross-entropy      outputs [n, classes], targets [n]                     one term each
                       outputs [n, ..., classes] or [n, classes, ...],       mean over the positions of a sample;
                       targets [n, ...]: sequences, segmentations            positions with target -100 do not count
    a user's own       f(outputs, targets) -> [n, ...]                       mean over the rest
                       a module or function of torch's with `reduction`      asked for "none", so that the above holds
                       f(outputs, targets) -> one number                     the same for all samples of the block

With one number for a block its samples cannot be told apart; what needs to (pruning, k = "auto") is refused beforehand.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

IGNORED = -100  # torch's own mark of a position that has no target

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class SampleLoss(Protocol):
    """Computes the loss of each sample of a block."""

    @property
    def per_sample(self) -> bool:
        """Whether the losses are the samples' own, and not one number for all of them."""

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a loss for each sample, [n]."""

    def total(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses."""


class CrossEntropy:
    """Cross-entropy, of classes or of sequences of them.

    >>> CrossEntropy()(torch.zeros(2, 3, 5), torch.tensor([[0, 1, 2], [3, -100, -100]]))  # log 5, of any position
    tensor([1.6094, 1.6094])
    """

    per_sample = True

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if targets.ndim == 1:
            return F.cross_entropy(outputs, targets, reduction="none")
        losses = F.cross_entropy(classes_second(outputs, targets), targets, reduction="none").flatten(1)
        counted = (targets != IGNORED).flatten(1).sum(1)
        return losses.sum(1) / counted.clamp(min=1)

    def total(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum") if targets.ndim == 1 else self(outputs, targets).sum()


class OwnLoss:
    """A user's loss, with a loss for each sample where it gives one.

    >>> OwnLoss(F.mse_loss)(torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.zeros(2, 2))
    tensor([5., 0.])
    >>> mean = OwnLoss(lambda outputs, targets: (outputs - targets).abs().mean())
    >>> mean(torch.tensor([1.0, 3.0]), torch.zeros(2))
    tensor([2., 2.])
    """

    def __init__(self, function: LossFunction, name: str = "loss") -> None:
        self._name = name
        self._function = _unreduced(function)
        self.per_sample = True  # until it gives one number for a block, which `check` asks for

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = self._function(outputs, targets)
        if losses.ndim == 0:
            return losses.expand(len(outputs))
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses

    def total(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self(outputs, targets).sum()

    def check(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Try the loss on a block, and refuse it if it does not give what training needs."""
        shapes = f"(outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)})"
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                losses = self._function(outputs, targets)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"loss {self._name!r} fails on the model's outputs: {reason} {shapes}") from error
        if any("target size" in str(warning.message) for warning in heard):  # torch would spread one over the other
            raise ValueError(f"loss {self._name!r} was given two shapes that do not match {shapes}; make them alike")
        if not isinstance(losses, torch.Tensor) or losses.shape[:1] not in ((), (len(outputs),)):
            found = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(
                f"loss {self._name!r} must return a loss for each of {len(outputs)} samples, or one number; "
                f"it gave {found} {shapes}"
            )
        if not losses.is_floating_point() or not losses.requires_grad:
            raise ValueError(
                f"loss {self._name!r} gave no gradient; return a tensor computed from the outputs, without .item(), "
                ".detach() or torch.no_grad()"
            )
        self.per_sample = losses.ndim > 0


def _unreduced(function: Any) -> LossFunction:
    """Return a loss that does not take the mean, where it can be asked for that."""
    if isinstance(function, type):
        function = function()
    if isinstance(function, nn.Module):
        if getattr(function, "reduction", None) in ("mean", "sum"):
            function = copy.copy(function)
            function.reduction = "none"
        return function  # type: ignore[no-any-return]
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function  # type: ignore[no-any-return]
    if "reduction" in parameters:
        return lambda outputs, targets: function(outputs, targets, reduction="none")
    return function  # type: ignore[no-any-return]


def classes_second(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the scores with classes as dimension 1, as torch wants them, wherever the model puts them.

    >>> classes_second(torch.zeros(2, 7, 5), torch.zeros(2, 7, dtype=torch.int64)).shape
    torch.Size([2, 5, 7])
    """
    second = outputs.shape[:1] + outputs.shape[2:] == targets.shape
    last = outputs.shape[:-1] == targets.shape
    if second == last:
        why = "either dimension could be the classes" if last else "neither fits"
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} need scores [samples, ..., classes] or [samples, classes, ...], "
            f"and the model gives {tuple(outputs.shape)}: {why}; give a loss of your own (--loss module:function)"
        )
    return outputs.movedim(-1, 1) if last else outputs


def count_right(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[int, int] | None:
    """Return how many positions the model guesses right, and how many there are; None where nothing is guessed.

    >>> count_right(torch.eye(3), torch.tensor([0, 1, 0])), count_right(torch.zeros(3, 1), torch.zeros(3, 1))
    ((2, 3), None)
    """
    if targets.is_floating_point() or outputs.ndim != targets.ndim + 1 or outputs.shape[0] != targets.shape[0]:
        return None
    if targets.ndim == 1:
        return int((outputs.argmax(1) == targets).sum()), len(targets)
    try:
        guesses = classes_second(outputs, targets).argmax(1)
    except ValueError:
        return None
    counted = targets != IGNORED
    return int((guesses[counted] == targets[counted]).sum()), int(counted.sum())
