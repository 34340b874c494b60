"""The cut problem: what any run of layers costs as a piece, in seconds for one micro-batch and in bytes of memory.

    seconds(p, i, j) = (forward + backward of its layers) / speed of its device
                     + sending its outputs over the link behind it + sending gradients over the link before it

    memory(p, i, j)  = (2 + states) x trained weights + untrained weights
                     + in_flight(p) x (activations of its layers + what it hands on and no layer has counted)
                     + micro-batches x (what it receives forward + gradients that it receives)

The weights are there with their gradients and the optimiser's states, such as momentum (states = 1) or Adam's two
(states = 2). A weight that several pieces use is held by each. The last term is there because torch's stages receive
each micro-batch into a buffer of its own. A message is counted as the sender's time. Pieces p and p + 1 are on devices
p mod k and (p + 1) mod k.

Layers that no cut may part make a block, and a piece is a run of blocks, from position i to position j (i < j):

    layers   0   1   2   3   4          bound = {2}: no cut between layers 1 and 2
    blocks   0 │   1   │ 2 │ 3
    positions 0    1   2   3   4        = cuts at layer 0, 1, 3, 4, 5; the first and the last are the ends of the model

What a piece needs is either a difference of running sums, seconds[j] - seconds[i], or an entry [i, j] of a matrix. A
matrix is filled by rectangles: a weight that block b uses is in every run with i <= b < j, a rectangle; so each weight
and each tensor changes four corners, and two running sums, down and across, make the matrix of it. That is n² additions
instead of n² looks at every weight.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.pipeline.devices import Device, Link, ring, whole_number
from paceline.pipeline.profile import Profile

MOST_LAYERS = 3_000  # matrices of all runs: 0.5 GB and a few seconds

Integers: TypeAlias = npt.NDArray[np.int64]
Reals: TypeAlias = npt.NDArray[np.float64]
InFlight: TypeAlias = Callable[[int], int] | Sequence[int]
Limits: TypeAlias = Sequence[float | None]  # bytes that each piece may take; None where there is no limit

# cost(piece, first, last): of the runs from positions `first` (rows) to positions `last` (columns), as a new array.
# Entries with last <= first are no runs, and may hold anything.
Cost: TypeAlias = Callable[[int, slice, slice], Reals]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Arrays over positions; those of two dimensions are indexed by a run's first position and its last.

    positions     the cut of each position, counted in layers
    seconds       running sum of forward and backward
    activations   running sum of what backward needs again, bytes for each micro-batch
    sent          bytes that cross a position forward, returned: gradients that come back over it; none at the ends
    trained       bytes of the trained weights that a run uses, untrained: of the others
    uncounted     bytes made in a run that cross its end and are in no layer's activations

    >>> from paceline.pipeline.profile import Layer, Weight
    >>> blocks = blocks_of(Profile(layers=(Layer(name="a"), Layer(name="b"), Layer(name="c")), bound=frozenset({2}),
    ...                            weights=(Weight(name="tied", bytes=8, layers=(0, 2)),)))
    >>> blocks.positions.tolist()
    [0, 1, 3]
    >>> blocks.trained[0, 1].item(), blocks.trained[1, 2].item(), blocks.trained[0, 2].item()
    (8, 8, 8)
    """

    positions: Integers
    seconds: Reals
    activations: Integers
    sent: Integers
    returned: Integers
    trained: Integers
    untrained: Integers
    uncounted: Integers

    @property
    def count(self) -> int:
        """The number of blocks: the most pieces that can be made of the model."""
        return len(self.positions) - 1


def blocks_of(profile: Profile) -> Blocks:
    """Return the blocks of a profile, and the sums."""
    _check(profile)
    layers = len(profile.layers)
    positions = np.array([at for at in range(layers + 1) if at in (0, layers) or at not in profile.bound], np.int64)
    block_of = np.searchsorted(positions, np.arange(layers), side="right") - 1
    sent, returned, uncounted = _tensors(profile, block_of, len(positions))
    return Blocks(
        positions=positions,
        seconds=_running([layer.seconds for layer in profile.layers], np.float64)[positions],
        activations=_running([layer.activation_bytes for layer in profile.layers], np.int64)[positions],
        sent=sent,
        returned=returned,
        trained=_weights(profile, block_of, len(positions), trained=True),
        untrained=_weights(profile, block_of, len(positions), trained=False),
        uncounted=uncounted,
    )


def _running(values: list[float] | list[int], kind: type[np.float64] | type[np.int64]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(1, kind), np.cumsum(np.array(values, kind))])


def _weights(profile: Profile, block_of: Integers, size: int, *, trained: bool) -> Integers:
    corners = np.zeros((size + 1, size + 1), np.int64)
    for weight in profile.weights:
        if weight.trained != trained:
            continue
        before = -1
        for block in sorted({int(block_of[layer]) for layer in weight.layers}):
            # It is the first of its blocks for runs that begin after the one before, and so counts once for each run.
            corners[before + 1, block + 1] += weight.bytes
            corners[block + 1, block + 1] -= weight.bytes
            before = block
    return _filled(corners)


def _tensors(profile: Profile, block_of: Integers, size: int) -> tuple[Integers, Integers, Integers]:
    sent, returned = np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
    corners = np.zeros((size + 1, size + 1), np.int64)
    for tensor in profile.tensors:
        made = int(block_of[tensor.producer]) if tensor.producer >= 0 else -1
        first, behind = made + 1, int(block_of[min(tensor.last_use, len(block_of) - 1)]) + 1
        if first >= behind:  # made and last used in one block
            continue
        for crossing in (sent, returned) if tensor.needs_gradient else (sent,):
            crossing[first] += tensor.bytes
            crossing[behind] -= tensor.bytes
        if not tensor.kept and made >= 0:
            corners[0, first] += tensor.bytes
            corners[0, behind] -= tensor.bytes
            corners[made + 1, first] -= tensor.bytes
            corners[made + 1, behind] += tensor.bytes
    sums = [np.cumsum(crossing)[:size] for crossing in (sent, returned)]
    for crossing in sums:
        crossing[0] = crossing[-1] = 0  # the model's inputs come from nobody, and its outputs go to nobody
    return sums[0], sums[1], _filled(corners)


def _filled(corners: Integers) -> Integers:
    np.cumsum(corners, axis=0, out=corners)
    np.cumsum(corners, axis=1, out=corners)
    return corners[:-1, :-1]


def _check(profile: Profile) -> None:
    layers = len(profile.layers)
    if not 1 <= layers <= MOST_LAYERS:
        raise ValueError(f"a profile must have between 1 and {MOST_LAYERS:,} layers (it has {layers:,})")
    for layer in profile.layers:
        for name in ("forward_seconds", "input_seconds", "weight_seconds", "activation_bytes"):
            value = getattr(layer, name)
            if not 0 <= value < np.inf:
                raise ValueError(f"{name} of layer {layer.name!r} must be at least 0 and finite ({name}={value})")
    for weight in profile.weights:
        if weight.bytes < 0 or not all(0 <= layer < layers for layer in weight.layers):
            raise ValueError(f"a weight must have bytes of at least 0, and layers from 0 to {layers - 1} ({weight})")
    for tensor in profile.tensors:
        if tensor.bytes < 0 or not -1 <= tensor.producer < layers:
            raise ValueError(f"a tensor must have bytes of at least 0, a producer from -1 to {layers - 1} ({tensor})")


class Costs:
    """The costs of all runs of a profile on given devices, for all pieces.

    >>> from paceline.pipeline.profile import Layer, Tensor
    >>> costs = Costs(
    ...     Profile(layers=(Layer(name="a", forward_seconds=2.0), Layer(name="b", forward_seconds=3.0)),
    ...             tensors=(Tensor(name="a", bytes=8, producer=0, last_use=1),)),
    ...     [Device(), Device(speed=2.0)], links=Link(bytes_per_second=16.0), microbatches=4, in_flight=[2, 1])
    >>> costs.seconds(0, slice(0, 1), slice(1, 2)), costs.seconds(1, slice(1, 2), slice(2, 3))
    (array([[2.5]]), array([[2.]]))
    >>> costs.memory(0, slice(0, 1), slice(1, 2))  # two outputs in flight, and four buffers for their gradients
    array([[48]])
    """

    def __init__(
        self,
        profile: Profile,
        devices: Sequence[Device],
        *,
        links: Link | Sequence[Link],
        microbatches: int,
        in_flight: InFlight,
        chunks: int = 1,
        states: float = 1.0,
    ) -> None:
        self.profile, self.devices = profile, tuple(devices)
        if not self.devices or not all(isinstance(device, Device) for device in self.devices):
            raise ValueError(f"devices must be at least one Device (devices={devices!r})")
        self.chunks = whole_number("chunks", chunks)
        self.microbatches = whole_number("microbatches", microbatches)
        if not isinstance(states, numbers.Real) or not 0 <= states < math.inf:
            raise ValueError(f"states must be at least 0 and finite (states={states!r})")
        self.states: float = float(states)
        self.links: tuple[Link, ...] = ring(links, len(self.devices), self.chunks)
        self.pieces: int = len(self.devices) * self.chunks
        self.limits: Limits = tuple(self.device(piece).memory_bytes for piece in range(self.pieces))  # of its device
        self.in_flight: tuple[int, ...] = _in_flight(in_flight, self.pieces)
        self.blocks: Blocks = blocks_of(profile)

    def device(self, piece: int) -> Device:
        return self.devices[piece % len(self.devices)]

    def link(self, piece: int) -> Link:
        """Return the link behind a piece; before piece 0 there is none, and link(-1) carries nothing."""
        return self.links[piece % len(self.devices)]

    @cached_property
    def crossing(self) -> Integers:
        """Bytes that cross each position for each micro-batch, forward and back."""
        return self.blocks.sent + self.blocks.returned

    @cached_property
    def weights(self) -> Integers:
        """Bytes of weights, gradients and optimiser states of each run."""
        trained: Integers = np.ceil(self.blocks.trained * (2 + self.states)).astype(np.int64)
        return np.add(trained, self.blocks.untrained, out=trained)

    @cached_property
    def _once(self) -> Integers:
        """Bytes of each run that do not depend on the micro-batches in flight."""
        blocks = self.blocks
        return self.weights + self.microbatches * (blocks.sent[:, None] + blocks.returned)

    @cached_property
    def _each(self) -> Integers:
        """Bytes of each run for each micro-batch in flight."""
        blocks = self.blocks
        return blocks.uncounted + (blocks.activations - blocks.activations[:, None])

    def seconds(self, piece: int, first: slice, last: slice) -> Reals:
        """Return the seconds for a micro-batch of the runs from `first` (rows) to `last` (columns), both positions."""
        blocks = self.blocks
        computing = (blocks.seconds[last] - blocks.seconds[first, None]) / self.device(piece).speed
        computing += _sending(self.link(piece), blocks.sent[last])
        computing += _sending(self.link(piece - 1), blocks.returned[first])[:, None]
        return computing

    def memory(self, piece: int, first: slice, last: slice) -> Integers:
        """Return the bytes that the same runs need."""
        needed: Integers = self._each[first, last] * self.in_flight[piece]
        needed += self._once[first, last]
        return needed

    def piece_seconds(self, piece: int, first: int, last: int) -> float:
        """Return the seconds of one run, as one piece."""
        return float(self.seconds(piece, slice(first, first + 1), slice(last, last + 1))[0, 0])

    def piece_bytes(self, piece: int, first: int, last: int) -> int:
        """Return the memory of one run, as one piece."""
        return int(self.memory(piece, slice(first, first + 1), slice(last, last + 1))[0, 0])

    def seconds_within(self, limits: Limits) -> Cost:
        """Return the seconds as a cost, infinite where a piece takes more memory than its limit."""

        def cost(piece: int, first: slice, last: slice) -> Reals:
            seconds, limit = self.seconds(piece, first, last), limits[piece]
            if limit is not None:
                seconds[self.memory(piece, first, last) > limit] = np.inf
            return seconds

        return cost

    def fullness(self, limits: Limits) -> Cost:
        """Return as a cost how many times its limit a piece needs; 0 where there is no limit."""

        def cost(piece: int, first: slice, last: slice) -> Reals:
            limit = limits[piece]
            if limit is None:
                return np.zeros((first.stop - first.start, last.stop - last.start))
            return self.memory(piece, first, last) / limit

        return cost


def _sending(link: Link, message_bytes: Integers) -> Reals:
    seconds: Reals = np.where(message_bytes > 0, link.latency_seconds + message_bytes / link.bytes_per_second, 0.0)
    return seconds


def _in_flight(given: InFlight, pieces: int) -> tuple[int, ...]:
    held = [given(piece) for piece in range(pieces)] if callable(given) else list(given)
    if len(held) != pieces:
        raise ValueError(f"in_flight must say for each of {pieces} pieces how many micro-batches it holds ({held})")
    return tuple(whole_number(f"in_flight of piece {piece}", number) for piece, number in enumerate(held))
