"""Codecs measured on this machine: how fast they are, how small their payloads, how large their error and bias.

In every turn a plain copy (`tensor.clone()`) and each codec's encoding and decoding are timed once, on a clock that
stands still while others have the core (`paceline.stopwatch`); the least of all turns counts, and the spread says how
far the median is above. Both write to memory they have just been given, as a copy does. Before the first turn each
codec runs once, so that its kernels are compiled and loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from paceline.bench.gradients import SampleGradient
from paceline.codecs import CODECS, Codec
from paceline.codecs.naming import FEEDBACK, inner_of, parse_codec, settings_of
from paceline.settings import SettingError
from paceline.stopwatch import Stopwatch, TimedTurns, spread_of

Returned = TypeVar("Returned")

BIAS_SEEDS = 64
DEVIATIONS = 3.0
# Every codec of the table is measured with its defaults; these have more settings worth measuring.
MORE_VARIANTS: dict[str, tuple[str, ...]] = {
    "qsgd": (
        "qsgd levels=1",
        "qsgd levels=127",
        "qsgd norm=l2",
        "qsgd norm=l2 lossless=elias",
        "qsgd lossless=entropy",
    )
}

# -- variants ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CodecVariant:
    """A codec with its settings, named as in `paceline.codecs.naming`.

    >>> CodecVariant("qsgd norm=l2 error-feedback").label
    'qsgd levels=7 l2 +feedback'
    >>> CodecVariant("one-bit").label
    'one-bit'
    """

    text: str

    def make(self, shapes: Sequence[torch.Size] | None = None) -> Codec:
        """Return the codec with an empty memory, and with error feedback only if the text names it."""
        codec = parse_codec(self.text)
        return (codec if FEEDBACK in self.text.split() else inner_of(codec)).fresh(shapes)

    @property
    def name(self) -> str:
        return self.text.split()[0]

    @property
    def label(self) -> str:
        """The name, its first setting, and those that differ from their defaults."""
        inner = inner_of(parse_codec(self.text))
        parts = [self.name]
        for index, (key, default) in enumerate(settings_of(self.name).items()):
            value = getattr(inner, key)
            if index == 0 or value != default:
                parts.append(value if isinstance(value, str) else f"{key}={value}")
        return " ".join([*parts, *(["+feedback"] if FEEDBACK in self.text.split() else [])])


def variants(texts: Iterable[str] = ()) -> list[CodecVariant]:
    """Return all variants, or those that are named; a name alone stands for all variants of that codec.

    >>> [variant.label for variant in variants(["identity", "qsgd levels=3"])]
    ['identity', 'qsgd levels=3']
    >>> variants(["one-bit", "two-bit"])
    Traceback (most recent call last):
    ValueError: unknown codec 'two-bit'; did you mean 'one-bit'? choose from identity, bfloat16, float16, ...
    """
    named = list(dict.fromkeys(texts)) or list(CODECS)
    for text in named:
        parse_codec(text)  # raises for a codec or a setting that does not exist
    found = [CodecVariant(each) for text in named for each in (text, *MORE_VARIANTS.get(text, ()))]
    return list({variant.label: variant for variant in found}.values())  # "qsgd" and "qsgd levels=7" are one


# -- bias --------------------------------------------------------------------------------------------------------------
# The bias is how far the mean of what is decoded is from what was encoded.
#
# The plain way, the length of (mean of R decodings - g), has a floor: it never comes out below error / sqrt(R), so an
# unbiased codec with a large error looks biased. With d_r = decoding r - g, and decodings that are independent,
#
#     the mean of <d_r, d_s> over all pairs r != s   has the expectation   ||bias||^2
#
# without any floor. Where there is no bias its deviation is sqrt(2 tr(C^2) / (R (R - 1))), C the covariance of a
# decoding, and the mean of <d_r, d_s>^2 over the pairs estimates tr(C^2). A bias is called seen if its square is above
# three deviations; otherwise it is only known to be smaller than one that would have been seen. (An unbiased estimate
# of the square of a mean by pairs is a U-statistic: Hoeffding, 1948.)


@dataclass(frozen=True, kw_only=True)
class Bias:
    """The bias as a share of the gradient's length, where it is seen; else a limit below which it lies.

    >>> str(Bias(seen=0.831)), str(Bias(below=0.0021)), str(Bias(seen=0.0))
    ('0.83', '<0.003', '0')
    """

    seen: float | None = None
    below: float = 0.0

    def __str__(self) -> str:
        if self.seen is not None:
            return f"{self.seen:.2g}"
        digit = f"{self.below:.0e}"  # rounded upwards: a limit must not be understated
        step = float(f"1e{digit[2:]}")
        return f"<{float(digit) if float(digit) >= self.below else float(digit) + step:.1g}"


def measure_bias(variant: CodecVariant, gradient: SampleGradient, *, seeds: int = BIAS_SEEDS) -> Bias | None:
    """Return the bias over so many seeds, each with a fresh codec; None if it is not random (all error is bias).

    >>> gradient = SampleGradient(vector=torch.arange(1.0, 2049.0), shapes=(torch.Size([2048]),), description="")
    >>> measure_bias(CodecVariant("one-bit"), gradient) is None
    True
    >>> measure_bias(CodecVariant("qsgd"), gradient).seen is None
    True
    """
    first, second = (_deviation(variant, gradient, seed) for seed in range(2))
    if torch.equal(first, second):
        return None
    off = torch.stack([first, second, *(_deviation(variant, gradient, seed) for seed in range(2, seeds))])
    products = off @ off.T / gradient.vector.double().square().sum()
    pairs = products[~torch.eye(seeds, dtype=torch.bool)]
    squared, deviation = float(pairs.mean()), float((2 * pairs.square().mean() / pairs.numel()).sqrt())
    if squared > DEVIATIONS * deviation:
        return Bias(seen=squared**0.5)
    return Bias(below=(max(squared, 0.0) + DEVIATIONS * deviation) ** 0.5)


def _deviation(variant: CodecVariant, gradient: SampleGradient, seed: int) -> torch.Tensor:
    codec = variant.make(gradient.shapes)
    payload = codec.encode(gradient.vector, torch.Generator().manual_seed(seed))
    return codec.decode(payload, expected_length=gradient.vector.numel()).double() - gradient.vector.double()


# -- speed, size and error ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CodecMeasurement:
    """Size, speed, error and bias of one codec. `spread` is how far the median of its turns is above the least.

    >>> measured = CodecMeasurement(label="half", name="half", elements=1000, payload_bytes=2000, encode_seconds=1e-6,
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
    spread: float = 0.0

    @property
    def bits(self) -> float:
        """Bits per element, headers included."""
        return 8 * self.payload_bytes / self.elements

    @property
    def ratio(self) -> float:
        """How many times smaller than float32 the payload is."""
        return 4 * self.elements / self.payload_bytes

    @property
    def encode_speed(self) -> float:
        """The speed of encoding in GB/s of the float32 vector."""
        return 4e-9 * self.elements / self.encode_seconds

    @property
    def decode_speed(self) -> float:
        """The speed of decoding in GB/s of the float32 vector."""
        return 4e-9 * self.elements / self.decode_seconds

    @property
    def copies(self) -> float:
        """The time of encoding and decoding, in plain copies of the vector."""
        return (self.encode_seconds + self.decode_seconds) / self.copy_seconds

    def as_document(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "codec": self.label,
            "bits_per_element": self.bits,
            "ratio": self.ratio,
            "payload_bytes": self.payload_bytes,
            "encode_seconds": self.encode_seconds,
            "decode_seconds": self.decode_seconds,
            "encode_gigabytes_per_second": self.encode_speed,
            "decode_gigabytes_per_second": self.decode_speed,
            "spread": self.spread,
            "copies": self.copies,
            "relative_error": self.error,
            "bias": self.bias.seen,
            "bias_below": None if self.bias.seen is not None else self.bias.below,
        }


class _TimedCodec:
    """One codec under measurement."""

    def __init__(self, variant: CodecVariant, gradient: SampleGradient, watch: Stopwatch) -> None:
        self.variant, self._gradient, self._watch = variant, gradient, watch
        self._codec: Codec = variant.make(gradient.shapes)
        self._generator = torch.Generator().manual_seed(0)
        self.payload = self._encode()  # compiles and loads the kernels; the error is that of a codec without memories
        length = float(gradient.vector.norm())
        self.error = float((self._decode() - gradient.vector).norm()) / length if length else 0.0
        self.encodings, self.decodings = TimedTurns(), TimedTurns()

    def turn(self) -> None:
        seconds, self.payload = timed(self._encode, self._watch)
        self.encodings.add(seconds)
        self.decodings.add(timed(self._decode, self._watch)[0])

    @property
    def spread(self) -> float:
        """How far the median of encoding and decoding is above their least."""
        both = (self.encodings, self.decodings)
        return spread_of(sum(turns.median for turns in both), sum(turns.least for turns in both))

    def _encode(self) -> torch.Tensor:
        return self._codec.encode(self._gradient.vector, self._generator)

    def _decode(self) -> torch.Tensor:
        return self._codec.decode(self.payload, expected_length=self._gradient.vector.numel())


def timed(work: Callable[[], Returned], watch: Stopwatch) -> tuple[float, Returned]:
    """Return the seconds a call takes, and its result.

    >>> seconds, returned = timed(lambda: 42, Stopwatch())
    >>> seconds >= 0, returned
    (True, 42)
    """
    watch.start()
    returned = work()
    return watch.stop(), returned


def check_repeats(repeats: int) -> None:
    """Raise SettingError for a number of turns out of range.

    >>> check_repeats(0)
    Traceback (most recent call last):
    paceline.settings.SettingError: repeats must be between 1 and 1000 (repeats=0)
    """
    if not 1 <= repeats <= 1000:
        raise SettingError(("repeats",), f"repeats must be between 1 and 1000 (repeats={repeats})")


def steps(chosen: Sequence[CodecVariant], repeats: int) -> int:
    """Return how often `measure` calls `on_step`.

    >>> steps([CodecVariant("identity")], repeats=5)
    7
    """
    return len(chosen) * (repeats + 2)


def measure(
    gradient: SampleGradient,
    small: SampleGradient,
    chosen: Sequence[CodecVariant],
    *,
    repeats: int,
    on_step: Callable[[str], None] = lambda name: None,
) -> list[CodecMeasurement]:
    """Measure codecs on a gradient, and their bias on a small one; `on_step` is called with the name of each step.

    >>> from paceline.bench.gradients import real_gradient
    >>> gradient = real_gradient(1000)
    >>> measure(gradient, gradient, [CodecVariant("identity")], repeats=1)[0].error
    0.0
    """
    check_repeats(repeats)
    biases, all_timed, watch = [], [], Stopwatch(waits=True)  # kernels run on a pool of threads
    for variant in chosen:
        on_step(f"{variant.label}: bias")
        biases.append(measure_bias(variant, small))
    for variant in chosen:
        on_step(f"{variant.label}: error")
        all_timed.append(_TimedCodec(variant, gradient, watch))
    copies = TimedTurns()
    for _ in range(repeats):
        for one in all_timed:
            on_step(f"{one.variant.label}: speed")
            one.turn()
        for _ in range(2):
            copies.add(timed(gradient.vector.clone, watch)[0])
    return [
        CodecMeasurement(
            label=one.variant.label,
            name=one.variant.name,
            elements=gradient.vector.numel(),
            payload_bytes=one.payload.numel(),
            encode_seconds=one.encodings.least,
            decode_seconds=one.decodings.least,
            copy_seconds=copies.least,
            error=one.error,
            bias=bias or Bias(seen=one.error),
            spread=one.spread,
        )
        for one, bias in zip(all_timed, biases, strict=True)
    ]
