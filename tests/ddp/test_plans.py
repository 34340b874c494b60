"""Plans among four real processes: against the same ranks in one process, and through DistributedDataParallel."""

from __future__ import annotations

import pytest

from paceline.codecs.naming import parse_codec
from paceline.exchanges.plans import plans_of
from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.xdist_group("plans")  # four processes for all of them

CODECS = ["identity", "bfloat16", "float16", "qsgd", "qsgd lossless=elias", "one-bit", "top-k", "power-sgd", "int8-sum"]
CASES = [(codec, plan) for codec in CODECS for plan in plans_of(parse_codec(codec))]
HELD = [(codec, plan) for codec in ("one-bit", "top-k", "power-sgd") for plan in plans_of(parse_codec(codec))]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("four"), 4, "tests.ddp.plan_jobs") as four:
        yield four


def same(results, *keys):
    assert all(result[key] == results[0][key] for result in results for key in keys)
    return results[0]


@pytest.mark.parametrize(("codec", "plan"), CASES)
def test_many_vectors_at_once_come_to_what_they_come_to_in_one_process(four, codec, plan):
    """To the bit where payloads are decoded in the order of the ranks; sums on their way are added in another order."""
    results = four.do("real_and_in_lockstep", codec=codec, plan=plan)
    same(results, "digest")
    within = {"bfloat16": 0.1, "float16": 0.02}.get(codec, 1e-5) if plan == "all-reduce" else 0.0
    assert all(result["apart"] <= within for result in results), [result["apart"] for result in results]


@pytest.mark.parametrize("codec", ["qsgd", "qsgd lossless=elias"])
def test_second_steps_start_in_the_same_order_however_late_a_rank_is(four, codec):
    same(four.do("real_and_in_lockstep", codec=codec, plan="two-step", steps=6, jitter=0.02), "digest")


@pytest.mark.parametrize(("codec", "plan"), [("qsgd", "two-step"), ("bfloat16", "all-reduce"), ("one-bit", "gather")])
def test_one_vector_that_is_waited_for_is_exchanged_as_many_are(four, codec, plan):
    for result in four.do("at_once", codec=codec, plan=plan):
        assert result["same"]
        assert result["bytes"][0] == result["bytes"][1] > 0


@pytest.mark.parametrize(("codec", "plan"), HELD)
def test_error_feedback_loses_nothing_when_ddp_changes_its_buckets(four, codec, plan):
    for found in four.do("nothing_is_lost", codec=codec, plan=plan):
        assert found["plans"] == [plan]
        assert found["changed"]
        assert found["lost"] < 1e-5 < found["held"]


@pytest.mark.parametrize("codec", ["qsgd", "one-bit", "top-k"])
def test_a_run_by_two_steps_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(four, codec):
    for found in four.do("resumed", codec=codec, plan="two-step"):
        assert found["same"]
        assert found["sent"]
        told = "this state is of one among 7 ranks (here are 4)"
        assert found["refused"] is None if codec == "qsgd" else told in found["refused"]


@pytest.mark.parametrize(("codec", "plan"), [("one-bit", "two-step"), ("bfloat16", "all-reduce"), ("qsgd", "two-step")])
def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks_and_training_can_go_on(four, codec, plan):
    results = four.do("not_finite", codec=codec, plan=plan, culprit=2)
    same(results, "digest")
    for found in results:
        before, error, after = found["errors"]
        assert (before, after) == (None, None)
        assert error.startswith("NotFiniteError: rank 2: the gradient is not finite in bucket ")
        assert found["finite"]


def test_a_codec_that_costs_more_than_it_saves_is_told_once_by_the_first_rank_with_the_numbers(four):
    (told,), *others = four.do("slow_codec")
    assert "among 4 ranks is " in told
    assert told.endswith("without compress() a step would be quicker")
    assert not any(others)


def test_small_buckets_are_sent_together_and_only_those_of_one_plan(four):
    results = four.do("joined_buckets")
    found = same(results, "sent", "apart")
    assert sum(map(len, found["sent"])) == found["buckets"] == 14
    assert all(len(set(plans)) == 1 for plans in found["sent"])
    assert {plans[0] for plans in found["sent"]} == {"gather", "two-step"}
    assert max(map(len, found["sent"])) >= 3
    assert found["apart"] < 0.02


def test_a_run_goes_on_by_another_plan(four):
    for found in four.do("resumed", codec="one-bit", plan="gather", other_plan="two-step"):
        assert not found["same"]
        assert found["sent"]


@pytest.mark.parametrize(("codec", "plan"), [("one-bit", "two-step"), ("qsgd", "gather"), ("bfloat16", "all-reduce")])
def test_a_rank_that_is_out_of_data_keeps_company_and_leaves_out_what_the_others_leave_out(four, codec, plan):
    results = four.do("joined", codec=codec, plan=plan)
    same(results, "digest")
    for rank, found in enumerate(results):
        assert found["kept"] == [0, 0, 0]
        told = [error for error in found["errors"] if error]
        assert len(told) == (1 if rank >= 2 else 0)
        assert all(error.startswith("NotFiniteError: rank 3: the gradient is not finite") for error in told)


def test_an_owner_that_cannot_add_up_is_named_by_all_and_the_next_exchange_is_right(four):
    results = four.do("sum_fails")
    assert all(result == results[0] for result in results)
    assert results[0][0] == [True, {"1": "OTHER"}]


def test_an_error_of_one_rank_alone_ends_its_exchanges_and_gives_nobody_a_wrong_sum(four):
    for found in four.do("fails_alone"):
        assert found["waited"] == [True, True, True]
        right, alone, later = found["ended"]
        assert right.startswith("Tensor: ")
        assert alone == "MemoryError: no memory for the sum"
        assert later.startswith("ConnectionLostError: this rank has left the exchanges: no memory for the sum")


def test_an_end_that_cannot_be_told_is_told_once_more_and_holds_up_no_other(four):
    assert all(result == [0, 0, 1, 1, 2, 2] for result in four.do("one_cannot_be_told"))


def test_misuse_is_told(four):
    for rank, errors in enumerate(four.do("misused")):
        assert "unknown plan 'two step'; did you mean 'two-step'?" in errors["unknown"]
        assert "cannot be exchanged by 'all-reduce'; choose from auto, gather, two-step" in errors["impossible"]
        assert "all ranks must compress alike" in errors["unlike"], rank
