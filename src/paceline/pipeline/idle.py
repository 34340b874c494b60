"""How much of the devices' time is idle, by formula: k equal stages, m micro-batches, messages that cost nothing.

A picture of the forward half of a step; the backward half is its mirror image:

    device 0  |F0 F1 F2 F3 .  . |     each device has m slots of work in a half of k - 1 + m slots
    device 1  |.  F0 F1 F2 F3 . |     idle before a device's work: 0 + 1 + ... + (k-1) = k (k-1) / 2 slots
    device 2  |.  .  F0 F1 F2 F3|     idle after it:               (k-1) + ... + 1 + 0 = k (k-1) / 2 slots

The lecture counts one of the two triangles in each half, and prints

    without pipelining   (1/2) (1 - 1/k)             with   (1/2) (1 - m/(k-1+m))

Counting every idle slot there are both triangles, and so twice as much:

    without pipelining   1 - 1/k                     with   (k-1) / (k-1+m)

The second is GPipe's known figure (Huang et al 2019). Without pipelining is with one micro-batch. The count does not
depend on what forward and backward cost, as long as they cost every stage the same; it holds for gpipe and for 1f1b.
"""

from __future__ import annotations


def lecture_idle_unpipelined(stages: int) -> float:
    """The lecture's loss factor without pipelining, as printed.

    >>> lecture_idle_unpipelined(4)
    0.375
    """
    _check(stages, 1)
    return (1 - 1 / stages) / 2


def lecture_idle(stages: int, microbatches: int) -> float:
    """The lecture's loss factor with pipelining, as printed.

    >>> lecture_idle(stages=3, microbatches=6)
    0.125
    """
    _check(stages, microbatches)
    return (1 - microbatches / (stages - 1 + microbatches)) / 2


def counted_idle_unpipelined(stages: int) -> float:
    """Every idle slot counted, without pipelining.

    >>> counted_idle_unpipelined(4)
    0.75
    """
    _check(stages, 1)
    return 1 - 1 / stages


def counted_idle(stages: int, microbatches: int) -> float:
    """Every idle slot counted, with pipelining by gpipe or 1f1b.

    >>> counted_idle(stages=3, microbatches=6)
    0.25
    """
    _check(stages, microbatches)
    return (stages - 1) / (stages - 1 + microbatches)


def _check(stages: int, microbatches: int) -> None:
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1 ({name}={value})")
