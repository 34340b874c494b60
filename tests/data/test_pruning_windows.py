"""Windows that begin where the learning rate changes: `window_at` in place of windows of one length."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline import Recipe
from paceline.data.pruning import PruningSettings, make_policy
from paceline.data.pruning.fine_pruning import FinePolicy, FineSchedule
from paceline.data.pruning.plan import plan_fine
from paceline.recipes import RecipeError, read_recipe
from paceline.settings import SettingError
from tests.data.pruning_play import SMALL, kept, passes

SHAPES = st.fixed_dictionaries(
    {
        "starting_point": st.integers(0, 5),
        "attenuation": st.sampled_from([1, 1.5, 2, 3]),
        "block": st.integers(1, 6),
        "count": st.integers(0, 6),
    }
).filter(lambda shape: shape["count"] <= shape["block"])
starts = st.sets(st.integers(5, 60), min_size=1, max_size=6).map(lambda found: tuple(sorted(found)))


@given(window=st.integers(5, 12), shape=SHAPES)
def test_windows_that_begin_at_equal_distances_are_windows_of_one_length(window, shape):
    constant = FineSchedule(window=window, **shape)
    given_starts = FineSchedule(window_at=tuple(range(window, 80, window)), **shape)
    for epoch in range(1, 80):
        assert given_starts.is_pruned(epoch) == constant.is_pruned(epoch)
        assert given_starts.starts_at(epoch) == constant.starts_at(epoch)
        assert given_starts.window_of(epoch) == constant.window_of(epoch)


@given(window_at=starts, shape=SHAPES)
def test_each_window_is_pruned_as_its_own_position_and_starting_point_say(window_at, shape):
    """Written out anew: the starting point is divided, and truncated, once for each window before this one."""
    schedule = FineSchedule(window_at=window_at, **shape)
    start, begins, number = shape["starting_point"], 0, 0
    for epoch in range(1, 80):
        if epoch in window_at:
            start, begins, number = int(start / shape["attenuation"]), epoch, number + 1
        position = epoch - begins
        pruned = epoch > 1 and position > 0 and position >= start and epoch % shape["block"] < shape["count"]
        assert schedule.is_pruned(epoch) == pruned
        assert (schedule.window_of(epoch), schedule.starts_at(epoch)) == (number, start)


@given(window_at=starts, epochs=st.integers(1, 80), shape=SHAPES)
def test_a_plan_has_a_row_for_every_window_and_the_epochs_of_the_schedule(window_at, epochs, shape):
    schedule = FineSchedule(window_at=window_at, **shape)
    plan = plan_fine(schedule, 100, epochs=epochs, batch_size=10)
    assert plan.pruned_epochs == tuple(epoch for epoch in range(1, epochs + 1) if schedule.is_pruned(epoch))
    assert [row.first for row in plan.rows] == [1, *(start for start in window_at if start <= epochs)]
    assert [(row.last + 1) for row in plan.rows[:-1]] == [row.first for row in plan.rows[1:]]
    assert plan.rows[-1].last == epochs
    assert plan.paper is None, "the paper's formulas know windows of one length"
    assert "one length" in plan.text()


def test_the_sampler_prunes_the_epochs_of_its_plan_and_forgets_counts_when_a_window_begins():
    settings = {name: value for name, value in SMALL.items() if name != "window"}
    pruning = paceline.FinePruning(50, batch_size=8, window_at=[6, 9], **settings)
    found = kept(passes(pruning, 14))
    assert tuple(epoch for epoch, samples in found.items() if len(samples) < 50) == pruning.plan(14).pruned_epochs
    assert pruning.policy.counts.max() <= 14 - 9 + 1


def test_equal_windows_by_either_name_hand_out_the_same_batches_to_the_bit():
    settings = {name: value for name, value in SMALL.items() if name != "window"}
    constant = paceline.FinePruning(50, batch_size=8, **SMALL)
    given_starts = paceline.FinePruning(50, batch_size=8, window_at=(6, 12), **settings)
    assert passes(constant, 17) == passes(given_starts, 17)
    assert (constant.times_pruned == given_starts.times_pruned).all()


def test_counts_of_a_window_without_an_end_stay_at_their_most():
    import numpy as np

    policy = FinePolicy(2, FineSchedule(window_at=(1,), starting_point=0))
    policy.counts[:], policy._counts_of = 65_535, 1
    policy.judge(5, np.arange(2), np.array([1, 9], np.float32), np.array([2]))
    assert policy.counts.tolist() == [65_535, 65_535]


@pytest.mark.parametrize(
    ("window_at", "told"),
    [
        ((5, 5), "rise"),
        ((9, 4), "rise"),
        ((0, 4), "window_at must be a whole number of at least 1"),
        ((2.5,), "whole number"),
        ((20,), "starting_point must be between 0 and the first of window_at"),
    ],
)
def test_windows_that_cannot_be_are_refused(window_at, told):
    with pytest.raises(ValueError, match=told):
        FineSchedule(window_at=window_at, starting_point=30)


def test_window_and_window_at_are_not_given_together():
    with pytest.raises(ValueError, match="give window or window_at, not both"):
        paceline.FinePruning(50, batch_size=8, window=10, window_at=[10], starting_point=5)
    with pytest.raises(SettingError, match="give window or window_at, not both"):
        PruningSettings(name="fine-pruning", window=30, window_at=(10, 20))


def test_a_state_goes_on_and_one_of_other_windows_is_warned_of():
    def make():
        return paceline.FinePruning(50, batch_size=8, window_at=[6, 9], starting_point=2, block=3, count=2)

    first, second = make(), make()
    whole = passes(make(), 14)
    before = passes(first, 14, stop_after=60)
    second.load_state_dict(first.state_dict())
    assert before + passes(second, 14) == whole
    constant = paceline.FinePruning(50, batch_size=8, window=6, starting_point=2, block=3, count=2)
    with pytest.warns(UserWarning, match=r"window_at=\[6, 9\], here none"):
        constant.load_state_dict(first.state_dict())


def test_a_recipe_has_windows_of_different_length(tmp_path):
    file = tmp_path / "windows.toml"
    file.write_text('[pruning]\nname = "fine-pruning"\nwindow_at = [12, 20]\n', encoding="utf-8")
    recipe = read_recipe(file)
    assert recipe.pruning.window_at == (12, 20)
    assert Recipe.from_document(recipe.to_document()) == recipe
    assert Recipe.from_document({"pruning": {"name": "fine-pruning"}}).pruning.window_at == ()
    assert make_policy(recipe.pruning, 10, seed=0).settings["window_at"] == [12, 20]
    file.write_text('[pruning]\nname = "fine-pruning"\nwindow_at = [4, 20]\n', encoding="utf-8")
    with pytest.raises(RecipeError, match=r"windows\.toml:3: starting_point must be"):
        read_recipe(file)


def test_windows_follow_each_other_without_a_gap():
    schedule = FineSchedule(window_at=(60, 120, 160))
    lengths = [schedule.window_length(number) for number in range(3)]
    assert lengths == [60, 60, 40]
    assert list(itertools.accumulate(lengths)) == [schedule.window_start(number) for number in range(1, 4)]
