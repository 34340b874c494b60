"""What a run of layers costs as a piece: its seconds for one micro-batch, and its memory.

    seconds(p, i, j) = (forward + backward of its layers) / speed of its device
                     + sending its outputs over the link behind it + sending gradients over the link before it

    memory(p, i, j)  = (2 + states) x trained weights + untrained weights
                     + in_flight(p) x (activations of its layers + what it hands on and no layer has counted)
                     + micro-batches x (what it receives forward + gradients that it receives)

The weights are there with their gradients and the optimiser's states, such as momentum (states = 1) or Adam's two
(states = 2). A weight that several pieces use is held by each. The last term is there because torch's stages receive
each micro-batch into a buffer of its own. A message is counted as the sender's time. Pieces p and p + 1 are on devices
p mod k and (p + 1) mod k.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from paceline.pipeline.blocks import Blocks, Real, Whole, blocks_of
from paceline.pipeline.cutting import Cost
from paceline.pipeline.devices import Device, Link, ring, whole
from paceline.pipeline.layers import Profile

InFlight: TypeAlias = Callable[[int], int] | Sequence[int]
Limits: TypeAlias = Sequence[float | None]  # bytes that each piece may take; None where there is no limit


class Costs:
    """The costs of all runs of a profile on given devices, for all pieces.

    >>> from paceline.pipeline.layers import Layer, Tensor
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
        self.chunks = whole("chunks", chunks)
        self.microbatches = whole("microbatches", microbatches)
        if not isinstance(states, numbers.Real) or not 0 <= states < math.inf:
            raise ValueError(f"states must be at least 0 and finite (states={states!r})")
        self.states: float = float(states)
        self.links: tuple[Link, ...] = ring(links, len(self.devices), self.chunks)
        self.pieces: int = len(self.devices) * self.chunks
        self.in_flight: tuple[int, ...] = _in_flight(in_flight, self.pieces)
        self.blocks: Blocks = blocks_of(profile)

    def device(self, piece: int) -> Device:
        """The device that holds a piece."""
        return self.devices[piece % len(self.devices)]

    @property
    def limits(self) -> Limits:
        """For each piece all the memory of its device."""
        return tuple(self.device(piece).memory_bytes for piece in range(self.pieces))

    def link(self, piece: int) -> Link:
        """The link behind a piece; before piece 0 there is none, and link(-1) carries nothing."""
        return self.links[piece % len(self.devices)]

    @cached_property
    def crossing(self) -> Whole:
        """Bytes that cross each position for each micro-batch, forward and back."""
        return self.blocks.sent + self.blocks.returned

    @cached_property
    def weights(self) -> Whole:
        """Bytes of weights, gradients and optimiser states of each run."""
        trained: Whole = np.ceil(self.blocks.trained * (2 + self.states)).astype(np.int64)
        return np.add(trained, self.blocks.untrained, out=trained)

    @cached_property
    def _once(self) -> Whole:
        blocks = self.blocks
        return self.weights + self.microbatches * (blocks.sent[:, None] + blocks.returned)

    @cached_property
    def _each(self) -> Whole:
        """Bytes of each run for each micro-batch in flight."""
        blocks = self.blocks
        return blocks.uncounted + (blocks.activations - blocks.activations[:, None])

    def seconds(self, piece: int, first: slice, last: slice) -> Real:
        """Seconds for one micro-batch of the runs from positions `first` (rows) to positions `last` (columns)."""
        blocks = self.blocks
        computing = (blocks.seconds[last] - blocks.seconds[first, None]) / self.device(piece).speed
        computing += _sending(self.link(piece), blocks.sent[last])
        computing += _sending(self.link(piece - 1), blocks.returned[first])[:, None]
        return computing

    def memory(self, piece: int, first: slice, last: slice) -> Whole:
        """Bytes of the same runs."""
        needed: Whole = self._each[first, last] * self.in_flight[piece]
        needed += self._once[first, last]
        return needed

    def seconds_within(self, limits: Limits) -> Cost:
        """Seconds, infinite where a piece takes more memory than its limit."""

        def cost(piece: int, first: slice, last: slice) -> Real:
            seconds, limit = self.seconds(piece, first, last), limits[piece]
            if limit is not None:
                seconds[self.memory(piece, first, last) > limit] = np.inf
            return seconds

        return cost

    def fullness(self, limits: Limits) -> Cost:
        """How many times its limit a piece needs; nothing where there is no limit."""

        def cost(piece: int, first: slice, last: slice) -> Real:
            limit = limits[piece]
            if limit is None:
                return np.zeros((first.stop - first.start, last.stop - last.start))
            return self.memory(piece, first, last) / limit

        return cost


def _sending(link: Link, message_bytes: Whole) -> Real:
    seconds: Real = np.where(message_bytes > 0, link.latency_seconds + message_bytes / link.bytes_per_second, 0.0)
    return seconds


def _in_flight(given: InFlight, pieces: int) -> tuple[int, ...]:
    held = [given(piece) for piece in range(pieces)] if callable(given) else list(given)
    if len(held) != pieces:
        raise ValueError(f"in_flight must say for each of {pieces} pieces how many micro-batches it holds ({held})")
    return tuple(whole(f"in_flight of piece {piece}", number) for piece, number in enumerate(held))
