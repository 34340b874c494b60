"""A profile: what is known of a model before it is cut, its layers in one order and the tensors between them.

    layer         0        1        2        3
                ┌────┐   ┌────┐   ┌────┐   ┌────┐
    input ─────>│conv├──>│ bn ├──>│conv├──>│add │──> output
                └─┬──┘   └────┘   └────┘   └─▲──┘
                  └──────────── skip ────────┘
    cut at            1        2        3
    crosses       conv=skip  bn,skip  conv,skip

A cut at position c lies between layer c - 1 and layer c. A tensor crosses every cut between the layer that makes it and
the last that reads it: pieces are in a row, and hand on what a later one needs. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from paceline.decoding import Between

INPUT = -1  # the producer of the model's own inputs
MOST = 2**50  # bytes, seconds or numbers of anything, in a file
Seconds: TypeAlias = Annotated[float, Between(0, MOST)]
Whole: TypeAlias = Annotated[int, Between(0, MOST)]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One indivisible layer of a model, as measured with one micro-batch on a device of speed 1.

    `fixed_seconds` is the part of its seconds that a smaller micro-batch would not save. `spread` is how far the median
    of its measured times is above the least, which its seconds are, as a share of them; 0 where nobody has measured.
    `activation_bytes` is what the layer makes and backward needs again, whoever keeps it. Backward has two parts, which
    only the zero-bubble schedule takes apart: the gradient of the layer's inputs, and that of its weights.

    >>> Layer(name="fc", kind="Linear", forward_seconds=1.0, input_seconds=1.0, weight_seconds=0.5).seconds
    2.5
    """

    name: str
    kind: str = ""
    forward_seconds: Seconds = 0.0
    input_seconds: Seconds = 0.0
    weight_seconds: Seconds = 0.0
    fixed_seconds: Seconds = 0.0
    activation_bytes: Whole = 0
    spread: Annotated[float, Between(0, MOST)] = 0.0

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.input_seconds + self.weight_seconds


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that one layer makes and others read; `producer` is INPUT for the model's own inputs.

    `kept` says that it is already counted in its producer's `activation_bytes`.

    >>> Tensor(name="x", bytes=400, producer=INPUT, last_use=3).crosses(2)
    True
    """

    name: str
    bytes: Whole
    producer: Annotated[int, Between(INPUT, MOST)]
    last_use: Whole
    needs_gradient: bool = True
    kept: bool = False

    def crosses(self, cut: int) -> bool:
        """Whether a cut before layer `cut` parts its producer from a reader."""
        return self.producer < cut <= self.last_use


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter or buffer, and the layers that use it. One that several pieces use is held by each of them.

    >>> Weight(name="fc.weight", bytes=64, layers=(2,)).trained
    True
    """

    name: str
    bytes: Whole
    layers: tuple[Whole, ...]
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that placement needs to know of a model; `notes` say which layers could not be parted, and why.

    `bound` are the cuts that are not possible: between layers that one piece must hold together. `evaluates` says
    whether the pieces do in eval mode what the model does.

    >>> chain = Profile(layers=(Layer(name="a"), Layer(name="b")),
    ...                 tensors=(Tensor(name="a", bytes=8, producer=0, last_use=1),))
    >>> chain.crossing_bytes(1)
    8
    """

    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...] = ()
    weights: tuple[Weight, ...] = ()
    bound: frozenset[Whole] = frozenset()
    notes: tuple[str, ...] = ()
    evaluates: bool = True

    def crossing(self, cut: int) -> tuple[Tensor, ...]:
        """Return the tensors that cross a cut, in the order in which they are handed on."""
        return tuple(tensor for tensor in self.tensors if tensor.crosses(cut))

    def crossing_bytes(self, cut: int) -> int:
        """Return the bytes that are sent forward over a cut for each micro-batch."""
        return sum(tensor.bytes for tensor in self.crossing(cut))

    def gradient_bytes(self, cut: int) -> int:
        """Return the bytes of gradients that come back over a cut for each micro-batch."""
        return sum(tensor.bytes for tensor in self.crossing(cut) if tensor.needs_gradient)
