"""elias: where the levels other than zero are, and what they are, in Elias's codes of whole numbers.

    gamma(x)    N zeros, a one, the N low bits of x        N = floor(log2 x); 2 N + 1 bits: short for the smallest x
    delta(x)    gamma(N + 1), the N low bits of x          N + 2 floor(log2(N + 1)) + 1 bits: short for larger x

    x        1      2, 3     4 .. 7    8 .. 15    16 .. 31    32 .. 63    1,000
    gamma    1      3        5         7          9           11          19
    delta    1      4        5         8          9           10          16        bits

    levels    0  0  0  -2  0  3              for each that is not zero:
    coded     delta(4) 1 gamma(2)            how far it is from the one before, its sign,
              delta(2) 0 gamma(3)            and its level, unless there is only one

Bits fill words of 64 from the low end; the words are little-endian. Zeros fill up the last byte: since a code has a one
in it, that is where the levels end. A reader takes words that go on for two more than the bits do (`padded`), so that
no peek leaves them.

With s levels, and the Euclidean length over n elements, these bits are expected at most (the norm's 32 aside):

    s = 1      sqrt(n) (log2 n + log2 2e)            at most sqrt(n) elements are expected to be other than zero
    any s      k (3 + 3/2 log2(2 (s^2 + n) / k))     at most k = s (s + sqrt(n)) are

One also finds k = s^2 + sqrt(n), which forgets that a small element is other than zero with probability s |g_i| / norm,
not |g_i| / norm. That is the same for s = 1 and still true for s = sqrt(n), but in between no coder need look for it:
for a million normally distributed elements and s = 4 the entropy of the levels is 1.7 times as large.

The kernels of `entropy.py` are here as well: numba keeps a kernel on disk until the kernel's own file changes, and
would not see a change in one that it calls from another file.

Elias, "Universal codeword sets and representations of the integers", 1975; Alistarh et al., "QSGD", 2017. Where we
differ: delta for gaps and gamma for levels, where QSGD has omega for both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs.machine_code import call, kernel
from paceline.codecs.payload import PayloadError

Array = Any  # numpy's, as numba sees it; a number may be Python's or numpy's

u64, u32, i64, i32 = np.uint64, np.uint32, np.int64, np.int32
LONGEST = 32  # bits of the largest number: a vector has at most 2**32 - 1 elements
BLOCK = 16  # elements that are skipped at once if all are zero
FINE, NO_GAP, BEYOND, NO_LEVEL, CUT = range(5)  # what can be wrong with an elias code

_WRONG = {
    NO_GAP: "the elias code has bits that are no gap",
    BEYOND: "the elias code has more elements than the payload says",
    NO_LEVEL: "the elias code has a level that is none",
    CUT: "the elias code ends within a level",
}


def encode(codes: Any, levels: int) -> Any:
    """Encode codes (a level, and its sign in the bit above all levels) as bytes.

    >>> encode(np.array([0, 0, 0, 2 + 4, 0, 3], np.int32), levels=3)
    array([166, 132,   1], dtype=uint8)
    """
    sign_at = levels.bit_length()
    most_bits = 3 + (2 * sign_at - 1 if levels > 1 else 0)  # for an element: a gap of two takes 4 bits, and a sign
    words = np.zeros((codes.size * most_bits >> 6) + 2, np.uint64)
    bits = call(write_levels, codes.view(np.uint32), sign_at, levels > 1, words)
    return words.view(np.uint8)[: (bits + 7) // 8].copy()


def decode(coded: Any, elements: int, levels: int) -> Any:
    """Decode bytes to so many codes; PayloadError if they hold none.

    >>> decode(np.array([166, 132, 1], np.uint8), elements=6, levels=3)
    array([0, 0, 0, 6, 0, 3], dtype=uint32)
    >>> decode(np.array([166, 132, 1], np.uint8), elements=5, levels=3)
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: the elias code has more elements than the payload says
    """
    codes = np.zeros(elements, np.uint32)
    wrong = call(read_levels, padded(coded), 8 * coded.size, levels, levels.bit_length(), codes)
    if wrong:
        raise PayloadError(_WRONG[wrong])
    return codes


# -- whole numbers --------------------------------------------------------------------------------------------------


def padded(coded: Any) -> Any:
    """Return bytes as words of 64 bits, with zeros after them.

    >>> padded(np.array([1, 2], np.uint8))
    array([513, 0, 0], dtype=uint64)
    """
    words = np.zeros(-(-coded.size // 8) + 2, np.uint64)
    words.view(np.uint8)[: coded.size] = coded
    return words


def delta_lengths(numbers: Any) -> Any:
    """Return how many bits the delta codes of numbers from 1 on take.

    >>> delta_lengths(np.array([1, 3, 1000]))
    array([ 1,  4, 16])
    """
    low = np.frexp(numbers)[1].astype(np.int64) - 1
    return low + 2 * np.frexp(low + 1)[1] - 1


@kernel
def put(words: Array, at: Any, bits: Any, length: Any) -> Any:
    """Write `length` bits (at most 64) from bit `at` on, where there are zeros yet; return where the next go."""
    word, shift = at >> 6, at & 63
    words[word] |= bits << u64(shift)
    if shift + length > 64:
        words[word + 1] |= bits >> u64(64 - shift)
    return at + length


@kernel
def peek(words: Array, at: Any) -> Any:
    """Return the 64 bits from bit `at` on."""
    word, shift = at >> 6, at & 63
    bits = words[word] >> u64(shift)
    if shift:
        bits |= words[word + 1] << u64(64 - shift)
    return bits


@kernel
def gamma(number: Any) -> Any:
    """Return the code of a number from 1 on, and its length."""
    low = 0
    while number >> (low + 1):  # small numbers are the rule
        low += 1
    rest = u64(number) ^ (u64(1) << u64(low))
    return (rest << u64(low + 1)) | (u64(1) << u64(low)), 2 * low + 1


@kernel
def delta(number: Any) -> Any:
    """Return the code of a number from 1 to 2**32 - 1, and its length (at most 42)."""
    low = 0
    while number >> (low + 1):
        low += 1
    code, length = gamma(low + 1)
    rest = u64(number) ^ (u64(1) << u64(low))
    return code | (rest << u64(length)), length + low


@kernel
def read_gamma(bits: Any, longest: int) -> Any:
    """Return the number of at most `longest` bits (31 at most) that begins here, and its code's length: 0 if none."""
    low = 0
    while not (bits >> u64(low)) & u64(1):
        low += 1
        if low >= longest:
            return i64(0), i64(0)
    rest = (bits >> u64(low + 1)) & ((u64(1) << u64(low)) - u64(1))
    return i64(rest | (u64(1) << u64(low))), i64(2 * low + 1)


@kernel
def read_delta(bits: Any) -> Any:
    """Return the number, below 2**32, that the bits begin with, and its code's length: 0 if none."""
    size, length = read_gamma(bits, 6)
    if size < 1 or size > LONGEST:
        return i64(0), i64(0)
    low = size - 1
    rest = (bits >> u64(length)) & ((u64(1) << u64(low)) - u64(1))
    return i64(rest | (u64(1) << u64(low))), length + low


# -- gaps and levels ------------------------------------------------------------------------------------------------


@kernel
def write_levels(codes: Array, sign_at: int, with_levels: bool, words: Array) -> Any:
    """Fill the words, which are zero; return how many bits it took."""
    mask, top = u32((1 << sign_at) - 1), u32(sign_at)
    at, last = 0, -1
    for start in range(0, codes.size, BLOCK):
        block = codes[start : start + BLOCK]
        some = u32(0)
        for index in range(block.size):
            some |= block[index]
        if not some & mask:
            continue
        for index in range(block.size):
            level = block[index] & mask
            if not level:
                continue
            code, length = delta(start + index - last)
            at = put(words, at, code, length)
            last = start + index
            sign = u64(block[index] >> top & u32(1))
            if with_levels:
                code, length = gamma(i64(level))
                at = put(words, at, sign | (code << u64(1)), length + 1)
            else:
                at = put(words, at, sign, 1)
    return at


@kernel
def read_levels(words: Array, end: int, levels: int, sign_at: int, codes: Array) -> Any:
    """Fill the codes, which are zero, from the bits before `end`; return what is wrong with them."""
    at, place = 0, -1
    while True:
        bits = peek(words, at)
        if end - at < 8 and not bits:  # behind the end there are zeros too
            return FINE
        gap, length = read_delta(bits)
        if not length:
            return NO_GAP
        place += gap
        at += length
        if place >= codes.size:
            return BEYOND
        if at >= end:
            return CUT
        bits = peek(words, at)
        level, length = i64(1), i64(0)
        if levels > 1:
            level, length = read_gamma(bits >> u64(1), sign_at)
            if not length or level > levels:
                return NO_LEVEL
        at += length + 1
        if at > end:
            return CUT
        codes[place] = u32(level) | (u32(bits & u64(1)) << u32(sign_at))


# -- histogram and symbols, for entropy.py --------------------------------------------------------------------------


@kernel
def count_symbols(codes: Array, levels: int, sign_at: int, counts: Array) -> None:
    """Count how often each level occurs: zero, 1, -1, 2, -2 ..."""
    mask, most, top = u32((1 << sign_at) - 1), u32(levels), u32(sign_at)
    for index in range(codes.size):
        level = min(codes[index] & mask, most)
        counts[2 * i64(level) - 1 + i64(codes[index] >> top & u32(1)) if level else 0] += 1


@kernel
def write_histogram(shared: int, present: Array, counts: Array, words: Array) -> Any:
    """Write a histogram to the words, which are zero; return how many bits it took."""
    code, length = gamma(shared + 1)
    at = put(words, i64(0), code, length)
    code, length = delta(present.size)
    at = put(words, at, code, length)
    last = i64(-1)
    for index in range(present.size):
        code, length = delta(present[index] - last)
        at = put(words, at, code, length)
        code, length = delta(counts[index])
        at = put(words, at, code, length)
        last = present[index]
    return at


@kernel
def read_histogram(words: Array, end: int, levels: int, present: Array, counts: Array) -> Any:
    """Return where it ends, the bits a symbol leaves out, and how many symbols occur: 0 if it is no histogram."""
    none = i64(0), i64(0), i64(0)
    first, at = read_gamma(peek(words, 0), 4)
    shared = first - 1
    size, length = read_delta(peek(words, at))
    at += length
    if not first or not length or size > present.size or at > end:
        return none
    symbols = 1 + 2 * (((levels - 1) >> shared) + 1)
    last = i64(-1)
    for index in range(size):
        gap, length = read_delta(peek(words, at))
        at += length
        if not length or last + gap >= symbols or at > end:
            return none
        count, length = read_delta(peek(words, at))
        at += length
        if not length or at > end:
            return none
        last += gap
        present[index], counts[index] = last, count
    return at, shared, size


@kernel
def write_symbols(
    codes: Array, levels: int, sign_at: int, shared: int, ranks: Array, symbols: Array, words: Array, at: int
) -> Any:
    """Fill in the symbols of codes, and write the bits that a symbol leaves out; return where those end."""
    mask, most, top = u32((1 << sign_at) - 1), u32(levels), u32(sign_at)
    low = u64((1 << shared) - 1)
    for index in range(codes.size):
        level = min(codes[index] & mask, most)
        if not level:
            symbols[index] = ranks[0]
            continue
        above = i64(level) - 1
        symbols[index] = ranks[1 + 2 * (above >> shared) + i64(codes[index] >> top & u32(1))]
        if shared:
            at = put(words, at, u64(above) & low, shared)
    return at


@kernel
def read_codes(
    symbols: Array, present: Array, words: Array, at: int, end: int, shared: int, levels: int, sign_at: int
) -> Any:
    """Turn symbols into codes in place; return whether all are levels and the left out bits end at `end`."""
    low = u64((1 << shared) - 1)
    for index in range(symbols.size):
        symbol = present[symbols[index]]
        if not symbol:
            symbols[index] = 0
            continue
        level = 1 + (((symbol - 1) >> 1) << shared)
        if shared:
            if at + shared > end:
                return False
            level += i64(peek(words, at) & low)
            at += shared
        if level > levels:
            return False
        symbols[index] = i32(level | (((symbol - 1) & 1) << sign_at))
    return at == end
