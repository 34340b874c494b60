"""What pipelines are measured by: the quickest of several steps, cuts that are compared in the same profile, bars."""

from __future__ import annotations

import pytest

from experiments.core.cut_models import Subject, measured
from experiments.core.ranks import Lane
from experiments.core.story import Size
from experiments.timings import pipeline_placement, plan_beside_load
from experiments.timings.pipeline_balance import claims_of, steps_rows
from experiments.timings.pipeline_idle import TOY as EQUAL_STAGES
from experiments.timings.pipeline_idle import message_seconds, row_of, schedules_for, slower_together
from experiments.timings.pipeline_placement import against_plain, plain_least, problems
from paceline.pipeline.timing import Span, Timeline
from tests.experiments.telling import EXPERIMENTS, TOY


def _step(*rows):
    """Return a step: for each device when it computes, from when to when."""
    return Timeline(
        rows=tuple(
            tuple(Span(device, device, "F", 0, begin, end) for begin, end in row) for device, row in enumerate(rows)
        )
    )


def test_the_quickest_of_several_steps_is_held_against_the_count():
    found = measured(EQUAL_STAGES, repeats=3)
    quick, slow = _step([(0.0, 1.0)], [(1.0, 2.0)]), _step([(0.0, 1.0)], [(3.0, 4.0)])
    row = row_of(found, "gpipe", 1, 0.0, [slow, quick, slow])
    assert (row["measured"], row["measured_seconds"], row["off"]) == (0.5, 2.0, 0.0)
    assert row["every_seconds"] == [4.0, 2.0, 4.0]
    assert row["predicted"] == pytest.approx(0.5)
    simulated = row_of(found, "gpipe", 1, 0.0)
    assert (simulated["measured"], simulated["off"]) == (None, None)


def test_a_message_is_what_lies_between_two_devices_with_nothing_else_to_do():
    """Forward on both and back: gaps of 1, 2 and 1, and none where a device goes on by itself."""
    step = _step([(0.0, 1.0), (7.0, 8.0)], [(2.0, 3.0), (3.0, 6.0)])
    assert message_seconds([step]) == 1.0
    assert message_seconds([_step([(0.0, 2.0)], [(1.0, 3.0)])]) == 0.0  # never less than nothing


def test_how_much_longer_work_takes_when_both_stages_compute():
    alone, together = _step([(0.0, 1.0)], [(1.0, 2.0)]), _step([(0.0, 3.0)], [(0.0, 3.0)])
    lanes = [Lane(plan="gpipe", microbatches=1), Lane(plan="gpipe", microbatches=2), Lane(plan="1f1b", microbatches=2)]
    assert slower_together(lanes, [[alone], [together], [alone]]) == 1.5


def test_with_one_micro_batch_there_is_nothing_that_gpipe_does_not_do():
    assert schedules_for(2, 1) == ["gpipe"]
    assert {"gpipe", "1f1b", "zero-bubble"} <= set(schedules_for(2, 4))


@pytest.mark.parametrize(
    ("method", "predicted", "ratio", "spread", "verdicts"),
    [
        ("equal counts", 1.2, 1.15, 0.0, [True, True]),
        ("equal counts", 1.05, 1.15, 0.0, [False, True]),
        ("equal counts", 1.2, 1.09, 0.5, [True, False]),  # no noise excuses it
        ("torchgpipe", 1.0, 1.0, 0.0, [True, True]),
        ("torchgpipe", 1.0, 0.98, 0.025, [True, None]),  # less than times are spread: reported
        ("torchgpipe", 1.0, 0.98, 0.01, [True, False]),
        ("torchgpipe", 1.0, 0.96, 0.5, [True, False]),  # however disturbed the machine is
        ("torchgpipe", 0.99, 1.0, 0.5, [False, True]),
        ("ours", 1.0, 1.0, 0.0, []),
    ],
)
def test_a_cut_that_is_no_slower_than_ours_is_reported(method, predicted, ratio, spread, verdicts):
    row = {"method": method, "model": "lenet", "stages": 2, "predicted_ratio": predicted, "measured_ratio": ratio}
    claims = claims_of({**row, "spread": spread})
    assert [claim.holds if claim.judged else None for claim in claims] == verdicts
    assert {claim.kind for claim in claims} <= {"bar"}


def test_the_quickest_step_of_each_cut_is_compared_with_our_quickest():
    steps = {
        "equal counts": ([_step([(0.0, 3.0)], [(0.0, 6.0)]), _step([(0.0, 4.0)], [(0.0, 4.0)])], 5.0),
        "ours": ([_step([(0.0, 2.0)], [(0.0, 2.0)]), _step([(0.0, 3.0)], [(0.0, 3.0)])], 2.5),
    }
    other, ours = steps_rows("lenet", steps)
    assert (other["measured_seconds"], other["idle"], other["every_seconds"]) == (4.0, 0.0, [6.0, 4.0])
    assert (other["measured_ratio"], other["median_ratio"], other["predicted_ratio"]) == (2.0, 2.0, 2.0)
    assert (ours["measured_ratio"], ours["off"]) == (1.0, 0.25)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("layers", "devices"), [(6, 3), (12, 4), (20, 2)])
def test_the_plain_recursion_comes_to_our_slowest_piece(layers, devices, seed):
    assert against_plain(layers, devices, seed, 1)["same"]
    for name in ("plain", "links"):
        problem = problems(layers, devices, seed)[name]
        assert plain_least(problem) == pytest.approx(problem.placed().slowest.seconds)


def _tell(name, **settings):
    return EXPERIMENTS[name].tell(TOY, lambda jobs: pytest.fail("a timing has no jobs"), **settings)


def test_a_recursion_that_comes_to_another_piece_is_reported(monkeypatch):
    text = "the plain recursion's slowest piece is ours"
    assert [claim.holds for claim in _tell("pipeline-placement").claims if claim.text == text] == [True]
    monkeypatch.setattr(pipeline_placement, "plain_least", lambda problem: 1e-9)
    assert [claim.text for claim in _tell("pipeline-placement").missed] == [text]


def test_layers_and_devices_of_a_placement_can_be_set():
    found = _tell("pipeline-placement", layers=24, devices=3, repeat=2)
    assert found.numbers["size"] == {"layers": 24, "devices": 3, "plain_layers": 20, "plain_devices": 4}
    assert {len(row["seconds"]) for row in found.numbers["rows"]} == {2}
    assert [row["row"] for row in found.numbers["rows"]] == [
        "plain", "links", "devices", "memory", "refused", "chunks"
    ]  # fmt: skip


def test_other_seeds_draw_other_models():
    first, other = (
        EXPERIMENTS["pipeline-placement"].tell(Size("toy", (seed,)), lambda jobs: jobs).numbers["rows"][0]
        for seed in (200, 201)
    )
    assert first["slowest_seconds"] != other["slowest_seconds"]


@pytest.mark.parametrize(("worst", "holds"), [(1.03, True), (1.04, False)])
def test_the_worst_cut_beside_load_is_held_against_the_median_of_quiet_ones(monkeypatch, worst, holds):
    """A profile is told here by its way and turn; three turns, in each of which every way is measured once."""
    measured_ways, seconds = [], {}

    def profile_by(way, subject, graph, repeats):
        measured_ways.append(way)
        turn = measured_ways.count(way)
        profile = object.__new__(plan_beside_load.Profile)
        seconds[id(profile)] = {
            plan_beside_load.QUIET: [1.0, 2.0, 0.5],
            plan_beside_load.BESIDE: [1.0, worst, 1.0],
            plan_beside_load.OLD: [3.0, 1.0, 1.0],
        }[way][turn - 1]
        kept.append(profile)
        return profile

    kept = []
    monkeypatch.setattr(plan_beside_load, "profile_by", profile_by)
    monkeypatch.setattr(plan_beside_load, "judged", lambda judge, profile, stages: seconds[id(profile)])
    monkeypatch.setattr(plan_beside_load, "seconds_of", lambda profile: 2.0 * seconds.get(id(profile), 0.5))
    found = _tell("plan-beside-load", repeat=3)
    (row,) = found.numbers["rows"]
    assert [measured_ways[turn : turn + 3] for turn in (0, 3, 6)] == [
        ["quiet", "beside load", "beside load, old way"],
        ["beside load", "beside load, old way", "quiet"],
        ["beside load, old way", "quiet", "beside load"],
    ]
    assert (row["beside_ratio"], row["old_ratio"]) == (worst, 3.0)
    assert [claim.holds for claim in found.claims] == [holds]


@pytest.mark.parametrize("name", ["pipeline-balance", "plan-beside-load"])
def test_a_network_that_is_not_among_them_is_refused(name):
    with pytest.raises(ValueError, match="unknown network 'vgg11'; choose from lenet"):
        _tell(name, only=("vgg11",))


def test_samples_of_a_micro_batch_can_be_set():
    subject = Subject(model="lenet", microbatch=2)
    assert subject.sized(5, 1) == Subject(model="lenet", microbatch=5, seed=1)
    assert subject.sized(0, 0) == subject
