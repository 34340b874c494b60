"""Strategies in their slowest, plainest form.

Gradients are lists of floats. A round is written down completely before anything is computed: what every worker
would compute block by block, in which order the workers get there, and how far the late ones came. Nothing here
is shared with the code it specifies.

    full        update = mean of all N gradients
    fastest-k   update = mean of the K that came first                       (backup workers, Chen et al. 2016)
    lgc         update = mean of the K that came first + e                   (live gradient compensation, J. Xu)
                e = (1/N) * sum of the M late gradients of the round before
                    - (M/N) * mean of the K first of the round before
                A late gradient of r of s blocks is their sum divided by s (scaled), or by r (unscaled); or (by samples)
                a batch of r / s as many samples.
    async       update = gradient / (1 + staleness)
                Where batches differ in size, a mean is the mean over samples: b_i / (sum of b) in place of 1/N and 1/K,
                and in e (sum of b over the late) / (sum of b over all N) in place of M/N.
    lars        v = momentum v + lr local (g + decay w); w = w - v           (large batches, You et al. 2017)
                local = trust_coefficient |w| / (|g| + decay |w|), layer by layer

Where we differ from the paper: the server never waits for late gradients, so M counts those that arrived by the
time the next round closes, not all N - K; and `late_work="partial"` gives late workers the time their blocks take
(`partial_rounds`), where the paper lets them finish for nothing (`complete_rounds`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Vector: TypeAlias = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class PlainRound:
    """One round on paper.

    `block_gradients[i]` holds the mean gradient of each of worker i's equal blocks. `order` is the order in which the
    workers come to an end. `late_blocks_done[i]` is how many blocks worker i had done when it stopped, for those
    stragglers whose gradient arrives before the next round closes; a straggler not named there misses it too.
    `samples[i]` is the size of worker i's batch, or of a straggler that misses it what the server takes for its size;
    without, all batches are of one size.

    >>> PlainRound(block_gradients=[[[1.0], [3.0]]], order=[0]).gradient(0)
    [2.0]
    """

    block_gradients: Sequence[Sequence[Vector]]
    order: Sequence[int]
    late_blocks_done: Mapping[int, int] = field(default_factory=dict)
    samples: Sequence[float] = ()

    @property
    def workers(self) -> int:
        """N, the number of workers that take part.

        >>> PlainRound(block_gradients=[[[1.0]], [[5.0]]], order=[1, 0]).workers
        2
        """
        return len(self.order)

    def size(self, worker: int) -> float:
        """Return the size of a worker's batch, 1 if all are of one size.

        >>> PlainRound(block_gradients=[[[1.0]], [[5.0]]], order=[1, 0], samples=[30, 10]).size(1)
        10
        """
        return self.samples[worker] if self.samples else 1

    def mean_of(self, workers: Sequence[int]) -> list[float]:
        """Return the mean gradient over all samples of several workers.

        >>> PlainRound(block_gradients=[[[1.0]], [[5.0]]], order=[1, 0], samples=[30, 10]).mean_of([0, 1])
        [2.0]
        """
        sizes = [self.size(worker) for worker in workers]
        weighed = [
            [size * value for value in self.gradient(worker)] for worker, size in zip(workers, sizes, strict=True)
        ]
        return [value / math.fsum(sizes) for value in total(weighed)]

    def gradient(self, worker: int) -> list[float]:
        """Return a whole gradient: the mean over all blocks.

        >>> PlainRound(block_gradients=[[[1.0, 0.0], [3.0, 2.0]]], order=[0]).gradient(0)
        [2.0, 1.0]
        """
        return mean(self.block_gradients[worker])

    def late_size(self, worker: int) -> float:
        """Return the samples that a straggler has done.

        >>> blocks = [[[1.0], [3.0], [9.0], [9.0]]]
        >>> PlainRound(block_gradients=blocks, order=[0], late_blocks_done={0: 3}, samples=[40]).late_size(0)
        30.0
        """
        return self.size(worker) * self.late_blocks_done[worker] / len(self.block_gradients[worker])

    def late_gradient(self, worker: int, *, scale_partial: bool) -> list[float]:
        """Return what a straggler's work counts as: the sum over the r blocks it did, divided by all s, or else by r.

        >>> late = PlainRound(block_gradients=[[[1.0], [3.0], [9.0], [9.0]]], order=[0], late_blocks_done={0: 2})
        >>> late.late_gradient(0, scale_partial=True), late.late_gradient(0, scale_partial=False)
        ([1.0], [2.0])
        """
        done = self.late_blocks_done[worker]
        parts = len(self.block_gradients[worker]) if scale_partial else done
        return [value / parts for value in total(self.block_gradients[worker][:done])]


def total(vectors: Sequence[Vector]) -> list[float]:
    """Return the sum, element by element.

    >>> total([[1.0, 2.0], [3.0, 4.0]])
    [4.0, 6.0]
    """
    return [math.fsum(column) for column in zip(*vectors, strict=True)]


def mean(vectors: Sequence[Vector]) -> list[float]:
    """Return the mean, element by element.

    >>> mean([[1.0, 2.0], [3.0, 4.0]])
    [2.0, 3.0]
    """
    return [value / len(vectors) for value in total(vectors)]


def full(rounds: Sequence[PlainRound]) -> list[list[float]]:
    """Return the update of every round when the server waits for everybody.

    >>> full([PlainRound(block_gradients=[[[1.0]], [[5.0]]], order=[1, 0])])
    [[3.0]]
    """
    return [plain.mean_of(plain.order) for plain in rounds]


def fastest_k(rounds: Sequence[PlainRound], *, k: int, warmup_rounds: int = 0) -> list[list[float]]:
    """Return the update of every round when the server takes the first K; the first rounds run as `full`.

    >>> fastest_k([PlainRound(block_gradients=[[[1.0]], [[5.0]]], order=[1, 0])], k=1)
    [[5.0]]
    """
    updates = []
    for number, plain in enumerate(rounds):
        first = plain.order if number < warmup_rounds else plain.order[:k]
        updates.append(plain.mean_of(first))
    return updates


def lgc(
    rounds: Sequence[PlainRound], *, k: int, warmup_rounds: int = 0, scale_partial: bool | Literal["samples"] = True
) -> list[list[float]]:
    """Return the update of every round when late gradients make up for the bias one round later.

    >>> plain = PlainRound(block_gradients=[[[1.0]], [[5.0]]], order=[1, 0], late_blocks_done={0: 1})
    >>> lgc([plain, plain], k=1)  # the second: 5 + 1/2 * 1 - 1/2 * 5
    [[5.0], [3.0]]
    """
    fresh_means = fastest_k(rounds, k=k, warmup_rounds=warmup_rounds)
    updates = [fresh_means[0]]
    for number in range(1, len(rounds)):
        before = rounds[number - 1]
        sizes = {worker: before.size(worker) for worker in before.order}
        if scale_partial == "samples":
            sizes |= {worker: before.late_size(worker) for worker in before.late_blocks_done}
        everybody = math.fsum(sizes.values())
        missing, update = 0.0, list(fresh_means[number])
        for worker in before.late_blocks_done:
            share = sizes[worker] / everybody
            missing += share
            late = before.late_gradient(worker, scale_partial=scale_partial is True)
            update = [so_far + share * value for so_far, value in zip(update, late, strict=True)]
        update = [value - missing * fresh for value, fresh in zip(update, fresh_means[number - 1], strict=True)]
        updates.append(update)
    return updates


def asynchronous(arrivals: Sequence[tuple[Vector, int]], *, staleness_scaling: bool = True) -> list[list[float]]:
    """Return the update of every gradient, given with the version it was computed at; each update is a version.

    >>> asynchronous([([4.0], 0), ([4.0], 0), ([4.0], 1)])
    [[4.0], [2.0], [2.0]]
    """
    updates = []
    for version, (gradient, computed_at) in enumerate(arrivals):
        divisor = 1 + version - computed_at if staleness_scaling else 1
        updates.append([value / divisor for value in gradient])
    return updates


def complete_rounds(seconds: Sequence[Sequence[float]], *, k: int) -> list[float]:
    """Return how long each round is open when late workers finish at no cost: the K-th of the sorted times.

    The paper's figure 1 takes 6.5 with everybody and 4 with the fastest two:

    >>> figure_1 = [(1.0, 1.2, 2.0), (1.1, 1.5, 2.0), (1.0, 1.3, 2.5)]
    >>> sum(complete_rounds(figure_1, k=3)), sum(complete_rounds(figure_1, k=2))
    (6.5, 4.0)
    """
    return [sorted(row)[k - 1] for row in seconds]


def stop_at_block_boundary(
    *, started_seconds: float, seconds: float, blocks: int, heard_seconds: float
) -> tuple[int, float]:
    """Return how many blocks a worker has done, and when it stops, if it hears at some time that its round has closed.

        |####|####|####|####|        a batch of 4 blocks
                ^ hears       ^      stops here: 2 blocks done

    >>> stop_at_block_boundary(started_seconds=0.0, seconds=4.0, blocks=4, heard_seconds=1.5)
    (2, 2.0)
    """
    for done in range(1, blocks):
        boundary = started_seconds + done * (seconds / blocks)
        if boundary >= heard_seconds:
            return done, boundary
    return blocks, started_seconds + seconds


@dataclass(frozen=True, kw_only=True)
class PartialRound:
    """A round of `partial_rounds`: when it closed, who was fresh, whose late blocks its update takes.

    >>> PartialRound(closed_seconds=1.0, fresh={0}, late_blocks_done={}).fresh
    {0}
    """

    closed_seconds: float
    fresh: set[int]
    late_blocks_done: dict[int, int]


def partial_rounds(seconds: Sequence[Sequence[float]], *, k: int, blocks: int, rounds: int) -> list[PartialRound]:
    """Return the rounds of a cluster whose late workers stop at a block boundary and join the next round from there.

    `seconds[d][i]` is how long worker i needs for its d-th batch. No network; no two times may be equal.
    A late gradient is used if it is there when the next round closes. A worker whose block outlasts that
    round too begins with whatever round is open when it gets there.

    >>> times = [(1.0, 4.0), (1.0, 9.0), (1.0, 9.0)]
    >>> [(plain.closed_seconds, plain.late_blocks_done) for plain in partial_rounds(times, k=1, blocks=8, rounds=3)]
    [(1.0, {}), (2.0, {1: 2}), (3.0, {1: 1})]
    """
    workers = range(len(seconds[0]))
    free_seconds, draws = [0.0 for _ in workers], [0 for _ in workers]
    late: dict[int, tuple[int, float]] = {}
    result = []
    for _ in range(rounds):
        finish = [free_seconds[i] + seconds[draws[i]][i] for i in workers]
        closed = sorted(finish)[k - 1]
        used = {i: done for i, (done, arrived) in late.items() if arrived <= closed}
        fresh = {i for i in workers if finish[i] <= closed}
        late = {}
        for i in workers:
            if i not in fresh and free_seconds[i] < closed:
                late[i] = stop_at_block_boundary(
                    started_seconds=free_seconds[i], seconds=seconds[draws[i]][i], blocks=blocks, heard_seconds=closed
                )
        for i in fresh | set(late):
            free_seconds[i] = late[i][1] if i in late else closed
            draws[i] += 1
        result.append(PartialRound(closed_seconds=closed, fresh=fresh, late_blocks_done=used))
    return result


# -- codecs: gradients as they are sent -----------------------------------------------------------------------------


def single(value: float) -> float:
    """Return the nearest float32, as memory and payloads hold it: after one operation on two of them, float32's result.

    >>> single(0.1)
    0.10000000149011612
    """
    nearest: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return nearest


def one_bit(gradient: Vector) -> list[float]:
    """Return what arrives of a gradient by its signs: the mean of those elements that have the same sign.

    >>> one_bit([0.1, 0.15, -0.2, 20.0, 15.3, -1.222])  # the lecture's
    [8.887499809265137, 8.887499809265137, -0.7110000252723694, 8.887499809265137, 8.887499809265137, -0.71100002527...]
    """
    means = {}
    for sign in (True, False):
        alike = [value for value in gradient if (value >= 0) == sign]
        means[sign] = single(math.fsum(alike) / len(alike)) if alike else 0.0
    return [means[value >= 0] for value in gradient]


def qsgd(
    gradient: Vector, uniform: Vector, *, levels: int, bucket: int = 0, norm: str = "max"
) -> tuple[list[float], list[int]]:
    """Return the norm of each bucket (0: one for all), and the level of each element, rounded by its random number.

    Three quarters of the way from 2 to 3, a random number in [0, 1) rounds up if it is a quarter or more:

    >>> qsgd([1.0, -0.6875, 0.6875], [0.9, 0.24, 0.25], levels=4)
    ([1.0], [4, -2, 3])
    """
    size = bucket or max(1, len(gradient))
    norms, result = [], []
    for start in range(0, len(gradient), size):
        part = gradient[start : start + size]
        squares = math.fsum(value * value for value in part)
        norms.append(single(math.sqrt(squares) if norm == "l2" else max(abs(value) for value in part)))
        for value, random in zip(part, uniform[start : start + size], strict=True):
            exact = single(single(abs(value) / (norms[-1] or 1.0)) * levels)
            level = min(math.floor(single(exact + random)), levels)
            result.append(-level if value < 0 else level)
    return norms, result


def qsgd_decoded(norms: Vector, quantised: Sequence[int], *, levels: int, bucket: int = 0) -> list[float]:
    """Return what arrives: the level's share of its bucket's norm.

    >>> qsgd_decoded([1.0], [4, -2, 3], levels=4)
    [1.0, -0.5, 0.75]
    """
    size = bucket or max(1, len(quantised))
    return [single(norms[place // size] * single(level / levels)) for place, level in enumerate(quantised)]


def lars(
    layers: Sequence[Vector],
    gradients: Sequence[Sequence[Vector]],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    warmup: int = 0,
    decay_from: str = "start",
) -> list[list[float]]:
    """Run Algorithm 1 of the LARS paper: `gradients[t][l]` is layer l's gradient at step t; the rate falls as poly(2).

    Its first `warmup` steps may be a warm-up; `warm_rate` says which rate that is, and where the fall is counted from.

    >>> lars([[3.0, 4.0]], [[[0.0, 2.0]]], lr=1.0, momentum=0.0, weight_decay=0.0, trust_coefficient=0.2)
    [[3.0, 3.0]]
    """
    weights = [list(layer) for layer in layers]
    velocities = [[0.0] * len(layer) for layer in layers]
    steps = len(gradients)
    for t in range(steps):
        rate = warm_rate(t, lr=lr, warmup=warmup, steps=steps, decay_from=decay_from)
        for w, g, v in zip(weights, gradients[t], velocities, strict=True):
            weight_norm, gradient_norm = math.hypot(*w), math.hypot(*g)
            local = 1.0
            if weight_norm > 0 and gradient_norm > 0:  # the paper does not say what else
                local = trust_coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm)
            for i in range(len(w)):
                v[i] = momentum * v[i] + rate * local * (g[i] + weight_decay * w[i])
                w[i] = w[i] - v[i]
    return weights


def warm_rate(t: int, *, lr: float, warmup: int, steps: int, power: float = 2.0, decay_from: str = "start") -> float:
    """The rate of step t (from 0): a line to lr over the warm-up, then a fall to zero at `steps`.

    Algorithm 1 of the LARS paper counts the fall from the start; counted from the warm-up, it falls from lr itself.

    >>> [warm_rate(t, lr=16.0, warmup=1, steps=4) for t in range(5)]
    [8.0, 9.0, 4.0, 1.0, 0.0]
    >>> [warm_rate(t, lr=18.0, warmup=1, steps=4, decay_from="warmup") for t in range(5)]
    [9.0, 18.0, 8.0, 2.0, 0.0]
    """
    if t < warmup:
        return lr * (t + 1) / (warmup + 1)
    begin = 0 if decay_from == "start" else warmup
    return lr * math.pow((steps - min(t, steps)) / (steps - begin), power)
