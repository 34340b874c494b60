"""What goes wrong on one rank ends on all of them, soon, with an error that names it."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks
from tests.waiting import until_there

pytestmark = pytest.mark.xdist_group("rounds")
SILENCE_SECONDS = 3.0
SOON_SECONDS = 15.0  # where nothing is waited for; the limits of these rounds are 20 and 30

# -- codecs ------------------------------------------------------------------------------------------------------------


def test_what_a_codec_cannot_carry_ends_the_rounds_on_all_ranks_and_names_the_rank(trio):
    wanted = (
        "RoundsDivergedError: round 3: the contribution of rank 1 is not finite, or beyond the 65,504 that float16 "
        "carries (bfloat16 has the range of float32): lower the learning rate, clip, or take another codec"
    )
    for said in trio.do("beyond_the_codec", culprit=1):
        assert said.startswith(wanted), said


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_on_all_ranks(trio):
    results = trio.do("misused")
    expected = {
        "ddp": "do not wrap the model in DistributedDataParallel",
        "ddp on one": "DistributedDataParallel",
        "sync batch norm": "1 is a SyncBatchNorm, which waits for all ranks",
        "codec": "unknown codec 'qsdg'",
        "codec on one": "codec must be a codec or the name of one (codec=3)",
        "unlike codecs": "all ranks must take rounds alike: the codec of",
        "plan": "cannot be exchanged by 'all-reduce'; choose from auto, gather, two-step",
        "unlike plans": "all ranks must take rounds alike: the plan of",
        "double": "codecs carry float32, and this model has float64 parameters (codec=ErrorFeedback(OneBit())): take "
        'codec="identity" with plan="auto", which adds them up as they are, or call .float() on the model',
        "double buffers": "codecs carry float32, and this model has float64 buffers",
        "k": "k must be a whole number of 1 or more",
        "k of words": "k must be a whole number of 1 or more",
        "k on one": "k must be a whole number of 1 or more",
        "too great a k": 'k must be at most the number of ranks, 3, or "auto" (k=4)',
        "unlike k": "all ranks must take rounds alike: the strategy of",
        "blocks": "blocks must be a whole number of 1 or more (blocks=0)",
        "blocks on one": "blocks must be a whole number of 1 or more (blocks=0)",
        "most behind": "most_behind must be a whole number of 1 or more (most_behind=0)",
        "other optimizer": "the optimizer has a parameter that the model does not have",
        "closure": "LBFGS computes gradients by itself (a closure)",
        "plateau": "ReduceLROnPlateau needs a metric in each step",
        "no scheduler": "scheduler must have a step() (it is a float)",
        "unlike rates": "all ranks must take rounds alike: the optimizer of",
        "twice": "this optimizer has an averaging or rounds already",
        "sharded": "the model is sharded (FSDP)",
    }
    for rank, found in enumerate(results):
        assert found.pop("again") is None
        assert set(found) == set(expected)
        for name, words in expected.items():
            assert words in found[name], (rank, name, found[name])
            if name.endswith("on one") and rank != 1:
                assert found[name].startswith("ValueError: rank 1 cannot take rounds: "), found[name]


def test_a_scheduler_that_is_stepped_in_the_loop_as_well_is_refused(trio):
    """All ranks do it alike, so no fingerprint shows it."""
    for error in trio.do("steps_scheduler_too"):
        assert "is stepped in the loop as well: leave out scheduler.step()" in error


def test_a_loop_that_cannot_work_says_so_on_its_rank_and_the_others_hear_it(trio):
    results = trio.do("misused_loops")
    expected = {
        "steps_itself": "RoundsError: the optimizer takes its steps in sync.step()",
        "scaler_steps": "RoundsError: the optimizer takes its steps in sync.step()",
        "forgets_the_step": "RoundsError: a batch of epoch() was not followed by step()",
        "breaks_off_a_batch": "RoundsError: the loop over sync.blocks(...) was left early",
        "does_some_blocks": "RoundsError: 2 of the 3 blocks of this batch are done, and its round is still open",
        "has_no_gradient": "RoundsError: step() comes after a batch, and no parameter has a gradient",
        "breaks_off_an_epoch": "RoundsError: an epoch begins at the same round on all ranks",
        "has_an_empty_loader": "ValueError: an epoch needs at least one round (rounds=0)",
        "sparse": "ValueError: a parameter has a sparse gradient",
    }
    for name, words in expected.items():
        assert results[1][name].startswith(words), (name, results[1][name])
        for rank in (0, 2):
            said = results[rank][name]
            assert said.startswith("RankGoneError: "), (name, rank, said)
            assert "rank 1 has left: " + words in said, (name, rank, said)  # of it, or of another that has heard of it
    for found in results:
        assert found["closed"] == "RoundsError: rounds have ended: this was closed"
        assert found["closed, flush"] == "RoundsError: rounds have ended: this was closed"


@pytest.mark.parametrize(("culprit", "how"), [(1, "scheduler"), (0, "weights"), (2, "weights")])
def test_a_rank_whose_model_changes_otherwise_is_named_in_the_next_round(trio, culprit, how):
    for said in trio.do("drifts", culprit=culprit, how=how):
        assert "have different " + ("learning rates" if how == "scheduler" else "parameters") + " in round 4" in said
        assert f"rank {culprit}" in said.partition(" have different")[0]


@pytest.mark.parametrize(("kind", "where"), [("lgc", "epoch"), ("lgc", "flush"), ("full", "loop")])
def test_a_learning_rate_may_be_set_by_hand_where_all_ranks_apply_the_same_updates_with_it(trio, kind, where):
    results = trio.do("sets_rates", kind=kind, where=where)
    assert [found["said"] for found in results] == [None] * 3
    assert len({found["digest"] for found in results}) == 1


def test_a_learning_rate_that_is_set_in_the_loop_is_named_at_once(trio):
    """A late rank applies several updates with one rate, so ranks would drift apart many rounds later."""
    for found in trio.do("sets_rates", kind="lgc", where="loop"):
        assert "the learning rate was set in the loop in round " in found["said"]
        assert "scheduler=torch.optim.lr_scheduler.LambdaLR" in found["said"]
        assert found["last"] <= 3


@pytest.mark.parametrize(
    ("where", "warned"),
    [("before", False), ("after", True), ("another model", False)],
)
def test_clipping_after_the_step_is_warned_of_once(trio, where, warned):
    for found in trio.do("clips", where=where):
        clipped = [text for text in found["said"] if "nothing was clipped" in text]
        assert len(clipped) == warned, found
        assert found["left"] == found["after"] == "None"  # no profiler is left


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("culprit", "k"), [(1, 3), (0, 3), (2, 1)])
def test_an_exception_on_one_rank_is_heard_by_all_with_its_text(trio, culprit, k):
    results = trio.do("raises", culprit=culprit, k=k)
    for rank, (said, seconds) in enumerate(results):
        if rank == culprit:
            assert said.startswith("ZeroDivisionError: out of luck")
        else:
            assert said.startswith("RankGoneError: ")
            assert f"rank {culprit} has left: ZeroDivisionError: out of luck" in said
        assert seconds < SOON_SECONDS


def test_an_exception_before_the_first_batch_is_heard_by_those_who_wait_for_the_first_epoch(trio):
    for rank, (said, seconds) in enumerate(trio.do("fails_first", culprit=1)):
        if rank != 1:
            assert said.startswith("RankGoneError: ")
            assert "rank 1 has left: ZeroDivisionError: no data here" in said
        assert seconds < SOON_SECONDS


def test_gradients_that_overflow_are_dropped_and_rounds_of_all_ranks_go_on(trio):
    """By a GradScaler: first on all ranks, as its scale is too great in the beginning, then on one."""
    results = trio.do("overflows", culprits=[0, 1, 2], bad_draws=[0, 1], rounds=4)
    assert len({found["digest"] for found in results}) == 1
    for found in results:
        assert found["came"] == [False, False, True, True, True, True]
        assert found["scale"] == 2.0**8
        assert found["finite"]
        assert found["dropped"] == {"it is not finite": 2}
    results = trio.do("overflows", culprits=[1], bad_draws=[0, 2], rounds=4)
    assert len({found["digest"] for found in results}) == 1
    assert [found["draws"] for found in results] == [4, 6, 4]
    assert [found["used"] for found in results] == [4, 4, 4]
    assert results[1]["dropped"] == {"it is not finite": 2}


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(("kind", "bad"), [("full", [[1, 4]]), ("lgc", [[1, 0]]), ("full", [[0, 0], [0, 1], [2, 4]])])
def test_a_rank_whose_gradient_is_dropped_at_a_flush_trains_on_in_every_round(trio, kind, bad, saves):
    """`if sync.version % 4 == 0: sync.flush()`: version 4, or 0, is reached twice there; the others have gone on."""
    results = trio.do("flushes_where_docs_say", kind=kind, bad=bad, every=4, rounds=10, saves=saves)
    assert len({found["digest"] for found in results}) == 1
    for rank, found in enumerate(results):
        again = [draw for culprit, draw in bad if culprit == rank]
        assert found["fresh"] == [[0, 1, 2]] * 10
        assert sorted(set(found["trained"])) == list(range(10))
        assert len(found["trained"]) == 10 + len(again)
        assert found["dropped"] == ({"it is not finite": len(again)} if again else {})
        if saves:
            assert all(of == version for version, of in found["states"])
        else:
            assert [version for version, met in found["states"] if met] == [4, 8]


@pytest.mark.parametrize("kind", ["full", "lgc"])
def test_a_flush_after_each_step_is_met_by_all_also_by_a_rank_whose_gradient_was_dropped(trio, kind):
    """All call it as often, and a collective comes behind it: nobody may go on into that alone."""
    results = trio.do("flushes_outside_of_epochs", kind=kind, bad=[[1, 2], [1, 3], [2, 3]], every=0, rounds=6)
    assert len({found["digest"] for found in results}) == 1
    assert [found["trained"] for found in results] == [[3] * 6] * 3


@pytest.mark.parametrize("kind", ["full", "lgc"])
def test_outside_of_epochs_a_rank_whose_gradient_was_dropped_at_a_flush_misses_that_round_alone(trio, kind):
    """It cannot know whether the others come to the flush too, until one of them trains on."""
    results = trio.do("flushes_outside_of_epochs", kind=kind, bad=[[1, 4]], every=4, rounds=12)
    assert len({found["digest"] for found in results}) == 1
    if kind == "full":
        assert results[0]["fresh"] == [[0, 1, 2] if number != 4 else [0, 2] for number in range(12)]
    assert results[1]["dropped"].get("it is not finite") == 1
    assert len(results[1]["trained"]) >= (12 if kind == "full" else 3)


# -- an error on the way of another ------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_whatever_fails_on_the_way_of_an_error_ends_the_rounds_on_all_ranks_and_nobody_waits(tmp_path, culprit):
    """Each call on that way fails in turn, on the rank that has the first error; rank 0 decides."""
    with Ranks(tmp_path, 2, "tests.rounds.jobs") as pair:
        results = pair.do("failing_twice", culprit=culprit, seconds=120.0)
    assert len(results[culprit]) > 10
    left = tuple(
        f"rank {culprit} has left: {error}" for error in ("RoundsError: MemoryError: no memory", "InjectedErr")
    )
    for (_, theirs), (failed, ours) in zip(results[1 - culprit], results[culprit], strict=True):
        assert "MemoryError: no memory" in ours or ours.startswith("InjectedError: "), (failed, ours)
        assert any(words in theirs for words in left), (failed, theirs)


# -- ranks that do not come --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lgc", "diloco"])
def test_a_rank_that_never_constructs_it_is_named_in_the_time_that_was_asked_for(trio, kind):
    """And whoever tries again with that rank finds it."""
    noun = {"lgc": "rounds", "diloco": "averaging"}[kind]
    results = trio.do("never_constructs", culprit=1, kind=kind, timeout_seconds=1.0)
    for rank in (0, 2):
        said, seconds = results[rank]
        assert said.startswith("RankGoneError: "), said
        assert said.endswith(f" waited 1 s for rank 1 to begin {noun}"), said
        assert seconds < 1.0 + SOON_SECONDS


@pytest.mark.parametrize("kind", ["lgc", "diloco"])
def test_a_constructor_that_fails_on_one_rank_is_heard_by_all_and_leaves_nothing_behind(trio, kind):
    results = trio.do("fails_in_the_constructor", culprit=1, kind=kind)
    assert results[1][0] == "ZeroDivisionError: out of luck"
    assert not results[1][2]
    for rank in (0, 2):
        said, seconds, _ = results[rank]
        assert said.startswith("RankGoneError: "), said
        assert "rank 1 has left: ZeroDivisionError: out of luck" in said
        assert seconds < SOON_SECONDS


@pytest.mark.parametrize("flushing", [False, True])
def test_a_rank_that_is_alive_and_does_not_come_is_gone_for_the_others(trio, flushing):
    """The same error as in averaging, and as of a rank that is dead: a script that starts again catches one."""
    results = trio.do("does_not_deliver", culprit=1, flushing=flushing)
    for said in results:
        assert said.startswith("RankGoneError: "), said
        assert "rank 1 has not " + ("come" if flushing else "delivered") in said


# -- ranks that are gone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1])
def test_a_rank_that_is_stopped_is_named_by_the_others(trio, tmp_path, k):
    """Also where it is not needed for a round to close: every rank takes part in every sum."""
    trio.tell("until_it_ends", silence_seconds=SILENCE_SECONDS, folder=str(tmp_path), k=k)
    until_there(*(tmp_path / f"training-{rank}" for rank in range(3)))
    trio.freeze(1)
    try:
        for said in trio.answers((0, 2), seconds=30):
            assert "rank 1 is gone: not heard of for" in said
    finally:
        trio.thaw(1)
    (said,) = trio.answers((1,), seconds=30)
    assert "rank 1 is gone" in said  # the others' farewell


@pytest.mark.parametrize("victim", [0, 1])
def test_kill_9_of_a_rank_ends_the_others_with_its_name(tmp_path, victim):
    """Rank 0 decides, and keeps the store here, as it does without torchrun: it takes both along."""
    with Ranks(tmp_path, 2, "tests.rounds.jobs") as pair:
        pair.tell("until_it_ends", silence_seconds=SILENCE_SECONDS, folder=str(tmp_path))
        until_there(*(tmp_path / f"training-{rank}" for rank in range(2)))
        pair.kill(victim)
        (said,) = pair.answers((1 - victim,), seconds=30)
    assert f"rank {victim} is gone" in said


def test_a_stopped_rank_that_decides_and_keeps_the_store_is_named(tmp_path):
    with Ranks(tmp_path, 2, "tests.rounds.jobs") as pair:
        pair.tell("until_it_ends", silence_seconds=SILENCE_SECONDS, folder=str(tmp_path))
        until_there(*(tmp_path / f"training-{rank}" for rank in range(2)))
        pair.freeze(0)
        try:
            (said,) = pair.answers((1,), seconds=30)
        finally:
            pair.thaw(0)
    assert "rank 0 is gone" in said
