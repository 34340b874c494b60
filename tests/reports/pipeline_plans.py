"""Plans without a model: layers with made-up costs, placed and timed as real ones are."""

from __future__ import annotations

from paceline.pipeline.devices import Device, Link
from paceline.pipeline.placement import Placement
from paceline.pipeline.plan import Batch, Plan
from paceline.pipeline.profile import INPUT, Layer, Profile, Tensor, Weight

COSTS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)
NAMES = tuple(f"block.{number}" for number in range(len(COSTS)))
LINK = Link(bytes_per_second=1e8, latency_seconds=1e-4)


def made_plan(
    names=NAMES,
    *,
    model="net",
    stages=3,
    microbatches=4,
    schedule="1f1b",
    chunks=1,
    memory_bytes=None,
    speeds=(),
    link=LINK,
    notes=(),
) -> Plan:
    """A plan of layers with these names."""
    layers = tuple(
        Layer(
            name=name,
            kind="Linear",
            forward_seconds=cost * 1e-3,
            input_seconds=cost * 1.1e-3,
            weight_seconds=cost * 0.7e-3,
            fixed_seconds=cost * 1e-4,
            activation_bytes=1000 * cost,
        )
        for name, cost in zip(names, COSTS, strict=False)
    )
    tensors = tuple(
        Tensor(name=f"t{place}", bytes=4000, producer=place, last_use=place + 1)
        for place in range(INPUT, len(layers) - 1)
    )
    weights = tuple(Weight(name=f"w{place}", bytes=8000, layers=(place,)) for place in range(len(layers)))
    devices = tuple(Device(speed=speed, memory_bytes=memory_bytes) for speed in speeds or (1.0,) * stages)
    plan = Plan(
        model=model,
        profile=Profile(layers=layers, tensors=tensors, weights=weights, notes=tuple(notes)),
        placement=Placement(cuts=(), pieces=(), devices=devices),
        batch=Batch(samples=8 * microbatches, shapes=((8, 16),), dtypes=("float32",)),
        microbatches=microbatches,
        schedule=schedule,
        links=link,
    )
    return plan.placed(devices, chunks=chunks)
