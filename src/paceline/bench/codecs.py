"""How fast codecs are on this machine, how small their payloads, and how far off what comes out.

In every turn a plain copy (`tensor.clone()`) and each codec's encoding and decoding are timed once; the best of all
turns counts. Both write to memory they have just been given, as a copy does. Before the first turn each codec runs
once, so that its kernels are compiled and loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from paceline.bench.bias import Bias, measure_bias
from paceline.bench.gradients import Gradient
from paceline.bench.variants import Variant
from paceline.codecs import Codec

Returned = TypeVar("Returned")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one codec came to.

    >>> measured = Measured(label="half", name="half", elements=1000, payload_bytes=2000, encode_seconds=1e-6,
    ...                     decode_seconds=2e-6, copy_seconds=1e-6, error=0.002, bias=Bias(seen=0.002))
    >>> measured.bits, measured.ratio, round(measured.encode_speed, 6), round(measured.copies, 6)
    (16.0, 2.0, 4.0, 3.0)
    """

    label: str
    name: str
    elements: int
    payload_bytes: int
    encode_seconds: float
    decode_seconds: float
    copy_seconds: float
    error: float
    bias: Bias

    @property
    def bits(self) -> float:
        """Bits per element, header and all."""
        return 8 * self.payload_bytes / self.elements

    @property
    def ratio(self) -> float:
        """How many times smaller than float32."""
        return 4 * self.elements / self.payload_bytes

    @property
    def encode_speed(self) -> float:
        """GB/s of the float32 vector."""
        return 4e-9 * self.elements / self.encode_seconds

    @property
    def decode_speed(self) -> float:
        """GB/s of the float32 vector."""
        return 4e-9 * self.elements / self.decode_seconds

    @property
    def copies(self) -> float:
        """Encoding and decoding, in plain copies of the vector."""
        return (self.encode_seconds + self.decode_seconds) / self.copy_seconds

    def as_document(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "codec": self.label,
            "bits_per_element": self.bits,
            "ratio": self.ratio,
            "payload_bytes": self.payload_bytes,
            "encode_seconds": self.encode_seconds,
            "decode_seconds": self.decode_seconds,
            "encode_gigabytes_per_second": self.encode_speed,
            "decode_gigabytes_per_second": self.decode_speed,
            "copies": self.copies,
            "relative_error": self.error,
            "bias": self.bias.seen,
            "bias_below": None if self.bias.seen is not None else self.bias.below,
        }


class _Timed:
    """One codec under measurement."""

    def __init__(self, variant: Variant, gradient: Gradient) -> None:
        self.variant, self._gradient = variant, gradient
        self._codec: Codec = variant.make(gradient.shapes)
        self._generator = torch.Generator().manual_seed(0)
        self.payload = self._encode()  # compiles and loads the kernels; the error is that of a codec without memories
        length = float(gradient.vector.norm())
        self.error = float((self._decode() - gradient.vector).norm()) / length if length else 0.0
        self.encodings: list[float] = []
        self.decodings: list[float] = []

    def turn(self) -> None:
        seconds, self.payload = timed(self._encode)
        self.encodings.append(seconds)
        self.decodings.append(timed(self._decode)[0])

    def _encode(self) -> torch.Tensor:
        return self._codec.encode(self._gradient.vector, self._generator)

    def _decode(self) -> torch.Tensor:
        return self._codec.decode(self.payload, expected_length=self._gradient.vector.numel())


def timed(work: Callable[[], Returned]) -> tuple[float, Returned]:
    """The seconds a call takes, and what it returns.

    >>> seconds, returned = timed(lambda: 42)
    >>> seconds >= 0, returned
    (True, 42)
    """
    began = time.perf_counter()
    returned = work()
    return time.perf_counter() - began, returned


def check_repeats(repeats: int) -> None:
    """Refuse a number of turns that is none.

    >>> check_repeats(0)
    Traceback (most recent call last):
    ValueError: repeats must be between 1 and 1000 (repeats=0)
    """
    if not 1 <= repeats <= 1000:
        raise ValueError(f"repeats must be between 1 and 1000 (repeats={repeats})")


def steps(chosen: Sequence[Variant], repeats: int) -> int:
    """How often `on_step` is called by `measure`.

    >>> steps([Variant("identity")], repeats=5)
    7
    """
    return len(chosen) * (repeats + 2)


def measure(
    gradient: Gradient,
    small: Gradient,
    chosen: Sequence[Variant],
    *,
    repeats: int,
    on_step: Callable[[str], None] = lambda what: None,
) -> list[Measured]:
    """Measure codecs on a gradient, and their bias on a small one. `on_step` is told what is about to be done.

    >>> from paceline.bench.gradients import real_gradient
    >>> gradient = real_gradient(1000)
    >>> measure(gradient, gradient, [Variant("identity")], repeats=1)[0].error
    0.0
    """
    check_repeats(repeats)
    biases, all_timed = [], []
    for variant in chosen:
        on_step(f"{variant.label}: bias")
        biases.append(measure_bias(variant, small))
    for variant in chosen:
        on_step(f"{variant.label}: error")
        all_timed.append(_Timed(variant, gradient))
    copies = []
    for _ in range(repeats):
        for one in all_timed:
            on_step(f"{one.variant.label}: speed")
            one.turn()
        copies += [timed(gradient.vector.clone)[0] for _ in range(2)]
    return [_measured(one, gradient, min(copies), bias) for one, bias in zip(all_timed, biases, strict=True)]


def _measured(one: _Timed, gradient: Gradient, copy_seconds: float, bias: Bias | None) -> Measured:
    return Measured(
        label=one.variant.label,
        name=one.variant.name,
        elements=gradient.vector.numel(),
        payload_bytes=one.payload.numel(),
        encode_seconds=min(one.encodings),
        decode_seconds=min(one.decodings),
        copy_seconds=copy_seconds,
        error=one.error,
        bias=bias or Bias(seen=one.error),
    )
