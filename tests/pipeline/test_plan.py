"""Plans: what is told, revised, saved and read again."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pipeline import PipelineError
from paceline.pipeline.devices import Device, Link
from paceline.pipeline.plan import Plan
from paceline.pipeline.plan_file import document_of, plan_from
from paceline.pipeline.planning import make_plan
from paceline.pipeline.schedules import SCHEDULES
from paceline.pipeline.text import describe
from tests.pipeline.zoo import mlp, model_and_inputs


@functools.cache
def planned(schedule="1f1b"):
    model, inputs = model_and_inputs("residual")
    return make_plan(model, inputs, stages=2, microbatches=2, schedule=schedule, repeats=3)


def test_a_revised_plan_is_placed_anew_on_the_same_profile():
    plan = planned()
    other = plan.revised(schedule="interleaved", links=Link(bytes_per_second=1e6), states=2.0)
    assert other.profile is plan.profile
    assert (other.stages, other.chunks, len(other.cuts)) == (2, 2, 3)
    assert other.revised(schedule="1f1b", links=Link(), states=1.0) == plan
    slower = plan.revised(devices=[Device(speed=0.1), Device()])
    assert slower.cuts[0] <= plan.cuts[0]
    assert plan.revised(stages=3, schedule="gpipe").stages == 3


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_survives_its_file(schedule, tmp_path):
    plan = planned().revised(schedule=schedule, links=[Link(bytes_per_second=1e9), Link(latency_seconds=0.1)])
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert str(Plan.load(tmp_path / "plan.json")) == str(plan)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_text_keeps_to_its_width_and_names_every_stage_and_schedule(schedule, width):
    plan = planned().revised(schedule=schedule)
    text = describe(plan, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert all(name in text for name in SCHEDULES)
    assert "no cut has a faster one" in " ".join(text.split())
    describe(plan, ascii_only=True).encode("ascii")


def test_schedules_that_cannot_be_are_told_with_their_reason():
    plan = planned("gpipe").revised(stages=3)
    reasons = {prediction.schedule: prediction.why_not for prediction in plan.predictions}
    assert "at least as many micro-batches as stages" in reasons["1f1b"]
    assert not reasons["gpipe"]


def test_predictions_name_the_three_figures_of_idleness():
    for prediction in planned().predictions:
        assert 0 <= prediction.idle < 1
        assert prediction.lecture == pytest.approx(0.5 * (1 - 2 / 3))
    gpipe = next(prediction for prediction in planned().predictions if prediction.schedule == "gpipe")
    assert gpipe.slots == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatches": 4}, "microbatches must divide the sample batch evenly .*take one of 1, 2, 3, 6"),
        ({"stages": 0}, r"stages must be .* \(stages=0\)"),
        ({"stages": 3}, "1f1b needs at least as many micro-batches as stages"),
        ({"schedule": "onef1b"}, "unknown schedule 'onef1b'"),
        ({"memory_bytes": 10}, "does not fit|more than|largest"),
        ({"devices": [1.0]}, r"one for each stage \(stages=2, devices=1\)"),
        ({"devices": [1.0, 2.0], "memory_bytes": 5}, "not both"),
        ({"repeats": 1}, "repeats must be"),
    ],
)
def test_bad_conditions_are_refused(changes, words):
    model, inputs = mlp(), torch.ones(6, 4)
    with pytest.raises(ValueError, match=words):
        make_plan(model, inputs, **({"stages": 2, "microbatches": 2, "repeats": 3} | changes))


@pytest.mark.parametrize("sample", [torch.ones(()), (torch.ones(2, 4), torch.ones(3, 4)), torch.ones(0, 4)])
def test_a_sample_that_is_no_batch_is_refused(sample):
    with pytest.raises(PipelineError, match="same number of samples, at least 1"):
        make_plan(mlp(), sample, stages=2, microbatches=2)


# -- files from elsewhere ----------------------------------------------------------------------------------------------


def places_in(document, path=()):
    """Every place in a document."""
    yield path
    inside = document.items() if isinstance(document, dict) else enumerate(document) if type(document) is list else ()
    for key, value in inside:
        yield from places_in(value, (*path, key))


STRANGE = [None, True, -1, 2**70, 1.5, float("nan"), "", "x", [], [[]], {}, {"x": 1}, -0.5, 10**6]


@given(st.data())
@settings(max_examples=150)
def test_a_damaged_document_is_refused_or_is_a_plan(data):
    document = copy.deepcopy(json.loads(json.dumps(document_of(planned()))))
    path = data.draw(st.sampled_from(list(places_in(document))[1:]))
    spot = document
    for key in path[:-1]:
        spot = spot[key]
    if data.draw(st.booleans()) and isinstance(spot, dict):
        del spot[path[-1]]
    else:
        spot[path[-1]] = data.draw(st.sampled_from(STRANGE))
    try:
        plan = plan_from(document)
    except PipelineError:
        return
    assert len(plan.cuts) == plan.stages * plan.chunks - 1
    assert plan.timeline.step_seconds >= 0


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1, 2", b'{"format": 2}', b"[" * 100_000, b"null"])
def test_a_file_that_is_no_plan_is_refused(content, tmp_path):
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(PipelineError, match="is not a plan"):
        Plan.load(file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(PipelineError, match=r"cannot read the plan .*none\.json: No such file or directory"):
        Plan.load(tmp_path / "none.json")


def test_batch_norm_that_cannot_take_half_a_micro_batch_is_planned():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    plan = make_plan(model, torch.ones(4, 4), stages=2, microbatches=np.int64(2), repeats=3)
    assert json.dumps(document_of(plan))


def test_a_plan_is_plain_values():
    plan = planned()
    assert dataclasses.replace(plan) == plan
    assert plan.dtypes == (torch.float32,)
