"""A recorded run of ranks held against its replay: the same bits, the same but for roundings, or another model."""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.drivers.averaging.job import AveragingRecorder
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.drivers.replayed.averaged_run import replay_averages
from paceline.events import Standing, Window
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_member, make_training
from paceline.runs.ranks import write_recipe

WORKERS = 3
STEPS = [tuple(Window(steps=2) for _ in range(WORKERS))] * 2
NOTHING = tuple(Window(standing=Standing.FLUSHING) for _ in range(WORKERS))


@pytest.fixture(scope="module")
def recipe():
    return Recipe(rounds=2).with_settings(
        cluster={"workers": WORKERS}, strategy={"name": "local-sgd", "period": 2}, data={"split": "iid"}
    )


@pytest.fixture(scope="module")
def played(recipe):
    return replay_averages(STEPS, make_training(recipe, load_data(recipe)), make_member(recipe)).parameters


def recorded(folder, recipe, windows, shared, without=(), averages=None):
    """A folder as ranks leave it; `without` settings of the codec that did not exist yet."""
    write_recipe(recipe, folder)
    document = recipe.to_document()
    for name in without:
        del document["codec"][name]
    rows = [[[w.steps, w.merged_after, int(w.standing)] for w in average] for average in windows]
    story = AveragingRecorder(WORKERS).state_dict(0.0) | {"windows": torch.tensor(rows)}
    story["recorded"] = len(rows) if averages is None else averages
    state = {"recipe": document, "story": story, "sync": {"replica": {"shared": shared}}}
    RankCheckpoints(folder, rank=0).keep(2, state)
    return folder


def test_an_average_that_brings_nothing_is_played_again_and_every_average_is_told(tmp_path, recipe, played):
    told = []
    folder = recorded(tmp_path, recipe, [NOTHING, *STEPS], played)
    assert paceline.replay(folder, on_step=lambda done, averages: told.append((done, averages))).identical
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_run_of_more_averages_than_are_kept_is_refused_in_a_line(tmp_path, recipe, played):
    with pytest.raises(ValueError, match=r"keeps the windows of the first 2 of 9 averages: a run as long as this one"):
        paceline.replay(recorded(tmp_path, recipe, STEPS, played, averages=9))


def test_ranks_that_did_not_come_to_their_last_round_are_compared_up_to_their_checkpoint(tmp_path, recipe, played):
    verdict = paceline.replay(recorded(tmp_path, recipe.with_settings(rounds=3), STEPS, played))
    assert (verdict.difference, verdict.checkpoint, verdict.identical) == (None, 2, False)
    assert verdict.missing == "rank 0's newest checkpoint is of round 2 of 3"


@pytest.mark.parametrize(("apart", "nearly"), [(1e-6, True), (1e-3, False)])
def test_a_sum_in_another_order_is_forgiven_and_another_model_is_not(tmp_path, recipe, played, apart, nearly):
    """A thousandth of the weights is what a wrong learning rate makes of them in some steps; no rounding does."""
    verdict = paceline.replay(recorded(tmp_path, recipe, STEPS, played * (1 + apart)))
    assert not verdict.identical
    assert bool(verdict.nearly) == nearly


def encoded(recipe, codec, plan):
    return recipe.with_settings(codec={"name": codec, "plan": plan})


def played_by(recipe):
    return replay_averages(STEPS, make_training(recipe, load_data(recipe)), make_member(recipe)).parameters


def test_a_record_that_says_no_plan_was_gathered(tmp_path, recipe):
    gathered, two_step = (played_by(encoded(recipe, "one-bit", plan)) for plan in ("gather", "two-step"))
    assert not torch.equal(gathered, two_step)
    folder = recorded(tmp_path / "before", encoded(recipe, "one-bit", "auto"), STEPS, gathered, without=["plan"])
    assert paceline.replay(folder).identical
    assert paceline.replay(
        recorded(tmp_path / "now", encoded(recipe, "one-bit", "two-step"), STEPS, two_step)
    ).identical


IN_ITS_ORDER = "more than two ranks add up in an order of gloo's own"


@pytest.mark.parametrize(
    ("codec", "plan", "apart", "why"),
    [
        ("bfloat16", "all-reduce", 1e-3, f"{IN_ITS_ORDER}, and 16 bits are rounded at every hop"),
        ("bfloat16", "gather", 1e-6, ""),
        ("power-sgd", "all-reduce", 1e-5, IN_ITS_ORDER),
        ("one-bit", "two-step", 1e-6, ""),
    ],
)
def test_roundings_are_forgiven_where_a_ring_adds_up_and_nowhere_else(tmp_path, recipe, codec, plan, apart, why):
    by_plan = encoded(recipe, codec, plan)
    verdict = paceline.replay(recorded(tmp_path, by_plan, STEPS, played_by(by_plan) * (1 + apart)))
    assert not verdict.identical
    assert verdict.nearly == (f"the final weights differ by {apart:.1e} of their length: {why}" if why else "")
