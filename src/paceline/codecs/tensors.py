"""The arithmetic of `kernels.py` in torch: for tensors on a GPU, and as the reference the kernels are held against.

The same bits come out, for the same seed, on any device. Whole numbers of 32 bits are kept in int64 here, and cut back
to 32 bits after each multiplication.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.codecs.layout import GOLDEN, LANES, MIX_1, MIX_2, ROWS, UNIT, buckets_of, in_rows

_WORD = 0xFFFFFFFF


# -- norms ----------------------------------------------------------------------------------------------------------


def bucket_norms(values: torch.Tensor, bucket: int, norm: str) -> torch.Tensor:
    """Return the norm of every bucket, as float32."""
    buckets = buckets_of(values.numel(), bucket)
    pieces = -(-bucket // UNIT)
    width = bucket if pieces == 1 else pieces * UNIT
    rows = F.pad(values, (0, buckets * bucket - values.numel())).view(buckets, bucket)
    if not buckets:
        return values
    if norm == "max":
        return rows.abs().amax(1)
    wide = F.pad(rows, (0, width - bucket)).view(buckets * pieces, -1).to(torch.float64)
    return halved(lane_sums(wide * wide).view(buckets, pieces)).sqrt().to(torch.float32)


def lane_sums(pieces: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row (float64), in the order of the kernels: 64 lanes, then halves."""
    padded = F.pad(pieces, (0, -pieces.shape[1] % LANES))
    rows = padded.view(pieces.shape[0], padded.shape[1] // LANES, LANES)
    lanes = torch.zeros(pieces.shape[0], LANES, dtype=torch.float64, device=pieces.device)
    for row in range(rows.shape[1]):
        lanes += rows[:, row]
    return halved(lanes)


def halved(columns: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, folded in halves.

    >>> halved(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([6.])
    """
    width = 1 << max(0, columns.shape[1] - 1).bit_length()
    columns = F.pad(columns, (0, width - columns.shape[1]))
    while width > 1:
        width //= 2
        columns = columns[:, :width] + columns[:, width:]
    return columns[:, 0]


# -- levels ---------------------------------------------------------------------------------------------------------


def uniform(count: int, low: int, high: int, device: torch.device) -> torch.Tensor:
    """Return a random float32 in [0, 1) for every place, from the seed's two halves.

    >>> few, many = (uniform(count, 1, 2, torch.device("cpu")) for count in (3, 1000))
    >>> bool((few == many[:3]).all())
    True
    """
    word = (torch.arange(count, dtype=torch.int64, device=device) * GOLDEN + low) & _WORD
    word ^= word >> 16
    word = (_times(word, MIX_1) ^ high) & _WORD
    word ^= word >> 15
    word = _times(word, MIX_2)
    word ^= word >> 16
    return (word >> 8).to(torch.float32) * 2.0**-24


def _times(word: torch.Tensor, factor: int) -> torch.Tensor:
    """Return a product modulo 2**32, by halves: int64 would overflow."""
    upper, lower = factor >> 16, factor & 0xFFFF
    return (((word * upper & 0xFFFF) << 16) + word * lower) & _WORD


def codes_of(
    values: torch.Tensor, norms: torch.Tensor, bucket: int, levels: int, width: int, low: int, high: int
) -> torch.Tensor:
    """Return levels by stochastic rounding, with their signs in the top bit, as int64."""
    norm = norms.repeat_interleave(bucket)[: values.numel()]
    exact = values.abs() / torch.where(norm == 0, 1, norm) * torch.tensor(levels, dtype=torch.float32)
    rounded = (exact + uniform(values.numel(), low, high, values.device)).to(torch.int64).clamp(max=levels)
    return rounded | (torch.signbit(values).to(torch.int64) << (width - 1))


def values_of(codes: torch.Tensor, norms: torch.Tensor, bucket: int, levels: int, width: int) -> torch.Tensor:
    """Return the values of levels and signs."""
    norm = norms.repeat_interleave(bucket)[: codes.numel()]
    magnitude = (codes & ((1 << (width - 1)) - 1)).clamp(max=levels).to(torch.float32)
    value = norm * (magnitude / torch.tensor(levels, dtype=torch.float32))
    return torch.where((codes >> (width - 1)) != 0, -value, value)


def int8_levels(
    values: torch.Tensor, norms: torch.Tensor, bucket: int, levels: int, low: int, high: int
) -> torch.Tensor:
    """Return levels by stochastic rounding, from -levels to levels (127 at most), as int8."""
    codes = codes_of(values, norms, bucket, levels, 8, low, high)
    return torch.where(codes >> 7 != 0, -(codes & 127), codes & 127).to(torch.int8)


def int8_values(sums: torch.Tensor, norms: torch.Tensor, bucket: int, levels: int) -> torch.Tensor:
    """Return the values of sums of levels."""
    norm = norms.repeat_interleave(bucket)[: sums.numel()]
    return norm * (sums.to(torch.float32) / torch.tensor(levels, dtype=torch.float32))


# -- packing (see layout.py) ----------------------------------------------------------------------------------------


def pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Return the words (int32) of all codes that are packed in rows."""
    rows = in_rows(codes.numel())
    full = rows // UNIT * UNIT
    parts = [_pack_units(codes[:full].view(-1, ROWS, UNIT // ROWS), width)] if full else []
    if rows > full:
        parts.append(_pack_units(codes[full:rows].view(1, ROWS, -1), width))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int32, device=codes.device)


def _pack_units(units: torch.Tensor, width: int) -> torch.Tensor:
    words = torch.zeros(units.shape[0], width + 1, units.shape[2], dtype=torch.int64, device=units.device)
    for row in range(ROWS):
        word, shift = row * width >> 5, row * width & 31
        wide = units[:, row] << shift
        words[:, word] |= wide & _WORD
        words[:, word + 1] |= wide >> 32
    words = words[:, :width].reshape(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(words: torch.Tensor, elements: int, width: int) -> torch.Tensor:
    """Return the codes (int64) of all elements that are packed in rows."""
    rows = in_rows(elements)
    full = rows // UNIT * UNIT
    whole = words.to(torch.int64) & _WORD
    parts = [_unpack_units(whole[: full // ROWS * width].view(-1, width, UNIT // ROWS), width)] if full else []
    if rows > full:
        parts.append(_unpack_units(whole[full // ROWS * width :].view(1, width, -1), width))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=words.device)


def _unpack_units(words: torch.Tensor, width: int) -> torch.Tensor:
    units = torch.empty(words.shape[0], ROWS, words.shape[2], dtype=torch.int64, device=words.device)
    padded = F.pad(words, (0, 0, 0, 1))
    for row in range(ROWS):
        word, shift = row * width >> 5, row * width & 31
        units[:, row] = (padded[:, word] | (padded[:, word + 1] << 32)) >> shift & ((1 << width) - 1)
    return units.view(-1)


# -- 1-bit ----------------------------------------------------------------------------------------------------------


def sign_means(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means of the negative and of the other elements, as float32; 0 where there are none."""
    positive = values >= 0
    wide = F.pad(values.to(torch.float64), (0, -values.numel() % UNIT)).view(-1, UNIT)
    kinds = F.pad(positive, (0, -values.numel() % UNIT)).view(-1, UNIT)
    upper = halved(lane_sums(torch.where(kinds, wide, 0.0)).view(1, -1))
    lower = halved(lane_sums(torch.where(kinds, 0.0, wide)).view(1, -1))
    count = positive.sum()
    negative = (lower / (values.numel() - count).clamp(min=1)).to(torch.float32)
    return negative, (upper / count.clamp(min=1)).to(torch.float32)
