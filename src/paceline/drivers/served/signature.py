"""Is it the same network on both sides? A digest of names, shapes and kinds.

Weights that are trained do not count: they travel. Those that are frozen do not travel, so they must be the same.
"""

from __future__ import annotations

import hashlib

import torch
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
    digest = hashlib.sha256("\n".join(parts).encode())
    for parameter in module.parameters():
        if not parameter.requires_grad:
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
