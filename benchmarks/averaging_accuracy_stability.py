"""How steep a valley may be before hpsgd falls out of it: exact, from the eigenvalues of one window.

Workers on a quadratic of curvature h, with rate r and momentum m. A step moves a worker's place y and its velocity v; a
window is w of them; the shared model s lacks the changes c_i that are under way:

    step      v <- m v + rh y          y <- y - v
    window    y_i starts at s (the paper), or at s + c_i (rebase); then d_i = what w steps made of y_i, less the start
    merge     s <- s + mean of c_i     c_i <- d_i

All of it is linear, so two things can be asked apart from each other, each of a small matrix:

    together  do the workers' means die out?                                                 (s, mean c, mean v)
    apart     do the workers' differences e die out? They are not in s, but gradients are taken where the workers are.
              The paper starts all at s: only velocities differ. With rebase a window starts from e <- d, its own last
              change alone: what had been e before is taken away although the steps have worked on it already, so e
              comes back as -a e, where 1 - a is what w steps leave of it.

Members that wait have the limits of plain SGD, 2, or 2 (1 + m) with momentum, whatever w is. Rebase has them together,
and a lower one apart; the paper has a lower one together, and with momentum a far lower one: its velocities go on with
what the restart has taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLATTEST, STEEPEST, SCANNED = 0.001, 4.0, 150
ROUNDING = 1e-9
MOMENTA = (0.0, 0.9)
LENGTHS = (1, 2, 3, 8)

Matrix = NDArray[np.float64]


def local_steps(*, steepness: float, momentum: float, steps: int) -> Matrix:
    """What so many steps make of (y, v).

    >>> local_steps(steepness=1.0, momentum=0.0, steps=2).astype(int).tolist()
    [[0, 0], [0, 0]]
    """
    return np.linalg.matrix_power(np.array([[1.0 - steepness, -momentum], [steepness, momentum]]), steps)


def together(*, steepness: float, momentum: float, steps: int, rebase: bool) -> Matrix:
    """What a window makes of (s, c, v), all workers alike.

    >>> together(steepness=1.0, momentum=0.0, steps=1, rebase=False).astype(int).tolist()
    [[1, 1, 0], [-1, 0, 0], [1, 0, 0]]
    """
    start = np.array([[1.0, float(rebase), 0.0], [0.0, 0.0, 1.0]])  # (s, c, v) -> (y, v)
    end = local_steps(steepness=steepness, momentum=momentum, steps=steps) @ start
    return np.stack([np.array([1.0, 1.0, 0.0]), end[0] - start[0], end[1]])


def apart(*, steepness: float, momentum: float, steps: int, rebase: bool) -> Matrix:
    """What a window makes of a worker's difference (e, v) from the mean.

    >>> apart(steepness=0.5, momentum=0.0, steps=1, rebase=True)[0, 0]
    np.float64(-0.5)
    """
    matrix = local_steps(steepness=steepness, momentum=momentum, steps=steps)
    return matrix - np.array([[1.0, 0.0], [0.0, 0.0]]) if rebase else matrix[1:, 1:]


def limit(window: Callable[..., Matrix], *, momentum: float, steps: int, rebase: bool) -> float:
    """The largest rate times curvature up to which nothing grows; at most 4.

    >>> [round(limit(together, momentum=0.0, steps=3, rebase=rebase), 2) for rebase in (False, True)]
    [1.0, 2.0]
    >>> round(limit(together, momentum=0.9, steps=3, rebase=True), 2)
    3.8
    """

    def grows(steepness: float) -> bool:
        matrix = window(steepness=steepness, momentum=momentum, steps=steps, rebase=rebase)
        return bool(np.abs(np.linalg.eigvals(matrix)).max() > 1.0 + ROUNDING)

    scan = np.geomspace(FLATTEST, STEEPEST, SCANNED).tolist()
    first = next((place for place, steepness in enumerate(scan) if grows(steepness)), None)
    if not first:
        return STEEPEST if first is None else 0.0
    holds, breaks = scan[first - 1], scan[first]
    while breaks - holds > 1e-4 * holds:
        middle = (holds + breaks) / 2
        holds, breaks = (holds, middle) if grows(middle) else (middle, breaks)
    return float(holds)


@cache
def limits() -> list[dict[str, Any]]:
    """All limits, by momentum, rebase and the window's steps."""
    return [
        {
            "momentum": momentum,
            "rebase": rebase,
            "steps": steps,
            "together": limit(together, momentum=momentum, steps=steps, rebase=rebase),
            "apart": limit(apart, momentum=momentum, steps=steps, rebase=rebase),
        }
        for momentum in MOMENTA
        for rebase in (False, True)
        for steps in LENGTHS
    ]
