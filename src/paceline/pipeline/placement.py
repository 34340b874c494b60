"""Where to cut a model, so that its slowest piece is as fast as it can be and every piece fits on its device.

    layers     a   b   c   d   e   f   g
    cuts               │           │                 cuts = (2, 5): pieces are layers 0-1, 2-4 and 5-6
    piece        0           1         2
    device       0           1         2             with chunks = 2 and k devices: piece p is on device p mod k

A pipeline is as fast as its slowest piece, so that is what is made least: exactly, over all cuts, with the time of
transfers, devices of different speeds, and each device's memory as a condition (`costs` says what a piece costs). Of
the cuts that are as good, the one with the fewest bytes crossing in both directions; of those, the one that cuts first.

Layers stay in the order in which the model was written. Another order of a graph's layers might cut better still.

The exact cut is found by dynamic programming. Let cost(p, i, j) be what piece p costs as the run from position i to
position j, infinite where it must not be. From the back to the front,

    best(p, i) = the least, over all j > i, of max(cost(p, i, j), best(p + 1, j))

is the least possible worst piece of all ways to cut what lies behind position i into the pieces p, p + 1, ...; so
best(0, 0) is the optimum (pieces in a row: Bellman's recursion, as PipeDream uses it, with costs that differ by piece).
Nothing is assumed of the costs, which therefore may hold transfers, devices that differ, and memory that is full. Among
all cuts as good, the one that crosses the fewest bytes is found by the same recursion with a sum for the maximum, over
the runs that cost no more than the optimum; and of those the first in order by walking from the front. Both take n²k/2
entries of cost, computed some rows at a time: about a second for 1,000 blocks and 64 pieces.

Where a device holds several pieces, its memory is for all of them, which couples pieces that are far apart in the row.
The best cut with each piece alone within the limit is the optimum if they fit together too. If they do not, a good cut
is searched for, perhaps not the best, and the placement says so. Dynamic programming solves exactly the question in
which every piece has a part of its own:

    device 0  │███ piece 0 ███│█ piece 2 █│      parts that are given,
    device 1  │█ piece 1 █│███ piece 3 ███│      and add up to the device

So parts are chosen, the best cut within them is found, and the parts become what the pieces of that cut take, with what
is left over divided in proportion. That cut is still within its parts then, so the next is as fast or faster. If there
is none within the parts, the one that comes nearest gives the next. Three beginnings are tried: the parts that pieces
have in the cut that would be best if nobody shared, equal parts, and those of a cut that takes little memory in all.
This is a search, not a proof: a better cut may be missed, and now and then the only one that fits. How often, against
all cuts of small models, is counted in tests/parity/test_placement_equals_brute_force.py.

A model that does not go on the devices is refused with the first of these reasons that can be shown:

    there are fewer blocks of layers than pieces
    one block alone is larger than the largest device
    all blocks together are larger than all devices together
    no cut fits; then the cut that comes nearest says how much is missing, and where

The second and the third hold whatever the cut: they count the weights and the activations, which no cut makes fewer,
with the fewest micro-batches that any piece holds at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.pipeline import PipelineError
from paceline.pipeline.costs import Cost, Costs, InFlight, Integers, Limits
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.profile import Profile
from paceline.quantities import counted, size_text

SEARCH_STEPS = 4  # from each beginning; more take longer and find little
ROWS = 128  # a strip of so many rows and 1,000 columns stays in the cache
NONE = np.iinfo(np.int64).max // 4  # bytes of a cut that does not exist; sums of two do not overflow
ADVICE = "use more stages, smaller or fewer micro-batches, a schedule with fewer in flight, or devices with more memory"


class PlacementError(PipelineError):
    """A model cannot be placed on the given devices. The message says why, and what may help."""


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
        return self.input_seconds + self.weight_seconds

    @property
    def transfer_seconds(self) -> float:
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
        """The piece that takes longest; of several the first."""
        return max(self.pieces, key=lambda piece: piece.seconds)

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross all cuts for each micro-batch, forward and back."""
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
    """Return the best cut of a profile over devices in a row; PlacementError says why if there is none.

    `in_flight` says how many micro-batches a piece holds at once, which the schedule decides; `states` how many numbers
    the optimiser keeps for each weight. `links` is one for all, or one behind each device; `chunks` the pieces that
    each device holds.

    >>> from paceline.pipeline.profile import Layer
    >>> chain = Profile(layers=tuple(Layer(name=f"fc{n}", forward_seconds=s) for n, s in enumerate((1, 1, 3, 1, 2))))
    >>> found = place(chain, [Device(), Device(), Device()], microbatches=8, in_flight=[3, 2, 1])
    >>> found.cuts, found.slowest.seconds, found.proven
    ((2, 3), 3.0, True)
    >>> place(chain, [Device()] * 6, microbatches=8, in_flight=[1] * 6)
    Traceback (most recent call last):
    paceline.pipeline.placement.PlacementError: 5 layers do not make 6 pieces (6 stages); use 5 pieces or fewer
    """
    costs = Costs(
        profile, devices, links=links, microbatches=microbatches, in_flight=in_flight, chunks=chunks, states=states
    )
    _check_count(costs)
    _check_size(costs)
    cuts = _fastest(costs, costs.limits)
    if cuts is None:
        raise _no_cut(costs)
    alone = _placed(costs, cuts, proven=True)
    if alone.fits:
        return alone
    cuts = _search_shared(costs, cuts)
    if cuts is None:
        raise _no_cut(costs)
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
    """Return what a given cut costs; its `fits` says whether it fits on the devices.

    >>> from paceline.pipeline.profile import Layer
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
    return Placement(
        cuts=tuple(int(costs.blocks.positions[cut]) for cut in cuts),
        pieces=tuple(_piece(costs, index, first, last) for index, first, last in _runs(costs, cuts)),
        devices=costs.devices,
        proven=proven,
        notes=notes,
    )


def _piece(costs: Costs, index: int, first: int, last: int) -> Piece:
    blocks, speed = costs.blocks, costs.device(index).speed
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
        seconds=costs.piece_seconds(index, first, last),
        sent_bytes=sent,
        returned_bytes=returned,
        memory_bytes=costs.piece_bytes(index, first, last),
    )


def _runs(costs: Costs, cuts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return the pieces of a cut: each with the positions where it begins and ends."""
    return [(piece, *ends) for piece, ends in enumerate(itertools.pairwise((0, *cuts, costs.blocks.count)))]


# -- the exact cut -----------------------------------------------------------------------------------------------------


def _fastest(costs: Costs, limits: Limits) -> tuple[int, ...] | None:
    """Return the positions of the best cut in which each piece is within its limit, if there is one."""
    return _best(costs, costs.seconds_within(limits))


def _best(costs: Costs, cost: Cost) -> tuple[int, ...] | None:
    most = least_worst(cost, costs.blocks.count, costs.pieces)
    return None if math.isinf(most) else fewest_bytes(cost, most, costs.crossing, costs.pieces)


def least_worst(cost: Cost, blocks: int, pieces: int) -> float:
    """Return the cost of the worst piece of the best cut; infinite if there is no cut.

    >>> sizes = np.array([0.0, 3.0, 4.0, 6.0])  # running sum of blocks of 3, 1 and 2
    >>> least_worst(lambda piece, first, last: sizes[None, last] - sizes[first, None], blocks=3, pieces=2)
    3.0
    """
    best = np.full(blocks + 1, np.inf)
    best[blocks] = -np.inf
    for piece in reversed(range(pieces)):
        nearer = np.full(blocks + 1, np.inf)
        for first, last in _strips(piece, blocks, pieces):
            worst = np.maximum(cost(piece, first, last), best[last])
            worst[_not_runs(worst.shape)] = np.inf
            nearer[first] = worst.min(axis=1)
        best = nearer
    return float(best[0])


def fewest_bytes(cost: Cost, most: float, crossing: Integers, pieces: int) -> tuple[int, ...]:
    """Return the positions of the cut that crosses the fewest bytes and has no piece that costs more than `most`.

    >>> sizes = np.array([0.0, 3.0, 4.0, 6.0])
    >>> fewest_bytes(lambda piece, first, last: sizes[None, last] - sizes[first, None], 4.0, np.array([0, 9, 5, 0]), 2)
    (2,)
    """
    blocks = len(crossing) - 1
    # Row p: the fewest bytes from a position on, with piece p beginning there, and what crosses at that position.
    behind = np.full((pieces + 1, blocks + 1), NONE)
    behind[pieces, blocks] = 0
    for piece in reversed(range(pieces)):
        for first, last in _strips(piece, blocks, pieces):
            allowed = cost(piece, first, last) <= most
            allowed[_not_runs(allowed.shape)] = False
            fewest = np.where(allowed, behind[piece + 1, last], NONE).min(axis=1)
            behind[piece, first] = np.minimum(fewest + crossing[first], NONE)
    cuts, at = [], 0
    for piece in range(pieces - 1):
        run = cost(piece, slice(at, at + 1), slice(at + 1, blocks + 1))[0] <= most
        ahead = np.where(run, behind[piece + 1, at + 1 :], NONE)
        at += 1 + int(ahead.argmin())
        cuts.append(at)
    return tuple(cuts)


def least_sum(cost: Cost, blocks: int, pieces: int) -> tuple[int, ...]:
    """Return the positions of the cut whose pieces cost least in sum; all costs must be finite.

    >>> sizes = np.array([0.0, 3.0, 4.0, 6.0])
    >>> least_sum(lambda piece, first, last: (sizes[None, last] - sizes[first, None]) * (1 + piece), blocks=3, pieces=2)
    (2,)
    """
    best = np.full(blocks + 1, np.inf)
    best[blocks] = 0.0
    ends = np.zeros((pieces, blocks + 1), np.int64)
    for piece in reversed(range(pieces)):
        nearer = np.full(blocks + 1, np.inf)
        for first, last in _strips(piece, blocks, pieces):
            total = cost(piece, first, last) + best[last]
            total[_not_runs(total.shape)] = np.inf
            ends[piece, first] = last.start + total.argmin(axis=1)
            nearer[first] = total.min(axis=1)
        best = nearer
    cuts, at = [], 0
    for piece in range(pieces - 1):
        at = int(ends[piece, at])
        cuts.append(at)
    return tuple(cuts)


def _strips(piece: int, blocks: int, pieces: int) -> Iterator[tuple[slice, slice]]:
    """Yield where a piece may begin and end, some rows at a time, if each piece before and behind it has a block."""
    spare = blocks - pieces
    ends = slice(blocks, blocks + 1) if piece == pieces - 1 else None
    for start in range(piece, piece + 1 if piece == 0 else piece + spare + 1, ROWS):
        rows = slice(start, 1 if piece == 0 else min(start + ROWS, piece + spare + 1))
        yield rows, ends or slice(start + 1, piece + spare + 2)


def _not_runs(shape: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the entries of a strip whose last position is not behind their first: a corner below the diagonal.

    A single column ends at the end of the model, and all its rows begin before that.
    """
    return _corner(1 if shape[1] == 1 else min(shape))


@functools.cache
def _corner(side: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    return np.tril_indices(side, -1)


# -- pieces that share a device's memory -----------------------------------------------------------------------------


def _search_shared(costs: Costs, alone: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the positions of a good cut in which the pieces of each device fit on it together, if one is found.

    `alone` is the best cut in which each piece fits by itself.
    """
    found: dict[tuple[int, ...], tuple[float, int]] = {}
    seen = set()
    for parts in (
        _parts(costs, _memory(costs, alone)),
        _parts(costs, [1] * costs.pieces),
        _parts(costs, _lightest(costs)),
    ):
        for _ in range(SEARCH_STEPS):
            cuts = _fastest(costs, parts) or _best(costs, costs.fullness(parts))
            if cuts is None or cuts in seen:
                break
            seen.add(cuts)
            memory = _memory(costs, cuts)
            if _fits(costs, memory):
                found[cuts] = _worth(costs, cuts)
            parts = _parts(costs, memory)
    return min(found, key=lambda cuts: (*found[cuts], cuts), default=None)


def _lightest(costs: Costs) -> list[int]:
    """Return the memory of each piece in a cut that asks little of all devices, and least of the fullest."""
    devices = len(costs.devices)
    weights = [1.0] * devices
    for _ in range(SEARCH_STEPS):
        limits = [None if limit is None else limit / weights[p % devices] for p, limit in enumerate(costs.limits)]
        memory = _memory(costs, least_sum(costs.fullness(limits), costs.blocks.count, costs.pieces))
        if _fits(costs, memory):
            break
        weights = [
            weight * (sum(memory[device::devices]) / limit if limit else 1.0)
            for device, (weight, limit) in enumerate(zip(weights, costs.limits[:devices], strict=True))
        ]
    return memory


def _memory(costs: Costs, cuts: tuple[int, ...]) -> list[int]:
    return [costs.piece_bytes(*run) for run in _runs(costs, cuts)]


def _worth(costs: Costs, cuts: tuple[int, ...]) -> tuple[float, int]:
    slowest = max(costs.piece_seconds(*run) for run in _runs(costs, cuts))
    return slowest, int(costs.crossing[list(cuts)].sum())


def _parts(costs: Costs, needed: list[int]) -> Limits:
    """Return each device's memory, divided among its pieces in proportion to what they need."""
    together = [max(1, sum(needed[device :: len(costs.devices)])) for device in range(len(costs.devices))]
    return [
        None if limit is None else limit * max(1, share) / together[piece % len(together)]
        for piece, (limit, share) in enumerate(zip(costs.limits, needed, strict=True))
    ]


def _fits(costs: Costs, needed: list[int]) -> bool:
    devices = len(costs.devices)
    sums = [sum(needed[device::devices]) for device in range(devices)]
    return all(limit is None or total <= limit for limit, total in zip(costs.limits[:devices], sums, strict=True))


# -- why a model does not fit -------------------------------------------------------------------------------------


def _differing(needed: float, has: float) -> tuple[str, str]:
    """Return two sizes that differ as texts that differ.

    >>> _differing(3000, 2000), _differing(3000, 2999)
    (('3.0 kB', '2.0 kB'), ('3,000 B', '2,999 B'))
    """
    if size_text(needed) != size_text(has):
        return size_text(needed), size_text(has)
    return f"{needed:,.0f} B", f"{has:,.0f} B"


def _check_count(costs: Costs) -> None:
    """Refuse if there are fewer blocks of layers than pieces."""
    blocks, pieces = costs.blocks.count, costs.pieces
    if blocks >= pieces:
        return
    layers = len(costs.profile.layers)
    per = f"{len(costs.devices)} stages x {costs.chunks} chunks" if costs.chunks > 1 else f"{pieces} stages"
    parted = counted(layers, "layer") + ("" if blocks == layers else f" with {counted(blocks - 1, 'possible cut')}")
    make = "does not make" if layers == 1 else "do not make"
    remedy = "1 piece" if blocks == 1 else f"{blocks} pieces or fewer"
    raise PlacementError(f"{parted} {make} {counted(pieces, 'piece')} ({per}); use {remedy}")


def _check_size(costs: Costs) -> None:
    """Refuse if one block is larger than the largest device, or all blocks are larger than all devices."""
    limits = [device.memory_bytes for device in costs.devices if device.memory_bytes is not None]
    if len(limits) < len(costs.devices):
        return
    held, activations = min(costs.in_flight), costs.blocks.activations
    weights = np.diagonal(costs.weights, 1)
    needed = weights + held * np.diff(activations)
    block = int(needed.argmax())
    if needed[block] > max(limits):
        inside = costs.profile.layers[costs.blocks.positions[block] : costs.blocks.positions[block + 1]]
        name = f"layer {inside[0].name!r} alone needs"
        if len(inside) > 1:
            name = f"layers {inside[0].name!r} to {inside[-1].name!r}, which cannot be parted, need"
        helps = "use a device with more memory"
        if weights[block] <= max(limits):
            share = f"weights are {size_text(weights[block])} of that"
            helps = f"{share}; use smaller micro-batches, or a device with more memory"
        need, has = _differing(needed[block], max(limits))
        raise PlacementError(f"{name} {need}, and the largest device has {has}; {helps}")
    total = int(costs.weights[0, -1]) + held * int(activations[-1])
    if total > sum(limits):
        need, has = _differing(total, sum(limits))
        devices = f"{len(limits)} devices have {has} together" if len(limits) > 1 else f"the device has {has}"
        raise PlacementError(f"the model needs at least {need}, and {devices}; {ADVICE}")


def _no_cut(costs: Costs) -> PlacementError:
    """Return the error that says what is missing, by the cut whose fullest piece is least too full."""
    limits = [None if limit is None else limit / costs.chunks for limit in costs.limits]
    cost = costs.fullness(limits)
    worst = least_worst(cost, costs.blocks.count, costs.pieces)
    needed = _memory(costs, fewest_bytes(cost, worst, costs.crossing, costs.pieces))
    full = [0.0 if limit is None else need / limit for need, limit in zip(needed, limits, strict=True)]
    piece = full.index(max(full))
    device = costs.device(piece)
    where = f"device {piece % len(costs.devices)}" + (f" ({device.name})" if device.name else "")
    need, has = _differing(needed[piece], limits[piece] or 0.0)
    found = "no cut fits"
    if costs.chunks > 1:
        found, has = "no cut was found that fits", f"{has} for each of its {costs.chunks} pieces"
    return PlacementError(f"{found}: the one that comes nearest needs {need} on {where}, which has {has}; {ADVICE}")
