"""Ranks that prune together: two and four real processes on gloo."""

from __future__ import annotations

import re

import pytest

from tests.data.pruning_jobs import KINDS, SAMPLES
from tests.data.pruning_play import kept, passes
from tests.distributed.ranks import JobError, Ranks
from tests.waiting import until_there

pytestmark = pytest.mark.xdist_group("pruning ranks")
EPOCHS = 8


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("four"), 4, "tests.data.pruning_jobs") as ranks:
        yield ranks


def alone(kind, batch_size, **more):
    """What one process does that has the samples of all ranks in a batch."""
    pruning = KINDS[kind](batch_size=batch_size, **more)
    return passes(pruning, EPOCHS), pruning


def with_small_rests_joined(taken, world):
    """The batches of one process as several ranks take them: no last step with one sample for each of them."""
    joined = []
    for epoch, batch in taken:
        if len(batch) <= world and joined[-1][0] == epoch:
            joined[-1] = (epoch, joined[-1][1] + batch)
        else:
            joined.append((epoch, batch))
    return joined


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_take_the_same_steps_and_together_keep_whom_one_process_keeps(four, kind, world):
    expected, pruning = alone(kind, 3 * world)
    expected = with_small_rests_joined(expected, world)
    found = four.do("handed_out", kind=kind, world=world, batch_size=3, epochs=EPOCHS)
    for first in range(0, 4, world):
        ranks = found[first : first + world]
        steps = [[(epoch, len(batch)) for epoch, batch in rank["taken"]] for rank in ranks]
        assert all(other == steps[0] for other in steps)
        assert len(steps[0]) == len(expected)
        for step, (epoch, batch) in enumerate(expected):
            together = [index for rank in ranks for index in rank["taken"][step][1]]
            assert ranks[0]["taken"][step][0] == epoch
            assert together[: len(batch)] == batch
            assert len(together) - len(batch) < world  # the last step is filled up
        assert kept([tuple(step) for rank in ranks for step in rank["taken"]]) == kept(expected)
        for rank in ranks:
            assert rank["times_pruned"] == pruning.times_pruned.tolist()
            assert rank["difficulty"] == pruning.difficulty().tolist()
    assert pruning.times_pruned.sum() > SAMPLES // 2


def test_drop_last_leaves_ranks_with_whole_batches(four):
    expected, _ = alone("fine-pruning", 12, drop_last=True)
    found = four.do("handed_out", kind="fine-pruning", world=4, batch_size=3, epochs=EPOCHS, drop_last=True)
    assert {len(batch) for rank in found for _, batch in rank["taken"]} == {3}
    assert [len(rank["taken"]) for rank in found] == [len(expected)] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_gets_a_batch_of_one_sample_which_batch_norm_refuses(four, kind):
    """66 samples are two steps of 32 and one for each of two ranks; 34, those of a pruned epoch, one and one each."""
    sizes = four.do("normalised", kind=kind, samples=66, batch_size=16, epochs=200)
    assert all(rank == sizes[0] for rank in sizes)
    assert min(sizes[0]) > 1
    assert max(sizes[0]) == 17


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_knows_the_losses_of_watched_samples_whoever_observed_them(four, kind):
    watch = [0, 7, 33, 60]
    _, pruning = alone(kind, 12, watch=watch)
    known = [[sample, [list(each) for each in found]] for sample, found in pruning.loss_history.items()]
    assert four.do("watched", kind=kind, watch=watch, epochs=EPOCHS) == [known] * 4
    assert all(found for _, found in known)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_save_in_mid_epoch_go_on_as_if_nothing_had_been(four, kind):
    undisturbed = four.do("handed_out", kind=kind, world=4, batch_size=3, epochs=EPOCHS)
    for stop_after in (2, 14):
        assert four.do("resumed", kind=kind, epochs=EPOCHS, stop_after=stop_after) == [r["taken"] for r in undisturbed]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("seeds", r"ranks do not agree when they begin an epoch: fingerprint of the order is \d+ on rank 1, \d+ on"),
        ("samples", "samples is 61 on rank 2, 60 on rank 0"),
        ("early", "ranks do not agree when they .*"),
        ("breaks", "ranks do not agree when they .*"),
        ("state", "this state is from the middle of an epoch, with rank=.*give every rank its own state"),
        ("rank", r"must be those of the process group \(rank=0, world_size=2"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_all_told(four, how, told):
    for said in four.do("refused", how=how):
        assert re.search(told, said), said


def test_killed_and_resumed_equals_undisturbed_and_a_rank_that_does_not_come_is_named(tmp_path):
    for name in ("undisturbed", "disturbed", "first", "second"):
        (tmp_path / name).mkdir()
    disturbed = tmp_path / "disturbed"
    with Ranks(tmp_path / "first", 2, "tests.data.pruning_jobs") as ranks:
        expected = ranks.do("trained", folder=str(tmp_path / "undisturbed"), epochs=5)
        ranks.tell("trained", folder=str(disturbed), epochs=5, until=19)
        until_there(disturbed / "0-19.pt", every_seconds=0.01)
        ranks.kill(1)
        with pytest.raises(JobError):
            ranks.answers()
    with Ranks(tmp_path / "second", 2, "tests.data.pruning_jobs") as ranks:
        found = ranks.do("trained", folder=str(disturbed), epochs=5)
        waited, _ = ranks.do("refused", how="absent")
    for rank in (0, 1):
        assert found[rank]["went_on_from"] in (18, 19)
        assert {**found[rank], "went_on_from": None} == expected[rank]
    assert sum(expected[0]["pruned"]) > 0
    assert re.search("rank 0 waited to begin an epoch in pruning, and not all ranks came .*[ /]1", waited)
