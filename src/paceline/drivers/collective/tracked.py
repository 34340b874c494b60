"""What of a model is averaged: the parameters that its optimiser trains, and the buffers that a checkpoint would hold.

Buffers travel as values: floating ones (BatchNorm's statistics) and counters (a single whole number).
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.codecs import Codec
from paceline.codecs.identity import Identity
from paceline.drivers.collective.common import codec_of
from paceline.training.replica import message_dtype

AVERAGED: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # optimisers that have an averaging


class Tracked:
    """The tensors of one model and one optimiser.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    >>> tracked = Tracked(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> tracked.names, len(tracked.buffers)
    (['0.weight', '0.bias', '1.weight', '1.bias'], 3)
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        _check_kinds(model, optimizer)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._names:
                    shape = tuple(parameter.shape)
                    raise ValueError(f"the optimizer has a parameter that the model does not have (of shape {shape})")
        trained = {id(parameter) for parameter in self._trained()}
        kept = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) in trained]
        if not kept:
            raise ValueError("there is nothing to average: the optimizer has no trainable parameter of this model")
        self.names = [name for name, _ in kept]
        self.parameters = [parameter for _, parameter in kept]
        self.buffers = list(_buffers(model))

    def _trained(self) -> Iterator[torch.nn.Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad)

    @property
    def device(self) -> torch.device:
        """Where the averages are kept."""
        return self.parameters[0].device

    def check(self) -> None:
        """Refuse parameters that train unseen, and buffers that have been replaced."""
        known = {id(parameter) for parameter in self.parameters}
        for parameter in self._trained():
            if id(parameter) not in known:
                name = self._names.get(id(parameter), "a new one")
                raise ValueError(
                    f"a parameter trains that did not when averaging began, so its changes are in no average: {name}; "
                    "unfreeze first, and construct the averaging after"
                )
        if [id(buffer) for buffer in _buffers(self._model)] != [id(buffer) for buffer in self.buffers]:
            raise ValueError(
                "the model's buffers are others than when averaging began: move or convert the model first, "
                "and construct the averaging after"
            )

    def everything(self) -> list[torch.Tensor]:
        """All parameters and buffers of the model, whoever trains them."""
        return [*self._model.parameters(), *self._model.buffers()]

    def description(self) -> str:
        """Names, shapes and types, in a few words: equal for equal models."""
        state = [*self._model.named_parameters(), *self._model.named_buffers()]
        lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in state] + ["trained", *self.names]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
        elements = sum(parameter.numel() for parameter in self.parameters)
        return f"{elements:,} elements in {len(self.names)} tensors, {digest}"

    def checksum(self) -> int:
        """A number that tells whether the tensors are the same as at another time, bit for bit.

        >>> model = torch.nn.Linear(3, 2)
        >>> tracked = Tracked(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> before = tracked.checksum()
        >>> _ = model.bias.data.add_(1.0)
        >>> tracked.checksum() == before
        False
        """
        total = 0
        for place, tensor in enumerate([*self.parameters, *self.buffers]):
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            words = torch.cat([raw, raw.new_zeros(-raw.numel() % 4)]).view(torch.int32)
            total += (place + 1) * int(words.sum(dtype=torch.int64))
        return total % 2**63


def accepted(model: torch.nn.Module, optimizer: torch.optim.Optimizer, codec: Codec | str) -> tuple[Tracked, Codec]:
    """What is averaged, and how it travels; ValueError says why it cannot be.

    >>> model = torch.nn.Linear(3, 2).double()
    >>> accepted(model, torch.optim.SGD(model.parameters(), lr=0.1), "one-bit")
    Traceback (most recent call last):
    ValueError: codecs carry float32, and this model has float64 parameters (codec=ErrorFeedback(OneBit()))
    """
    found, tracked = codec_of(codec), Tracked(model, optimizer)
    if message_dtype(tracked.parameters) is torch.float64 and not isinstance(found, Identity):
        raise ValueError(f"codecs carry float32, and this model has float64 parameters (codec={found!r})")
    if optimizer in AVERAGED:
        raise ValueError("this optimizer has an averaging already; close() that one first")
    return tracked, found


def _check_kinds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model must be a torch.nn.Module (it is a {type(model).__name__})")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer (it is a {type(optimizer).__name__})")
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError("the model is a DistributedDataParallel, which averages already: give the model inside it")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet: run the model once before")
        if not parameter.is_floating_point():
            raise ValueError(f"parameter {name} is {parameter.dtype}: only floating-point parameters are averaged")


def _buffers(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    seen = set()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            counts = buffer.numel() == 1 and not buffer.is_complex() and buffer.dtype is not torch.bool
            if buffer.is_floating_point() or counts:
                seen.add(id(buffer))
                yield buffer
