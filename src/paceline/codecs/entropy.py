"""entropy: levels by asymmetric numeral systems, in as many bits as their histogram allows, and the histogram.

    symbols    0: the level zero     1, 2: levels 1 .. w, +, -     3, 4: levels w + 1 .. 2 w, +, -     ...
    coded      gamma(1 + log2 w), delta(how many symbols occur),
               for each of them: delta(its distance from the one before), delta(how often it occurs),
               log2 w bits for each level but zero: which one of its w it is
               zeros up to a byte, then the symbols in words of 32 bits

Symbols that occur with frequencies p take n sum p log2(1 / p) bits and a word more. Every level is a symbol of its own
(w = 1) until that histogram costs more than it saves, as it does with 32,767 levels: then neighbours share a symbol.
The width w, a power of two, is the one that makes the sum of all parts least. That sum has logarithms in it: should two
widths tie to the last bit, another processor may take the other. The payload says which, and every machine reads both.

The decoder makes its model of the same whole numbers, by one division and one multiplication for each symbol in
float64, where whole numbers are exact: the same model on every machine. After the last symbol its stack must be as
empty as the encoder's was before the first one, which it hardly is if a word was altered.

Duda, "Asymmetric numeral systems", 2013; the coder is that of Bamler, "constriction", 2022.
"""

from __future__ import annotations

from typing import Any

import constriction
import numpy as np

from paceline.codecs.elias import (
    count_symbols,
    delta_lengths,
    padded,
    read_codes,
    read_histogram,
    write_histogram,
    write_symbols,
)
from paceline.codecs.machine_code import call
from paceline.codecs.payload import PayloadError

CHUNK = 2**18  # symbols in one call: the coder holds Python's lock meanwhile


def encode(codes: Any, levels: int) -> Any:
    """Encode codes (a level, and its sign in the bit above all levels) as bytes.

    >>> coded = encode(np.array([0, 0, 0, 2 + 4, 0, 3] * 1000, np.int32), levels=3)
    >>> coded.size, decode(coded, elements=6000, levels=3)[-6:]
    (952, array([0, 0, 0, 6, 0, 3], dtype=uint32))
    """
    if not codes.size:
        return np.empty(0, np.uint8)
    codes, sign_at = codes.view(np.uint32), levels.bit_length()
    counts = np.zeros(1 + 2 * levels, np.int64)
    call(count_symbols, codes, levels, sign_at, counts)
    shared, counts = _cheapest(counts)
    present = np.flatnonzero(counts)
    counts, ranks = counts[present], np.zeros(counts.size, np.int32)
    ranks[present] = np.arange(present.size)
    symbols = np.empty(codes.size, np.int32)
    words = np.zeros((96 * (present.size + 1) + codes.size * shared >> 6) + 2, np.uint64)
    bits = call(write_histogram, shared, present, counts, words)
    bits = call(write_symbols, codes, levels, sign_at, shared, ranks, symbols, words, bits)
    return np.concatenate([words.view(np.uint8)[: (bits + 7) // 8], _pushed(symbols, counts)])


def decode(coded: Any, elements: int, levels: int) -> Any:
    """Decode bytes to so many codes; PayloadError if they hold none.

    >>> decode(np.zeros(9, np.uint8), elements=6, levels=3)
    Traceback (most recent call last):
    paceline.codecs.payload.PayloadError: the entropy code has no histogram of 6 elements
    """
    if not elements and not coded.size:
        return np.empty(0, np.uint32)
    sign_at, words = levels.bit_length(), padded(coded)
    most = min(1 + 2 * levels, 4 * coded.size)  # symbols: two bits at least for each
    present, counts = np.empty(most, np.int64), np.empty(most, np.int64)
    at, shared, size = call(read_histogram, words, 8 * coded.size, levels, present, counts)
    present, counts = present[:size], counts[:size]
    if not size or counts.sum() != elements:
        raise PayloadError(f"the entropy code has no histogram of {elements:,} elements")
    end = at + shared * (elements - (int(counts[0]) if present[0] == 0 else 0))
    if end > 8 * coded.size:
        raise PayloadError("the entropy code ends within its levels")
    symbols = _popped(coded[(end + 7) // 8 :], elements, counts)
    if not call(read_codes, symbols, present, words, at, end, shared, levels, sign_at):
        raise PayloadError("the entropy code has levels that are none")
    return symbols.view(np.uint32)


# -- the width of a symbol ------------------------------------------------------------------------------------------


def _cheapest(counts: Any) -> tuple[int, Any]:
    """Return how many bits of a level its symbol leaves out, and the symbols' counts, so that all takes least."""
    signed = counts[1:].reshape(-1, 2)
    others, best, least = int(signed.sum()), (0, counts), _cost(counts)
    for shared in range(1, len(signed).bit_length()):
        if len(signed) % 2:
            signed = np.concatenate([signed, np.zeros((1, 2), np.int64)])
        signed = signed[0::2] + signed[1::2]
        joined = np.concatenate([counts[:1], signed.reshape(-1)])
        cost = _cost(joined) + shared * others
        if cost < least:
            best, least = (shared, joined), cost
    return best


def _cost(counts: Any) -> float:
    """Return the bits of a histogram and of its symbols."""
    present = np.flatnonzero(counts)
    some = counts[present]
    histogram = delta_lengths(np.diff(present, prepend=-1)).sum() + delta_lengths(some).sum()
    return float(histogram + (some * (np.log2(some.sum()) - np.log2(some))).sum())


# -- the coder of symbols -------------------------------------------------------------------------------------------


def _model(counts: Any) -> Any:
    return constriction.stream.model.Categorical(counts.astype(np.float64), perfect=False)


def _pushed(symbols: Any, counts: Any) -> Any:
    """Return the bytes of symbols; none if all are the same."""
    coder = constriction.stream.stack.AnsCoder()
    if counts.size > 1:
        model = _model(counts)
        for start in reversed(range(0, symbols.size, CHUNK)):
            coder.encode_reverse(symbols[start : start + CHUNK], model)
    return coder.get_compressed().view(np.uint8)


def _popped(coded: Any, elements: int, counts: Any) -> Any:
    """Return the symbols (int32) that were pushed."""
    if coded.size % 4 or (counts.size == 1 and coded.size):
        raise PayloadError(f"the entropy code's symbols do not take {coded.size:,} bytes")
    symbols = np.zeros(elements, np.int32)
    if counts.size == 1:
        return symbols
    words = np.frombuffer(coded.tobytes(), np.uint32)  # a copy is aligned
    if words.size and not words[-1]:
        raise PayloadError("the entropy code ends in an empty word")
    coder, model = constriction.stream.stack.AnsCoder(words), _model(counts)
    for start in range(0, elements, CHUNK):
        symbols[start : start + CHUNK] = coder.decode(model, min(CHUNK, elements - start))
    if not coder.is_empty():
        raise PayloadError("the entropy code's words are not those of its histogram")
    return symbols
