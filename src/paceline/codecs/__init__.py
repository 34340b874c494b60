"""Gradient <-> bytes.

`encode` gives the bytes that travel, `decode` gives back a flat float32 vector. Nothing here knows where the bytes go.
A payload describes itself, and comes from outside: nothing it says is believed before it is checked.
A new codec is its file and a line in `CODECS` and in `_HOMES`; settings of its own also go into the recipe's [codec].
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from paceline.lazy import lazy_names
from paceline.lookup import unknown

if TYPE_CHECKING:
    import torch

    from paceline.codecs.error_feedback import ErrorFeedback
    from paceline.codecs.floats import BFloat16, Float16, Identity
    from paceline.codecs.int8_sum import Int8Sum
    from paceline.codecs.one_bit import OneBit
    from paceline.codecs.payload import NotFiniteError, PayloadError
    from paceline.codecs.power_sgd import PowerSGD
    from paceline.codecs.qsgd import QSGD, Sparsifier
    from paceline.codecs.top_k import TopK

CODECS: dict[str, str] = {
    "identity": "Identity",
    "bfloat16": "BFloat16",
    "float16": "Float16",
    "one-bit": "OneBit",
    "qsgd": "QSGD",
    "sparsifier": "Sparsifier",
    "top-k": "TopK",
    "power-sgd": "PowerSGD",
    "int8-sum": "Int8Sum",
}
"""Name -> the class in this package."""

_HOMES = {
    "Identity": "floats",
    "BFloat16": "floats",
    "Float16": "floats",
    "OneBit": "one_bit",
    "QSGD": "qsgd",
    "Sparsifier": "qsgd",
    "TopK": "top_k",
    "PowerSGD": "power_sgd",
    "Int8Sum": "int8_sum",
    "ErrorFeedback": "error_feedback",
    "NotFiniteError": "payload",
    "PayloadError": "payload",
}


class Codec(Protocol):
    """A codec: encodes a gradient as bytes, and decodes them; it may keep a memory from one gradient to the next."""

    @property
    def biased(self) -> bool:
        """Whether the mean of what is decoded differs from what was encoded: such a codec wants error feedback."""

    @property
    def suits_parameters(self) -> bool:
        """Whether every element keeps its size, so that a model's parameters can be sent, and not only changes."""

    @property
    def fixed_size(self) -> bool:
        """Whether a payload always has `most_bytes`: its size follows from the vector's length alone."""

    @property
    def plans(self) -> tuple[str, ...]:
        """The ways in which ranks may exchange vectors with it: all-reduce (by its `add_up`), gather, two-step."""

    @property
    def adds_exactly(self) -> bool:
        """Whether an all-reduce gives the sum of what the ranks sent, to float32 rounding: no hop loses anything."""

    @property
    def sum_steps(self) -> int:
        """How many all-reduces an `add_up` asks for, one after the other."""

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the bytes of a gradient of any shape, as a uint8 tensor; NotFiniteError if it is not finite."""

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the flat float32 vector of a payload: in `out` if given, else it may share the payload's memory.

        PayloadError (a ValueError) if it is none of this codec's, or not of the expected length.
        """

    def most_bytes(self, elements: int) -> int:
        """Return the most bytes that a vector of so many elements can take."""

    def fresh(self, shapes: Sequence[torch.Size] | None = None) -> Self:
        """Return the same codec with an empty memory, for one more sender; `shapes` are the tensors' in its vector."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the codec remembers between two gradients: tensors by name."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""


def make_codec(name: str, **settings: Any) -> Codec:
    """Return a new codec, by its name.

    >>> make_codec("qsgd", levels=3)
    QSGD(levels=3, bucket=512, norm='max', lossless='packed')
    >>> make_codec("bfloat")
    Traceback (most recent call last):
    ValueError: unknown codec 'bfloat'; did you mean 'bfloat16'? choose from identity, bfloat16, float16, one-bit, ...
    """
    codec: Codec = codec_class(name)(**settings)
    return codec


def codec_class(name: str) -> Any:
    """Return the class of a codec, by the codec's name.

    >>> codec_class("top-k").__name__
    'TopK'
    """
    if name not in CODECS:
        raise unknown("codec", name, CODECS)
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[CODECS[name]]}"), CODECS[name])


__all__ = [
    "CODECS",
    "QSGD",
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Float16",
    "Identity",
    "Int8Sum",
    "NotFiniteError",
    "OneBit",
    "PayloadError",
    "PowerSGD",
    "Sparsifier",
    "TopK",
    "make_codec",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
