"""Gradient <-> bytes.

A codec is a frozen value: `encode` gives the bytes that travel, `decode` gives back a flat float32 vector. Nothing here
knows where the bytes go. A new codec is its file and one line in `CODECS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paceline.lazy import lazy_names
from paceline.lookup import unknown

if TYPE_CHECKING:
    import torch

    from paceline.codecs.bfloat16 import BFloat16
    from paceline.codecs.identity import Identity

CODECS: dict[str, str] = {
    "identity": "Identity",
    "bfloat16": "BFloat16",
}
"""Name -> the class in this package."""

_HOMES = {"Identity": "identity", "BFloat16": "bfloat16"}


class Codec(Protocol):
    """What every codec can do."""

    def encode(self, vector: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """The bytes of a flat float32 vector, as a uint8 tensor; may share its memory."""

    def decode(self, payload: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The flat float32 vector of a uint8 tensor: in `out` if that is given, else it may share its memory."""

    def most_bytes(self, elements: int) -> int:
        """The most bytes that a vector of so many elements can take."""


def make_codec(name: str) -> Codec:
    """A codec by name.

    >>> make_codec("identity")
    Identity()
    >>> make_codec("bfloat")
    Traceback (most recent call last):
    ValueError: unknown codec 'bfloat'; did you mean 'bfloat16'? choose from identity, bfloat16
    """
    if name not in CODECS:
        raise unknown("codec", name, CODECS)
    import importlib

    home = importlib.import_module(f"{__name__}.{_HOMES[CODECS[name]]}")
    codec: Codec = getattr(home, CODECS[name])()
    return codec


__all__ = ["CODECS", "BFloat16", "Codec", "Identity", "make_codec"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)
