"""The vector that codecs are measured on: a gradient of a real network, not noise.

Noise would flatter some codecs and wrong others. In a real gradient layers differ in scale a thousandfold, a few
elements are large, and matrices are close to some of low rank: quantisers care for the first, sparsifiers for the
second, PowerSGD for the third. Here it is that of ResNet-18 (11.2 M parameters) after three steps of SGD on the digits,
enlarged to 32x32 pixels, what the network is made for: with 8x8 its last layers see one pixel each, and most of the
gradient is exactly zero, which no codec should be praised for. Up to 26,122 elements the MLP's gradient does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.data import load_dataset
from paceline.models import build_model
from paceline.settings import SettingError

STEPS_BEFORE = 3
BATCH = 16
LEARNING_RATE = 0.02
SIDES = {"mlp": 8, "resnet18": 32}
MOST_ELEMENTS = 2**30


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleGradient:
    """A flat gradient, the shapes of the tensors in it, and a description.

    >>> SampleGradient(vector=torch.ones(3), shapes=(torch.Size([3]),), description="ones").shapes
    (torch.Size([3]),)
    """

    vector: torch.Tensor
    shapes: tuple[torch.Size, ...]
    description: str


def real_gradient(elements: int) -> SampleGradient:
    """Return a gradient of so many elements: that of a network, cut off, or repeated where it is too short.

    >>> gradient = real_gradient(10_000)
    >>> gradient.vector.numel(), gradient.shapes
    (10000, (torch.Size([128, 64]), torch.Size([128]), torch.Size([13, 128]), torch.Size([16])))
    >>> real_gradient(0)
    Traceback (most recent call last):
    paceline.settings.SettingError: size must be between 1 and 1,073,741,824 (size=0)
    """
    check_size(elements)
    name, tensors = "mlp", _gradients_of("mlp")
    if sum(tensor.numel() for tensor in tensors) < elements:
        name, tensors = "resnet18", _gradients_of("resnet18")
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
    times = -(-elements // whole.numel())
    changed = f", {times} times over" if times > 1 else f", its first {elements:,}" if elements < whole.numel() else ""
    return SampleGradient(
        vector=whole.repeat(times)[:elements].clone(),
        shapes=_cut([tensor.shape for tensor in tensors] * times, elements),
        description=f"gradient of {name} on digits ({SIDES[name]}x{SIDES[name]} pixels, batch {BATCH}) after "
        f"{STEPS_BEFORE} steps{changed}",
    )


def check_size(elements: int) -> None:
    """Raise SettingError for a size that no gradient can have.

    >>> check_size(-1)
    Traceback (most recent call last):
    paceline.settings.SettingError: size must be between 1 and 1,073,741,824 (size=-1)
    """
    if not 1 <= elements <= MOST_ELEMENTS:
        raise SettingError(("size",), f"size must be between 1 and {MOST_ELEMENTS:,} (size={elements:,})")


def _gradients_of(name: str) -> list[torch.Tensor]:
    """Return the gradients of a network's parameters in its fourth step."""
    data, side = load_dataset("digits").train, SIDES[name]
    model = build_model(name, input_shape=(1, side, side), classes=10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS_BEFORE + 1):
        if step:
            optimizer.step()
        batch = slice(step * BATCH, (step + 1) * BATCH)
        images = F.interpolate(data.inputs[batch], size=(side, side), mode="bilinear")
        model.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(images), data.targets[batch]))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _cut(shapes: list[torch.Size], elements: int) -> tuple[torch.Size, ...]:
    """Return the first shapes, up to so many elements. Of the last, whole rows stay a matrix; part of a row is flat."""
    kept: list[torch.Size] = []
    for shape in shapes:
        row = shape[1:].numel()
        rows = min(shape[0], elements // row)
        if rows:
            kept.append(torch.Size([rows, *shape[1:]]))
            elements -= rows * row
        if rows < shape[0]:
            break
    return (*kept, torch.Size([elements])) if elements else tuple(kept)
