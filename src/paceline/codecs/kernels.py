"""The arithmetic of the quantising codecs, in machine code: one pass over memory, eight elements at a time.

`tensors.py` is the same arithmetic in torch, equal to the last bit. What makes that possible:

- A random number is a hash of the seed and the element's place: no state, so no order and no threads in it,
  and a replay rounds as the run did.
- The largest magnitude is found among the bit patterns, as whole numbers: the same in any order, and a number that is
  not finite is the largest of all.
- Sums are in float64, in 64 lanes that are then folded in halves: an order that vectors can follow.

Kernels work on `first` .. `last` of what they count in (units of 4,096 elements, or buckets); see `in_threads`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs import layout
from paceline.codecs.layout import LANES, ROWS, UNIT
from paceline.codecs.machine_code import kernel

GOLDEN, MIX_1, MIX_2 = (np.uint32(constant) for constant in (layout.GOLDEN, layout.MIX_1, layout.MIX_2))
MAGNITUDE = np.uint32(0x7FFFFFFF)
TO_UNIT = np.float32(2.0**-24)
MAX, L2 = 0, 1

Array = Any  # numpy's, as numba sees it

u32, i32, f32, f64 = np.uint32, np.int32, np.float32, np.float64


# -- norms ----------------------------------------------------------------------------------------------------------


@kernel
def largest_bits(bits: Array) -> Any:
    """Return the bit pattern of the largest magnitude."""
    largest = u32(0)
    for index in range(bits.size):
        largest = max(largest, bits[index] & MAGNITUDE)
    return largest


@kernel
def folded(lanes: Array) -> Any:
    """Return the sum over all lanes, folded in halves."""
    width = lanes.size // 2
    while width:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    return lanes[0]


@kernel
def square_sum(values: Array, lanes: Array) -> Any:
    """Return the sum of squares of at most one unit."""
    rows = values.size // LANES
    lanes[:] = 0.0
    for row in range(rows):
        part = values[row * LANES : (row + 1) * LANES]
        for lane in range(LANES):
            value = f64(part[lane])
            lanes[lane] += value * value
    rest = values[rows * LANES :]
    for lane in range(rest.size):
        value = f64(rest[lane])
        lanes[lane] += value * value
    return folded(lanes)


@kernel
def small_norms(first: int, last: int, values: Array, bucket: int, kind: int, norms: Array) -> None:
    """Fill in the norms of buckets of at most one unit each."""
    bits, found = values.view(np.uint32), norms.view(np.uint32)
    lanes = np.empty(LANES, np.float64)
    for index in range(first, last):
        start, end = index * bucket, min((index + 1) * bucket, values.size)
        if kind == MAX:
            found[index] = largest_bits(bits[start:end])
        else:
            norms[index] = f32(np.sqrt(square_sum(values[start:end], lanes)))


@kernel
def piece_norms(first: int, last: int, values: Array, bucket: int, kind: int, pieces: int, found: Array) -> None:
    """Fill in what each unit-long piece of a large bucket adds to its norm, as float64: its largest, or its squares."""
    bits = values.view(np.uint32)
    largest = np.empty(1, np.uint32)
    lanes = np.empty(LANES, np.float64)
    for index in range(first, last):
        start = index // pieces * bucket + index % pieces * UNIT
        end = min(start + UNIT, (index // pieces + 1) * bucket, values.size)
        if end <= start:
            found[index] = 0.0
        elif kind == MAX:
            largest[0] = largest_bits(bits[start:end])
            found[index] = f64(largest.view(np.float32)[0])
        else:
            found[index] = square_sum(values[start:end], lanes)


# -- levels ---------------------------------------------------------------------------------------------------------


@kernel
def quantise(values: Array, norm: Any, levels: int, width: int, start: int, low: Any, high: Any, codes: Array) -> None:
    """Fill in levels with their signs in the top bit, for part of a bucket that begins at element `start`."""
    bits = values.view(np.uint32)
    scale, most, top = f32(levels), i32(levels), u32(width - 1)
    if norm == f32(0):
        norm = f32(1)
    place = u32(u32(start) * GOLDEN + low)
    for index in range(values.size):
        random = u32(u32(index) * GOLDEN + place)
        random ^= random >> u32(16)
        random = u32(random * MIX_1) ^ high
        random ^= random >> u32(15)
        random = u32(random * MIX_2)
        random ^= random >> u32(16)
        # |value| / norm is at most 1 in floating point too; adding the random number may round up beyond the last level
        exact = (abs(values[index]) / norm) * scale
        level = min(i32(exact + f32(i32(random >> u32(8))) * TO_UNIT), most)
        codes[index] = u32(level) | ((bits[index] >> u32(31)) << top)


@kernel
def quantise_buckets(
    start: int,
    values: Array,
    bucket: int,
    norms: Array,
    levels: int,
    width: int,
    low: Any,
    high: Any,
    end: int,
    codes: Array,
) -> None:
    """Fill in the levels of elements `start` .. `end`, bucket by bucket."""
    place = start
    while place < end:
        index = place // bucket
        until = min(end, (index + 1) * bucket)
        part = codes[place - start : until - start]
        quantise(values[place:until], norms[index], levels, width, place, low, high, part)
        place = until


@kernel
def scale_levels(codes: Array, norm: Any, levels: int, width: int, out: Array) -> None:
    """Fill in the values of part of a bucket from its levels and signs."""
    scale, most = f32(levels), u32(levels)
    top, magnitude = u32(width - 1), u32((1 << (width - 1)) - 1)
    for index in range(codes.size):
        value = norm * (f32(i32(min(codes[index] & magnitude, most))) / scale)
        out[index] = -value if codes[index] >> top else value


@kernel
def scale_buckets(
    start: int, codes: Array, bucket: int, norms: Array, levels: int, width: int, end: int, out: Array
) -> None:
    """Fill in the values of elements `start` .. `end`, bucket by bucket."""
    place = start
    while place < end:
        index = place // bucket
        until = min(end, (index + 1) * bucket)
        scale_levels(codes[place - start : until - start], norms[index], levels, width, out[place:until])
        place = until


# -- packing (see layout.py) ----------------------------------------------------------------------------------------


@kernel
def pack(codes: Array, width: int, words: Array) -> None:
    """Pack the codes of one unit into words."""
    columns = codes.size // ROWS
    words[:] = u32(0)
    for row in range(ROWS):
        word, shift = row * width >> 5, u32(row * width & 31)
        part, into = codes[row * columns : (row + 1) * columns], words[word * columns : (word + 1) * columns]
        for column in range(columns):
            into[column] |= part[column] << shift
        if shift + width > 32:
            into, back = words[(word + 1) * columns : (word + 2) * columns], u32(32 - shift)
            for column in range(columns):
                into[column] |= part[column] >> back


@kernel
def unpack(words: Array, width: int, codes: Array) -> None:
    """Unpack words into the codes of one unit."""
    columns = codes.size // ROWS
    mask = u32((1 << width) - 1)
    for row in range(ROWS):
        word, shift = row * width >> 5, u32(row * width & 31)
        part, source = codes[row * columns : (row + 1) * columns], words[word * columns : (word + 1) * columns]
        if shift + width > 32:
            more, back = words[(word + 1) * columns : (word + 2) * columns], u32(32 - shift)
            for column in range(columns):
                part[column] = ((source[column] >> shift) | (more[column] << back)) & mask
        else:
            for column in range(columns):
                part[column] = (source[column] >> shift) & mask


# -- QSGD -----------------------------------------------------------------------------------------------------------


@kernel
def qsgd_encode(
    first: int,
    last: int,
    values: Array,
    bucket: int,
    fused: bool,
    kind: int,
    norms: Array,
    levels: int,
    width: int,
    low: Any,
    high: Any,
    words: Array,
) -> None:
    """Quantise and pack units; where buckets fit a unit, their norms are found on the way (`fused`)."""
    rows = values.size // ROWS * ROWS
    memory = np.empty(UNIT, np.uint32)
    for unit in range(first, last):
        start, end = unit * UNIT, min((unit + 1) * UNIT, rows)
        if fused:
            small_norms(start // bucket, -(-end // bucket), values, bucket, kind, norms)
        codes = memory[: end - start]
        quantise_buckets(start, values, bucket, norms, levels, width, low, high, end, codes)
        pack(codes, width, words[start // ROWS * width : end // ROWS * width])


@kernel
def qsgd_decode(
    first: int, last: int, words: Array, bucket: int, norms: Array, levels: int, width: int, out: Array
) -> None:
    """Unpack units and scale them."""
    rows = out.size // ROWS * ROWS
    memory = np.empty(UNIT, np.uint32)
    for unit in range(first, last):
        start, end = unit * UNIT, min((unit + 1) * UNIT, rows)
        codes = memory[: end - start]
        unpack(words[start // ROWS * width : end // ROWS * width], width, codes)
        scale_buckets(start, codes, bucket, norms, levels, width, end, out)


@kernel
def qsgd_codes(
    first: int,
    last: int,
    values: Array,
    bucket: int,
    norms: Array,
    levels: int,
    width: int,
    low: Any,
    high: Any,
    codes: Array,
) -> None:
    """Quantise units, and leave the codes as they are: for the lossless coders, and for the rest of a vector."""
    for unit in range(first, last):
        start, end = unit * UNIT, min((unit + 1) * UNIT, values.size)
        quantise_buckets(start, values, bucket, norms, levels, width, low, high, end, codes[start:end])


@kernel
def qsgd_values(
    first: int, last: int, codes: Array, bucket: int, norms: Array, levels: int, width: int, out: Array
) -> None:
    """Scale the codes of units."""
    for unit in range(first, last):
        start, end = unit * UNIT, min((unit + 1) * UNIT, out.size)
        scale_buckets(start, codes[start:end], bucket, norms, levels, width, end, out)


# -- int8-sum -------------------------------------------------------------------------------------------------------


@kernel
def int8_round(
    first: int,
    last: int,
    values: Array,
    bucket: int,
    norms: Array,
    levels: int,
    low: Any,
    high: Any,
    out: Array,
) -> None:
    """Fill in the levels of units, as qsgd rounds them, with their signs: from -levels to levels."""
    memory = np.empty(UNIT, np.uint32)
    for unit in range(first, last):
        start, end = unit * UNIT, min((unit + 1) * UNIT, values.size)
        codes, part = memory[: end - start], out[start:end]
        quantise_buckets(start, values, bucket, norms, levels, 8, low, high, end, codes)
        for index in range(codes.size):
            level = i32(codes[index] & u32(127))
            part[index] = np.int8(-level if codes[index] >> u32(7) else level)


@kernel
def int8_values(first: int, last: int, sums: Array, bucket: int, norms: Array, levels: int, out: Array) -> None:
    """Fill in the values of units from sums of levels."""
    scale = f32(levels)
    for unit in range(first, last):
        place, end = unit * UNIT, min((unit + 1) * UNIT, out.size)
        while place < end:
            index = place // bucket
            until, norm = min(end, (index + 1) * bucket), norms[index]
            part, into = sums[place:until], out[place:until]
            for element in range(part.size):
                into[element] = norm * (f32(part[element]) / scale)
            place = until


# -- 1-bit ----------------------------------------------------------------------------------------------------------


@kernel
def sign_sums(values: Array, codes: Array, positive: Array, negative: Array) -> Any:
    """Fill in the sign bits (1: not negative) of at most one unit, and sums of either kind; return how many are 1."""
    positive[:] = 0.0
    negative[:] = 0.0
    count = i32(0)
    for index in range(values.size):
        sign = u32(values[index] >= f32(0))
        codes[index] = sign
        count += i32(sign)
    rows = values.size // LANES
    for row in range(rows):
        part = values[row * LANES : (row + 1) * LANES]
        for lane in range(LANES):
            value = f64(part[lane])
            positive[lane] += value if value >= 0.0 else 0.0
            negative[lane] += 0.0 if value >= 0.0 else value
    rest = values[rows * LANES :]
    for lane in range(rest.size):
        value = f64(rest[lane])
        positive[lane] += value if value >= 0.0 else 0.0
        negative[lane] += 0.0 if value >= 0.0 else value
    return count


@kernel
def one_bit_encode(first: int, last: int, values: Array, sums: Array, counts: Array, words: Array) -> None:
    """Pack the sign bits of units; sums[0] and sums[1] get each unit's sums, of both kinds."""
    rows = values.size // ROWS * ROWS
    codes = np.empty(UNIT, np.uint32)
    positive, negative = np.empty(LANES, np.float64), np.empty(LANES, np.float64)
    for unit in range(first, last):
        start, end = unit * UNIT, min((unit + 1) * UNIT, values.size)
        counts[unit] = sign_sums(values[start:end], codes[: end - start], positive, negative)
        sums[0, unit], sums[1, unit] = folded(positive), folded(negative)
        packed = max(min(end, rows), start)
        pack(codes[: packed - start], 1, words[start // ROWS : packed // ROWS])


@kernel
def one_bit_decode(first: int, last: int, words: Array, negative: Any, positive: Any, out: Array) -> None:
    """Fill in the mean that each sign bit stands for."""
    rows = out.size // ROWS * ROWS
    memory = np.empty(UNIT, np.uint32)
    for unit in range(first, last):
        start, end = unit * UNIT, min((unit + 1) * UNIT, rows)
        codes, part = memory[: end - start], out[start:end]
        unpack(words[start // ROWS : end // ROWS], 1, codes)
        for index in range(part.size):
            part[index] = positive if codes[index] else negative
