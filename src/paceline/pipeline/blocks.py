"""A profile as placement sees it: blocks of layers that no cut may part, and sums over runs of blocks as arrays.

    layers   0   1   2   3   4          bound = {2}: no cut between layers 1 and 2
    blocks   0 │   1   │ 2 │ 3
    positions 0    1   2   3   4        = cuts at layer 0, 1, 3, 4, 5; the first and the last are the ends of the model

A run of blocks from position i to position j (i < j) is a piece. What a piece needs is either a difference of running
sums, seconds[j] - seconds[i], or an entry [i, j] of a matrix. A matrix is filled by rectangles: a weight that block b
uses is in every run with i <= b < j, a rectangle; so each weight and each tensor changes four corners, and two running
sums, down and across, make the matrix of it. That is n² additions instead of n² looks at every weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.pipeline.layers import Profile

Whole = npt.NDArray[np.int64]
Real = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Arrays over positions; those of two dimensions are indexed by a run's first position and its last.

    positions     the cut of each position, counted in layers
    seconds       running sum of forward and backward
    activations   running sum of what backward needs again, bytes for each micro-batch
    sent          bytes that cross a position forward, returned: gradients that come back over it; none at the ends
    trained       bytes of the trained weights that a run uses, untrained: of the others
    uncounted     bytes made in a run that cross its end and are in no layer's activations

    >>> from paceline.pipeline.layers import Layer, Weight
    >>> blocks = blocks_of(Profile(layers=(Layer(name="a"), Layer(name="b"), Layer(name="c")), bound=frozenset({2}),
    ...                            weights=(Weight(name="tied", bytes=8, layers=(0, 2)),)))
    >>> blocks.positions.tolist()
    [0, 1, 3]
    >>> blocks.trained[0, 1].item(), blocks.trained[1, 2].item(), blocks.trained[0, 2].item()
    (8, 8, 8)
    """

    positions: Whole
    seconds: Real
    activations: Whole
    sent: Whole
    returned: Whole
    trained: Whole
    untrained: Whole
    uncounted: Whole

    @property
    def count(self) -> int:
        """How many blocks there are: the most pieces that can be made of the model."""
        return len(self.positions) - 1


def blocks_of(profile: Profile) -> Blocks:
    """The blocks of a profile, and the sums."""
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


def _weights(profile: Profile, block_of: Whole, size: int, *, trained: bool) -> Whole:
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


def _tensors(profile: Profile, block_of: Whole, size: int) -> tuple[Whole, Whole, Whole]:
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


def _filled(corners: Whole) -> Whole:
    np.cumsum(corners, axis=0, out=corners)
    np.cumsum(corners, axis=1, out=corners)
    return corners[:-1, :-1]


def _check(profile: Profile) -> None:
    layers = len(profile.layers)
    if not layers:
        raise ValueError("a profile must have at least one layer (it has none)")
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
