"""qsgd: levels on a grid, by stochastic rounding, so that the mean of what is sent is what was meant.

    q_i = norm * sign(g_i) * xi_i        xi_i on the grid 0, 1/s, 2/s .. 1: one of the two neighbours of |g_i| / norm,
                                         the nearer one more often, so that its expectation is |g_i| / norm

The norm is that of a bucket of elements (512 of them, or the whole vector: bucket=0): its largest magnitude ("max") or
its Euclidean length ("l2", the theory's). With s levels and l2 over n elements the second moment grows by at most
1 + min(n / s^2, sqrt(n) / s). `Sparsifier` is s = 1, l2 over the whole vector: at most sqrt(n) elements are expected to
be other than zero.

Levels are coded without loss: "packed" in bits of equal number, fast; "elias" as gaps and levels, small where few are
other than zero; "entropy" close to Shannon's limit. Whichever comes out larger than packed is sent packed.

    packed     n (bits of s + 1) bits, and 32 for each bucket
    elias      sqrt(n) (log2 n + log2 2e) expected for s = 1, l2 over the whole vector: at most sqrt(n) are not 0
               k (3 + 3/2 log2(2 (s^2 + n) / k)) expected for any s, with k = s (s + sqrt(n))
    entropy    n H + a few: H is the entropy of the levels, and no lossless code of single levels takes less

Alistarh et al., "QSGD", 2017. Ours: the packing, and random numbers that depend on seed and place alone.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from paceline.codecs import tensors
from paceline.codecs.layout import UNIT, buckets_of, in_rows, pack_rest, packed_bytes, units_of, unpack_rest
from paceline.codecs.machine_code import in_threads
from paceline.codecs.payload import (
    HEADER_BYTES,
    Header,
    NotFiniteError,
    PayloadError,
    StatelessCodec,
    check_bytes,
    check_claim,
    flat_vector,
    open_payload,
    output_vector,
    refuse_not_finite,
)
from paceline.lookup import unknown

MOST_LEVELS = 2**15 - 1
NORMS = ("max", "l2")
LOSSLESS = ("packed", "elias", "entropy")


@dataclass(frozen=True, slots=True)
class QSGD(StatelessCodec):
    """Rounds every element at random to one of `levels` steps besides zero, either sign, of its bucket's norm.

    A `bucket` of elements shares one norm (0: all of them do), which is the largest magnitude ("max") or the Euclidean
    length ("l2"). `lossless` is how levels are coded: "packed", "elias" or "entropy".

    >>> codec = QSGD(levels=7)
    >>> payload = codec.encode(torch.randn(4096), torch.Generator().manual_seed(0))
    >>> 8 * payload.numel() / 4096  # four bits a level, a norm for each bucket, and a header
    4.09375
    """

    NUMBER: ClassVar[int] = 4

    levels: int = 7
    bucket: int = 512
    norm: Literal["max", "l2"] = "max"
    lossless: Literal["packed", "elias", "entropy"] = "packed"

    def __post_init__(self) -> None:
        if not isinstance(self.levels, int) or not isinstance(self.bucket, int):
            raise ValueError(f"levels and bucket are whole numbers (levels={self.levels}, bucket={self.bucket})")
        if not 1 <= self.levels <= MOST_LEVELS:
            raise ValueError(f"levels must be between 1 and {MOST_LEVELS:,} (levels={self.levels})")
        if not 0 <= self.bucket < 2**32:
            raise ValueError(f"bucket must be between 0 (the whole vector) and 2**32 - 1 (bucket={self.bucket})")
        if self.norm not in NORMS:
            raise unknown("norm", self.norm, NORMS)
        if self.lossless not in LOSSLESS:
            raise unknown("lossless", self.lossless, LOSSLESS)

    @property
    def width(self) -> int:
        """Bits of a level and its sign."""
        return self.levels.bit_length() + 1

    @property
    def fixed_size(self) -> bool:
        """Whether payloads of one length have one size: packed ones do."""
        return self.lossless == "packed"

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return norms and levels. The generator (on the CPU) gives one seed; without one, torch's own does."""
        vector = flat_vector(gradient)
        seed = int(torch.randint(2**62, (1,), generator=generator, device="cpu"))
        low, high, on_cpu = seed & 0xFFFFFFFF, seed >> 32, vector.device.type == "cpu"
        if self.lossless == "packed":
            return (_pack_by_kernel if on_cpu else _pack_by_torch)(self, vector, low, high)
        norms, codes = (_quantise_by_kernel if on_cpu else _quantise_by_torch)(self, vector, low, high)
        _check_norms(norms, vector)
        coded = torch.from_numpy(_coder(self.lossless).encode(codes.to(torch.int32).cpu().numpy(), self.levels))
        if coded.numel() >= packed_bytes(vector.numel(), self.width):
            return self._packed(norms, codes)
        payload = self._header(vector.numel(), self.lossless).payload(4 * norms.numel() + coded.numel(), vector.device)
        payload[HEADER_BYTES:].copy_(torch.cat([norms.view(torch.uint8), coded.to(vector.device)]))
        return payload

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return levels times norms, by the parameters in the payload, whatever this codec's own are."""
        header, body = open_payload(payload, self.NUMBER, expected_length, out)
        sender, elements = _sender(header), header.elements
        norms_bytes = 4 * sender._buckets(elements)
        if body.numel() < norms_bytes:
            raise PayloadError(f"the norms take {norms_bytes:,} bytes (the payload's body has {body.numel():,})")
        norms, coded = body[:norms_bytes].view(torch.float32), body[norms_bytes:]
        if not bool(((norms >= 0) & (norms <= torch.finfo(torch.float32).max)).all()):
            raise PayloadError("the norms must be finite and not negative")
        if sender.lossless == "packed":
            check_bytes(coded, packed_bytes(elements, sender.width))
            vector, rows = output_vector(elements, out, body.device), in_rows(elements)
            words, rest = coded[: rows // 8 * sender.width], coded[rows // 8 * sender.width :]
            unpack = _unpack_by_kernel if coded.device.type == "cpu" else _unpack_by_torch
            unpack(sender, norms, words, unpack_rest(rest, elements - rows, sender.width), vector)
            return vector
        check_claim(elements, expected_length, out)
        codes = _coder(sender.lossless).decode(coded.cpu().numpy(), elements, sender.levels)
        return output_vector(elements, out, body.device).copy_(_scale_by_kernel(sender, norms.cpu(), codes))

    def most_bytes(self, elements: int) -> int:
        """Return what the levels take packed; other coders are used only where they take less."""
        return HEADER_BYTES + 4 * self._buckets(elements) + packed_bytes(elements, self.width)

    # -- how a payload is laid out -----------------------------------------------------------------------------

    def _bucket(self, elements: int) -> int:
        """Return the elements of a bucket: no more than there are, whatever a payload says."""
        return max(1, min(self.bucket or elements, elements))

    def _buckets(self, elements: int) -> int:
        return buckets_of(elements, self._bucket(elements))

    def _header(self, elements: int, lossless: str) -> Header:
        first = self.levels | NORMS.index(self.norm) << 16 | LOSSLESS.index(lossless) << 20
        return Header(codec=self.NUMBER, elements=elements, first=first, second=self.bucket)

    def _laid_out(
        self, elements: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return an empty packed payload, and in it: the norms, the words of the rows, the bytes of the rest."""
        payload = self._header(elements, "packed").payload(self.most_bytes(elements) - HEADER_BYTES, device)
        norms_end = HEADER_BYTES + 4 * self._buckets(elements)
        words_end = norms_end + packed_bytes(in_rows(elements), self.width)
        norms, words = payload[HEADER_BYTES:norms_end].view(torch.float32), payload[norms_end:words_end]
        return payload, norms, words.view(torch.int32), payload[words_end:]

    def _packed(self, norms: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return a packed payload of norms and the codes of all elements."""
        payload, into, words, rest = self._laid_out(codes.numel(), norms.device)
        into.copy_(norms)
        words.copy_(tensors.pack(codes.to(norms.device, torch.int64), self.width))
        rest.copy_(pack_rest(codes[in_rows(codes.numel()) :].tolist(), self.width))
        return payload


class Sparsifier(QSGD):
    """One level, and the Euclidean length of the whole vector: few elements are sent, large ones more often.

    >>> sent = Sparsifier().decode(Sparsifier().encode(torch.ones(10_000)))
    >>> sorted(set(sent.tolist()))
    [0.0, 100.0]
    """

    __slots__ = ()

    def __init__(self, lossless: Literal["packed", "elias", "entropy"] = "elias") -> None:
        super().__init__(levels=1, bucket=0, norm="l2", lossless=lossless)


# -- on the CPU: kernels, over the threads that torch has -----------------------------------------------------------


def _pack_by_kernel(codec: QSGD, vector: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Return the packed payload of a vector: norms, levels and packing in one pass where buckets fit a unit."""
    from paceline.codecs import kernels

    payload, norms, words, rest = codec._laid_out(vector.numel(), vector.device)
    elements, rows, values, found = vector.numel(), in_rows(vector.numel()), vector.numpy(), norms.numpy()
    bucket, kind = codec._bucket(elements), NORMS.index(codec.norm)
    fused = UNIT % bucket == 0
    norms_by_kernel(values, bucket, kind, found, after=buckets_of(rows, bucket) if fused else 0)
    common = codec.levels, codec.width, np.uint32(low), np.uint32(high)
    in_threads(
        kernels.qsgd_encode, units_of(rows), UNIT, values, bucket, fused, kind, found, *common,
        words.numpy().view(np.uint32),
    )  # fmt: skip
    codes = np.empty(elements - rows, np.uint32)
    kernels.quantise_buckets(rows, values, bucket, found, *common, elements, codes)
    _check_norms(norms, vector)  # before anything is done with the codes: those of NaN have no meaning
    rest.copy_(pack_rest(codes.tolist(), codec.width))
    return payload


def _quantise_by_kernel(codec: QSGD, vector: torch.Tensor, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms, and the codes of all elements (as int32)."""
    from paceline.codecs import kernels

    values, bucket = vector.numpy(), codec._bucket(vector.numel())
    norms, codes = np.empty(codec._buckets(values.size), np.float32), np.empty(values.size, np.uint32)
    norms_by_kernel(values, bucket, NORMS.index(codec.norm), norms)
    in_threads(
        kernels.qsgd_codes, -(-codes.size // UNIT), UNIT, values, bucket, norms, codec.levels, codec.width,
        np.uint32(low), np.uint32(high), codes,
    )  # fmt: skip
    return torch.from_numpy(norms), torch.from_numpy(codes.view(np.int32))


def norms_by_kernel(values: Any, bucket: int, kind: int, norms: Any, *, after: int = 0) -> None:
    """Fill in the norms of all buckets from number `after` on."""
    from paceline.codecs import kernels

    if bucket <= UNIT:
        values = values[after * bucket :]
        in_threads(kernels.small_norms, norms.size - after, bucket, values, bucket, kind, norms[after:])
        return
    pieces = -(-bucket // UNIT)
    parts = np.empty(norms.size * pieces)
    in_threads(kernels.piece_norms, parts.size, UNIT, values, bucket, kind, pieces, parts)
    by_bucket = torch.from_numpy(parts).view(norms.size, pieces)
    whole = by_bucket.amax(1) if kind == kernels.MAX else tensors.halved(by_bucket).sqrt()
    norms[:] = whole.to(torch.float32).numpy()


def _unpack_by_kernel(
    sender: QSGD, norms: torch.Tensor, words: torch.Tensor, left: list[int], vector: torch.Tensor
) -> None:
    from paceline.codecs import kernels

    elements, rows, ours = vector.numel(), in_rows(vector.numel()), vector.numpy()
    common = sender._bucket(elements), norms.numpy(), sender.levels, sender.width
    in_threads(kernels.qsgd_decode, units_of(rows), UNIT, words.numpy().view(np.uint32), *common, ours)
    kernels.scale_buckets(rows, np.array(left, np.uint32), *common, elements, ours)


def _scale_by_kernel(sender: QSGD, norms: torch.Tensor, codes: Any) -> torch.Tensor:
    """Return the values of codes (uint32, numpy)."""
    from paceline.codecs import kernels

    vector = torch.empty(codes.size, dtype=torch.float32, device="cpu")
    in_threads(
        kernels.qsgd_values, -(-codes.size // UNIT), UNIT, codes, sender._bucket(codes.size), norms.numpy(),
        sender.levels, sender.width, vector.numpy(),
    )  # fmt: skip
    return vector


# -- elsewhere, and as the reference: torch's operations ------------------------------------------------------------


def _pack_by_torch(codec: QSGD, vector: torch.Tensor, low: int, high: int) -> torch.Tensor:
    norms, codes = _quantise_by_torch(codec, vector, low, high)
    _check_norms(norms, vector)
    return codec._packed(norms, codes)


def _quantise_by_torch(codec: QSGD, vector: torch.Tensor, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    bucket = codec._bucket(vector.numel())
    norms = tensors.bucket_norms(vector, bucket, codec.norm)
    return norms, tensors.codes_of(vector, norms, bucket, codec.levels, codec.width, low, high)


def _unpack_by_torch(
    sender: QSGD, norms: torch.Tensor, words: torch.Tensor, left: list[int], vector: torch.Tensor
) -> None:
    rows, rest = in_rows(vector.numel()), torch.tensor(left, dtype=torch.int64, device=vector.device)
    codes = torch.cat([tensors.unpack(words.view(torch.int32), rows, sender.width), rest])
    vector.copy_(tensors.values_of(codes, norms, sender._bucket(vector.numel()), sender.levels, sender.width))


# -- both -----------------------------------------------------------------------------------------------------------


def _check_norms(norms: torch.Tensor, vector: torch.Tensor) -> None:
    if bool(torch.isfinite(norms).all()):
        return
    refuse_not_finite(vector)
    raise NotFiniteError(f"the vector's length is beyond float32 (norms of {norms.max().item()}): scale it down")


def _sender(header: Header) -> QSGD:
    """Return the codec that made a payload."""
    levels, norm, lossless = header.first & 0xFFFF, header.first >> 16 & 0xF, header.first >> 20
    if not 1 <= levels <= MOST_LEVELS or norm >= len(NORMS) or lossless >= len(LOSSLESS):
        raise PayloadError(f"no qsgd has these parameters (levels={levels}, norm={norm}, lossless={lossless})")
    return QSGD(levels=levels, bucket=header.second, norm=NORMS[norm], lossless=LOSSLESS[lossless])  # type: ignore[arg-type]


def _coder(name: str) -> Any:
    """Return a lossless coder's module: encode(codes, levels) -> bytes, decode(bytes, elements, levels) -> codes."""
    return importlib.import_module(f"paceline.codecs.{name}")
