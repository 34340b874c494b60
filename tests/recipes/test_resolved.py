"""A recorded recipe holds the values that `auto` and empty settings came to, and means the same run."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Recipe
from paceline.codecs import CODECS
from paceline.models import MODELS
from paceline.recipes.assembly import averages, codec_text_of, make_member, make_strategy, resolved
from paceline.strategies import STRATEGIES
from paceline.strategies.averaging import AVERAGING
from paceline.strategies.averaging.members import SETTINGS
from paceline.strategies.lgc import settled

RECIPES = st.builds(
    lambda strategy, codec, model, workers: Recipe().with_settings(
        strategy={"name": strategy, "k": "auto"},
        codec={"name": codec},
        model={"name": model},
        cluster={"workers": workers},
    ),
    st.sampled_from([*STRATEGIES, *AVERAGING]),
    st.sampled_from([*CODECS]),
    st.sampled_from([*MODELS]),
    st.integers(1, 100),
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(recipe=RECIPES)
def test_what_is_written_down_is_the_same_run_and_has_nothing_left_to_resolve(recipe):
    found = resolved(recipe)
    assert resolved(found) == found == Recipe.from_document(json.loads(json.dumps(found.to_document())))
    assert found.strategy.k == "auto"  # a policy of every round, not a value
    assert codec_text_of(found) == codec_text_of(recipe)
    assert found.codec.error_feedback in (True, False)
    if averages(recipe):
        before, after = make_member(recipe), make_member(found)
        workers = recipe.cluster.workers
        assert after.outer.momentum_of(workers) == before.outer.momentum_of(workers)
        assert dataclasses.replace(after, outer=before.outer) == before
        assert not [name for name in SETTINGS[before.name] if getattr(found.strategy, name) == "auto"]
    else:
        assert make_strategy(found) == settled(make_strategy(recipe))
        assert found.strategy.scale_partial != "auto"


@pytest.mark.parametrize("name", ["bmuf", "hpsgd"])
def test_what_was_given_stays(name):
    given_ = {"name": name, "period": 3, "rebase": False}
    found = resolved(Recipe().with_settings(strategy=given_, codec={"name": "one-bit", "error_feedback": False}))
    assert (found.strategy.period, found.strategy.rebase, found.codec.error_feedback) == (3, False, False)


def test_a_model_of_ones_own_and_one_without_a_choice_have_no_norm_to_write_down():
    named = [Recipe().with_settings(model={"name": name}) for name in ("my:net", "mlp", "vgg11")]
    assert [resolved(recipe).model.norm for recipe in named] == ["", "", "batch"]
