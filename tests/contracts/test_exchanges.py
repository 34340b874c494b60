"""The laws of every codec by every plan that it says it can do: N ranks in one process, request by request."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import QSGD, ErrorFeedback, NotFiniteError
from paceline.codecs.naming import inner_of
from paceline.codecs.requests import AllToAll, request_traffic
from paceline.exchanges import PayloadSizeError, Trouble, TroubleError, make_exchange
from paceline.exchanges.joined import begin_exchange, join_exchanges
from paceline.exchanges.lockstep import run_in_lockstep
from paceline.exchanges.plans import ALL_REDUCE, PLANS, choose_plan, plans_of, shard_edges, steps_of, traffic_of
from tests.contracts.codec_variants import EVERY_CODEC, VARIANTS, seeded, vector_of

# Of every codec of the table one variant, those whose payloads vary in size, and all that hold something back.
EXCHANGED = [
    *(variants[0] for variants in VARIANTS.values()),
    QSGD(levels=3, bucket=31, lossless="elias"),
    ErrorFeedback(QSGD(levels=1, lossless="entropy")),
    *(ErrorFeedback(variants[0]) for name, variants in VARIANTS.items() if name != "sparsifier"),
]
CASES = [(codec, plan) for codec in EXCHANGED for plan in plans_of(codec)]
every_case = pytest.mark.parametrize(("codec", "plan"), CASES, ids=lambda part: str(part))
WITH_FEEDBACK = [(codec, plan) for codec, plan in CASES if isinstance(codec, ErrorFeedback)]
SHAPES = [torch.Size([40, 70]), torch.Size([33]), torch.Size([25, 4, 6])]
ELEMENTS = sum(shape.numel() for shape in SHAPES)


def ranks_of(codec, plan, world, shapes=SHAPES):
    return [make_exchange(codec, shapes, place, world, plan) for place in range(world)]


def vectors_of(world, seed, kind="normal", elements=ELEMENTS):
    return [vector_of(kind, elements, seed=100 * seed + place) for place in range(world)]


def exchange(ranks, vectors, seed=0, heard=None):
    runs = [rank.run(each, seeded(seed + rank.place)) for rank, each in zip(ranks, vectors, strict=True)]
    return run_in_lockstep(runs, heard)


def held(ranks):
    parts = [rank.held() for rank in ranks]
    return sum((part.double() for part in parts if part is not None), torch.zeros(ELEMENTS, dtype=torch.float64))


def total_of(vectors):
    return sum((each.double() for each in vectors if each is not None), torch.zeros(ELEMENTS, dtype=torch.float64))


def test_every_plan_is_done_by_some_codec():
    assert {plan for _, plan in CASES} == set(PLANS)


@every_case
@settings(max_examples=6)
@given(world=st.integers(1, 6), seed=st.integers(0, 99), absent=st.sets(st.integers(0, 5)))
def test_all_ranks_come_to_the_same_bits_and_an_exact_codec_to_the_sum(codec, plan, world, seed, absent):
    ranks = ranks_of(codec, plan, world)
    vectors = [None if place in absent else each for place, each in enumerate(vectors_of(world, seed))]
    first, *others = exchange(ranks, vectors)
    assert (first.dtype, first.shape) == (torch.float32, (ELEMENTS,))
    assert all(torch.equal(first, other) for other in others)
    if type(inner_of(codec)).__name__ == "Identity":
        torch.testing.assert_close(first.double(), total_of(vectors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("codec", "plan"), WITH_FEEDBACK, ids=lambda part: str(part))
@settings(max_examples=4)
@given(world=st.integers(1, 5), seed=st.integers(0, 99), absent=st.sets(st.integers(0, 4)))
def test_what_comes_out_and_what_is_held_back_is_what_went_in(codec, plan, world, seed, absent):
    """Sum g + sum r + sum R = result + sum r' + sum R', over several steps, with ranks that bring nothing in some."""
    ranks, given_so_far, out_so_far = ranks_of(codec, plan, world), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    given_so_far, out_so_far = given_so_far.double(), out_so_far.double()
    for step in range(3):
        vectors = vectors_of(world, seed + step)
        if step == 1:
            vectors = [None if place in absent else each for place, each in enumerate(vectors)]
        given_so_far += total_of(vectors)
        out_so_far += exchange(ranks, vectors, seed=step)[0].double()
        scale = max(1.0, float(held(ranks).abs().max()), float(out_so_far.abs().max()))
        torch.testing.assert_close(out_so_far + held(ranks), given_so_far, rtol=0, atol=3e-6 * world * scale)


@every_case
@pytest.mark.parametrize("world", [2, 3])
def test_one_that_is_not_finite_is_named_by_all_and_nothing_of_the_step_is_lost(codec, plan, world):
    ranks, good = ranks_of(codec, plan, world), vectors_of(world, 1)
    first = exchange(ranks, good)[0].double()
    before, spoiled = held(ranks), vectors_of(world, 2)
    spoiled[1][7] = float("nan")
    for rank, error in zip(ranks, exchange(ranks, spoiled), strict=True):
        assert isinstance(error, TroubleError)
        assert error.troubles == {1: Trouble.NOT_FINITE}
        assert isinstance(error.cause, NotFiniteError) == (rank.place == 1)
        rank.take_back()
    kept = total_of([each for place, each in enumerate(spoiled) if place != 1])
    if isinstance(codec, ErrorFeedback):
        torch.testing.assert_close(held(ranks), before + kept, rtol=1e-5, atol=1e-4 * world)
        out = first + exchange(ranks, good)[0].double() + held(ranks)
        torch.testing.assert_close(out, 2 * total_of(good) + kept, rtol=1e-4, atol=1e-4 * world)
    else:
        assert held(ranks).abs().max() == 0


@pytest.mark.parametrize(("codec", "plan"), WITH_FEEDBACK, ids=lambda part: str(part))
def test_a_step_that_is_taken_back_leaves_the_sums_that_were_held_back_with_their_owners(codec, plan):
    ranks, vectors = ranks_of(codec, plan, 3), vectors_of(3, 5)
    exchange(ranks, vectors)
    before = held(ranks)
    exchange(ranks, vectors, seed=9)
    for rank in ranks:
        rank.take_back()
    torch.testing.assert_close(held(ranks), before + total_of(vectors), rtol=1e-5, atol=2e-4)


@every_case
@settings(max_examples=3)
@given(world=st.integers(2, 5), seed=st.integers(0, 9))
def test_a_state_goes_on_to_the_same_bits(codec, plan, world, seed):
    ranks, again = ranks_of(codec, plan, world), ranks_of(codec, plan, world)
    exchange(ranks, vectors_of(world, seed), seed)
    for ours, theirs in zip(again, ranks, strict=True):
        state = theirs.state_dict()
        assert all(isinstance(part, torch.Tensor) for part in state.values())
        ours.load_state_dict(state)
    vectors = vectors_of(world, seed + 1)
    assert torch.equal(exchange(ranks, vectors, 7)[0], exchange(again, vectors, 7)[0])
    torch.testing.assert_close(held(ranks), held(again), rtol=0, atol=0)


@every_case
@pytest.mark.parametrize("world", [1, 3])
def test_vectors_that_travel_together_come_to_what_they_come_to_alone(codec, plan, world):
    """One in trouble is in trouble alone; in a second step, what all have remembered is what they remember alone.

    Their sums are written where the vectors were, which alone they are not.
    """
    sizes = [torch.Size([40, 70]), torch.Size([3]), torch.Size([25, 60]), torch.Size([1030])]
    alone, together = ([ranks_of(codec, plan, world, [size]) for size in sizes] for _ in range(2))
    for step, spoiled in enumerate((2, None)):
        vectors = [vectors_of(world, 10 * step + n, elements=size.numel()) for n, size in enumerate(sizes)]
        if spoiled is not None:
            vectors[spoiled][-1][5] = float("nan")
        wanted = [exchange(ranks, each, seed=7 * n) for n, (ranks, each) in enumerate(zip(alone, vectors, strict=True))]
        asked = []
        found = run_in_lockstep(
            [
                join_exchanges(
                    [
                        begin_exchange(together[n][place].run(each, seeded(7 * n + place), out=each))
                        for n, each in enumerate(vectors[n][place].clone() for n in range(len(sizes)))
                    ]
                )
                for place in range(world)
            ],
            asked.append,
        )
        assert len(asked) == steps_of(plan, together[0][0].codec)
        for n, place in itertools.product(range(len(sizes)), range(world)):
            ours, theirs = found[place][n], wanted[n][place]
            if n == spoiled:
                assert isinstance(ours, TroubleError)
                assert ours.troubles == theirs.troubles == {world - 1: Trouble.NOT_FINITE}
            else:
                assert torch.equal(ours, theirs)
        for rank in (rank for exchanges in (alone, together) for rank in exchanges[spoiled or 0] if spoiled):
            rank.take_back()


@pytest.mark.parametrize("plan", ["gather", "two-step"])
@pytest.mark.parametrize("liar", [0, 2])
def test_a_size_that_no_payload_has_is_refused_and_its_sender_is_named(plan, liar):
    """Before memory is taken for it; on all ranks alike, whatever shard it is said of."""
    ranks = ranks_of(QSGD(lossless="elias"), plan, 3, [torch.Size([2000])])
    runs = [rank.run(torch.ones(2000), seeded(rank.place)) for rank in ranks]
    sizes = [next(run).tensor.clone() for run in runs]
    sizes[liar][-1] = 2**40
    for run in runs:
        with pytest.raises(PayloadSizeError, match=f"place {liar} says 1,099,511,627,776 bytes") as refused:
            run.send(torch.stack(sizes))
        assert refused.value.place == liar


def test_vectors_that_ask_for_different_things_do_not_travel_together():
    by = [
        make_exchange(QSGD(), [torch.Size([600])], 0, 2, plan).run(torch.ones(600)) for plan in ("gather", "two-step")
    ]
    with pytest.raises(ValueError, match="ask for the same things"):
        next(join_exchanges([begin_exchange(protocol) for protocol in by]))


@every_case
@pytest.mark.parametrize("world", [1, 2, 5])
def test_the_bytes_that_are_foretold_are_those_that_are_given(codec, plan, world):
    """At the most: a codec whose payloads vary may send fewer; slots are padded, and a trouble's places come on top."""
    ranks, given_in_all, steps = ranks_of(codec, plan, world, [torch.Size([40_000])]), [0] * world, []

    def heard(requests):
        steps.append(requests)
        for place, request in enumerate(requests):
            given_in_all[place] += request_traffic(request, world, place).given_bytes

    exchange(ranks, vectors_of(world, 3, elements=40_000), heard=heard)
    foretold = traffic_of(plan, ranks[0].codec, 40_000, world).given_bytes
    spare = steps_of(plan, ranks[0].codec) * (world + 1) * (world + 16) * 4
    assert max(given_in_all) <= foretold + spare
    assert len(steps) <= steps_of(plan, ranks[0].codec)
    if ranks[0].codec.fixed_size and plan != ALL_REDUCE:
        assert max(given_in_all) >= 0.9 * foretold


@every_case
@pytest.mark.parametrize("elements", [1, 513, 1030])
def test_vectors_shorter_than_there_are_shards_come_through(codec, plan, elements):
    ranks = ranks_of(codec, plan, 4, [torch.Size([elements])])
    outcomes = exchange(ranks, vectors_of(4, 2, elements=elements))
    assert all(torch.equal(outcomes[0], each) for each in outcomes)
    assert bool(torch.isfinite(outcomes[0]).all())


UNBIASED = [
    (codec, plan)
    for codec, plan in CASES
    if not codec.biased and not isinstance(codec, ErrorFeedback) and getattr(codec, "lossless", "") != "elias"
]


@pytest.mark.parametrize(("codec", "plan"), UNBIASED, ids=lambda part: str(part))
def test_the_mean_over_seeds_is_the_sum_and_its_variance_that_of_both_encodings(codec, plan):
    """E result = sum g; in two steps Var = sum of the ranks' variances + E Var of the second encoding of their sum."""
    world, elements, seeds = 3, 1536, 100
    vectors = vectors_of(world, 4, elements=elements)
    wanted = total_of_any(vectors)
    shapes = [torch.Size([elements])]
    outcomes = torch.stack(
        [exchange(ranks_of(codec, plan, world, shapes), vectors, 1000 * seed)[0].double() for seed in range(seeds)]
    )
    error = outcomes.mean(0) - wanted
    spread = outcomes.var(0, correction=1)
    allowed = 1.6 * spread.sum() / seeds + rounding(codec, vectors).square().sum()
    assert error.square().sum() <= allowed
    if plan == "two-step" and float(spread.sum()) > 0:
        assert 0.75 < float(spread.sum() / two_step_variance(codec, vectors, seeds)) < 1.33


def rounding(codec, vectors):
    """What every hop may round off, where numbers are rounded to the nearest."""
    bits = {"Identity": 22, "BFloat16": 7, "Float16": 10}.get(type(codec).__name__)
    magnitude = sum(each.abs().double() for each in vectors)
    return magnitude * 2.0 ** -(bits or 20) * (2 * len(vectors)) + 1e-6


def total_of_any(vectors):
    return sum(each.double() for each in vectors)


def two_step_variance(codec, vectors, seeds):
    """The variance of the result by simulating each encoding for itself, shard by shard."""
    world, total = len(vectors), 0.0
    for before, after in itertools.pairwise(shard_edges(vectors[0].numel(), world)):
        parts = [each[before:after] for each in vectors]
        firsts = [
            torch.stack([codec.decode(codec.encode(part, seeded(31 * seed + place))).double() for seed in range(seeds)])
            for place, part in enumerate(parts)
        ]
        total += sum(float(first.var(0, correction=1).sum()) for first in firsts)
        sums = sum(firsts)
        again = torch.stack([codec.decode(codec.encode(each.float(), seeded(77 + n))) for n, each in enumerate(sums)])
        total += float(((again.double() - sums) ** 2).sum(1).mean())
    return total


def test_ranks_choose_alike_and_gather_only_what_is_small():
    for codec, elements, world in itertools.product(EVERY_CODEC, (1, 10_000, 10_000_000), (1, 2, 4, 64)):
        plan = choose_plan(codec, elements, world)
        assert plan in plans_of(codec)
        if elements == 10_000_000 and world >= 4 and len(plans_of(codec)) > 1:
            assert plan != "gather"


def test_shards_cover_the_vector_in_order():
    for elements, world in itertools.product((0, 1, 511, 512, 513, 5000, 123_457), range(1, 10)):
        edges = shard_edges(elements, world)
        assert edges == sorted(edges)
        assert (edges[0], edges[-1], len(edges)) == (0, elements, world + 1)
        assert all(edge % 512 == 0 for edge in edges[1:-1] if edge != elements)


def test_ranks_that_ask_for_different_things_are_an_error_in_one_process():
    one, other = (
        make_exchange(EVERY_CODEC[0], SHAPES, place, 2, plan) for place, plan in enumerate(("gather", "two-step"))
    )
    with pytest.raises(ValueError, match="ranks ask for different things"):
        run_in_lockstep([one.run(torch.ones(ELEMENTS)), other.run(torch.ones(ELEMENTS))])


def test_a_part_that_is_not_as_long_as_expected_is_an_error_in_one_process():
    def asks(sends, receives):
        answer = yield AllToAll(torch.zeros(sum(sends)), sends, receives)
        return answer

    with pytest.raises(ValueError, match=r"place 0 expects \(1, 1\), and gets \[1, 2\]"):
        run_in_lockstep([asks((1, 2), (1, 1)), asks((2, 1), (2, 1))])


@pytest.mark.parametrize(("codec", "plan"), WITH_FEEDBACK, ids=lambda part: str(part))
def test_what_one_plan_has_held_back_another_holds_back(codec, plan):
    for other in plans_of(codec):
        before, after = ranks_of(codec, plan, 3), ranks_of(codec, other, 3)
        exchange(before, vectors_of(3, seed=1))
        exchange(after, vectors_of(3, seed=2))  # of which nothing is left
        for one, then in zip(before, after, strict=True):
            then.load_state_of(one.plan, one.state_dict())
            assert torch.equal(then.held(), one.held())
        exchange(after, vectors_of(3, seed=3))  # they still go together
