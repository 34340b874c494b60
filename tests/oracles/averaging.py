"""Averaging without a server in its slowest, plainest form: what the fast code is tested against.

Parameters are lists of floats. How many local steps every worker takes in every window is written down before anything
is computed. With c = the mean over workers of what their local steps changed:

    local-sgd   w <- w + c, and everybody goes on from w; bmuf and diloco put momentum between the two
    hpsgd       w <- w + c of window j while window j + 1 is trained (Y. Zhou et al., 2021)

Nothing here is shared with the code it specifies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

Vector: TypeAlias = Sequence[float]
Gradient: TypeAlias = Callable[[int, Vector], Vector]  # of a worker, at these parameters


def plus(first: Vector, second: Vector, times: float = 1.0) -> list[float]:
    """Return first + times * second, element by element.

    >>> plus([1.0, 2.0], [10.0, 20.0], 0.5)
    [6.0, 12.0]
    """
    return [one + times * other for one, other in zip(first, second, strict=True)]


def change_of(worker: int, start: Vector, gradient: Gradient, *, lr: float, steps: int) -> list[float]:
    """Return what so many plain SGD steps of a worker change.

    >>> change_of(0, [8.0], lambda worker, parameters: parameters, lr=0.5, steps=2)
    [-6.0]
    """
    place = list(start)
    for _ in range(steps):
        place = plus(place, gradient(worker, place), -lr)
    return plus(place, start, -1.0)


def mean_change(changes: Sequence[Vector], steps: Sequence[int], *, normalize: bool = False) -> list[float]:
    """Return the mean change; normalized, each is first scaled to the mean steps of the workers that took any.

    >>> mean_change([[2.0], [6.0]], [1, 3]), mean_change([[2.0], [6.0]], [1, 3], normalize=True)
    ([4.0], [4.0])
    """
    took = [count for count in steps if count]
    scales = [math.fsum(took) / len(took) / count if normalize and count else 1.0 for count in steps]
    scaled = [[scale * value for value in change] for scale, change in zip(scales, changes, strict=True)]
    return [math.fsum(column) / len(changes) for column in zip(*scaled, strict=True)]


def local_sgd(
    start: Vector,
    gradient: Gradient,
    windows: Sequence[Sequence[int]],
    *,
    lr: float,
    normalize: bool = False,
    rate: float = 1.0,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> list[float]:
    """Return the model after windows of `windows[j][i]` local steps of worker i, each from the model of the one before.

    >>> local_sgd([0.0], lambda worker, parameters: [-1.0 - worker], [[2, 2], [2, 2]], lr=1.0)
    [6.0]
    """
    model, velocity = list(start), [0.0 for _ in start]
    for steps in windows:
        changes = [change_of(worker, model, gradient, lr=lr, steps=count) for worker, count in enumerate(steps)]
        change = mean_change(changes, steps, normalize=normalize)
        velocity = plus(change, velocity, momentum)
        model = plus(model, plus(change, velocity, momentum) if nesterov else velocity, rate)
    return model


def hpsgd(
    start: Vector,
    gradient: Gradient,
    windows: Sequence[Sequence[int]],
    *,
    lr: float,
    rebase: bool = False,
    normalize: bool = False,
) -> list[float]:
    """Return the model where window j is averaged while window j + 1 is trained.

    That window begins without window j; with `rebase` it begins with the worker's own change of window j.

    >>> hpsgd([8.0], lambda worker, parameters: parameters, [[1], [1], [1]], lr=0.5)  # 8 - 4 - 4 - 2
    [-2.0]
    """
    model = list(start)
    on_the_way = [[0.0 for _ in start] for _ in windows[0]]  # each worker's change that is being averaged
    for number, steps in enumerate(windows):
        begins = [plus(model, own) if rebase else model for own in on_the_way]
        changes = [change_of(i, begins[i], gradient, lr=lr, steps=count) for i, count in enumerate(steps)]
        if number:
            model = plus(model, mean_change(on_the_way, windows[number - 1], normalize=normalize))
        on_the_way = changes
    return plus(model, mean_change(on_the_way, windows[-1], normalize=normalize))
