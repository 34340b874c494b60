"""How levels lie in a payload: in units of 4,096 elements, each of 32 rows, so that packing is plain vector work.

    unit      row 0   | e0    e1    e2   ... e127  |     column c of the 32 rows goes, `width` bits each, into
              row 1   | e128  e129  e130 ... e255  |     `width` words of 32 bits: word k of column c is number
              ...                                        k * columns + c of the unit
              row 31  | e3968 ...                  |

The last unit has fewer columns, and what is left of it (fewer than 32 elements) is packed element by element: a vector
of n levels takes just n * width bits, rounded up to a whole byte.
"""

from __future__ import annotations

import torch

# The kernels are compiled with these, and numba looks only at their own file to see whether it must compile again:
# whoever changes one touches kernels.py too.
UNIT = 4096
ROWS = 32
LANES = 64  # of a sum
GOLDEN, MIX_1, MIX_2 = 0x9E3779B9, 0x7FEB352D, 0x846CA68B  # of the hash


def in_rows(elements: int) -> int:
    """Return how many of so many elements are packed in rows; fewer than 32 are left.

    >>> in_rows(100)
    96
    """
    return elements // ROWS * ROWS


def units_of(elements: int) -> int:
    """Return how many units the rows of so many elements make, the last one perhaps not full.

    >>> units_of(4096), units_of(4128)
    (1, 2)
    """
    return -(-in_rows(elements) // UNIT)


def packed_bytes(elements: int, width: int) -> int:
    """Return the bytes of so many levels of `width` bits.

    >>> packed_bytes(100, 1)
    13
    """
    return (elements * width + 7) // 8


def pack_rest(levels: list[int], width: int) -> torch.Tensor:
    """Return the bytes of fewer than 32 levels, one after the other.

    >>> pack_rest([1, 0, 1], 1)
    tensor([5], dtype=torch.uint8)
    """
    number = sum(level << (index * width) for index, level in enumerate(levels))
    packed = number.to_bytes(packed_bytes(len(levels), width), "little")
    return torch.tensor(list(packed), dtype=torch.uint8, device="cpu")


def unpack_rest(packed: torch.Tensor, count: int, width: int) -> list[int]:
    """Return the levels that `pack_rest` packed.

    >>> unpack_rest(pack_rest([1, 6, 3], 3), 3, 3)
    [1, 6, 3]
    """
    number = int.from_bytes(bytes(packed.tolist()), "little")
    return [(number >> (index * width)) & ((1 << width) - 1) for index in range(count)]


def buckets_of(elements: int, bucket: int) -> int:
    """Return how many buckets so many elements fall into.

    >>> buckets_of(1025, 512)
    3
    """
    return -(-elements // bucket)
