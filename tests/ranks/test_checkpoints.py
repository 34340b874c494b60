"""Where ranks begin: which checkpoints they go on from, which they remove, and which they leave alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from paceline.distributed.stores import StoreGather
from paceline.drivers.ranks.checkpoints import RankCheckpoints, agreed_start
from paceline.traces.run_settings import difference

RECIPE = {"seed": 0, "optimizer": {"lr": 0.1, "decay_at": [3]}, "data": {"directory": "/here"}}
TIMEOUT_SECONDS = 60.0


def keep(folder, rank, *rounds, recipe=RECIPE, launch="first"):
    checkpoints = RankCheckpoints(folder, rank)
    checkpoints.claim(launch)
    for number in rounds:
        checkpoints.keep(number, {"recipe": recipe, "weight": torch.tensor([float(number)])})


def start(folder, *, launch="first", resume=False, recipe=RECIPE, ranks=2, defaults=None):
    """All ranks of a life agree where they begin; what each goes on from, or how it refuses."""
    store = dist.HashStore()

    def be(rank):
        gather = StoreGather(store, rank, ranks, timeout_seconds=TIMEOUT_SECONDS, launch=launch)
        try:
            state = agreed_start(RankCheckpoints(folder, rank), gather, resume=resume, recipe=recipe, defaults=defaults)
        except ValueError as error:
            return str(error)
        return None if state is None else state["weight"].item()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(be, range(ranks)))


def held(folder, ranks=2):
    return [RankCheckpoints(folder, rank).held() for rank in range(ranks)]


def test_a_new_run_begins_and_is_known_to_be_of_this_launch(tmp_path):
    assert start(tmp_path, launch="mine") == [None, None]
    assert [RankCheckpoints(tmp_path, rank).launch for rank in range(2)] == ["mine", "mine"]


def test_a_launch_that_is_started_again_goes_on_from_what_all_have(tmp_path):
    keep(tmp_path, 0, 50, 60)
    keep(tmp_path, 1, 40, 50)
    assert start(tmp_path) == [50.0, 50.0]


def test_a_folder_that_was_refused_is_refused_to_the_next_life_too_and_nothing_in_it_is_touched(tmp_path):
    """torchrun answers the refusal by starting the ranks again: they went on with another recipe's model."""
    keep(tmp_path, 1, 50, launch="last week")
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    for _ in range(2):
        said = start(tmp_path, launch="today", recipe=RECIPE | {"seed": 1})
        assert (
            said == [f"rank 1: {tmp_path} holds a run; give another --out, or go on with it: --resume {tmp_path}"] * 2
        )
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before


def test_who_is_told_to_resume_goes_on_with_another_launch_s_run(tmp_path):
    for rank in range(2):
        keep(tmp_path, rank, 50, launch="last week")
    assert start(tmp_path, launch="today", resume=True) == [50.0, 50.0]


def test_what_a_dead_life_left_is_removed_before_a_new_one_comes_to_the_same_rounds(tmp_path):
    """Rank 1 died before it had written 60. The next life came to its own 60, and died when only rank 1 had it."""
    keep(tmp_path, 0, 50, 60)
    keep(tmp_path, 1, 40, 50)
    assert start(tmp_path) == [50.0, 50.0]
    assert held(tmp_path) == [[50], [50, 40]]
    keep(tmp_path, 1, 60)
    assert start(tmp_path) == [50.0, 50.0]  # not rank 0's 60 of one life and rank 1's of another


def test_a_life_that_began_before_what_the_dead_left_can_be_gone_on_with(tmp_path):
    """Rank 0's 60 and 70 of a dead life took the two places there are, and its new 50 was never offered."""
    for rank in range(2):
        keep(tmp_path, rank, 40, launch="first")
    keep(tmp_path, 0, 60, 70, launch="first")
    checkpoints = RankCheckpoints(tmp_path, 0)
    checkpoints.keep(50, {"recipe": RECIPE, "weight": torch.tensor([50.0])})
    keep(tmp_path, 1, 50)
    assert start(tmp_path) == [50.0, 50.0]
    assert [rounds[0] for rounds in held(tmp_path)] == [50, 50]


def test_what_a_crash_left_half_replaced_does_not_come_back(tmp_path):
    for rank in range(2):
        keep(tmp_path, rank, 50)
    keep(tmp_path, 0, 60)
    folder = tmp_path / "rank-0"
    (folder / "checkpoint-00000060").rename(folder / ".replaced-checkpoint-00000060")
    assert start(tmp_path) == [50.0, 50.0]
    keep(tmp_path, 0, 55)
    assert held(tmp_path)[0] == [55, 50]


def test_a_launch_that_died_in_its_first_checkpoint_begins_anew(tmp_path):
    keep(tmp_path, 0, 10)
    keep(tmp_path, 1)  # it was here, and has not come to write one
    assert start(tmp_path) == [None, None]
    assert held(tmp_path) == [[], []]


@pytest.mark.parametrize("resume", [True, False])
def test_a_rank_that_lacks_its_folder_is_named_and_the_others_keep_theirs(tmp_path, resume):
    keep(tmp_path, 0, 10)
    (said,) = set(start(tmp_path, resume=resume))
    assert said.startswith("there is no checkpoint that all ranks have: rank 1 lacks that of round 10")
    assert held(tmp_path) == [[10], []]


@pytest.mark.parametrize("resume", [True, False])
def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(tmp_path, resume):
    for rank in range(2):
        keep(tmp_path, rank, 10)
        (tmp_path / f"rank-{rank}" / "checkpoint-00000010" / "state.json").write_text("{}")
    (said,) = set(start(tmp_path, resume=resume))
    assert said == f"rank 0: no checkpoint in {tmp_path / 'rank-0'} can be read"
    assert (tmp_path / "rank-1" / "checkpoint-00000010").is_dir()


def test_another_recipe_is_refused_by_all_with_the_rank_and_both_values(tmp_path):
    keep(tmp_path, 0, 10)
    keep(tmp_path, 1, 10, 20, recipe=RECIPE | {"optimizer": {"lr": 0.2, "decay_at": [3]}})
    (said,) = set(start(tmp_path))
    assert said == (
        f"rank 1: the checkpoint of round 10 in {tmp_path} is of another recipe: optimizer.lr was 0.2, and is 0.1 now"
    )
    assert held(tmp_path) == [[10], [20, 10]]


def test_a_setting_that_did_not_exist_when_a_run_began_has_its_default(tmp_path):
    for rank in range(2):
        keep(tmp_path, rank, 10)
    defaults = {"seed": 1, "optimizer": {"lr": 0.05, "trust_coefficient": 0.001}, "pruning": {"name": "none"}}
    newer = RECIPE | {"optimizer": RECIPE["optimizer"] | {"trust_coefficient": 0.001}, "pruning": {"name": "none"}}
    assert start(tmp_path, recipe=newer, defaults=defaults) == [10.0, 10.0]
    other = newer | {"optimizer": newer["optimizer"] | {"trust_coefficient": 0.002}}
    (said,) = set(start(tmp_path, recipe=other, defaults=defaults))
    assert said.endswith("is of another recipe: optimizer.trust_coefficient was 0.001, and is 0.002 now")


def test_what_makes_two_recipes_different():
    assert difference(RECIPE, RECIPE | {"optimizer": {"lr": 0.1, "decay_at": (3,)}}) == ""
    assert difference(RECIPE, RECIPE | {"data": {"directory": "/there"}}) == ""  # the same data, elsewhere
    assert difference(RECIPE, RECIPE | {"rounds": 7}) == "rounds was null, and is 7 now"
    assert difference(RECIPE | {"codec": {"name": "one-bit"}}, RECIPE) == (
        'codec was {"name": "one-bit"}, and is null now'
    )
