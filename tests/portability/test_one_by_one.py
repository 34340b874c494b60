"""One by one or all at once, in whatever shape: the same bits.

`tests/drivers/test_delays.py` once failed on an AMD EPYC with AVX-512: there numpy's `**` of an array and of a number
differ in the last bit, so a worker's delay depended on how many others were drawn with it.
"""

from __future__ import annotations

import ast
import math
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch

from paceline import randomness
from paceline.codecs import QSGD, tensors
from paceline.data.augment import ExtendedAugmentation, PadCropFlip
from paceline.data.batches import BatchOrder
from paceline.data.pruning.fine_pruning import above_batch_mean
from paceline.drivers.simulated.delays import Pareto, Recorded, ShiftedExponential, SlowWorkers
from tests.contracts.codec_variants import EVERY_CODEC, seeded

WORKERS, DRAWS = 7, 331
DELAYS = {
    "shifted-exponential": ShiftedExponential(seed=3),
    "held": ShiftedExponential(seed=3, persistence=7),
    "pareto": Pareto(seed=3),
    "heavy tail": Pareto(seed=3, shape=1.01, persistence=2),
    "slow-worker": SlowWorkers(base=Pareto(seed=3), slow=2, factor=1.7),
    "recorded": Recorded(rows=tuple(tuple(0.1 + 0.3 * w + 0.7 * d for w in range(WORKERS)) for d in range(5))),
}
HELPERS = {
    "uniform": lambda place: randomness.uniform(7, place, 5),
    "exponential": lambda place: randomness.exponential(7, place, 5),
    "pareto": lambda place: randomness.pareto(7, place, 5, shape=2.5),
    "log": lambda place: randomness.log(np.ldexp(randomness.uniform(7, place) + 0.5, place % 2000 - 1000)),
    "exp": lambda place: randomness.exp((randomness.uniform(7, place) - 0.5) * 1400),
}


def shapes(count):
    """Yield (places, where they are among all): whole, in pieces of every size, strided, reversed, transposed, 0-d."""
    every = np.arange(count)
    yield every
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64):
        yield from np.array_split(every, math.ceil(count / size))
    yield from (every[::2], every[1::3], every[::-1])
    yield every[: count // 6 * 6].reshape(-1, 6).T
    yield every[: count // 6 * 6].reshape(2, 3, -1).transpose(2, 0, 1)
    yield np.broadcast_to(every[:5], (3, 5))
    yield from (np.asarray(place) for place in range(0, count, 17))


@pytest.mark.parametrize("draw", HELPERS.values(), ids=HELPERS)
def test_a_draw_does_not_depend_on_the_array_that_it_is_in(draw):
    all_at_once = draw(np.arange(1000))
    for places in shapes(1000):
        found = draw(places)
        assert found.shape == places.shape
        assert np.array_equal(found, all_at_once[places])


@pytest.mark.parametrize("delays", DELAYS.values(), ids=DELAYS)
def test_a_delay_does_not_depend_on_the_array_that_it_is_in(delays):
    table = delays.seconds(np.arange(WORKERS)[:, None], np.arange(DRAWS))
    assert table.shape == (WORKERS, DRAWS)
    for worker in range(WORKERS):
        for draws in shapes(DRAWS):
            assert np.array_equal(delays.seconds(np.asarray(worker), draws), table[worker][draws])
    for draw in range(0, DRAWS, 30):
        for workers in shapes(WORKERS):
            assert np.array_equal(delays.seconds(workers, np.asarray(draw)), table[:, draw][workers])
            assert np.array_equal(delays.seconds(workers, np.full(workers.shape, draw)), table[:, draw][workers])


DIGESTS = {
    "uniform": "c025d604b9486dcf",
    "exponential": "704cb0dd45121878",
    "pareto": "ff15c10a66031839",
}
DRAWN = """
import hashlib, sys
import numpy as np
from paceline import randomness
places = np.arange(100_000)
drawn = {
    "uniform": randomness.uniform(7, places, 5),
    "exponential": randomness.exponential(7, places, 5),
    "pareto": randomness.pareto(7, places, 5, shape=2.5),
}
print({name: hashlib.sha256(values.astype("<f8").tobytes()).hexdigest()[:16] for name, values in drawn.items()})
"""


@pytest.mark.parametrize("kind", ["this machine", "without vector instructions"])
def test_draws_are_these_bits_on_every_machine(kind):
    """Also where numpy and the C library take other code paths: their own logarithms differ there."""
    environment = dict(os.environ)
    if kind == "without vector instructions" and platform.machine() == "x86_64":
        environment["GLIBC_TUNABLES"] = "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F"
        environment["NPY_DISABLE_CPU_FEATURES"] = "X86_V3 AVX2 FMA3"
    command = [sys.executable, "-W", "ignore", "-c", DRAWN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ast.literal_eval(done.stdout) == DIGESTS


def test_a_seed_of_a_place_is_this_one_on_every_machine():
    assert randomness.seed_for(7, "delay", 3) == 7543250114426177240


@pytest.mark.parametrize(("name", "of_c"), [("log", math.log), ("exp", math.exp)])
def test_logarithm_and_exponential_are_right_to_a_few_units_of_the_last_place(name, of_c):
    chance = randomness.uniform(1, np.arange(20_000))
    if name == "log":
        near_one = 1.0 - np.arange(1, 1000) * 2.0**-53
        values = np.concatenate([1.0 - chance, near_one, chance * 1e-300, 1 / near_one, [1.0, 2.0, 0.5, 2.0**-1074]])
    else:
        values = np.concatenate([chance * 40, (chance - 0.5) * 1400, chance * 1e-9, [0.0, -0.0, 709.0, -708.0]])
    expected = np.array([of_c(value) for value in values])
    found = getattr(randomness, name)(values)
    assert (np.abs(found - expected) <= 4 * np.spacing(np.abs(expected))).all()


def test_the_random_rounding_of_an_element_does_not_depend_on_how_many_follow():
    everything = tensors.uniform(5003, 11, 12, torch.device("cpu"))
    for count in (0, 1, 2, 3, 31, 32, 33, 511, 512, 513, 4097):
        assert torch.equal(tensors.uniform(count, 11, 12, torch.device("cpu")), everything[:count])
    vector = torch.randn(5003, generator=seeded(0))
    whole = QSGD(bucket=64).decode(QSGD(bucket=64).encode(vector, seeded(1)))
    for count in (1, 63, 64, 65, 1000, 4096):
        bucketed = count // 64 * 64  # the last bucket's norm is that of the elements in it
        part = QSGD(bucket=64).decode(QSGD(bucket=64).encode(vector[:count], seeded(1)))
        assert torch.equal(part[:bucketed], whole[:bucketed])


@pytest.mark.parametrize("codec", EVERY_CODEC, ids=str)
def test_a_payload_does_not_depend_on_how_the_gradient_lies_in_memory(codec):
    vector = torch.randn(2, 601, generator=seeded(2))[0]
    strided = torch.randn(601, 3, generator=seeded(3))
    strided[:, 1] = vector
    payloads = [codec.fresh().encode(given, seeded(4)) for given in (vector, strided[:, 1], vector.clone())]
    assert all(torch.equal(payload, payloads[0]) for payload in payloads)


def test_a_batch_order_does_not_depend_on_where_it_was_begun():
    shard = torch.arange(200)[::2]  # not contiguous
    order = BatchOrder(shard, 7, seed=1, worker=2)
    for _ in range(60):
        again = BatchOrder(shard.clone(), 7, seed=1, worker=2)
        again.load_state_dict(order.state_dict())
        assert torch.equal(order.next(), again.next())


@pytest.mark.parametrize("vary", [PadCropFlip(padding=2), ExtendedAugmentation()])
def test_an_augmented_image_does_not_depend_on_how_the_batch_lies_in_memory(vary):
    images = torch.randn(9, 3, 8, 8, generator=seeded(5))
    expected = vary(images, seeded(6))
    wide = torch.randn(9, 3, 8, 16, generator=seeded(7))
    wide[..., ::2] = images
    for given in (images.to(memory_format=torch.channels_last), wide[..., ::2]):
        assert torch.equal(vary(given, seeded(6)), expected)


@pytest.mark.parametrize("size", [1, 3, 8, 127, 128, 129, 1000, 8192, 8193, 20_000])
def test_a_batch_is_judged_alone_as_among_others(size):
    """Losses that are nearly equal, so that a sum in another order would decide otherwise."""
    losses = (1 + np.arange(5 * size) % 7 * 2.0**-23).astype(np.float32)
    ends = np.arange(size, 5 * size + 1, size)
    together = above_batch_mean(losses, ends, 0.0)
    spread = np.repeat(losses, 2)[::2]
    assert np.array_equal(above_batch_mean(spread, ends, 0.0), together)
    for start in range(0, 5 * size, size):
        alone = above_batch_mean(losses[start : start + size], np.array([size]), 0.0)
        assert np.array_equal(alone, together[start : start + size])
