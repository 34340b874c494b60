"""How far a cut depends on noise: against all cuts of small models, and in the plan's own words."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pipeline import PipelineError
from paceline.pipeline.certainty import TOLERATED, certainty
from paceline.pipeline.devices import Device
from paceline.pipeline.placement import Placement
from paceline.pipeline.plan import Batch, Plan
from paceline.pipeline.plan_file import document_of, plan_from
from paceline.pipeline.profile import Layer, Profile

lengths = st.floats(0.01, 10.0)


def plan_of(seconds, spreads, stages=2, speeds=None):
    layers = tuple(
        Layer(name=f"layer{place}", forward_seconds=each / 2, input_seconds=each / 2, spread=spread)
        for place, (each, spread) in enumerate(zip(seconds, spreads, strict=True))
    )
    plan = Plan(
        model="made up",
        profile=Profile(layers=layers),
        placement=Placement(cuts=(), pieces=(), devices=()),
        batch=Batch(samples=2 * max(4, stages), shapes=((2, 3),), dtypes=("float32",)),
        microbatches=max(4, stages),
    )
    return plan.placed([Device(speed=speed) for speed in speeds or [1.0] * stages], chunks=1)


@st.composite
def plans(draw):
    stages = draw(st.integers(1, 3))
    seconds = draw(st.lists(lengths, min_size=stages, max_size=7))
    spreads = draw(st.lists(st.floats(0, 1), min_size=len(seconds), max_size=len(seconds)))
    speeds = draw(st.lists(st.floats(0.5, 2), min_size=stages, max_size=stages))
    return plan_of(seconds, spreads, stages, speeds)


def slowest(seconds, cuts, speeds):
    ends = [0, *cuts, len(seconds)]
    return max(sum(seconds[a:b]) / speed for (a, b), speed in zip(itertools.pairwise(ends), speeds, strict=True))


@given(plans())
def test_the_cost_of_a_wrong_cut_is_that_of_all_cuts_tried(plan):
    """Plainly: raise one piece after the other, try every cut there is, and see how much better the best is."""
    seconds, speeds = [each.seconds for each in plan.profile.layers], [each.speed for each in plan.placement.devices]
    worst = 0.0
    for piece in plan.placement.pieces:
        inside = range(piece.first, piece.last)
        error = math.sqrt(sum((seconds[at] * plan.profile.layers[at].spread) ** 2 for at in inside))
        factor = 1 + error / sum(seconds[at] for at in inside)
        raised = [factor * each if at in inside else each for at, each in enumerate(seconds)]
        every = itertools.combinations(range(1, len(seconds)), plan.stages - 1)
        best = min(slowest(raised, cuts, speeds) for cuts in every)
        worst = max(worst, slowest(raised, plan.cuts, speeds) / best - 1)
    assert certainty(plan).cut == pytest.approx(worst, abs=1e-9)


@given(plans(), st.floats(0, 1))
def test_less_spread_is_less_doubt_about_the_step(plan, share):
    layers = tuple(dataclasses.replace(each, spread=share * each.spread) for each in plan.profile.layers)
    calmer = dataclasses.replace(plan, profile=dataclasses.replace(plan.profile, layers=layers))
    assert certainty(calmer).step <= certainty(plan).step + 1e-12
    assert certainty(calmer).spread <= certainty(plan).spread + 1e-12
    assert certainty(plan).step <= max(each.spread for each in plan.profile.layers) + 1e-9


@given(plans())
def test_a_plan_speaks_of_noise_only_where_it_matters(plan):
    found = plan.certainty
    noted = [note for note in plan.notes if "from round to round" in note]
    assert len(noted) == (max(found.cut, found.step) > TOLERATED)
    assert ("another cut" in "".join(noted)) == (found.cut > TOLERATED)
    assert all(note in " ".join(str(plan).split()) for note in noted)
    assert max(map(len, str(plan).splitlines())) <= 80


def test_one_heavy_layer_that_varies_decides_the_cut():
    plan = plan_of([1.0, 1.0, 1.0, 1.0], [0.0, 0.9, 0.0, 0.0])
    assert plan.cuts == (2,)
    assert plan.certainty.cut == 0.0  # 1 + 1.9 against 2: the other cuts have 3 and more on one side
    other = plan_of([1.0, *[0.1] * 30], [0.6, *[0.0] * 30])
    assert other.certainty.cut == pytest.approx(2.6 / 2.3 - 1, abs=0.05)
    assert "plan again on a quieter machine" in other.notes[-1]


def test_a_profile_of_before_has_no_spread_and_no_doubt():
    plan = plan_of([1.0, 2.0, 3.0], [0.5, 0.5, 0.5])
    document = json.loads(json.dumps(document_of(plan)))
    assert plan_from(document).certainty == plan.certainty
    for layer in document["profile"]["layers"]:
        del layer["spread"]
    old = plan_from(document)
    assert (old.certainty.spread, old.certainty.cut, old.certainty.step, old.notes) == (0.0, 0.0, 0.0, ())
    document["profile"]["layers"][0]["spread"] = -0.1
    with pytest.raises(PipelineError, match="spread"):
        plan_from(document)


def test_a_large_model_is_looked_at_in_part():
    """400 layers on 32 devices: the pieces that matter most are raised, and it takes a moment."""
    plan = plan_of([1.0 + (place % 7) / 10 for place in range(400)], [0.2] * 400, stages=32)
    assert 0 <= plan.certainty.cut < 0.2
