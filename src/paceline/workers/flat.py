"""A model's parameters and buffers as flat vectors, which is how they travel and are added up."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class FlatModel:
    """A module whose parameters, and whose gradients, live in one flat vector each; one that is not `trained` has none.

    >>> flat = FlatModel(nn.Linear(2, 1))
    >>> flat.parameters.numel(), flat.buffers.numel()
    (3, 0)
    """

    def __init__(self, module: nn.Module, *, trained: bool = True) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not parameters:
            raise ValueError("the model has no parameter that requires a gradient")
        kinds = {parameter.dtype for parameter in parameters}
        if kinds not in ({torch.float32}, {torch.float64}):
            found = ", ".join(sorted(str(kind) for kind in kinds))
            raise ValueError(f"parameters must all be float32, or all float64 (found {found}); convert the model first")
        refuse_buffers(module, parameters[0].dtype)
        self.module = module
        self.parameters = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.gradient = torch.zeros_like(self.parameters) if trained else self.parameters.new_zeros(0)
        self.offsets: dict[nn.Parameter, int] = {}
        offset = 0
        for parameter in parameters:
            end = offset + parameter.numel()
            parameter.data = self.parameters[offset:end].view_as(parameter)
            parameter.grad = self.gradient[offset:end].view_as(parameter) if trained else None
            self.offsets[parameter] = offset
            offset = end

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the parameters, in the order of the flat vector.

        >>> FlatModel(nn.Linear(2, 1)).shapes
        [torch.Size([1, 2]), torch.Size([1])]
        """
        return [parameter.shape for parameter in self.offsets]

    def attach_gradient(self) -> None:
        """Let every parameter's `.grad` be its part of the flat gradient again, whatever was done to it meanwhile.

        >>> flat = FlatModel(nn.Linear(2, 1))
        >>> flat.module.zero_grad()
        >>> flat.attach_gradient()
        >>> flat.module.weight.grad
        tensor([[0., 0.]])
        """
        for parameter, part in self._gradient_parts():
            parameter.grad = part

    def gradient_from_parameters(self) -> None:
        """Gather gradients that somebody put elsewhere; a parameter without one counts as zero.

        >>> flat = FlatModel(nn.Linear(2, 1, bias=False))
        >>> flat.module.weight.grad = torch.ones(1, 2)
        >>> flat.gradient_from_parameters()
        >>> flat.gradient
        tensor([1., 1.])
        """
        for parameter, part in self._gradient_parts():
            if parameter.grad is None:
                part.zero_()
            elif parameter.grad.data_ptr() != part.data_ptr():
                part.copy_(parameter.grad)

    def _gradient_parts(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for parameter, offset in self.offsets.items():
            yield parameter, self.gradient[offset : offset + parameter.numel()].view_as(parameter)

    @property
    def buffers(self) -> torch.Tensor:
        """All buffers (BatchNorm's statistics) in one vector; whole numbers become floats."""
        kind = self.parameters.dtype
        buffers = [buffer.detach().reshape(-1).to(kind) for buffer in self.module.buffers()]
        return torch.cat(buffers) if buffers else torch.zeros(0, dtype=kind)

    def load(self, parameters: torch.Tensor, buffers: torch.Tensor) -> None:
        """Take over parameters and buffers from vectors."""
        self.parameters.copy_(parameters)
        self.load_buffers(buffers)

    def load_buffers(self, buffers: torch.Tensor) -> None:
        """Take over the buffers from a vector; whole numbers are rounded back."""
        offset = 0
        for buffer in self.module.buffers():
            part = buffers[offset : offset + buffer.numel()].view_as(buffer)
            buffer.copy_(part if buffer.is_floating_point() else part.round())
            offset += buffer.numel()


def _travels(buffer: torch.dtype, kind: torch.dtype) -> bool:
    """Whether a vector of a type holds the numbers of another; types of 8 bits that torch promotes to none do not."""
    try:
        return torch.promote_types(buffer, kind) is kind
    except RuntimeError:
        return False


def refuse_buffers(module: nn.Module, kind: torch.dtype) -> None:
    """Refuse buffers whose numbers a vector of this type would round.

    >>> refuse_buffers(nn.BatchNorm1d(2).double(), torch.float32)
    Traceback (most recent call last):
    ValueError: buffer running_mean is float64, and buffers travel in the type of the parameters, float32: call ...
    """
    most = round(2 / torch.finfo(kind).eps)
    name_of_kind = str(kind).removeprefix("torch.")
    for name, buffer in module.named_buffers():
        if not _travels(buffer.dtype, kind):
            call = "" if buffer.is_complex() else f"call .to(torch.{name_of_kind}) on it before, or "
            raise ValueError(
                f"buffer {name} is {str(buffer.dtype).removeprefix('torch.')}, and buffers travel in the type of the "
                f"parameters, {name_of_kind}: {call}leave it out of the buffers (a plain attribute)"
            )
        counts = not buffer.is_floating_point() and buffer.numel() > 0 and not buffer.is_meta
        if counts and float(buffer.to(torch.float64).abs().max()) > most:
            raise ValueError(
                f"buffer {name} has whole numbers beyond {most:,}, which {name_of_kind} has no exact numbers for, and "
                "buffers travel in it: set a counter to 0 (num_batches_tracked.zero_()), or leave it out of the "
                "buffers (a plain attribute)"
            )
