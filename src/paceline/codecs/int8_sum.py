"""int8-sum: whole numbers of eight bits that all ranks add up on their way, on a scale that they agree on first.

    scale_b  = largest |g| of bucket b, over all ranks       a first all-reduce, of one float32 for each bucket
    L        = floor(127 / N)                                N ranks, so a sum of N levels is 127 at most: no overflow
    q_i      = +-floor(L |g_i| / scale_b + u)                u uniform in [0, 1): E[q_i] scale_b / L = g_i
    total    = scale_b / L * (sum of all ranks' q_i)         a second all-reduce, of one int8 for each element

It is unbiased: at each element a rank's error has mean 0, and a variance of at most (scale_b / L)**2 / 4. Each rank
draws its own u, so that these variances add up; with equal ones the errors themselves would. The more ranks there are,
the fewer levels each has: with 42 there are three. Among more, `qsgd levels=127` has eight bits for any number.

Alone, as a worker of a parameter server sends it, a vector has its own scales and all 127 levels:

    | header | the scale of each bucket, float32 | a level of each element, int8 |

The idea of integers that are summed on a shared scale: Mishchenko et al., "IntSGD", 2021; the rounding is that of QSGD.
Where we differ: a scale for each bucket by its largest element, where IntSGD has one by the model's last step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from paceline.codecs import tensors
from paceline.codecs.layout import UNIT, buckets_of
from paceline.codecs.machine_code import in_threads
from paceline.codecs.payload import (
    HEADER_BYTES,
    Header,
    NotFiniteError,
    PayloadError,
    StatelessCodec,
    check_bytes,
    flat_vector,
    open_payload,
    output_vector,
    refuse_not_finite,
)
from paceline.codecs.qsgd import norms_by_kernel
from paceline.codecs.requests import Adding, AllReduce

LEVELS = 127
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Int8Sum(StatelessCodec):
    """Sends one byte for each element, and a scale for each `bucket` of elements (0: for the whole vector).

    >>> codec = Int8Sum()
    >>> payload = codec.encode(torch.tensor([1.0, -0.5, 0.0, 0.003]), torch.Generator().manual_seed(0))
    >>> payload.numel(), codec.decode(payload)
    (24, tensor([ 1.0000, -0.4961,  0.0000,  0.0079]))
    """

    NUMBER: ClassVar[int] = 8
    fixed_size: ClassVar[bool] = True
    plans: ClassVar[tuple[str, ...]] = ("all-reduce",)
    adds_exactly: ClassVar[bool] = True
    sum_steps: ClassVar[int] = 2
    most_ranks: ClassVar[int] = 42

    bucket: int = 512

    def __post_init__(self) -> None:
        if not isinstance(self.bucket, int) or not 0 <= self.bucket < 2**32:
            raise ValueError(f"bucket must be between 0 (the whole vector) and 2**32 - 1 (bucket={self.bucket})")

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return scales and levels. The generator (on the CPU) gives one seed; without one, torch's own does."""
        vector, seed = flat_vector(gradient), _seed(generator)
        elements, bucket = vector.numel(), self._bucket(vector.numel())
        header = Header(codec=self.NUMBER, elements=elements, second=self.bucket)
        payload = header.payload(self.most_bytes(elements) - HEADER_BYTES, vector.device)
        scales, levels = _parts(payload[HEADER_BYTES:], buckets_of(elements, bucket))
        _fill_scales(vector, bucket, scales)
        _fill_levels(vector, bucket, scales, LEVELS, seed, levels)
        return payload

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return levels times scales, by the bucket in the payload, whatever this codec's own is."""
        header, body = open_payload(payload, self.NUMBER, expected_length, out)
        sender = Int8Sum(bucket=header.second)
        if header.first:
            raise PayloadError(f"the first parameter of int8-sum is 0 (this payload's is {header.first:,})")
        check_bytes(body, sender.most_bytes(header.elements) - HEADER_BYTES)
        bucket = sender._bucket(header.elements)
        scales, levels = _parts(body, buckets_of(header.elements, bucket))
        if not bool(((scales >= 0) & (scales <= LARGEST)).all()):
            raise PayloadError("the scales must be finite and not negative")
        if levels.numel() and int(levels.min()) < -LEVELS:
            raise PayloadError(f"levels are between -{LEVELS} and {LEVELS} (there is a -128)")
        return _values(levels, bucket, scales, LEVELS, output_vector(header.elements, out, body.device))

    def add_up(
        self,
        vector: torch.Tensor,
        world: int,
        generator: torch.Generator | None = None,
        *,
        out: torch.Tensor | None = None,
        rest: torch.Tensor | None = None,
    ) -> Adding:
        """Add up the vectors of all ranks: the largest scales first, then levels. Each rank needs its own generator."""
        self.check_ranks(world)
        vector, seed = flat_vector(vector), _seed(generator)
        elements, bucket, levels = vector.numel(), self._bucket(vector.numel()), LEVELS // world
        found = torch.zeros(buckets_of(elements, bucket) + world, dtype=torch.float32, device=vector.device)
        _fill_scales(vector, bucket, found[: found.numel() - world])
        scales = (yield AllReduce(found, largest=True))[: found.numel() - world]
        total = output_vector(elements, out, vector.device)
        if not elements:
            return total
        rounded = torch.empty(elements, dtype=torch.int8, device=vector.device)
        _fill_levels(vector, bucket, scales, levels, seed, rounded)
        if rest is not None:
            torch.sub(vector, _values(rounded, bucket, scales, levels, rest), out=rest)
        _values((yield AllReduce(rounded)), bucket, scales, levels, total)
        if float(scales.max()) * world > LARGEST and not bool(torch.isfinite(total).all()):
            raise NotFiniteError(
                "the sum of all ranks' gradients is beyond float32; clip the gradient, and skip this step"
            )
        return total

    def check_ranks(self, world: int) -> None:
        """Refuse more ranks than levels can be shared among."""
        if world > self.most_ranks:
            raise ValueError(
                f"int8-sum adds up among at most {self.most_ranks} ranks (there are {world}); take 'qsgd levels=127'"
            )

    def most_bytes(self, elements: int) -> int:
        return HEADER_BYTES + 4 * buckets_of(elements, self._bucket(elements)) + elements

    def _bucket(self, elements: int) -> int:
        """Return the elements of a bucket: no more than there are, whatever a payload says."""
        return max(1, min(self.bucket or elements, elements))


def _seed(generator: torch.Generator | None) -> tuple[int, int]:
    """Return the two halves of a seed."""
    seed = int(torch.randint(2**62, (1,), generator=generator, device="cpu"))
    return seed & 0xFFFFFFFF, seed >> 32


def _parts(body: torch.Tensor, buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and the levels of a payload's body."""
    return body[: 4 * buckets].view(torch.float32), body[4 * buckets :].view(torch.int8)


def _fill_scales(vector: torch.Tensor, bucket: int, scales: torch.Tensor) -> None:
    """Fill in the largest magnitude of each bucket; NotFiniteError if one is not finite."""
    if vector.device.type == "cpu":
        from paceline.codecs.kernels import MAX

        norms_by_kernel(vector.numpy(), bucket, MAX, scales.numpy())
    else:
        scales.copy_(tensors.bucket_norms(vector, bucket, "max"))
    if not bool(torch.isfinite(scales).all()):
        refuse_not_finite(vector)


def _fill_levels(
    vector: torch.Tensor, bucket: int, scales: torch.Tensor, levels: int, seed: tuple[int, int], into: torch.Tensor
) -> None:
    """Fill in levels, from -levels to levels, by stochastic rounding."""
    if vector.device.type != "cpu":
        into.copy_(tensors.int8_levels(vector, scales, bucket, levels, *seed))
        return
    from paceline.codecs.kernels import int8_round

    low, high = map(np.uint32, seed)
    common: tuple[Any, ...] = vector.numpy(), bucket, scales.numpy(), levels, low, high, into.numpy()
    in_threads(int8_round, -(-vector.numel() // UNIT), UNIT, *common)


def _values(sums: torch.Tensor, bucket: int, scales: torch.Tensor, levels: int, vector: torch.Tensor) -> torch.Tensor:
    """Fill in the values of levels, or of sums of levels."""
    if vector.device.type != "cpu":
        return vector.copy_(tensors.int8_values(sums, scales, bucket, levels))
    from paceline.codecs.kernels import int8_values

    units = -(-vector.numel() // UNIT)
    in_threads(int8_values, units, UNIT, sums.numpy(), bucket, scales.numpy(), levels, vector.numpy())
    return vector
