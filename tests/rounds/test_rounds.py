"""Rounds in real processes: all ranks hold the same, to the bit, and every gradient is counted once."""

from __future__ import annotations

import pytest
from hypothesis import settings

pytestmark = pytest.mark.xdist_group("rounds")  # one trio for all of them
RANKS = 3
EACH = settings.default.max_examples // 5  # random schedules of one setting: six, in the long run twenty


def check_counts(results):
    """Every gradient is in one step, or dropped with a reason."""
    for found in results:
        assert found["draws"] == found["used"] + found["late"] + sum(found["dropped"].values()), found


# -- the same on all ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "optimizer", "settings"),
    [
        ("lgc", "sgd", {"k": 2}),
        ("lgc", "adam", {"k": 1, "blocks": 1}),
        ("lgc", "lars", {"k": 2, "scale_partial": False}),
        ("lgc", "sgd", {"k": 2, "scale_partial": "samples"}),
        ("lgc", "adam", {"k": "auto", "warmup_rounds": 2, "most_behind": 1}),
        ("fastest-k", "sgd", {"k": 2}),
        ("full", "lars", {}),
        ("lgc", "adam", {"k": 2, "codec": "one-bit", "plan": "two-step"}),
        ("lgc", "sgd", {"k": 1, "codec": "power-sgd", "plan": "all-reduce"}),
        ("fastest-k", "sgd", {"k": 2, "codec": "qsgd lossless=elias", "plan": "gather"}),
    ],
)
def test_all_ranks_hold_the_same_bits_after_every_round_and_flush(trio, kind, optimizer, settings):
    """Parameters, BatchNorm's statistics and counter, the optimiser's state; with random delays and a slow rank."""
    results = trio.do("alike", kind=kind, optimizer=optimizer, rounds=16, **settings)
    assert len({found["begun"] for found in results}) == 1
    assert results[0]["found"] == results[1]["found"] == results[2]["found"]
    assert len(set(results[0]["found"])) > 8
    check_counts(results)
    if kind == "lgc" and settings["k"] == 2:
        assert sum(found["late"] for found in results) > 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("lgc", {"k": RANKS, "blocks": 1, "norm": True}),
        ("lgc", {"k": RANKS, "blocks": 4, "optimizer": "adam"}),
        ("full", {"blocks": 3}),
        ("full", {"blocks": 4, "clip": 0.3}),
        ("full", {"blocks": 4, "samples": 30}),  # three blocks of 10
        ("full", {"blocks": 4, "samples": 31}),  # one block
    ],
)
def test_rounds_of_all_ranks_are_plain_data_parallel_training(trio, kind, settings):
    """DistributedDataParallel by the same batches, within rounding; a gradient is clipped before it is added up."""
    for found in trio.do("like_plain", kind=kind, rounds=20, **settings):
        assert found["distance"] < 2e-5 < 0.05 < found["moved"]
        assert found["used"] == found["draws"] == 20


def test_a_buffer_in_float64_beside_float32_parameters_is_added_up_in_float64(trio):
    results = trio.do("counts_in_doubles", kind="full", rounds=5, blocks=1)
    assert len({found["digest"] for found in results}) == 1
    assert results[0]["thirds"] == pytest.approx(5 / 3, rel=1e-15, abs=0)


def test_random_schedules_end_and_all_ranks_are_equal(trio):
    """Random K, blocks, delays, epochs, flushes, bad numbers; without an end somewhere the trio does not answer."""
    for place in range(10):
        results = trio.do("schedules", place=place, count=EACH)
        assert results[0]["ends"] == results[1]["ends"] == results[2]["ends"]
        check_counts(results)


def test_a_rank_that_closes_first_is_waited_for_by_nobody_and_loses_count_of_nothing(trio):
    results = trio.do("some_close_first", first=1)
    assert len({found["digest"] for found in results}) == 1
    assert [found["version"] for found in results] == [4, 4, 4]
    check_counts(results)
    assert results[1]["dropped"] == {"it is not finite": 1}


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_an_epoch_ends_at_the_same_round_on_all_ranks_and_a_slow_rank_takes_its_rest_first(trio):
    """Loaders of 4, 6 and 5 batches, one rank as slow as two rounds of the others, and no flush between epochs."""
    results = trio.do("epochs", lengths=[4, 6, 5], count=3, late=2, k=2)
    assert results[0]["ends"] == results[1]["ends"] == results[2]["ends"]
    assert [version for version, _ in results[0]["ends"]] == [6, 12, 18]
    check_counts(results)
    for found, length in zip(results, [4, 6, 5], strict=True):
        taken = [number for epoch in found["taken"] for number in epoch]
        assert taken == [number % length for number in range(len(taken))]
    first, second, slow = (sum(map(len, found["taken"])) for found in results)
    assert first == second == 18  # a batch for each round, which closes with these two
    assert slow <= 9


def test_the_rounds_of_an_epoch_can_be_given_and_a_flush_between_epochs_does_no_harm(trio):
    results = trio.do("epochs", lengths=[2, 2, 2], count=2, rounds=5, flush=True, k=1)
    assert results[0]["ends"] == results[1]["ends"] == results[2]["ends"]
    assert [version for version, _ in results[0]["ends"]] == [5, 10]


def test_a_flush_in_an_epoch_ends_at_the_same_version_on_all_ranks_also_a_slow_one(trio):
    """A rank that begins its epoch late may be past the version at which the others flush: they meet at the next."""
    results = trio.do("epochs", lengths=[6, 6, 6], count=2, slow=2, flush_every=2, k=1)
    assert results[0]["ends"] == results[1]["ends"] == results[2]["ends"]
    assert results[0]["flushed"] == results[1]["flushed"] == results[2]["flushed"]
    versions = [version for version, _ in results[0]["flushed"]]
    assert versions == sorted(set(versions))
    assert versions[-1] == 12
    assert set(versions) <= {2, 4, 6, 8, 10, 12}


def test_all_ranks_may_break_out_of_an_epoch(trio):
    results = trio.do("broken_off", after=[1, 3, 2])
    assert results[0]["ends"] == results[1]["ends"] == results[2]["ends"]
    (first, _), (last, _) = results[0]["ends"]
    assert last == first + 4
    assert [found["first"] for found in results] == [[1], [3], [2]]  # what was not taken comes first


def test_a_second_loader_has_as_many_rounds_as_the_longest_too(trio):
    results = trio.do("second_loader", lengths=[[3, 2, 1], [1, 2, 5]])
    assert results[0] == results[1] == results[2]
    assert [version for version, _ in results[0]] == [3, 8]


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "codec", "plan"),
    [("full", "identity", "auto"), ("lgc", "identity", "auto"), ("lgc", "one-bit", "two-step")],
)
def test_a_resumed_run_is_the_undisturbed_one_to_the_bit(trio, strategy, codec, plan):
    """With lgc a late gradient of one rank is pending in the state, and is in the first step after it.

    What codecs and owners of shards hold back is in it, too.
    """
    results = trio.do("resumed", strategy=strategy, rounds=8, after=4, codec=codec, plan=plan)
    for rank, found in enumerate(results):
        assert found["resumed"][0] == found["whole"][0] == results[0]["whole"][0]
        assert found["resumed"][1]["draws"] == found["whole"][1]["draws"] == 8
        assert found["resumed"] == found["whole"]
        assert found["held"] == ([] if codec == "identity" else ["owned", "residual", "used"])
        if strategy == "lgc":
            assert found["pending"] == 1
            assert found["whole"][1]["late" if rank == 2 else "used"] >= 7
    if strategy == "lgc":
        assert results[2]["ended"]["dropped"] == {"the run ended": 1}


@pytest.mark.parametrize("after", [2, 4, 6])
def test_a_checkpoint_within_an_epoch_goes_on_with_the_samples_and_rounds_that_are_left(trio, after):
    """Epochs have 4 rounds: in the first, at its end, in the second. Nothing but the rounds' state says where."""
    results = trio.do("goes_on_within_an_epoch", after=after)
    for found in results:
        assert found["parts"] == found["whole"]
        assert found["digests"][0] == found["digests"][1] == results[0]["digests"][0]
    for epoch in range(3):
        assert {number for found in results for number in found["parts"][epoch]} == set(range(40))


def test_states_are_of_one_moment_on_all_ranks_and_others_are_refused(trio):
    """While one rank takes its state no other may go on: else the decider's state would be of a later round."""
    results = trio.do("wrong_states")
    assert results[0]["decider"]["rounds"] == [[0, []]] * 12
    for found in results:
        assert found["late"].startswith("RoundsError: a state is loaded before the first round")
        refused = "SavedStateError: the state of the rounds is refused:"
        assert found["other model"].startswith(f"{refused} the model is not what it was")
        assert found["other k"].startswith(f"{refused} it is of other rounds: its strategy is")
        assert found["closed"] == results[0]["closed"]
        for began in (True, False):
            error, weighs, decides, same = found["last release"][f"{began} auto"]
            assert (error, weighs, same) == (None, began, True)
            assert decides in (began, None)  # one rank decides
            assert f"scale_partial={began}" in found["last release"][f"{began} samples"][0]
    assert results[0]["last release"]["False auto"][2] is False


def test_a_state_that_is_refused_changes_nothing(trio):
    """Each part of a state is damaged or left out in turn, also those that come last."""
    results = trio.do("refused_states")
    assert len({found["digest"] for found in results}) == 1
    for rank, each in enumerate(results):
        for name, (error, same) in each["found"].items():
            if "decider" in name and rank and error is None:  # the rank that decides reads it alone
                continue
            assert error.startswith("SavedStateError: the state of the rounds is refused: "), (rank, name, error)
            assert same, (rank, name)


# -- step times --------------------------------------------------------------------------------------------------------


def test_a_watched_model_s_clock_hears_who_waits_for_whom(trio):
    """The slow rank sleeps in both blocks of every batch; the others wait for it, and it waits for nobody."""
    rounds, pause_seconds = 6, 0.05
    results = trio.do("watched", rounds=rounds, pause_seconds=pause_seconds)
    waits = [sum(wait for wait, *_ in found["steps"]) for found in results]
    assert min(waits[:2]) - waits[2] > rounds * pause_seconds  # half of what it sleeps
    for found in results:
        assert len(found["steps"]) == rounds
        assert all(wait + optimiser + between <= whole for wait, optimiser, between, whole in found["steps"])
        assert all(optimiser > 0 for _, optimiser, *_ in found["steps"])
        for buckets in found["buckets"]:
            assert all(0 <= ready < done for ready, done in buckets)
        assert sum(map(len, found["buckets"])) >= rounds - 1


def test_rank_0_gets_the_step_times_that_are_on_other_machines(trio, tmp_path):
    found = trio.do("apart", folder=str(tmp_path), name="apart", steps=4)
    assert found[0] == [[0, 4], [1, 5], [2, 6]]
    assert found[1:] == [[[1, 5]], [[2, 6]]]
