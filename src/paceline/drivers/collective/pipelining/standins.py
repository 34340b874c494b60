"""Tensors that take no memory, in the place of those that a rank does not hold while its model is traced.

A model is traced on the device it will run on, for operations write their device down; and a model that needs a
pipeline may not fit there. torch.export looks at shapes alone, so every weight can be one number, repeated:

    weight [4096, 4096] on the CPU, or on no device at all   ->   one 0 on the GPU, seen 4096 x 4096 times
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

Place = tuple[nn.Module, str]


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a model by name; one that has several names is there under each.

    >>> sorted(tensors_of(nn.Linear(2, 2)))
    ['bias', 'weight']
    """
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Let a model have this tensor under that name.

    >>> model = nn.Linear(2, 2)
    >>> put(model, "bias", nn.Parameter(torch.ones(2)))
    >>> model.bias.tolist()
    [1.0, 1.0]
    """
    path, _, field = name.rpartition(".")
    setattr(model.get_submodule(path), field, tensor)  # not past it: some modules keep lists of their weights


@contextmanager
def stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """For a while, tensors on `device` that take no memory in the place of all that are elsewhere.

    >>> model = nn.Linear(2, 2, device="meta")
    >>> with stand_ins(model, torch.device("cpu")):
    ...     print(model.weight.device, model.weight.stride())
    cpu (0, 0)
    >>> model.weight.device
    device(type='meta')
    """
    before = {name: tensor for name, tensor in tensors_of(model).items() if not same_device(tensor.device, device)}
    made: dict[int, torch.Tensor] = {}
    try:
        for name, tensor in before.items():
            if id(tensor) not in made:
                made[id(tensor)] = like(tensor, torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape))
            put(model, name, made[id(tensor)])
        yield
    finally:
        for name, tensor in before.items():
            put(model, name, tensor)


def like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values as what a tensor is: a parameter of the same kind, or a buffer.

    >>> like(nn.Parameter(torch.ones(1)), torch.zeros(1)).requires_grad
    True
    """
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one; "cuda" is any.

    >>> same_device(torch.device("cpu"), torch.device("meta"))
    False
    """
    return one.type == other.type and (one.index is None or other.index is None or one.index == other.index)
