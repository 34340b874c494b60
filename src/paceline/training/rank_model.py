"""A rank's model between two rounds: its gradient goes out as a message, an update comes in through its optimiser.

    batch ── backward ──> .grad ── pack ──> message     [ gradient | change of the buffers | flags ]
    update ── apply ──> .grad ──> the user's optimiser, then its schedulers; buffers move by the mean change

Every rank applies the same updates in the same order, so parameters, optimiser states and buffers are equal on all of
them, to the bit. A parameter that no gradient in its sum has a value for gets none: an optimiser leaves it alone,
where it would decay one with a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from paceline.training.contributions import MessageLayout
from paceline.training.replica import Flat, message_dtype
from paceline.training.train_state import word_sums

LEAST_OF_VARIANCE = 0.1  # of itself that is left of a running variance in one round, at the least


class RankModel:
    """The parameters and buffers of one rank; `step` takes the optimiser's step and those of its schedulers.

    `variances` says which buffers are variances (BatchNorm's `running_var`): they stay above zero.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> model = RankModel([weight], [], torch.optim.SGD([weight], lr=1.0).step)
    >>> weight.grad = torch.tensor([1.0, 2.0])
    >>> model.pack(torch.empty(model.layout.size))
    tensor([1., 2., 1.])
    >>> model.apply(torch.tensor([3.0, 4.0, 1.0]))
    >>> weight.data
    tensor([-3., -4.])
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[torch.Tensor],
        step: Callable[[], object],
        *,
        variances: Sequence[bool] | None = None,
    ) -> None:
        self.dtype = message_dtype(parameters, buffers)
        self._parameters, self._buffers, self._step = list(parameters), list(buffers), step
        self._variances = [False] * len(self._buffers) if variances is None else list(variances)
        self._flat, self._flat_buffers = Flat(self._parameters, self.dtype), Flat(self._buffers, self.dtype)
        self.layout = MessageLayout(
            gradient=self._flat.size, buffers=self._flat_buffers.size, flags=len(self._parameters)
        )
        self._agreed = [buffer.detach().clone() for buffer in self._buffers]  # those of the model that was taken

    @torch.no_grad()
    def pack(self, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with the gradient and the change of the buffers, and take the gradient off the parameters."""
        has = []
        for part, parameter in zip(self._flat.parts(out), self._parameters, strict=True):
            has.append(parameter.grad is not None)
            if parameter.grad is None:
                part.zero_()
                continue
            if parameter.grad.is_sparse:
                raise ValueError("a parameter has a sparse gradient: rounds add up dense ones (sparse=False)")
            part.copy_(parameter.grad)
            parameter.grad = None
        changes = self._flat_buffers.parts(self.layout.buffers_of(out))
        for change, buffer, agreed in zip(changes, self._buffers, self._agreed, strict=True):
            # A buffer that has not changed may be infinite (a mask): its difference would be NaN.
            change.copy_(torch.where(buffer == agreed, torch.zeros_like(buffer), buffer - agreed))
        self.layout.flags_of(out).copy_(torch.tensor(has, dtype=self.dtype))
        return out

    @torch.no_grad()
    def apply(self, update: torch.Tensor) -> None:
        """Take the step of an update: the sum of what all ranks contributed."""
        flags = self.layout.flags_of(update).tolist()
        for part, parameter, flag in zip(self._flat.parts(update), self._parameters, flags, strict=True):
            parameter.grad = _as_gradient(part, parameter) if flag else None
        with torch.enable_grad():
            self._step()
        for parameter in self._parameters:
            parameter.grad = None
        changes = self._flat_buffers.parts(self.layout.buffers_of(update))
        for change, buffer, agreed, variance in zip(changes, self._buffers, self._agreed, self._variances, strict=True):
            moved = agreed + (change if buffer.is_floating_point() else change.round()).to(buffer.dtype)
            # A late change is one since an older model: several of them together could make a variance negative.
            agreed.copy_(torch.maximum(moved, LEAST_OF_VARIANCE * agreed) if variance else moved)
            buffer.copy_(agreed)

    def forget_gradients(self) -> None:
        """Take gradients off the parameters, and what a batch changed in the buffers."""
        for parameter in self._parameters:
            parameter.grad = None
        self.restore_buffers()

    @torch.no_grad()
    def restore_buffers(self) -> None:
        """Set the buffers to those of the model that was taken."""
        for buffer, agreed in zip(self._buffers, self._agreed, strict=True):
            buffer.copy_(agreed)

    @torch.no_grad()
    def take_buffers(self) -> None:
        """Take the buffers as they are for those that all ranks agree on: a checkpoint was loaded."""
        for buffer, agreed in zip(self._buffers, self._agreed, strict=True):
            agreed.copy_(buffer)

    @torch.no_grad()
    def fingerprint(self) -> int:
        """Return a number that changes with any one bit of the parameters; one look at the device for all of them."""
        # Odd factors: an even one would shift the highest bit of a word, the sign of a number, out of sight.
        sums = [torch.add(*word_sums(parameter)) * (2 * place + 1) for place, parameter in enumerate(self._parameters)]
        return int(torch.stack(sums).sum())


def _as_gradient(part: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a part of an update as a gradient, laid out as its parameter is: fused optimisers rely on that."""
    if part.stride() != parameter.stride():
        return torch.empty_like(parameter).copy_(part)
    return part.to(parameter.dtype)
