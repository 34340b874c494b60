"""Random models, devices and links for the placement tests.

All seconds are eighths, speeds and bandwidths powers of two, so that sums are the same in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.pipeline.devices import Device, Link
from paceline.pipeline.profile import INPUT, Layer, Profile, Tensor, Weight
from tests.oracles import placement as reference

SPEEDS = (0.5, 1.0, 1.0, 2.0)
BANDWIDTHS = (64.0, 256.0, 1024.0, float("inf"))


@dataclass(frozen=True)
class Case:
    profile: Profile
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    microbatches: int
    in_flight: tuple[int, ...]
    chunks: int
    states: float

    @property
    def settings(self):
        return {name: getattr(self, name) for name in ("links", "microbatches", "in_flight", "chunks", "states")}


def random_profile(chance, layers, *, skips=True, bound=0.15):
    levels = int(chance.choice((1, 3, 60)))  # few levels make many cuts equally good
    seconds = chance.integers(0, levels, (layers, 3)) / 8 + 0.125
    made = [
        Layer(
            name=f"layer{n}",
            forward_seconds=float(forward),
            input_seconds=float(inputs),
            weight_seconds=float(weights),
            activation_bytes=int(chance.integers(0, 50)),
        )
        for n, (forward, inputs, weights) in enumerate(seconds)
    ]
    tensors = []
    for producer in range(INPUT, layers - 1):
        for _ in range(1 + int(skips and chance.random() < 0.3)):
            reach = int(chance.integers(1, 5)) if skips else 1
            tensors.append(
                Tensor(
                    name=f"tensor{len(tensors)}",
                    bytes=int(chance.integers(0, 4) * 16),
                    producer=producer,
                    last_use=min(producer + reach, layers - 1),
                    needs_gradient=bool(producer >= 0 and chance.random() < 0.8),
                    kept=bool(chance.random() < 0.5),
                )
            )
    weights = [
        Weight(
            name=f"weight{n}",
            bytes=int(chance.integers(1, 60)),
            layers=tuple(sorted(set(chance.integers(0, layers, chance.integers(1, 4)).tolist()))),
            trained=bool(chance.random() < 0.7),
        )
        for n in range(int(chance.integers(0, layers + 1)))
    ]
    kept_together = frozenset(cut for cut in range(1, layers) if chance.random() < bound)
    return Profile(layers=tuple(made), tensors=tuple(tensors), weights=tuple(weights), bound=kept_together)


def random_case(chance, *, chunks=1, most_layers=9, most_devices=4, limited=0.7):
    layers, k = int(chance.integers(1, most_layers + 1)), int(chance.integers(1, most_devices + 1))
    profile = random_profile(chance, layers, skips=bool(chance.integers(0, 2)))
    tight = chance.random() < limited
    microbatches, states = int(chance.integers(1, 5)), float(chance.choice((0.0, 1.0, 1.5, 2.0)))
    in_flight = tuple(int(held) for held in chance.integers(1, 5, k * chunks))
    whole = reference.piece_bytes(profile, 0, layers, in_flight=3, microbatches=microbatches, states=states)
    room = 2 + whole * float(chance.choice((0.8, 1.2, 1.6, 2.4))) / k
    devices = tuple(
        Device(
            name=f"device{n}",
            speed=float(chance.choice(SPEEDS)),
            memory_bytes=int(room * chance.choice((0.7, 1, 1.5))) if tight and chance.random() < 0.9 else None,
        )
        for n in range(k)
    )
    links = tuple(
        Link(bytes_per_second=float(chance.choice(BANDWIDTHS)), latency_seconds=float(chance.integers(0, 3)) / 8)
        for _ in range(k)
    )
    return Case(
        profile=profile,
        devices=devices,
        links=links,
        microbatches=microbatches,
        in_flight=in_flight,
        chunks=chunks,
        states=states,
    )


def chance_of(seed):
    return np.random.default_rng(seed)
