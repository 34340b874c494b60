"""elias: where the levels other than zero are, and what they are, in Elias's codes.

    levels    0  0  0  -2  0  3              for each that is not zero:
    coded     delta(4) 1 gamma(2)            how far it is from the one before, its sign,
              delta(2) 0 gamma(3)            and its level, unless there is only one

Zeros fill up the last byte: since a code has a one in it, that is where the levels end.

With s levels, and the Euclidean length over n elements, these bits are expected at most (the norm's 32 aside):

    s = 1      sqrt(n) (log2 n + log2 2e)            at most sqrt(n) elements are expected to be other than zero
    any s      k (3 + 3/2 log2(2 (s^2 + n) / k))     at most k = s (s + sqrt(n)) are

One also finds k = s^2 + sqrt(n), which forgets that a small element is other than zero with probability s |g_i| / norm,
not |g_i| / norm. That is the same for s = 1 and still true for s = sqrt(n), but in between no coder need look for it:
for a million normally distributed elements and s = 4 the entropy of the levels is 1.7 times as large.

Alistarh et al., "QSGD", 2017. Ours: delta for gaps and gamma for levels, where the paper has omega for both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs.bits import BEYOND, CUT, NO_GAP, NO_LEVEL, padded, read_levels, write_levels
from paceline.codecs.compiling import call
from paceline.codecs.payload import PayloadError

_WRONG = {
    NO_GAP: "the elias code has bits that are no gap",
    BEYOND: "the elias code has more elements than the payload says",
    NO_LEVEL: "the elias code has a level that is none",
    CUT: "the elias code ends within a level",
}


def encode(codes: Any, levels: int) -> Any:
    """Codes (a level, and its sign in the bit above all levels) -> bytes.

    >>> encode(np.array([0, 0, 0, 2 + 4, 0, 3], np.int32), levels=3)
    array([166, 132,   1], dtype=uint8)
    """
    sign_at = levels.bit_length()
    most_bits = 3 + (2 * sign_at - 1 if levels > 1 else 0)  # for an element: a gap of two takes 4 bits, and a sign
    words = np.zeros((codes.size * most_bits >> 6) + 2, np.uint64)
    bits = call(write_levels, codes.view(np.uint32), sign_at, levels > 1, words)
    return words.view(np.uint8)[: (bits + 7) // 8].copy()


def decode(coded: Any, elements: int, levels: int) -> Any:
    """Bytes -> so many codes; PayloadError if the bytes are none.

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
