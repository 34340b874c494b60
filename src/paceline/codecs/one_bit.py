"""one-bit: a sign for every element, and two means for all of them.

    g:        0.1    0.15   -0.2     20     15.3   -1.222
    sent:      1      1       0       1       1      0        and 8.8875, -0.711
    decoded:  8.8875 8.8875 -0.711  8.8875  8.8875 -0.711

The means are those of the elements that are not negative, and of those that are (0 where there are none). One bit an
element, two floats and a header. It is biased: use it with error feedback.

Where we differ: a zero has the sign bit 1 and counts in the upper mean; the lecture counts positive elements alone
there.

Seide et al., "1-Bit Stochastic Gradient Descent", 2014.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from paceline.codecs import tensors
from paceline.codecs.layout import UNIT, in_rows, pack_rest, packed_bytes, units_of, unpack_rest
from paceline.codecs.machine_code import in_threads
from paceline.codecs.payload import (
    HEADER_BYTES,
    Header,
    PayloadError,
    StatelessCodec,
    check_bytes,
    flat_vector,
    open_payload,
    output_vector,
    refuse_not_finite,
)

_MEANS_BYTES = 8


@dataclass(frozen=True, slots=True)
class OneBit(StatelessCodec):
    """Sends the sign of every element, one bit, and the means of the positive and of the negative ones.

    >>> OneBit().decode(OneBit().encode(torch.tensor([0.1, 0.15, -0.2, 20, 15.3, -1.222])))
    tensor([ 8.8875,  8.8875, -0.7110,  8.8875,  8.8875, -0.7110])
    """

    NUMBER: ClassVar[int] = 3
    biased: ClassVar[bool] = True
    fixed_size: ClassVar[bool] = True

    def encode(self, gradient: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return the means and the sign bits."""
        vector = flat_vector(gradient)
        payload = Header(codec=self.NUMBER, elements=vector.numel()).payload(
            self.most_bytes(vector.numel()) - HEADER_BYTES, vector.device
        )
        means, bits = _parts(payload[HEADER_BYTES:])
        rows = in_rows(vector.numel())
        words = bits[: rows // 8].view(torch.int32)
        encode = _encode_by_kernel if vector.device.type == "cpu" else _encode_by_torch
        encode(vector, words, means)
        if not bool(torch.isfinite(means.sum())):
            refuse_not_finite(vector)
        bits[rows // 8 :] = pack_rest((vector[rows:] >= 0).tolist(), 1)
        return payload

    def decode(
        self, payload: torch.Tensor, *, expected_length: int | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the two means, each where its sign bit says."""
        header, body = open_payload(payload, self.NUMBER, expected_length, out)
        check_bytes(body, self.most_bytes(header.elements) - HEADER_BYTES)
        (means, bits), rows = _parts(body), in_rows(header.elements)
        negative, positive = means.tolist()
        if not (np.isfinite(negative) and np.isfinite(positive)):
            raise PayloadError(f"the means must be finite (they are {negative} and {positive})")
        vector = output_vector(header.elements, out, body.device)
        decode = _decode_by_kernel if body.device.type == "cpu" else _decode_by_torch
        decode(bits[: rows // 8].view(torch.int32), means, vector)
        rest = unpack_rest(bits[rows // 8 :], header.elements - rows, 1)
        vector[rows:] = torch.tensor([positive if bit else negative for bit in rest], device="cpu")
        return vector

    def most_bytes(self, elements: int) -> int:
        return HEADER_BYTES + _MEANS_BYTES + packed_bytes(elements, 1)


def _parts(body: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return body[:_MEANS_BYTES].view(torch.float32), body[_MEANS_BYTES:]


def _encode_by_kernel(vector: torch.Tensor, words: torch.Tensor, means: torch.Tensor) -> None:
    from paceline.codecs.kernels import one_bit_encode

    units = -(-vector.numel() // UNIT)
    sums, counts = np.zeros((2, units)), np.zeros(units, np.int32)
    in_threads(one_bit_encode, units, UNIT, vector.numpy(), sums, counts, words.numpy().view(np.uint32))
    positive = int(counts.sum())
    upper, lower = tensors.halved(torch.from_numpy(sums)).tolist()
    means[0], means[1] = lower / max(1, vector.numel() - positive), upper / max(1, positive)


def _decode_by_kernel(words: torch.Tensor, means: torch.Tensor, vector: torch.Tensor) -> None:
    from paceline.codecs.kernels import one_bit_decode

    units, bits = units_of(vector.numel()), words.numpy().view(np.uint32)
    in_threads(one_bit_decode, units, UNIT, bits, *means.numpy(), vector.numpy())


def _encode_by_torch(vector: torch.Tensor, words: torch.Tensor, means: torch.Tensor) -> None:
    means[0], means[1] = tensors.sign_means(vector)
    words.copy_(tensors.pack((vector[: in_rows(vector.numel())] >= 0).to(torch.int64), 1))


def _decode_by_torch(words: torch.Tensor, means: torch.Tensor, vector: torch.Tensor) -> None:
    rows = in_rows(vector.numel())
    vector[:rows] = torch.where(tensors.unpack(words, rows, 1) != 0, means[1], means[0])
