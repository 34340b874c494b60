"""Why a model does not go on the given devices: the first of these reasons that can be shown, with its numbers.

    there are fewer blocks of layers than pieces
    one block alone is larger than the largest device
    all blocks together are larger than all devices together
    no cut fits; then the cut that comes nearest says how much is missing, and where

The second and the third hold whatever the cut: they count the weights and the activations, which no cut makes fewer,
with the fewest micro-batches that any piece holds at once.
"""

from __future__ import annotations

import itertools

import numpy as np

from paceline.pipeline.costs import Costs
from paceline.pipeline.cutting import fewest_bytes, least_worst
from paceline.pipeline.errors import PipelineError
from paceline.pipeline.words import size

ADVICE = "use more stages, smaller or fewer micro-batches, a schedule with fewer in flight, or devices with more memory"


class PlacementError(PipelineError):
    """A model cannot be placed on the given devices. The message says why, and what may help."""


def sizes(needed: float, has: float) -> tuple[str, str]:
    """Two sizes that differ, in words that differ.

    >>> sizes(3000, 2000), sizes(3000, 2999)
    (('3.0 kB', '2.0 kB'), ('3,000 B', '2,999 B'))
    """
    if size(needed) != size(has):
        return size(needed), size(has)
    return f"{needed:,.0f} B", f"{has:,.0f} B"


def check_count(costs: Costs) -> None:
    """Refuse if there are fewer blocks of layers than pieces."""
    blocks, pieces = costs.blocks.count, costs.pieces
    if blocks >= pieces:
        return
    layers = len(costs.profile.layers)
    per = f"{len(costs.devices)} stages x {costs.chunks} chunks" if costs.chunks > 1 else f"{pieces} stages"
    parted = f"{layers} layers" if blocks == layers else f"{layers} layers with {blocks - 1} possible cuts"
    raise PlacementError(f"{parted} do not make {pieces} pieces ({per}); use {blocks} pieces or fewer")


def check_size(costs: Costs) -> None:
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
            helps = (
                f"weights are {size(weights[block])} of that; use smaller micro-batches, or a device with more memory"
            )
        need, has = sizes(needed[block], max(limits))
        raise PlacementError(f"{name} {need}, and the largest device has {has}; {helps}")
    total = int(costs.weights[0, -1]) + held * int(activations[-1])
    if total > sum(limits):
        need, has = sizes(total, sum(limits))
        devices = f"{len(limits)} devices have {has} together" if len(limits) > 1 else f"the device has {has}"
        raise PlacementError(f"the model needs at least {need}, and {devices}; {ADVICE}")


def no_cut(costs: Costs) -> PlacementError:
    """What is missing, where no cut was found that fits: the cut whose fullest piece is least too full says it."""
    limits = [None if limit is None else limit / costs.chunks for limit in costs.limits]
    cost, blocks = costs.fullness(limits), costs.blocks.count
    worst = least_worst(cost, blocks, costs.pieces)
    ends = (0, *fewest_bytes(cost, worst, costs.crossing, costs.pieces), blocks)
    runs = [(slice(first, first + 1), slice(last, last + 1)) for first, last in itertools.pairwise(ends)]
    piece = max(range(costs.pieces), key=lambda piece: float(cost(piece, *runs[piece])[0, 0]))
    needed, limit = int(costs.memory(piece, *runs[piece])[0, 0]), limits[piece] or 0.0
    device = costs.device(piece)
    where = f"device {piece % len(costs.devices)}" + (f" ({device.name})" if device.name else "")
    need, has = sizes(needed, limit)
    found = "no cut fits"
    if costs.chunks > 1:
        found, has = "no cut was found that fits", f"{has} for each of its {costs.chunks} pieces"
    return PlacementError(f"{found}: the one that comes nearest needs {need} on {where}, which has {has}; {ADVICE}")
