"""Rounds whose contributions travel encoded, by every codec and plan: all ranks in one process, request by request."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.codecs import ErrorFeedback
from paceline.codecs.naming import parse_codec
from paceline.codecs.requests import given_by_all, request_traffic
from paceline.exchanges import TroubleError
from paceline.exchanges.lockstep import run_in_lockstep
from paceline.exchanges.plans import plans_of
from paceline.strategies import LGC, FastestK, Full
from paceline.strategies.combine import Combiner
from paceline.training.contributions import MessageLayout, RankGradients, VectorPool
from paceline.training.round_sums import EncodedSum, PlainSum, make_round_sum
from tests.training.play import play

RANKS = 3
SHAPES = [torch.Size([30, 40]), torch.Size([700]), torch.Size([9])]
SIZES = [shape.numel() for shape in SHAPES]
LAYOUT = MessageLayout(gradient=sum(SIZES), buffers=2, flags=len(SHAPES))
NAMES = ["identity", "bfloat16", "qsgd", "qsgd lossless=elias", "one-bit", "top-k", "power-sgd", "int8-sum"]
CASES = [(name, plan) for name in NAMES for plan in plans_of(parse_codec(name))]
HOLDING = [(name, plan) for name, plan in CASES if isinstance(parse_codec(name), ErrorFeedback)]
HOLDING += [("int8-sum error-feedback", "all-reduce"), ("qsgd levels=127 error-feedback", "two-step")]
DRAWN = st.binary(min_size=12, max_size=36)
STRATEGIES = [Full(), FastestK(k=2), LGC(k=1), LGC(k=2)]


def message_of(rank, version, *, flags=(1.0, 1.0, 1.0)):
    """A gradient, what the batch changed in the buffers, and flags."""
    generator = torch.Generator().manual_seed(97 * version + rank)
    gradient = torch.randn(LAYOUT.gradient, generator=generator)
    gradient *= torch.tensor(flags).repeat_interleave(torch.tensor(SIZES))
    return torch.cat([gradient, torch.randn(2, generator=generator), torch.tensor(flags)])


def gradients_of(strategy=None):
    compensates = strategy is None or isinstance(strategy, LGC)
    pools = [VectorPool(LAYOUT.size, torch.float32, torch.device("cpu")) for _ in range(RANKS)]
    return [RankGradients(rank, LAYOUT, pool, compensates=compensates) for rank, pool in enumerate(pools)]


def sums_of(codec, plan):
    more = {"world": RANKS, "plan": plan, "seed": 5}
    return [make_round_sum(parse_codec(codec), SHAPES, LAYOUT, place=place, **more) for place in range(RANKS)]


def add_up(sums, ranks, step):
    """Return the update of a step, as all ranks have it, to the bit; and who brought something."""
    brings = [rank.has_part_in(step) for rank in ranks]
    vectors = [rank.contribute(step) for rank in ranks]
    assert all(brought or not vector.any() for brought, vector in zip(brings, vectors, strict=True))
    protocols = [
        each.add_up(vector, step.version, brings=brought)
        for each, vector, brought in zip(sums, vectors, brings, strict=True)
    ]
    first, *others = run_in_lockstep(protocols)
    assert all(torch.equal(first, other) for other in others)
    return first.clone(), brings


def held(sums):
    parts = [each.exchange.held() for each in sums if isinstance(each, EncodedSum)]
    return sum((part.double() for part in parts if part is not None), torch.zeros(LAYOUT.gradient, dtype=torch.float64))


def update_of(combiner, step):
    return combiner.update(step, lambda share: LAYOUT.gradient_of(message_of(share.worker, share.version)).double())


# -- what a server would have made of it -------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "plan"), HOLDING)
@settings(max_examples=5)
@given(drawn=DRAWN, place=st.integers(0, len(STRATEGIES) - 1))
def test_updates_and_what_is_held_back_are_the_updates_of_a_server_over_all_rounds(codec, plan, drawn, place):
    """Late gradients and the compensation for the step before are in it, and ranks that a step has nothing of."""
    strategy = STRATEGIES[place]
    sums, ranks, combiner = sums_of(codec, plan), gradients_of(strategy), Combiner()
    of_server = of_ranks = torch.zeros(LAYOUT.gradient, dtype=torch.float64)
    for step in play(strategy, drawn, ranks, message_of):
        of_server = of_server + update_of(combiner, step)
        total, _ = add_up(sums, ranks, step)
        of_ranks = of_ranks + LAYOUT.gradient_of(total).double()
        torch.testing.assert_close(of_ranks + held(sums), of_server, rtol=1e-4, atol=2e-4)
        shares = (*step.fresh, *step.late)
        changes = [LAYOUT.buffers_of(message_of(share.worker, share.version)) for share in shares]
        torch.testing.assert_close(LAYOUT.buffers_of(total), torch.stack(changes).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("codec", "plan"), [case for case in CASES if case not in HOLDING])
@settings(max_examples=4)
@given(drawn=DRAWN)
def test_codecs_that_hold_nothing_back_come_near_to_the_update_of_a_server(codec, plan, drawn):
    sums, ranks, combiner = sums_of(codec, plan), gradients_of(), Combiner()
    for step in play(LGC(k=2), drawn, ranks, message_of):
        expected = update_of(combiner, step)
        found = LAYOUT.gradient_of(add_up(sums, ranks, step)[0]).double()
        error = float((found - expected).norm() / expected.norm())
        assert error < {"identity": 1e-6, "bfloat16": 0.02, "int8-sum": 0.1, "qsgd": 0.4}[codec.split()[0]]
        assert codec == "identity" or error > 0


def test_a_sum_rounds_by_chance_anew_in_every_round_and_on_every_rank_and_not_from_run_to_run():
    def encoded(version, seed=5, place=0):
        alone = EncodedSum(parse_codec("qsgd"), SHAPES, LAYOUT, place=place, world=RANKS, plan="gather", seed=seed)
        protocol = alone.add_up(message_of(0, 0), version, brings=True)
        return bytes(protocol.send(next(protocol).tensor).tensor.tolist())

    assert encoded(0) == encoded(0)
    assert len({encoded(0), encoded(1), encoded(0, seed=6), encoded(0, place=1)}) == 4


# -- what is held back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "plan"), [("one-bit", "gather"), ("top-k", "two-step"), ("power-sgd", "all-reduce")])
def test_what_a_rank_holds_back_stays_with_it_while_a_step_has_nothing_of_it(codec, plan):
    sums, ranks, away = sums_of(codec, plan), gradients_of(), 0
    for step in play(LGC(k=1), bytes(range(0, 250, 7)), ranks, message_of):
        before = [each.state_dict().get("residual") for each in sums]
        _, brings = add_up(sums, ranks, step)
        for each, residual, brought in zip(sums, before, brings, strict=True):
            if residual is not None:
                assert torch.equal(residual, each.state_dict()["residual"]) == (not brought)
                away += not brought
    assert away


@pytest.mark.parametrize(("codec", "plan"), CASES)
@settings(max_examples=3)
@given(drawn=DRAWN)
def test_ranks_go_on_from_their_states_with_the_same_bits(codec, plan, drawn):
    sums, ranks = sums_of(codec, plan), gradients_of()
    for step in play(LGC(k=2), drawn, ranks, message_of):
        again, others = sums_of(codec, plan), gradients_of()
        for mine, other, rank, twin in zip(sums, again, ranks, others, strict=True):
            file = io.BytesIO()
            torch.save({"plan": mine.plan, "sum": mine.state_dict(), "rank": rank.state_dict()}, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
            other.load_state_dict(state["plan"], state["sum"])
            twin.load_state_dict(state["rank"])
        assert torch.equal(add_up(sums, ranks, step)[0], add_up(again, others, step)[0])


def test_a_state_of_another_plan_holds_back_as_much_and_plain_sums_refuse_one():
    sums, ranks = sums_of("one-bit", "two-step"), gradients_of()
    for step in play(LGC(k=2), bytes(range(20)), ranks, message_of):
        add_up(sums, ranks, step)
    gathered = sums_of("one-bit", "gather")
    for old, new in zip(sums, gathered, strict=True):
        new.load_state_dict(old.plan, old.state_dict())
    assert held(sums).any()
    torch.testing.assert_close(held(gathered), held(sums))
    plain = PlainSum()
    plain.load_state_dict("all-reduce", plain.state_dict())
    with pytest.raises(ValueError, match="a codec has held something back"):
        plain.load_state_dict("two-step", sums[0].state_dict())


# -- parameters without a gradient -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["top-k", "top-k error-feedback=false", "identity"])
def test_a_parameter_without_a_gradient_has_one_if_something_of_it_was_held_back(codec):
    """In the second round no rank has a gradient of the first parameter; top-k held back most of its first."""

    def message(rank, version):
        made = message_of(rank, version, flags=(0.0, 1.0, 0.0) if version else (1.0, 1.0, 0.0))
        made[: SIZES[0]] *= 100.0
        return made

    sums, ranks = sums_of(codec, "gather"), gradients_of()
    totals = [add_up(sums, ranks, step)[0] for step in play(Full(), [0] * 6, ranks, message)]
    assert [LAYOUT.flags_of(total).bool().tolist() for total in totals] == [
        [True, True, False],
        [codec == "top-k", True, False],
    ]
    first = totals[1][: SIZES[0]]
    assert bool(first.any()) == (codec == "top-k")


@pytest.mark.parametrize(("codec", "plan"), HOLDING)
def test_a_parameter_that_never_had_a_gradient_gets_none_and_its_first_is_not_its_noise(codec, plan):
    """One-bit decodes zeros to a mean. The last parameter has gradients from round 5 on, and the second none at all."""
    rounds, first_used = 9, 5

    def message(rank, version):
        return message_of(rank, version, flags=(1.0, 0.0, float(version >= first_used)))

    sums, ranks, combiner = sums_of(codec, plan), gradients_of(Full()), Combiner()
    found, expected = (torch.zeros(LAYOUT.gradient, dtype=torch.float64) for _ in range(2))
    for step in play(Full(), [0] * (RANKS * rounds), ranks, message):
        expected += combiner.update(
            step, lambda share: LAYOUT.gradient_of(message(share.worker, share.version)).double()
        )
        total, _ = add_up(sums, ranks, step)
        flags = LAYOUT.flags_of(total).bool()
        assert flags.tolist() == [True, False, step.version >= first_used]
        found += LAYOUT.gradient_of(total).double() * flags.repeat_interleave(torch.tensor(SIZES))
    assert step.version == rounds - 1
    last = slice(-SIZES[-1], None)
    torch.testing.assert_close((found + held(sums))[last], expected[last], rtol=1e-4, atol=2e-4)


def test_which_parameters_had_a_gradient_is_in_the_state_and_a_state_without_it_has_them_all():
    sums, ranks = sums_of("one-bit", "gather"), gradients_of()
    for step in play(
        Full(), [0] * RANKS, ranks, lambda rank, version: message_of(rank, version, flags=(1.0, 0.0, 1.0))
    ):
        add_up(sums, ranks, step)
    states = [each.state_dict() for each in sums]
    assert [state["used"].tolist() for state in states] == [[True, False, True]] * RANKS
    with pytest.raises(ValueError, match=r"used must be bool of shape \(3,\), not bool of shape \(2,\)"):
        sums[0].load_state_dict("gather", states[0] | {"used": torch.ones(2, dtype=torch.bool)})
    del states[0]["used"]
    sums[0].load_state_dict("gather", states[0])
    assert sums[0].state_dict()["used"].all()


@pytest.mark.parametrize("absent", range(RANKS))
@pytest.mark.parametrize(("codec", "plan"), CASES)
def test_every_rank_knows_the_bytes_that_all_of_them_send(codec, plan, absent):
    """Also where one of them brings nothing, and payloads have sizes of their own."""

    def heard(requests):
        sent = sum(request_traffic(request, RANKS, place).given_bytes for place, request in enumerate(requests))
        assert [given_by_all(request, RANKS) for request in requests] == [round(sent)] * RANKS

    vectors = [message_of(place, 0) * (place != absent) for place in range(RANKS)]
    protocols = [
        each.add_up(vector, 0, brings=place != absent)
        for place, (each, vector) in enumerate(zip(sums_of(codec, plan), vectors, strict=True))
    ]
    run_in_lockstep(protocols, heard)


def test_a_contribution_that_cannot_be_encoded_ends_the_sum_on_all_ranks_and_is_named():
    sums = sums_of("float16", "two-step")
    vectors = [message_of(rank, 0) for rank in range(RANKS)]
    vectors[1][7] = 1e6  # beyond float16
    outcomes = run_in_lockstep([each.add_up(v, 0, brings=True) for each, v in zip(sums, vectors, strict=True)])
    assert [type(outcome) for outcome in outcomes] == [TroubleError] * RANKS
    assert all(list(outcome.troubles) == [1] for outcome in outcomes)
