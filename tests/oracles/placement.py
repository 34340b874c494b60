"""The placement of a model's layers in its slowest, plainest form: what `pipeline.placement` is tested against.

    fitting_cuts    every cut is tried; the best is the fastest, then the one of the fewest bytes, then the first

A model comes as a `paceline.pipeline.profile.Profile`, devices and links as `Device` and `Link` of
`paceline.pipeline.devices`; only their fields are read. Nothing here is shared with the code it specifies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

Profile: TypeAlias = Any
Device: TypeAlias = Any
Link: TypeAlias = Any


def possible_cuts(layers: int, pieces: int, bound: Collection[int] = ()) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut layers in a row into pieces of at least one layer, in lexicographic order.

    >>> list(possible_cuts(4, 3, bound={1}))
    [(2, 3)]
    """
    return itertools.combinations([cut for cut in range(1, layers) if cut not in bound], pieces - 1)


def crossing(profile: Profile, cut: int) -> list[Any]:
    """Return the tensors that cross a cut; the ends of the model are no cuts."""
    if cut in (0, len(profile.layers)):
        return []
    return [tensor for tensor in profile.tensors if tensor.producer < cut <= tensor.last_use]


def message_bytes(tensors: Sequence[Any], *, gradients: bool) -> int:
    """Return the bytes of these tensors, or of the gradients of those that need one."""
    return sum(tensor.bytes for tensor in tensors if tensor.needs_gradient or not gradients)


def message_seconds(link: Link, size: int) -> float:
    """Return how long a message takes; an empty one is not sent."""
    seconds: float = link.latency_seconds + size / link.bytes_per_second if size else 0.0
    return seconds


def piece_seconds(profile: Profile, first: int, last: int, device: Device, before: Link, behind: Link) -> float:
    """Return the time of layers `first` to `last - 1` for one micro-batch, with what they send in both directions."""
    computing = sum(
        layer.forward_seconds + layer.input_seconds + layer.weight_seconds for layer in profile.layers[first:last]
    )
    outputs = message_bytes(crossing(profile, last), gradients=False)
    gradients = message_bytes(crossing(profile, first), gradients=True)
    seconds: float = computing / device.speed + message_seconds(behind, outputs) + message_seconds(before, gradients)
    return seconds


def piece_bytes(
    profile: Profile, first: int, last: int, *, in_flight: int, microbatches: int, states: float = 1.0
) -> int:
    """Return the memory of layers `first` to `last - 1`.

    Weights with gradients and optimiser states; for each micro-batch in flight the activations, and the outputs that no
    layer has counted among them; for every micro-batch a buffer for what comes in from either side.
    """
    used = [weight for weight in profile.weights if any(first <= layer < last for layer in weight.layers)]
    trained = sum(weight.bytes for weight in used if weight.trained)
    untrained = sum(weight.bytes for weight in used if not weight.trained)
    activations = sum(layer.activation_bytes for layer in profile.layers[first:last])
    outputs = sum(t.bytes for t in crossing(profile, last) if t.producer >= first and not t.kept)
    received = message_bytes(crossing(profile, first), gradients=False)
    received += message_bytes(crossing(profile, last), gradients=True)
    weights = math.ceil((2 + states) * trained) + untrained
    return int(weights + in_flight * (activations + outputs) + microbatches * received)


def fitting_cuts(
    profile: Profile,
    devices: Sequence[Device],
    *,
    links: Sequence[Link],
    microbatches: int,
    in_flight: Sequence[int],
    chunks: int = 1,
    states: float = 1.0,
) -> Iterator[tuple[float, int, tuple[int, ...]]]:
    """Yield of every cut that fits on the devices the slowest piece's seconds, all bytes that cross, and the cuts.

    Piece p is on device p mod k. `links` has one behind each device, the last leading back to the first. The best is
    the least of these.
    """
    layers, k = len(profile.layers), len(devices)
    for cuts in possible_cuts(layers, k * chunks, profile.bound):
        slowest, full = 0.0, [0] * k
        for p, (first, last) in enumerate(itertools.pairwise((0, *cuts, layers))):
            before, behind = links[(p - 1) % k], links[p % k]
            slowest = max(slowest, piece_seconds(profile, first, last, devices[p % k], before, behind))
            full[p % k] += piece_bytes(
                profile, first, last, in_flight=in_flight[p], microbatches=microbatches, states=states
            )
        crossed = sum(
            message_bytes(crossing(profile, cut), gradients=gradients) for cut in cuts for gradients in (False, True)
        )
        if all(d.memory_bytes is None or needed <= d.memory_bytes for d, needed in zip(devices, full, strict=True)):
            yield slowest, crossed, cuts
