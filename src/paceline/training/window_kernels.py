"""The passes of a replica over a large tensor, in machine code: each reads and writes every number once.

    tensor, base, shared, change: float32, of one length, the same numbers of each side by side

`WindowSpan` in replica.py has the same passes in torch's operations, equal to the last bit: there are only single
additions and subtractions in them. There closing a window goes over memory four times (read, subtract, add, write).

Arrays are cut before they are looped over: with an index that begins at 0 numba knows that it is never negative, and
takes eight numbers at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.codecs.layout import UNIT
from paceline.codecs.machine_code import call, kernel

Array = Any  # numpy's, as numba sees it


@kernel
def write_change(first: int, last: int, tensor: Array, base: Array, change: Array) -> None:
    """Write change = tensor - base."""
    here = slice(first * UNIT, last * UNIT)
    tensor, base, change = tensor[here], base[here], change[here]
    for index in range(tensor.size):
        change[index] = tensor[index] - base[index]


@kernel
def change_and_begin_at_shared(first: int, last: int, tensor: Array, base: Array, shared: Array, change: Array) -> None:
    """Write change = tensor - base, then set tensor and base to shared."""
    here = slice(first * UNIT, last * UNIT)
    tensor, base, shared, change = tensor[here], base[here], shared[here], change[here]
    for index in range(tensor.size):
        change[index] = tensor[index] - base[index]
        tensor[index] = shared[index]
        base[index] = shared[index]


@kernel
def change_and_begin_ahead(first: int, last: int, tensor: Array, base: Array, shared: Array, change: Array) -> None:
    """Write change = tensor - base, then set tensor and base to shared + change."""
    here = slice(first * UNIT, last * UNIT)
    tensor, base, shared, change = tensor[here], base[here], shared[here], change[here]
    for index in range(tensor.size):
        moved = tensor[index] - base[index]
        begun = shared[index] + moved
        change[index] = moved
        tensor[index] = begun
        base[index] = begun


@kernel
def move_open_window(first: int, last: int, tensor: Array, base: Array, shared: Array) -> None:
    """Move a window that stays open: tensor = shared + (tensor - base), base = shared."""
    here = slice(first * UNIT, last * UNIT)
    tensor, base, shared = tensor[here], base[here], shared[here]
    for index in range(tensor.size):
        tensor[index] = shared[index] + (tensor[index] - base[index])
        base[index] = shared[index]


def load_kernels() -> None:
    """Load all kernels, or compile them: in the first average everybody would wait for it."""
    none = np.empty(0, dtype=np.float32)
    call(write_change, 0, 0, none, none, none)
    call(change_and_begin_at_shared, 0, 0, none, none, none, none)
    call(change_and_begin_ahead, 0, 0, none, none, none, none)
    call(move_open_window, 0, 0, none, none, none)
