"""What the tests of LARS share: its three ways, small layers with gradients, and one step written down in numpy."""

from __future__ import annotations

import numpy as np
import torch

from paceline import LARS

WAYS = {"one by one": {"foreach": False}, "many at once": {"foreach": True}, "one pass": {"fused": True}}
SHAPES = ((5, 3), (4,), (2, 3, 2, 2), (1, 7), ())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def numbers(shapes, *, seed=0, scale=1.0, dtype=torch.float64):
    """Normal numbers, rounded to float32 so that every type begins with the same."""
    generator = seeded(seed)
    return [(scale * torch.randn(shape, generator=generator, dtype=torch.float32)).to(dtype) for shape in shapes]


def parameters(tensors, dtype=None):
    return [torch.nn.Parameter(tensor.detach().clone().to(dtype or tensor.dtype)) for tensor in tensors]


def give(layers, gradients):
    for layer, gradient in zip(layers, gradients, strict=True):
        layer.grad = None if gradient is None else gradient.to(layer.dtype)


def run(start, gradients, *, dtype=None, make=LARS, schedule=None, **settings):
    """The layers and their optimiser after a step with each of `gradients`."""
    layers = parameters(start, dtype)
    optimizer = make(layers, **settings)
    scheduler = schedule(optimizer) if schedule else None
    for each in gradients:
        give(layers, each)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return layers, optimizer


def one_step(w, v, g, *, lr, momentum, weight_decay, trust_coefficient, clip, nesterov, maximize, scaled):
    """One layer's step in numpy, as the papers of LARS, LARC and Nesterov's momentum have it."""
    rate = lr
    lengths = np.linalg.norm(w), np.linalg.norm(g)
    if scaled and all(lengths):
        local = trust_coefficient * lengths[0] / (lengths[1] + weight_decay * lengths[0])
        rate = min(local, lr) if clip else lr * local
    downhill = (-g if maximize else g) + weight_decay * w
    v = momentum * v + rate * downhill
    return (w - rate * downhill - momentum * v, v) if nesterov else (w - v, v)


def written_down(start, gradients, *, exclude_bias_and_norm, **settings):
    """The layers after all steps, by `one_step`."""
    found = [(tensor.double().numpy(), np.zeros(tensor.shape)) for tensor in start]
    for each in gradients:
        found = [
            one_step(w, v, g.double().numpy(), scaled=w.ndim > 1 or not exclude_bias_and_norm, **settings)
            for (w, v), g in zip(found, each, strict=True)
        ]
    return [torch.from_numpy(np.asarray(w)) for w, _ in found]


def assert_close(found, expected, *, rtol=1e-12, atol=1e-12, message=None):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.detach().double(),
            other.detach().double(),
            rtol=rtol,
            atol=atol,
            msg=message and (lambda m: message + m),
        )


def assert_equal(found, expected):
    assert_close(found, expected, rtol=0, atol=0)
