"""Where to cut a model, so that its slowest piece is as fast as it can be and every piece fits on its device.

    layers     a   b   c   d   e   f   g
    cuts               │           │                 cuts = (2, 5): pieces are layers 0-1, 2-4 and 5-6
    piece        0           1         2
    device       0           1         2             with chunks = 2 and k devices: piece p is on device p mod k

A pipeline is as fast as its slowest piece, so that is what is made least: exactly, over all cuts, with the time of
transfers, devices of different speeds, and each device's memory as a condition (`cutting` says how, `costs` what a
piece costs). Of the cuts that are as good, the one with the fewest bytes crossing in both directions; of those, the one
that cuts first.

Where a device holds several pieces, its memory is for all of them, which couples pieces that are far apart. The best
cut with each piece alone within the limit is the optimum if they fit together too. If they do not, a good cut is
searched for (`sharing`), perhaps not the best, and the placement says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.pipeline.costs import Costs, InFlight
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.layers import Profile
from paceline.pipeline.refusing import PlacementError, check_count, check_size, no_cut
from paceline.pipeline.sharing import fastest, fastest_together

__all__ = ["Piece", "Placement", "PlacementError", "place", "priced"]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Layers `first` to `last - 1`, and what they cost on their device; seconds and bytes sent are per micro-batch.

    `send_seconds` is for the outputs that go on to the next piece, `return_seconds` for the gradients that go back to
    the piece before; `seconds` is all of them together.
    """

    index: int
    device: int
    first: int
    last: int
    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    send_seconds: float
    return_seconds: float
    seconds: float
    sent_bytes: int
    returned_bytes: int
    memory_bytes: int

    @property
    def backward_seconds(self) -> float:
        """Both parts of backward."""
        return self.input_seconds + self.weight_seconds

    @property
    def transfer_seconds(self) -> float:
        """Forward and back."""
        return self.send_seconds + self.return_seconds


@dataclass(frozen=True, kw_only=True)
class Placement:
    """A cut and what it costs. `proven` says that no cut has a faster slowest piece; `notes`, why that is not known."""

    cuts: tuple[int, ...]
    pieces: tuple[Piece, ...]
    devices: tuple[Device, ...]
    proven: bool = False
    notes: tuple[str, ...] = ()

    @property
    def slowest(self) -> Piece:
        """The piece that takes longest; the first of them."""
        return max(self.pieces, key=lambda piece: piece.seconds)

    @property
    def crossing_bytes(self) -> int:
        """What crosses all cuts for each micro-batch, forward and back."""
        return sum(piece.sent_bytes + piece.returned_bytes for piece in self.pieces)

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """The memory that each device needs for all its pieces."""
        stages = len(self.devices)
        return tuple(sum(piece.memory_bytes for piece in self.pieces[device::stages]) for device in range(stages))

    @property
    def fits(self) -> bool:
        """Whether every device has the memory it needs."""
        return all(
            device.memory_bytes is None or needed <= device.memory_bytes
            for device, needed in zip(self.devices, self.device_bytes, strict=True)
        )


def place(
    profile: Profile,
    devices: Sequence[Device],
    *,
    microbatches: int,
    in_flight: InFlight,
    links: Link | Sequence[Link] = Link(),  # noqa: B008 - frozen
    chunks: int = 1,
    states: float = 1.0,
) -> Placement:
    """The best cut of a profile over devices in a row; PlacementError says why if there is none.

    `in_flight` says how many micro-batches a piece holds at once, which the schedule decides; `states` how many numbers
    the optimiser keeps for each weight. `links` is one for all, or one behind each device; `chunks` the pieces that
    each device holds.

    >>> from paceline.pipeline.layers import Layer
    >>> chain = Profile(layers=tuple(Layer(name=f"fc{n}", forward_seconds=s) for n, s in enumerate((1, 1, 3, 1, 2))))
    >>> found = place(chain, [Device(), Device(), Device()], microbatches=8, in_flight=[3, 2, 1])
    >>> found.cuts, found.slowest.seconds, found.proven
    ((2, 3), 3.0, True)
    >>> place(chain, [Device()] * 6, microbatches=8, in_flight=[1] * 6)
    Traceback (most recent call last):
    paceline.pipeline.refusing.PlacementError: 5 layers do not make 6 pieces (6 stages); use 5 pieces or fewer
    """
    costs = Costs(
        profile, devices, links=links, microbatches=microbatches, in_flight=in_flight, chunks=chunks, states=states
    )
    check_count(costs)
    check_size(costs)
    cuts = fastest(costs, costs.limits)
    if cuts is None:
        raise no_cut(costs)
    alone = _placed(costs, cuts, proven=True)
    if alone.fits:
        return alone
    cuts = fastest_together(costs, cuts)
    if cuts is None:
        raise no_cut(costs)
    note = (
        f"a device's memory was divided among its {chunks} pieces step by step, which need not end with the best cut; "
        f"whatever the cut, the slowest piece takes at least {alone.slowest.seconds:.6g} s"
    )
    return _placed(costs, cuts, notes=(note,))


def priced(
    profile: Profile,
    cuts: Sequence[int],
    devices: Sequence[Device],
    *,
    microbatches: int,
    in_flight: InFlight,
    links: Link | Sequence[Link] = Link(),  # noqa: B008 - frozen
    chunks: int = 1,
    states: float = 1.0,
) -> Placement:
    """What a cut of one's own costs; whether it fits on the devices is said by `fits`.

    >>> from paceline.pipeline.layers import Layer
    >>> chain = Profile(layers=tuple(Layer(name=f"fc{n}", forward_seconds=s) for n, s in enumerate((1, 1, 3, 1, 2))))
    >>> mine = priced(chain, [1, 4], [Device()] * 3, microbatches=8, in_flight=[3, 2, 1])
    >>> [piece.seconds for piece in mine.pieces]
    [1.0, 5.0, 2.0]
    >>> priced(chain, [4, 4], [Device()] * 3, microbatches=8, in_flight=[3, 2, 1])
    Traceback (most recent call last):
    ValueError: cuts must be 2 positions that increase, of those between 1 and 4 that are not bound (cuts=[4, 4])
    """
    costs = Costs(
        profile, devices, links=links, microbatches=microbatches, in_flight=in_flight, chunks=chunks, states=states
    )
    at = {int(layer): position for position, layer in enumerate(costs.blocks.positions)}
    given, layers = [*cuts], len(profile.layers)
    inner = set(at) - {0, layers}
    if len(given) != costs.pieces - 1 or not inner.issuperset(given) or given != sorted(set(given)):
        raise ValueError(
            f"cuts must be {costs.pieces - 1} positions that increase, of those between 1 and {layers - 1} "
            f"that are not bound (cuts={given})"
        )
    return _placed(costs, tuple(at[cut] for cut in given))


def _placed(costs: Costs, cuts: tuple[int, ...], *, proven: bool = False, notes: tuple[str, ...] = ()) -> Placement:
    runs = zip((0, *cuts), (*cuts, costs.blocks.count), strict=True)
    return Placement(
        cuts=tuple(int(costs.blocks.positions[cut]) for cut in cuts),
        pieces=tuple(_piece(costs, index, first, last) for index, (first, last) in enumerate(runs)),
        devices=costs.devices,
        proven=proven,
        notes=notes,
    )


def _piece(costs: Costs, index: int, first: int, last: int) -> Piece:
    run, blocks, speed = (slice(first, first + 1), slice(last, last + 1)), costs.blocks, costs.device(index).speed
    begin, end = int(blocks.positions[first]), int(blocks.positions[last])
    layers = costs.profile.layers[begin:end]
    sent, returned = int(blocks.sent[last]), int(blocks.returned[first])
    return Piece(
        index=index,
        device=index % len(costs.devices),
        first=begin,
        last=end,
        forward_seconds=math.fsum(layer.forward_seconds for layer in layers) / speed,
        input_seconds=math.fsum(layer.input_seconds for layer in layers) / speed,
        weight_seconds=math.fsum(layer.weight_seconds for layer in layers) / speed,
        send_seconds=costs.link(index).seconds(sent),
        return_seconds=costs.link(index - 1).seconds(returned),
        seconds=float(costs.seconds(index, *run)[0, 0]),
        sent_bytes=sent,
        returned_bytes=returned,
        memory_bytes=int(costs.memory(index, *run)[0, 0]),
    )
