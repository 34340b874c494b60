"""The k largest magnitudes of a long vector, by radix select in machine code.

The bit pattern of a float's magnitude, as a whole number, orders as the magnitude does: no comparison of floats, and a
number that is not finite is larger than all others. With the 31 bits in three digits (11, 10 and 10 bits):

1. `digit_counts`: how many elements have which first digit. That of the k-th largest is the floor. In a long vector a
   sample is counted: a floor too low costs time, one too high is noticed, and neither changes the result.
2. `at_least`: the places of all elements from the floor on, in ascending order. In a usual gradient few more than k.
3. `kept_from`: among these, the other two digits of the k-th largest; then all above it, and the first of its equals.

The first two read the whole vector, in threads; see `threads.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs.compiling import kernel
from paceline.codecs.layout import UNIT

MAGNITUDE = np.uint32(0x7FFFFFFF)
NOT_FINITE = np.uint32(0x7F800000)  # from this bit pattern on
FIRST_SHIFT = np.uint32(20)
DIGITS = 2048
LANES = 4

Array = Any  # numpy's, as numba sees it

u32 = np.uint32


@kernel
def digit_counts(first: int, last: int, bits: Array) -> Any:
    """How many elements of units `first` .. `last` have which first digit: in lanes, to be added up.

    Neighbours count in different lanes: equal ones would wait for each other.
    """
    counts = np.zeros(LANES * DIGITS, np.int64)
    for index in range(first * UNIT, min(last * UNIT, bits.size)):
        lane = u32(index & (LANES - 1)) * u32(DIGITS)
        counts[lane + ((bits[index] & MAGNITUDE) >> FIRST_SHIFT)] += 1
    return counts


@kernel
def at_least(first: int, last: int, bits: Array, floor: Any) -> Any:
    """The places, in units `first` .. `last`, of the elements whose magnitude is not below the floor."""
    start, end = first * UNIT, min(last * UNIT, bits.size)
    places = np.empty(max(0, end - start) + 1, np.uint32)  # memory that is not written to costs nothing
    count = 0
    for index in range(start, end):
        places[count] = u32(index)
        count += (bits[index] & MAGNITUDE) >= floor
    return places[:count]


@kernel
def kept_from(bits: Array, places: Array, positions: Array, values: Array) -> None:
    """Of elements at ascending places, fill in the positions and bit patterns of the largest, as many as fit."""
    magnitudes = np.empty(places.size, np.uint32)
    for index in range(places.size):
        magnitudes[index] = bits[places[index]] & MAGNITUDE
    threshold, equals = kth_largest(magnitudes, positions.size)
    count = 0
    for index in range(places.size):
        magnitude = magnitudes[index]
        if magnitude < threshold:
            continue
        if magnitude == threshold:
            if equals == 0:
                continue
            equals -= 1
        positions[count] = places[index]
        values[count] = bits[places[index]]
        count += 1


@kernel
def kth_largest(magnitudes: Array, k: int) -> Any:
    """The k-th largest of bit patterns, and how many equal to it are among the k largest.

    Digit by digit: `prefix` is what is known of it, with a zero for the digit in question; `left` is its rank among
    those that begin alike.
    """
    prefix, left = u32(0), k
    counts = np.empty(DIGITS, np.int64)
    for shift in range(20, -1, -10):
        counts[:] = 0
        for index in range(magnitudes.size):
            digits = magnitudes[index] >> u32(shift)
            if digits >> u32(10) == prefix >> u32(10) or shift == 20:
                counts[digits - prefix] += 1
        digit = DIGITS - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        prefix = (prefix + u32(digit)) << u32(min(shift, 10))
    return prefix, left


@kernel
def first_misplaced(positions: Array, values: Array, elements: int) -> int:
    """The first index whose position is not above the one before and below `elements`, or whose value is not finite."""
    before = np.int64(-1)
    for index in range(positions.size):
        position = np.int64(positions[index])
        if position <= before or position >= elements or (values[index] & MAGNITUDE) >= NOT_FINITE:
            return index
        before = position
    return -1


@kernel
def scatter(positions: Array, values: Array, out: Array) -> None:
    """Put bit patterns where they belong."""
    for index in range(positions.size):
        out[positions[index]] = values[index]
