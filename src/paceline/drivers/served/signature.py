"""Is it the same network on both sides? A digest of names, shapes and kinds; the weights themselves do not count."""

from __future__ import annotations

import hashlib

from torch import nn


def signature(module: nn.Module) -> str:
    """A digest of what a network is made of.

    >>> signature(nn.Linear(2, 3)) == signature(nn.Linear(2, 3))
    True
    >>> signature(nn.Linear(2, 3)) == signature(nn.Linear(3, 2))
    False
    """
    parts = [
        f"{kind} {name} {tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'requires_grad', False)}"
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for name, tensor in tensors
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
