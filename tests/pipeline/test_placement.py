"""Laws of the placement that hold for models of any size, on models too large to try every cut."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest

from experiments.core import cuts as reference
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.placement import PlacementError, place, priced
from paceline.pipeline.profile import Layer, Profile, Tensor, Weight
from tests.pipeline.cases import chance_of, random_profile

SLOW = Link(bytes_per_second=64.0, latency_seconds=0.125)


def chain(*seconds, bytes_between=(), **more):
    layers = tuple(Layer(name=f"layer{n}", forward_seconds=float(s)) for n, s in enumerate(seconds))
    tensors = tuple(
        Tensor(name=f"tensor{n}", bytes=size, producer=n, last_use=n + 1) for n, size in enumerate(bytes_between)
    )
    return Profile(layers=layers, tensors=tensors, **more)


def plain(pieces):
    return {"microbatches": 4, "in_flight": [1] * pieces}


# -- what is made least -------------------------------------------------------------------------------------------


def test_a_faster_device_is_given_more_layers():
    found = place(chain(*[1] * 9), [Device(), Device(speed=2.0)], **plain(2))
    assert found.cuts == (3,)
    assert [piece.seconds for piece in found.pieces] == [3.0, 3.0]


def test_a_cut_goes_where_little_crosses_if_links_are_slow():
    model = chain(2, 2, 2, 2, bytes_between=(64, 640, 64))
    assert place(model, [Device()] * 2, **plain(2)).cuts == (2,)
    assert place(model, [Device()] * 2, links=SLOW, **plain(2)).cuts == (1,)


def test_a_link_counts_for_who_sends_over_it():
    model = chain(1, 1, 1, bytes_between=(64, 64))
    found = place(model, [Device()] * 3, links=[Link(), SLOW], **plain(3))
    assert [piece.send_seconds for piece in found.pieces] == [0.0, 1.125, 0.0]
    assert [piece.return_seconds for piece in found.pieces] == [0.0, 0.0, 1.125]
    assert [piece.seconds for piece in found.pieces] == [1.0, 2.125, 2.125]


def test_a_tensor_without_gradient_sends_nothing_back():
    model = chain(1, 1, bytes_between=(64,))
    model = replace(model, tensors=(replace(model.tensors[0], needs_gradient=False),))
    found = place(model, [Device()] * 2, links=SLOW, **plain(2))
    assert [piece.transfer_seconds for piece in found.pieces] == [1.125, 0.0]
    assert (found.crossing_bytes, found.pieces[0].memory_bytes, found.pieces[1].memory_bytes) == (64, 64, 4 * 64)


def test_a_skip_is_handed_on_by_every_piece_between():
    model = chain(1, 1, 1)
    skip = Tensor(name="skip", bytes=64, producer=0, last_use=2)
    found = place(replace(model, tensors=(skip,)), [Device()] * 3, links=SLOW, **plain(3))
    assert [piece.sent_bytes for piece in found.pieces] == [64, 64, 0]
    assert [piece.returned_bytes for piece in found.pieces] == [0, 64, 64]


def test_of_cuts_as_fast_the_one_of_fewer_bytes_then_the_first():
    for between, cuts in (((8, 6, 4), (1, 3)), ((8, 4, 6), (1, 2)), ((4, 4, 4), (1, 2))):
        assert place(chain(9, 1, 1, 1, bytes_between=between), [Device()] * 3, **plain(3)).cuts == cuts


def test_a_tied_weight_is_counted_once_in_a_piece_and_in_every_piece_that_uses_it():
    model = chain(1, 1, 1, weights=(Weight(name="tied", bytes=100, layers=(0, 1, 2)),))
    assert [p.memory_bytes for p in priced(model, [2], [Device()] * 2, **plain(2)).pieces] == [300, 300]
    assert priced(model, [], [Device()], states=2.0, **plain(1)).device_bytes == (400,)
    frozen = replace(model, weights=(replace(model.weights[0], trained=False),))
    assert priced(frozen, [2], [Device()] * 2, **plain(2)).device_bytes == (100, 100)


def test_memory_that_is_full_moves_the_cut():
    model = chain(1, 1, 1, 1, weights=tuple(Weight(name=f"w{n}", bytes=100, layers=(n,)) for n in range(4)))
    assert place(model, [Device()] * 2, **plain(2)).cuts == (2,)
    found = place(model, [Device(memory_bytes=300), Device()], **plain(2))
    assert (found.cuts, found.device_bytes, found.proven) == ((1,), (300, 900), True)


def test_more_micro_batches_in_flight_take_more_memory():
    layers = tuple(Layer(name=f"l{n}", forward_seconds=1.0, activation_bytes=100) for n in range(6))
    devices = [Device(memory_bytes=600)] * 3
    found = place(Profile(layers=layers), devices, microbatches=8, in_flight=lambda piece: 3 - piece)
    assert found.device_bytes == (600, 400, 200)
    found = place(Profile(layers=layers), devices, microbatches=8, in_flight=[6, 3, 1])
    assert (found.cuts, found.device_bytes) == ((1, 3), (600, 600, 300))


def test_bound_layers_stay_together():
    found = place(chain(1, 1, 1, 1, bound=frozenset({2})), [Device()] * 2, **plain(2))
    assert found.cuts == (1,)


def test_one_device_holds_everything():
    found = place(chain(1, 2), [Device(speed=2.0)], **plain(1))
    assert (found.cuts, found.slowest.seconds) == ((), 1.5)
    assert place(chain(1, 2), [Device()], chunks=2, links=SLOW, **plain(2)).slowest.seconds == 2.0


# -- several pieces on a device -----------------------------------------------------------------------------------


def test_pieces_go_round_over_the_devices_and_the_link_back():
    model = chain(1, 1, 1, 1, bytes_between=(64, 64, 64))
    found = place(model, [Device(), Device(speed=2.0)], links=[Link(), SLOW], chunks=2, **plain(4))
    assert [piece.device for piece in found.pieces] == [0, 1, 0, 1]
    assert [piece.send_seconds for piece in found.pieces] == [0.0, 1.125, 0.0, 0.0]
    assert [piece.return_seconds for piece in found.pieces] == [0.0, 0.0, 1.125, 0.0]
    assert [piece.seconds for piece in found.pieces] == [1.0, 1.625, 2.125, 0.5]


def test_memory_of_a_device_is_that_of_its_pieces():
    sizes = (100, 100, 50, 50, 50, 50)
    model = chain(*[1] * 6, weights=tuple(Weight(name=f"w{n}", bytes=b, layers=(n,)) for n, b in enumerate(sizes)))
    free = place(model, [Device()] * 2, chunks=2, **plain(4))
    assert free.proven
    assert sum(free.device_bytes) == 3 * sum(sizes)
    enough = [Device(memory_bytes=most) for most in free.device_bytes]
    assert place(model, enough, chunks=2, **plain(4)).cuts == free.cuts
    tight = place(model, [Device(memory_bytes=600)] * 2, chunks=2, **plain(4))
    assert tight.fits
    assert tight.device_bytes == (600, 600)


def test_as_many_chunks_never_make_the_slowest_piece_slower():
    chance = chance_of(7)
    for _ in range(20):
        model = random_profile(chance, 12, bound=0.0)
        one = place(model, [Device()] * 3, **plain(3))
        two = place(model, [Device()] * 3, chunks=2, **plain(6))
        assert two.slowest.seconds <= one.slowest.seconds
        assert two.proven


# -- against what others do ---------------------------------------------------------------------------------------


def test_neither_block_partition_nor_equal_counts_is_ever_faster():
    chance, faster = chance_of(5), 0
    for _ in range(60):
        layers, k = int(chance.integers(8, 60)), int(chance.integers(2, 8))
        model = random_profile(chance, layers)
        pieces = min(k, layers - len(model.bound))
        devices, settings = [Device()] * pieces, {"links": SLOW, **plain(pieces)}
        ours = place(model, devices, **settings).slowest.seconds
        for cuts in (
            reference.balanced([layer.seconds for layer in model.layers], pieces, model.bound),
            reference.equal_counts(layers, pieces, model.bound),
        ):
            theirs = priced(model, cuts, devices, **settings).slowest.seconds
            assert ours <= theirs
            faster += ours < theirs
    assert faster > 60


def test_blocks_of_the_block_partition_differ_by_no_more_than_the_largest_cost():
    chance = chance_of(6)
    for _ in range(100):
        costs = chance.integers(1, 1000, chance.integers(4, 40)).tolist()
        ends = (0, *reference.block_partition(costs, 4), len(costs))
        sums = [sum(costs[begin:end]) for begin, end in itertools.pairwise(ends)]
        assert max(sums) - min(sums) <= max(costs)
        assert min(sums) > 0


# -- size, and sameness -------------------------------------------------------------------------------------------


def test_a_thousand_layers_on_64_devices_take_less_than_ten_seconds():
    model = random_profile(chance_of(8), 1000, bound=0.0)
    devices = [Device(speed=1.0 + n % 2, memory_bytes=20_000) for n in range(64)]
    began = time.process_time()
    found = place(model, devices, links=SLOW, microbatches=64, in_flight=lambda piece: 64 - piece)
    assert time.process_time() - began < 10
    assert found.proven
    assert priced(
        model, found.cuts, devices, links=SLOW, microbatches=64, in_flight=lambda piece: 64 - piece
    ) == replace(found, proven=False)


def test_the_same_question_has_the_same_answer():
    one, two = (place(random_profile(chance_of(9), 150), [Device()] * 8, links=SLOW, **plain(8)) for _ in range(2))
    assert one == two


def test_neither_a_device_more_nor_memory_more_makes_it_slower():
    chance, slowed = chance_of(10), 0
    for _ in range(20):
        model = replace(random_profile(chance, 20, bound=0.0), tensors=())
        times = [place(model, [Device()] * k, **plain(k)).slowest.seconds for k in (1, 2, 3, 5)]
        assert times == sorted(times, reverse=True)
        needed = max(place(model, [Device()] * 3, **plain(3)).device_bytes)
        by_memory = [slowest_within(model, int(needed * share)) for share in (0.8, 0.85, 0.9, 0.95, 1)]
        assert by_memory == sorted(by_memory, reverse=True)
        assert by_memory[-1] == times[2]
        slowed += times[2] < by_memory[0] < math.inf
    assert slowed > 0


def slowest_within(model, limit):
    try:
        return place(model, [Device(memory_bytes=limit)] * 3, **plain(3)).slowest.seconds
    except PlacementError:
        return math.inf


@pytest.mark.parametrize("cuts", [[0], [4], [2], [3, 1], [1, 1], [], ["1"]])
def test_cuts_of_ones_own_must_be_possible(cuts):
    with pytest.raises(ValueError, match="cuts must be"):
        priced(chain(1, 1, 1, 1, bound=frozenset({2})), cuts, [Device()] * 2, **plain(2))
