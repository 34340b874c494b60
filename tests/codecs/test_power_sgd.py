"""Low-rank matrices come out exactly, others ever nearer to their best approximation, and nothing becomes NaN."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import ErrorFeedback, NotFiniteError, PayloadError, PowerSGD, power_sgd
from paceline.codecs.payload import HEADER_BYTES, Header, read_header
from paceline.codecs.power_sgd import MOST_TENSORS
from tests.codecs.rings import added_up

SHAPES = [torch.Size(shape) for shape in ((8, 3, 3, 3), (8,), (12, 8), (2, 2), (), (12,))]
ELEMENTS = sum(math.prod(shape) for shape in SHAPES)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_matrix(rows, columns, rank=None, seed=0):
    """With a rank: of whole numbers, for then the rank stays when a power of two makes them subnormal."""
    generator = seeded(seed)
    if rank is None:
        return torch.randn(rows, columns, generator=generator)
    p, q = (torch.randint(-5, 6, shape, generator=generator).float() for shape in ((rows, rank), (rank, columns)))
    return p @ q


def sent(codec, gradient, seed=0):
    return codec.decode(codec.encode(gradient, seeded(seed)))


@settings(max_examples=50)
@given(
    rows=st.integers(9, 30), columns=st.integers(9, 30), rank=st.integers(1, 3), seed=st.integers(0, 99),
    scale=st.sampled_from([1.0, 2.0**-140, 1e-30, 1e30, 1e-6, 2.0**21]),
)  # fmt: skip
def test_a_matrix_of_low_rank_comes_out_as_it_is_whatever_its_size(rows, columns, rank, seed, scale):
    matrix = random_matrix(rows, columns, rank, seed) * scale
    codec = PowerSGD(rank=3).fresh([matrix.shape])
    wrong = (sent(codec, matrix, seed).view_as(matrix) - matrix).abs().max()
    assert wrong <= 1e-4 * matrix.abs().max() + 6e-45  # a few steps of the smallest float


def test_repeated_encodes_come_near_the_best_approximation_of_that_rank():
    matrix = random_matrix(40, 30)
    best = torch.linalg.svdvals(matrix.double())[4:].square().sum().sqrt().item()
    codec = PowerSGD(rank=4).fresh([matrix.shape])
    errors = [(sent(codec, matrix).view_as(matrix) - matrix).norm().item() for _ in range(60)]
    assert all(later <= earlier * (1 + 1e-5) for earlier, later in pairwise(errors))
    assert errors[0] > 1.03 * best  # else there is nothing to warm up for
    assert best * (1 - 1e-5) <= errors[-1] <= 1.002 * best


def test_it_is_the_projection_on_the_space_that_power_iteration_reaches():
    matrix, codec = random_matrix(20, 25, seed=4), PowerSGD(rank=2).fresh([torch.Size([20, 25])])
    start = torch.randn(2, 25, generator=seeded(7)).T
    for _ in range(3):
        basis = torch.linalg.qr((matrix @ start).double()).Q
        decoded = codec.decode(codec.encode(matrix, seeded(7))).view_as(matrix)
        assert torch.allclose(decoded.double(), basis @ basis.T @ matrix.double(), rtol=1e-4, atol=1e-4)
        start = (matrix.double().T @ basis).float()


def test_tensors_of_less_than_two_dimensions_and_small_ones_come_out_exactly():
    gradient = torch.randn(ELEMENTS, generator=seeded())
    codec = PowerSGD(rank=2).fresh(SHAPES)
    payload = codec.encode(gradient, seeded())
    parts, originals = (
        vector.split([math.prod(shape) for shape in SHAPES]) for vector in (codec.decode(payload), gradient)
    )
    assert [torch.equal(part, original) for part, original in zip(parts, originals, strict=True)] == [
        False, True, False, True, True, True,
    ]  # fmt: skip
    assert payload.numel() == codec.most_bytes(ELEMENTS) == 16 + 8 * 6 + 4 * (2 * (8 + 27) + 8 + 2 * 20 + 4 + 1 + 12)


@settings(max_examples=50)
@given(elements=st.integers(0, 300), rank=st.integers(1, 5))
def test_without_shapes_any_length_comes_back_within_the_bound_of_bytes(elements, rank):
    gradient = torch.randn(elements, generator=seeded(elements))
    codec = PowerSGD(rank=rank)
    payload = codec.encode(gradient, seeded())
    assert payload.numel() <= min(codec.most_bytes(elements), 16 + 4 * elements)
    decoded = codec.decode(payload)
    assert decoded.shape == gradient.shape
    assert (decoded - gradient).norm() <= gradient.norm() * (1 + 1e-5)  # a projection
    out = torch.full_like(gradient, math.nan)
    assert codec.decode(payload, out=out) is out
    assert torch.equal(out, decoded)


def test_another_codec_of_the_same_kind_decodes_without_knowing_rank_or_shapes():
    codec = PowerSGD(rank=2).fresh(SHAPES)
    payload = codec.encode(torch.randn(ELEMENTS, generator=seeded()), seeded())
    assert torch.equal(PowerSGD(rank=7).decode(payload), codec.decode(payload))
    assert payload.numel() <= PowerSGD(rank=7).most_bytes(ELEMENTS)


# -- numbers at the ends of float32 ---------------------------------------------------------------------------------

extremes = st.sampled_from([0.0, 1.0, -1.0, 1e-45, -1e-38, 1e30, -1e30, 3.4e38, -3.4e38, 1e-20, 2.0**20])


@settings(max_examples=50)
@given(values=st.lists(extremes, min_size=81, max_size=81), sparse=st.booleans(), rank=st.integers(1, 4))
def test_whatever_is_finite_decodes_to_finite_numbers_and_so_is_what_is_lost(values, sparse, rank):
    matrix = torch.tensor(values).view(9, 9) * (torch.eye(9) if sparse else 1)
    codec = PowerSGD(rank=rank).fresh([matrix.shape])
    for _ in range(3):
        decoded = sent(codec, matrix).view_as(matrix)
        assert bool(torch.isfinite(decoded).all())
        assert bool(torch.isfinite(matrix - decoded).all())


def test_after_a_gradient_of_zeros_it_finds_its_way_again():
    matrix, codec = random_matrix(20, 20, rank=2), PowerSGD(rank=2).fresh([torch.Size([20, 20])])
    assert not sent(codec, torch.zeros(20, 20)).any()
    sent(codec, matrix)
    assert torch.allclose(sent(codec, matrix).view_as(matrix), matrix, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 8 * 27 + 3, ELEMENTS - 1])
def test_what_is_not_finite_is_refused_by_its_place_and_nothing_is_forgotten(bad, place):
    codec = PowerSGD(rank=2).fresh(SHAPES)
    gradient = torch.randn(ELEMENTS, generator=seeded())
    codec.encode(gradient, seeded())
    before = codec.state_dict()
    gradient[place] = bad
    with pytest.raises(NotFiniteError, match=f"number {place} "):
        codec.encode(gradient)
    assert all(torch.equal(codec.state_dict()[name], before[name]) for name in before)


# -- memory ---------------------------------------------------------------------------------------------------------


def test_a_memory_that_was_saved_gives_the_same_next_payload():
    gradients = torch.randn(3, ELEMENTS, generator=seeded())
    codec, other = PowerSGD(rank=2).fresh(SHAPES), PowerSGD(rank=2).fresh(SHAPES)
    codec.encode(gradients[0], seeded(1))
    state = codec.state_dict()
    expected = [codec.encode(gradient) for gradient in gradients[1:]]
    other.load_state_dict(state)
    assert all(
        torch.equal(other.encode(gradient), payload) for gradient, payload in zip(gradients[1:], expected, strict=True)
    )


def test_random_numbers_are_drawn_only_where_there_is_no_memory():
    codec, generator = PowerSGD(rank=2).fresh(SHAPES), seeded()
    gradient = torch.randn(ELEMENTS, generator=seeded(5))
    untouched = generator.get_state()
    codec.encode(gradient, generator)
    after_first = generator.get_state()
    codec.encode(gradient, generator)
    assert not torch.equal(untouched, after_first)
    assert torch.equal(after_first, generator.get_state())
    torch_before = torch.get_rng_state()
    PowerSGD(rank=2).fresh(SHAPES).encode(gradient, generator)
    assert torch.equal(torch_before, torch.get_rng_state())


@pytest.mark.parametrize("scale", [1e-40, 1e-3, 1e5, 1e37])
def test_what_is_remembered_has_no_size_so_that_no_size_adds_up(scale):
    codec = PowerSGD(rank=2).fresh(SHAPES)
    codec.encode(torch.randn(ELEMENTS, generator=seeded()) * scale, seeded())
    for remembered in codec.state_dict().values():
        assert torch.allclose(remembered.norm(dim=1), torch.ones(2))


def test_fresh_ones_share_nothing():
    codec = PowerSGD(rank=2).fresh(SHAPES)
    codec.encode(torch.randn(ELEMENTS), seeded())
    assert codec.state_dict()
    assert codec.fresh().state_dict() == {}
    assert codec.fresh().shapes == codec.shapes
    assert repr(codec) == "PowerSGD(rank=2)"


@pytest.mark.parametrize(
    "state",
    [
        {"p0": torch.ones(2, 27)},
        {"q": torch.ones(2, 27)},
        {"q0": torch.ones(2, 26)},
        {"q0": torch.ones(3, 27)},
        {"q1": torch.ones(2, 8)},
        {"q9": torch.ones(2, 27)},
        {"q0": torch.full((2, 27), math.nan)},
        {"q0": torch.ones(2, 27, dtype=torch.float64)},
        {"q0": [1.0]},
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(state):
    codec = PowerSGD(rank=2).fresh(SHAPES)
    codec.encode(torch.randn(ELEMENTS, generator=seeded()), seeded())
    before = codec.state_dict()
    with pytest.raises(ValueError, match="q"):
        codec.load_state_dict(state)
    assert codec.state_dict().keys() == before.keys()


# -- refusals -------------------------------------------------------------------------------------------------------


def test_bad_settings_and_lengths_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match="rank=0"):
        PowerSGD(rank=0)
    with pytest.raises(ValueError, match="65,537"):
        PowerSGD().fresh([torch.Size([1])] * (MOST_TENSORS + 1))
    with pytest.raises(ValueError, match=r"the shapes have 6 elements and the gradient has 7"):
        PowerSGD().fresh([torch.Size([2, 3])]).encode(torch.ones(7))


def payload_of(elements, rank, pairs, floats):
    payload = Header(codec=PowerSGD.NUMBER, elements=elements, first=rank, second=len(pairs)).payload(
        8 * len(pairs) + 4 * len(floats)
    )
    body = np.concatenate([np.array(pairs, np.uint32).reshape(-1), np.array(floats, np.float32).view(np.uint32)])
    payload[HEADER_BYTES:] = torch.from_numpy(body.view(np.uint8))
    return payload


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (payload_of(9, 0, [(3, 3)], [1.0] * 6), "a rank is between"),
        (payload_of(9, 2**17, [(3, 3)], [1.0] * 6), "a rank is between"),
        (payload_of(10, 1, [(3, 3)], [1.0] * 6), "have 9 elements"),
        (payload_of(9, 1, [(2**32 - 1, 2**32 - 1)], [1.0] * 6), "its header says 9"),
        (payload_of(9, 1, [(3, 3)], [1.0] * 5), "must have 32 bytes"),
        (payload_of(9, 1, [(3, 3)], [1e30] * 6), "beyond float32"),
        (payload_of(9, 1, [(3, 3)], [math.inf, 1, 1, 0, 0, 0]), "beyond float32"),
        (payload_of(9, 1, [(3, 3)], [1, 1, 1, 0, math.nan, 0]), "beyond float32"),
        (payload_of(9, 1, [(9, 1)], [math.inf] * 9), "finite"),
        (payload_of(2**32 - 2**17, 1, [(2**16, 2**16 - 2)], [1.0] * (2**17 - 2)), "give expected_length"),
        (Header(codec=6, elements=9, first=1, second=2**32 - 1).payload(8), "at most 65,536 tensors"),
        (Header(codec=6, elements=9, first=1, second=2).payload(8), "in 8 bytes"),
    ],
)
def test_a_payload_that_lies_is_refused_and_out_is_untouched(payload, message):
    with pytest.raises(PayloadError, match=message):
        PowerSGD().decode(payload)
    out = torch.full((read_header(payload).elements if payload.numel() < 1000 else 9,), 7.0)
    with pytest.raises(PayloadError):
        PowerSGD().decode(payload, out=out)
    assert bool((out == 7).all())


def test_mutated_payloads_are_refused_or_give_the_promised_length():
    generator = np.random.default_rng(0)
    codec, refused, given_back = PowerSGD(rank=2).fresh(SHAPES), 0, 0
    original = codec.encode(torch.randn(ELEMENTS, generator=seeded()), seeded())
    for _ in range(2000):
        payload, reach = original.clone(), 64 if generator.random() < 0.5 else original.numel()
        for place in generator.integers(0, reach, generator.integers(1, 4)):
            payload[place] = int(generator.integers(256))
        payload = payload[: generator.integers(payload.numel() + 1)] if generator.random() < 0.2 else payload
        try:
            decoded = codec.decode(payload, expected_length=ELEMENTS)
        except ValueError:
            refused += 1
        else:
            given_back += 1
            assert decoded.shape == (ELEMENTS,)
            assert bool(torch.isfinite(decoded).all())
    assert refused > 100
    assert given_back > 100


# -- added up on their way ------------------------------------------------------------------------------------------


def gradients_of(world, elements=ELEMENTS, seed=0):
    return [torch.randn(elements, generator=seeded(100 * seed + place)) for place in range(world)]


@settings(max_examples=25)
@given(world=st.integers(1, 6), rank=st.integers(1, 3), shaped=st.booleans(), steps=st.integers(1, 3))
def test_the_total_is_what_one_rank_would_make_of_the_sum_and_the_parts_add_up_to_it(world, rank, shaped, steps):
    shapes = SHAPES if shaped else None
    codecs = [PowerSGD(rank=rank).fresh(shapes) for _ in range(world)]
    alone = PowerSGD(rank=rank).fresh(shapes)
    for step in range(steps):
        vectors = gradients_of(world, seed=step)
        if not step:
            alone.load_state_dict(_shared_starts(alone, vectors[0]))
        expected = sent(alone, torch.stack(vectors).sum(0))
        found = added_up(codecs, vectors)
        total = found[0][0]
        size = torch.stack(vectors).abs().sum(0).max()
        assert torch.allclose(total, expected, atol=1e-4 * size)
        assert torch.allclose(torch.stack([part for _, part in found]).sum(0), total.double(), atol=1e-6 * size)
        assert all(torch.equal(each, total) for each, _ in found)
        for codec in codecs:
            assert all(torch.equal(codec.state_dict()[name], q) for name, q in codecs[0].state_dict().items())
            assert codec.state_dict().keys() == alone.state_dict().keys()


def _shared_starts(codec, vector):
    codec = codec.fresh()
    codec.encode(vector, seeded())
    matrices = codec._matrices(vector.numel())
    return {
        name: power_sgd._shared_start(None, matrices[int(name[1:])], int(name[1:]), torch.device("cpu"))
        for name in codec.state_dict()
    }


def test_repeated_sums_come_near_the_best_approximation_of_the_sum():
    matrices = [random_matrix(40, 30, seed=place).view(-1) for place in range(3)]
    whole = torch.stack(matrices).sum(0).view(40, 30)
    best = torch.linalg.svdvals(whole.double())[4:].square().sum().sqrt().item()
    codecs = [PowerSGD(rank=4).fresh([whole.shape]) for _ in matrices]
    errors = [(added_up(codecs, matrices)[0][0].view_as(whole) - whole).norm().item() for _ in range(60)]
    assert errors[0] > 1.03 * best
    assert best * (1 - 1e-5) <= errors[-1] <= 1.002 * best


def test_what_travels_is_p_and_what_is_not_factored_then_q():
    seen = []
    added_up([PowerSGD(rank=2).fresh(SHAPES) for _ in range(3)], gradients_of(3), seen=seen)
    plain = 8 + 4 + 1 + 12
    assert [tuple(rows.shape) for rows in seen] == [(3, 2 * (8 + 12) + plain + 3), (3, 2 * (27 + 8))]
    seen = []
    added_up([PowerSGD().fresh([torch.Size([5])])] * 2, [torch.ones(5)] * 2, seen=seen)
    assert [tuple(rows.shape) for rows in seen] == [(2, 7)]  # nothing is factored, and no second sum is asked for


def test_what_a_rank_holds_back_is_lost_of_its_own_matrix_alone():
    """It is orthogonal to the directions that were sent, so with equal gradients on all ranks it is equal, too."""
    matrix = random_matrix(20, 25).view(-1)
    codecs = [PowerSGD(rank=2).fresh([torch.Size([20, 25])]) for _ in range(3)]
    found = added_up(codecs, [matrix, torch.zeros(500), 2 * matrix])
    assert not found[1][1].any()
    assert torch.allclose(2 * found[0][1], found[2][1], atol=1e-5)
    left = (matrix - found[0][1]).double()
    assert abs(left @ found[0][1].double()) <= 1e-4 * left.norm() * found[0][1].norm()


def test_ranks_begin_alike_whatever_their_generators_are_and_these_are_not_asked():
    generators = [seeded(1), seeded(2)]
    before = [generator.get_state() for generator in generators]
    codecs = [PowerSGD(rank=2).fresh(SHAPES) for _ in range(2)]
    found = added_up(codecs, gradients_of(2), generators)
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(generator.get_state(), old) for generator, old in zip(generators, before, strict=True))


def test_a_sum_that_is_given_up_changes_no_memory():
    codec = PowerSGD(rank=2).fresh(SHAPES)
    added_up([codec], gradients_of(1))
    before = codec.state_dict()
    adding = codec.add_up(gradients_of(1, seed=3)[0], 1)
    adding.send(next(adding).tensor)
    adding.close()
    assert all(torch.equal(codec.state_dict()[name], before[name]) for name in before)


@pytest.mark.parametrize("place", [0, ELEMENTS - 1])
def test_what_is_not_finite_is_refused_before_anything_travels(place):
    gradient = gradients_of(1)[0]
    gradient[place] = math.nan
    with pytest.raises(NotFiniteError, match=f"the first is number {place} "):
        next(PowerSGD(rank=2).fresh(SHAPES).add_up(gradient, 2))


@pytest.mark.parametrize("value", [3e38, 1e38])
def test_a_sum_beyond_float32_is_refused_and_nothing_is_remembered(value):
    codecs = [PowerSGD(rank=2).fresh(SHAPES) for _ in range(4)]
    with pytest.raises(NotFiniteError, match="beyond float32"):
        added_up(codecs, [torch.full((ELEMENTS,), value)] * 4)
    assert not any(codec.state_dict() for codec in codecs)


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-20, 1e15])
def test_sums_of_any_size_stay_finite_and_no_longer_than_what_was_added(scale):
    vectors = [gradient * scale for gradient in gradients_of(3)]
    codecs = [PowerSGD(rank=2).fresh(SHAPES) for _ in vectors]
    for _ in range(3):
        found = added_up(codecs, vectors)
        assert bool(torch.isfinite(found[0][0]).all())
        exact = torch.stack(vectors).sum(0).double()
        assert found[0][0].double().norm() <= exact.norm() * (1 + 1e-5) + ELEMENTS * 2.0**-149


def test_error_feedback_keeps_on_each_rank_what_was_lost_of_its_own_and_nothing_is_lost_in_sum():
    codecs = [ErrorFeedback(PowerSGD(rank=1)).fresh(SHAPES) for _ in range(3)]
    held = torch.zeros(ELEMENTS)
    for step in range(4):
        vectors = gradients_of(3, seed=step)
        total = added_up(codecs, vectors)[0][0]
        left = torch.stack([codec.residual for codec in codecs]).sum(0)
        assert torch.allclose(total + left, torch.stack(vectors).sum(0) + held, atol=1e-5)
        held = left
    assert held.norm() > 1  # else nothing was held back, and nothing was tried
