"""What is refused, and how: the message has the numbers that made it impossible."""

from __future__ import annotations

import math

import pytest

from paceline.pipeline.devices import Device, Link
from paceline.pipeline.placement import PlacementError, place
from paceline.pipeline.profile import Layer, Profile, Tensor, Weight


def model(*sizes, activations=0, bound=(), tensors=()):
    return Profile(
        layers=tuple(
            Layer(name=f"fc{n}", forward_seconds=1.0, activation_bytes=activations) for n in range(len(sizes))
        ),
        weights=tuple(Weight(name=f"fc{n}.weight", bytes=size, layers=(n,)) for n, size in enumerate(sizes)),
        bound=frozenset(bound),
        tensors=tuple(tensors),
    )


def message(profile, limits, *, chunks=1, in_flight=1, microbatches=4):
    devices = [Device(name=f"gpu{n}", memory_bytes=limit) for n, limit in enumerate(limits)]
    held = [in_flight] * len(devices) * chunks
    with pytest.raises(PlacementError) as refused:
        place(profile, devices, microbatches=microbatches, in_flight=held, chunks=chunks)
    return str(refused.value)


def test_fewer_layers_than_pieces():
    assert message(model(1), [None] * 2) == "1 layer does not make 2 pieces (2 stages); use 1 piece"
    assert message(model(1, 1), [None] * 3) == "2 layers do not make 3 pieces (3 stages); use 2 pieces or fewer"
    assert message(model(1, 1, 1), [None] * 2, chunks=2) == (
        "3 layers do not make 4 pieces (2 stages x 2 chunks); use 3 pieces or fewer"
    )
    assert message(model(1, 1, 1, 1, bound=(1, 2)), [None] * 3) == (
        "4 layers with 1 possible cut do not make 3 pieces (3 stages); use 2 pieces or fewer"
    )


def test_one_layer_is_larger_than_the_largest_device():
    assert message(model(10, 2000, 10), [1000, 5999]) == (
        "layer 'fc1' alone needs 6,000 B, and the largest device has 5,999 B; use a device with more memory"
    )
    assert message(model(10, 100, 10, activations=500), [1000, 700], in_flight=2) == (
        "layer 'fc1' alone needs 1.3 kB, and the largest device has 1.0 kB; weights are 300 B of that; "
        "use smaller micro-batches, or a device with more memory"
    )
    assert message(model(10, 300, 300, 10, bound=(2,)), [1000] * 2).startswith(
        "layers 'fc1' to 'fc2', which cannot be parted, need 1.8 kB, and the largest device has 1.0 kB"
    )


def test_all_layers_are_larger_than_all_devices():
    said = message(model(100, 100, 100), [400, 400])
    assert said.startswith("the model needs at least 900 B, and 2 devices have 800 B together; use more stages")
    assert message(model(100, 100, 100, 100), [500, 500], chunks=2).startswith("the model needs at least 1.2 kB")


def test_otherwise_the_cut_that_comes_nearest_says_what_is_missing():
    said = message(model(100, 100, 100), [450, 450])
    assert said.startswith(
        "no cut fits: the one that comes nearest needs 600 B on device 1 (gpu1), which has 450 B; use more"
    )
    assert place(model(100, 100, 100), [Device(memory_bytes=600)] * 2, microbatches=4, in_flight=[1, 1]).fits
    buffers = [Tensor(name="x", bytes=100, producer=0, last_use=1, kept=True)]
    said = message(model(1, 1, tensors=buffers), [300, None], microbatches=4)
    assert "needs 403 B on device 0 (gpu0), which has 300 B;" in said
    assert place(model(1, 1, tensors=buffers), [Device(memory_bytes=300)] * 2, microbatches=2, in_flight=[1, 1]).fits


def test_pieces_that_fit_alone_but_not_together():
    said = message(model(100, 100, 100, 100, 100), [800, 800], chunks=2)
    assert said.startswith("no cut was found that fits: the one that comes nearest needs 600 B on device 1 (gpu1)")
    assert "which has 400 B for each of its 2 pieces;" in said


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Device(speed=-1.0), r"speed must be above 0 and finite \(speed=-1.0\)"),
        (lambda: Device(speed=math.nan), "speed must be above 0"),
        (lambda: Device(speed=math.inf), "speed must be above 0"),
        (lambda: Device(memory_bytes=0), r"memory_bytes must be a whole number of at least 1 \(memory_bytes=0\)"),
        (lambda: Device(memory_bytes=1.5), "memory_bytes must be a whole number"),
        (lambda: Device(memory_bytes=2**61), "memory_bytes must be between 1 and"),
        (lambda: Link(bytes_per_second=0), "bytes_per_second must be above 0"),
        (lambda: Link(bytes_per_second=math.nan), "bytes_per_second must be above 0"),
        (lambda: Link(latency_seconds=-1), "latency_seconds must be at least 0 and finite"),
        (lambda: Link(latency_seconds=math.inf), "latency_seconds must be at least 0 and finite"),
    ],
)
def test_devices_and_links_are_checked(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": []}, "devices must be at least one Device"),
        ({"devices": [2]}, "devices must be at least one Device"),
        ({"microbatches": 0}, "microbatches must be a whole number of at least 1"),
        ({"chunks": 0}, "chunks must be a whole number of at least 1"),
        ({"states": -1.0}, "states must be at least 0 and finite"),
        ({"states": math.inf}, "states must be at least 0 and finite"),
        ({"in_flight": [1]}, "in_flight must say for each of 2 pieces"),
        ({"in_flight": [1, 0]}, "in_flight of piece 1 must be a whole number of at least 1"),
        ({"links": []}, r"links must be one Link, or 1 of them, one between each device and the next \(links has 0\)"),
        ({"links": [Link()] * 3}, "links has 3"),
        ({"links": [Link()], "chunks": 2, "in_flight": [1] * 4}, "or 2 of them: the last leads back"),
        ({"profile": Profile(layers=())}, "between 1 and 3,000 layers"),
        ({"profile": Profile(layers=(Layer(name="a", input_seconds=math.nan),))}, "input_seconds of layer 'a'"),
        (
            {"profile": Profile(layers=(Layer(name="a"),), weights=(Weight(name="w", bytes=1, layers=(1,)),))},
            "a weight must have",
        ),
        (
            {
                "profile": Profile(
                    layers=(Layer(name="a"),), tensors=(Tensor(name="t", bytes=-1, producer=0, last_use=0),)
                )
            },
            "a tensor must have",
        ),
    ],
)
def test_settings_are_checked(change, words):
    settings = {
        "profile": model(1, 1, 1, 1), "devices": [Device()] * 2, "microbatches": 4, "in_flight": [1, 1], **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words) as refused:
        place(**settings)
    assert not isinstance(refused.value, PlacementError)


def test_a_link_is_a_link():
    with pytest.raises(TypeError, match="links must be a Link"):
        place(model(1, 1), [Device()] * 2, microbatches=1, in_flight=[1, 1], links=[1e9])
