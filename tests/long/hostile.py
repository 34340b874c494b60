"""Payloads as an enemy would send them: altered, cut, spliced and made up, against every codec's `decode`.

What is allowed is a `PayloadError`, or a flat float32 vector of the length that was promised: the expected one, or else
the one that the payload's header says. All numbers must be finite, but with codecs whose payload is the numbers
themselves: whoever receives those checks them. Nothing else may be raised, and memory may grow by no more than a few
copies of the longest vector that may come out.

Kernels check no bounds. To have each access checked, compile them so, in a cache of their own:

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(mktemp -d) make test-long ARGS="tests/long/test_hostile.py"
"""

from __future__ import annotations

import contextlib
import functools
import random
import resource
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.codecs import CODECS, QSGD, PayloadError, make_codec
from paceline.codecs.payload import HEADER_BYTES, MOST_CLAIMED, read_header

SHAPES = [torch.Size([40, 20]), torch.Size([7]), torch.Size([6, 3, 2, 2])]
LENGTHS = (0, 1, 33, 100, 1000, 5003)
TELLING = (0, 1, 2, 31, 2**15, 2**16, 2**20, 2**23, 2**24, 2**24 + 1, 2**28, 2**31 - 1, 2**31, 2**32 - 1)

# What a vector takes while it is decoded: its codes, its values, and the place they go to; and room for the allocator.
COPIES, ROOM_BYTES = 4, 32 * 2**20


@dataclass(kw_only=True)
class Siege:
    """What became of the payloads that were sent to one codec."""

    refused: int = 0
    decoded: int = 0
    slowest_seconds: float = 0.0
    breaches: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


def besiege(codec: Any, payloads: int, seed: int = 0) -> Siege:
    """Send so many payloads to a codec: half of them to somebody who knows which length to expect.

    >>> siege = besiege(make_codec("one-bit"), 100)
    >>> siege.refused + siege.decoded, siege.breaches
    (100, [])
    """
    _warm_up()
    dice, siege, samples = random.Random(seed), Siege(), _samples(codec, seed)
    for expecting in (True, False):
        longest = max(LENGTHS) if expecting else MOST_CLAIMED
        with memory_capped(4 * COPIES * longest + ROOM_BYTES):
            for _ in range(payloads // 2):
                sample = dice.choice(samples)
                attack = bytearray(dice.choice(_ATTACKS)(sample, samples, dice))
                _send(codec, attack, read_header(_tensor(sample)).elements if expecting else None, siege)
    return siege


@functools.cache
def _warm_up() -> None:
    """Load and compile whatever a payload can lead to: that takes memory too."""
    for codec in targets():
        for sample in _samples(codec, seed=0):
            codec.decode(_tensor(sample))


@contextlib.contextmanager
def memory_capped(more_bytes: int) -> Iterator[None]:
    """Let this process have no more than so many bytes in addition; any number where nobody says what it has."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    has_bytes = int(sizes.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has_bytes + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _send(codec: Any, attack: bytearray, expected: int | None, siege: Siege) -> None:
    begun = time.perf_counter()
    try:
        wrong = _wrong(codec, codec.decode(_tensor(attack), expected_length=expected), attack, expected)
        siege.decoded += 1
    except PayloadError as error:
        wrong = ""
        siege.refused += 1
        siege.reasons[str(error)[:24]] += 1
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    siege.slowest_seconds = max(siege.slowest_seconds, time.perf_counter() - begun)
    if wrong:
        shown = attack[:64].hex() + ("..." if len(attack) > 64 else "")
        siege.breaches.append(f"{wrong} ({len(attack)} bytes, {expected} elements expected: {shown})")


def _wrong(codec: Any, vector: torch.Tensor, attack: bytearray, expected: int | None) -> str:
    promised = read_header(_tensor(attack)).elements if expected is None else expected
    if vector.dtype is not torch.float32 or vector.shape != (promised,):
        return f"{promised:,} elements were promised, and {vector.dtype} {tuple(vector.shape)} came"
    if not codec.suits_parameters and not bool(torch.isfinite(vector).all()):
        return "numbers came that are not finite"
    return ""


def _tensor(payload: bytes | bytearray) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)


def _samples(codec: Any, seed: int) -> list[bytes]:
    """Honest payloads: of several lengths, with and without shapes, dense and sparse."""
    generator, samples = torch.Generator().manual_seed(seed), []
    shaped = sum(shape.numel() for shape in SHAPES)
    for length in (*LENGTHS, shaped):
        dense = torch.randn(length, generator=generator)
        for vector in (dense, torch.zeros(length), dense * (torch.rand(length, generator=generator) > 0.95)):
            sender = codec.fresh(SHAPES if length == shaped else None)
            samples.append(bytes(sender.encode(vector, generator).tolist()))
    return samples


# -- attacks: an honest payload, all of them, dice -> bytes ---------------------------------------------------------


def _flipped(sample: bytes, _: list[bytes], dice: random.Random) -> bytes:
    altered = bytearray(sample)
    for _flip in range(dice.choice((1, 1, 2, 8))):
        altered[dice.randrange(len(altered))] ^= 1 << dice.randrange(8)
    return bytes(altered)


def _cut(sample: bytes, _: list[bytes], dice: random.Random) -> bytes:
    return sample[: dice.randrange(len(sample))]


def _extended(sample: bytes, _: list[bytes], dice: random.Random) -> bytes:
    return sample + dice.choice((dice.randbytes(dice.randint(1, 64)), bytes(dice.randint(1, 64))))


def _misdescribed(sample: bytes, _: list[bytes], dice: random.Random) -> bytes:
    """One or more of the header's numbers: elements, first, second."""
    numbers = list(struct.unpack("<III", sample[4:HEADER_BYTES]))
    for _change in range(dice.choice((1, 1, 2, 3))):
        place = dice.randrange(3)
        near = numbers[place] + dice.choice((-32, -1, 1, 32, 2**16, 2**20))
        numbers[place] = dice.choice((near % 2**32, dice.choice(TELLING), dice.getrandbits(dice.randint(1, 32))))
    return sample[:4] + struct.pack("<III", *numbers) + sample[HEADER_BYTES:]


def _spliced(sample: bytes, others: list[bytes], dice: random.Random) -> bytes:
    return dice.choice(others)[:HEADER_BYTES] + sample[HEADER_BYTES:]


def _refilled(sample: bytes, _: list[bytes], dice: random.Random) -> bytes:
    """Random bytes from some place on."""
    kept = dice.choice((HEADER_BYTES, dice.randint(HEADER_BYTES, len(sample))))
    return sample[:kept] + dice.randbytes(len(sample) - kept)


def _made_up(sample: bytes, _: list[bytes], dice: random.Random) -> bytes:
    return sample[: dice.choice((0, 2, 4, 8))] + dice.randbytes(dice.randint(0, 300))


_ATTACKS: tuple[Callable[[bytes, list[bytes], random.Random], bytes], ...] = (
    _flipped, _cut, _extended, _misdescribed, _spliced, _refilled, _made_up,
)  # fmt: skip


# -- whom they are sent to -------------------------------------------------------------------------------------------


def targets() -> list[Any]:
    """Every codec of the table, and the coders of levels that are no codec's default."""
    coded = [QSGD(levels=3, norm="l2", lossless=coder) for coder in ("elias", "entropy")]  # type: ignore[arg-type]
    return [*(make_codec(name) for name in CODECS), *coded, QSGD(levels=32_767, bucket=0, lossless="entropy")]
