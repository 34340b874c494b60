"""What goes wrong on one rank ends on all of them, soon, with an error that names it."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks
from tests.waiting import until_there

pytestmark = pytest.mark.xdist_group("averaging")  # one trio for all of them
SILENCE_SECONDS = 4.0


@pytest.mark.parametrize(
    ("codec", "member", "what"),
    [("identity", "hpsgd", "change"), ("qsgd", "local-sgd", "change"), ("elias", "ssgd", "gradient")],
)
def test_one_ranks_nan_is_told_to_all_and_merged_by_none(trio, codec, member, what):
    results = trio.do("poisoned", codec=codec, member=member, culprit=1)
    for found in results:
        assert found["said"].startswith(f"NotFiniteError: rank 1: the {what} is not finite in average")
    assert results[0]["finite"]
    assert results[2]["finite"]


def test_a_change_beyond_float16_is_not_called_infinite(trio):
    for found in trio.do("poisoned", codec="float16", member="local-sgd", culprit=1, moved=1e6):
        said = "NotFiniteError: rank 1: the change is not finite, or beyond the 65,504 that float16 carries"
        assert found["said"].startswith(said)


@pytest.mark.parametrize(
    ("codec", "plan"), [("qsgd", "gather"), ("one-bit", "two-step"), ("elias", "two-step"), ("bfloat16", "all-reduce")]
)
def test_a_rank_that_cannot_encode_is_named_by_all_whatever_the_plan(trio, codec, plan):
    for said in trio.do("unable", culprit=1, codec=codec, plan=plan):
        assert said == "AveragingError: rank 1: the change could not be encoded in average 1; the reason is with rank 1"


@pytest.mark.parametrize("member", ["hpsgd", "psgd"])
def test_a_rank_that_raises_says_why_to_all(trio, member):
    results = trio.do("left_by_one", culprit=1, how="raises", member=member)
    assert results[1][0].startswith("ZeroDivisionError: out of luck")
    for rank in (0, 2):
        assert "RankGoneError: rank 1 has left: ZeroDivisionError: out of luck (average" in results[rank][0]


def test_a_rank_that_never_comes_is_named_and_so_is_where_it_is(trio):
    results = trio.do("stays_away", culprit=1)
    for rank in (0, 2):
        assert "rank 1 did not come to average 0 in 1.5 s: alive, and in no average yet" in results[rank][0]
    assert "did not come to average 0" in results[1][0]  # when it comes, it hears why nobody is there


@pytest.mark.parametrize("plan", ["gather", "two-step"])
def test_a_size_that_no_payload_has_is_refused_before_there_is_room_made_for_it(trio, plan):
    for said in trio.do("lying", culprit=1, plan=plan):
        assert said.startswith("AveragingError: rank 1 says that its payload has 1,125,899,906,842,624 bytes")


def test_a_rank_that_is_stopped_is_named_by_the_others(trio, tmp_path):
    trio.tell("until_it_ends", member="hpsgd", silence_seconds=SILENCE_SECONDS, folder=str(tmp_path))
    until_there(*(tmp_path / f"training-{rank}" for rank in range(3)))
    trio.freeze(1)
    try:
        for said in trio.answers((0, 2), seconds=30):
            assert "rank 1 is gone: not heard of for" in said
    finally:
        trio.thaw(1)
    (said,) = trio.answers((1,), seconds=30)
    assert "rank 1 is gone" in said  # the others' farewell


@pytest.mark.parametrize(("victim", "member", "codec"), [(1, "hpsgd", "elias"), (0, "local-sgd", "identity")])
def test_kill_9_of_a_rank_ends_the_others_with_its_name(tmp_path, victim, member, codec):
    """Rank 0 keeps the store here, as it does without torchrun: it takes that along."""
    other = 1 - victim
    with Ranks(tmp_path, 2, "tests.averaging.jobs") as pair:
        settings = {"member": member, "codec": codec, "silence_seconds": SILENCE_SECONDS}
        pair.tell("until_it_ends", folder=str(tmp_path), **settings)
        until_there(*(tmp_path / f"training-{rank}" for rank in range(2)))
        pair.kill(victim)
        (said,) = pair.answers((other,), seconds=30)
    assert f"rank {victim} is gone" in said
