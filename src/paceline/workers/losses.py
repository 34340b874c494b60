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

from paceline.user_code import UserCodeError

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
        self._function = _unreduced(function, name)
        self._ignored = _ignored_by(function)
        self.per_sample = True  # until it gives one number for a block, which `check` asks for

    @property
    def of_classes(self) -> bool:
        """Whether it is known to be a loss of classes: torch's cross-entropy, or its likelihood."""
        return self._ignored is not None

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = self._function(outputs, targets)
        if losses.ndim == 0:
            return losses.expand(len(targets))
        if losses.ndim == 1:
            return losses
        if self._ignored is None or losses.shape != targets.shape:
            return losses.flatten(1).mean(1)
        return losses.flatten(1).sum(1) / (targets != self._ignored).flatten(1).sum(1).clamp(min=1)

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
            raise UserCodeError(f"loss {self._name!r} fails on the model's outputs: {reason} {shapes}") from error
        if any("target size" in str(warning.message) for warning in heard):  # torch would spread one over the other
            raise UserCodeError(
                f"loss {self._name!r} was given two shapes that do not match {shapes}; "
                "make them alike: targets[:, None] are [samples, 1]"
            )
        if not isinstance(losses, torch.Tensor) or losses.shape[:1] not in ((), (len(targets),)):
            found = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise UserCodeError(
                f"loss {self._name!r} must return a loss for each of {len(targets)} samples, or one number; "
                f"it gave {found} {shapes}"
            )
        if not losses.is_floating_point() or not losses.requires_grad:
            raise UserCodeError(
                f"loss {self._name!r} gave no gradient; return a tensor computed from the outputs, without .item(), "
                ".detach() or torch.no_grad()"
            )
        self.per_sample = losses.ndim > 0
        if not self.per_sample and len(targets) > 1:
            self._refuse_a_sum(float(losses.detach()), outputs, targets)

    def _refuse_a_sum(self, loss: float, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Refuse a number that doubles when every sample is there twice: it is taken for a mean."""
        with torch.no_grad():
            doubled = float(self._function(torch.cat([outputs, outputs]), torch.cat([targets, targets])))
        if loss and abs(doubled / loss - 2.0) < 1e-3:
            raise UserCodeError(f"loss {self._name!r} gives a sum, which grows with the batch; return the mean")


_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)


def _ignored_by(function: Any) -> int | None:
    """Return the target that torch's losses of classes do not count; None for any other loss."""
    if function in (F.cross_entropy, F.nll_loss, *_OF_CLASSES):
        return IGNORED
    return int(function.ignore_index) if isinstance(function, _OF_CLASSES) else None


def _unreduced(function: Any, name: str) -> LossFunction:
    """Return a loss that does not take the mean, where it can be asked for that and nothing weighs the samples."""
    if isinstance(function, type):
        try:
            function = function()
        except TypeError as error:
            raise UserCodeError(
                f"loss {name!r} is a class that cannot be made without arguments ({error}); name a function of yours "
                "that returns the loss"
            ) from None
    if not callable(function):
        raise UserCodeError(f"loss {name!r} is a {type(function).__name__}; name a function of outputs and targets")
    if isinstance(function, nn.Module):
        if getattr(function, "reduction", None) == "sum":
            raise UserCodeError(f"loss {name!r} gives a sum, which grows with the batch; take reduction='mean'")
        if getattr(function, "reduction", None) == "mean" and getattr(function, "weight", None) is None:
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
        raise UserCodeError(
            f"targets of shape {tuple(targets.shape)} need scores [samples, ..., classes] or [samples, classes, ...], "
            f"and the model gives {tuple(outputs.shape)}: {why}; give a loss of your own (--loss module:function)"
        )
    return outputs.movedim(-1, 1) if last else outputs


def count_right(outputs: torch.Tensor, targets: torch.Tensor, classes: int | None = None) -> tuple[int, int] | None:
    """Return how many positions the model guesses right, and how many there are; None where nothing is guessed.

    With `classes`, outputs of another size are no scores of classes.

    >>> count_right(torch.eye(3), torch.tensor([0, 1, 0])), count_right(torch.zeros(3, 1), torch.zeros(3, 1))
    ((2, 3), None)
    """
    if targets.is_floating_point() or outputs.ndim != targets.ndim + 1 or outputs.shape[0] != targets.shape[0]:
        return None
    if targets.ndim == 1:
        scores = outputs
    else:
        try:
            scores = classes_second(outputs, targets)
        except UserCodeError:
            return None
    if classes is not None and scores.shape[1] != classes:
        return None
    guesses = scores.argmax(1)
    if targets.ndim == 1:
        return int((guesses == targets).sum()), len(targets)
    counted = targets != IGNORED
    return int((guesses[counted] == targets[counted]).sum()), int(counted.sum())
