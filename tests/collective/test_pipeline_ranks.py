"""Pipelines on real processes: their gradients, losses and weights are those of one process."""

from __future__ import annotations

import re

import pytest

from paceline.pipeline.schedules import SCHEDULES, orders
from tests.distributed.ranks import Ranks
from tests.waiting import until_there

pytestmark = pytest.mark.xdist_group("pipeline ranks")  # four processes for all of them
STEPS = 8
CLOSE = 1e-12  # all in float64: what is left is the order of sums


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("four"), 4, "tests.collective.pipeline_jobs") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def names(four):
    """The names of a model's state and of its parameters."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = four.do("names_of", ranks=[0], name=name)[0]
        return found[name]

    return of


def equal_one_process(found, names, close=CLOSE):
    """All that every rank has is what one process has, and together they have all of it."""
    saved, trained = names
    for rank in found:
        assert rank["losses"] < close
        assert rank["gradients"] < close
        assert rank["weights"] < close
    assert sorted({name for rank in found for name in rank["names"]}) == saved
    assert sorted({name for rank in found for name in rank["trained"]}) == trained


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "cnn", "rnn"])
def test_steps_on_four_stages_equal_one_process(four, names, name, schedule):
    found = four.do("trained", name=name, schedule=schedule, stages=4, world=4, sizes=[12] * STEPS)
    equal_one_process(found, names(name))


@pytest.mark.parametrize("schedules", [["gpipe", "interleaved"], ["1f1b", "zero-bubble"]])
@pytest.mark.parametrize("name", ["mlp", "cnn", "rnn"])
def test_steps_on_two_stages_equal_one_process(four, names, name, schedules):
    found = four.do("trained", name=name, schedule=schedules, stages=2, world=2, sizes=[12] * STEPS)
    for pair in (found[:2], found[2:]):
        equal_one_process(pair, names(name))


@pytest.mark.parametrize(
    ("name", "schedule", "shared"),
    [
        ("tied", "zero-bubble", {"embed.weight": [0, 3], "late.weight": [0, 2]}),
        ("tied", "interleaved", {"embed.weight": [0, 3], "late.weight": [0, 1]}),
        ("row", "zero-bubble", {"0.weight": [0, 2], "3.weight": [0, 2]}),
        ("fixed", "zero-bubble", {}),
        ("fixed", "1f1b", {}),
    ],
)
def test_shared_weights_whole_numbers_and_tensors_without_gradient_cross_as_they_should(
    four, names, name, schedule, shared
):
    found = four.do("trained", name=name, schedule=schedule, stages=4, world=4, sizes=[12] * 4)
    equal_one_process(found, names(name))
    saved, _ = names(name)
    held = {name: [place for place, rank in enumerate(found) if name in rank["names"]] for name in saved}
    assert {name: places for name, places in held.items() if len(places) > 1} == shared


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_batch_norm_equals_one_process_that_runs_the_micro_batches_in_turn(four, names, schedule):
    found = four.do("trained", name="bn", schedule=schedule, stages=4, world=4, sizes=[12] * 4, by_microbatch=True)
    equal_one_process(found, names("bn"))
    assert any("running_var" in name for rank in found for name in rank["names"])


def test_weights_of_the_shape_of_what_they_are_added_to_have_gradients_of_their_own(four, names):
    more = {"sizes": [12] * 2, "by_microbatch": True}
    found = four.do("trained", name="added", schedule=["zero-bubble", "1f1b"], stages=2, world=2, **more)
    for pair in (found[:2], found[2:]):
        equal_one_process(pair, names("added"))
    assert {"one", "other", "wide.weight"} <= set(found[1]["trained"])  # in one piece, behind another


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_batches_that_are_smaller_or_larger_than_planned_equal_one_process(four, names, schedule):
    found = four.do("trained", name="mlp", schedule=schedule, stages=4, world=4, sizes=[12, 8, 2, 20, 12, 7])
    equal_one_process(found, names("mlp"))


def test_a_rest_that_the_model_cannot_train_on_is_refused_by_all_and_little_is_kept(four):
    for rank in four.do("small_rests"):
        assert re.search("with 1 samples the model does something else.*than 1 value.*drop_last=True", rank["told"])
        assert 0 < rank["loss"] < 10
        assert rank["counted"] in ([], [2])
        assert rank["runners"] <= 6


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_two_replicas_equal_one_process_on_the_joined_batch(four, names):
    found = four.do("replicated", codec="identity", sizes=[12, 12, 10, 11], seeds=[0, 5])
    equal_one_process(found, names("tied"))


@pytest.mark.parametrize("codec", ["qsgd", "top-k fraction=0.3"])
def test_replicas_whose_gradients_travel_encoded_stay_equal_and_close_to_one_process(four, names, codec):
    found = four.do("replicated", codec=codec, sizes=[12, 12, 10, 11], name="tied in float32")
    states = [rank["state"] for rank in found]
    assert states[0] == states[2]
    assert states[1] == states[3]
    for name in set(states[0]) & set(states[1]):  # held by both stages
        assert states[0][name] == states[1][name]
    assert sorted({name for rank in found for name in rank["trained"]}) == names("tied")[1]
    assert found[0]["sent"] > 0
    for rank in found:
        assert CLOSE < rank["losses"] < 0.05
        assert rank["weights"] < 0.1


def test_replicas_that_would_round_their_doubles_are_refused_on_all_ranks(four):
    for told in four.do("refused_doubles"):
        assert re.search(r"^PipelineError.*codecs carry float32, and this model has float64 parameters", told)


def test_steps_add_up_between_replicas_and_holders_and_losses_may_be_sums(four):
    for rank in four.do("accumulated"):
        assert rank["far"] < CLOSE
        assert rank["norm"] == pytest.approx(1.0, abs=1e-9)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_is_refused_is_refused_by_all_ranks_alike_and_the_pipeline_goes_on(four, names):
    found = four.do("refused")
    equal_one_process(found, names("mlp"))
    wanted = [
        r"inputs must be \[samples, 5\]",
        "inputs must be torch.float64",
        "at least one sample",
        r"the same number of samples: stage 0 \(rank 0\) has 12, stage 3 \(rank 3\) has 11",
        r"must be a tensor or a tuple of tensors \(str\)",
        "takes 1 inputs",
        r"stage 3 \(rank 3\): targets must be",
        "reduction='none'",
        "reduction='none'",
        "reduction=tensor",
        "loss_function must be callable",
        "no_grad",
        "it has no",
        r"tensors with content \(8.bias is ndarray\)",
        r"tensors with content \(8.bias is NoneType\)",
        r"tensors with content \(8.bias is torch.strided on meta\)",
        r"stage 1 \(rank 1\): a state must be a mapping of names to tensors \(int\)",
    ]
    for rank in found:
        assert rank["told"] == found[0]["told"]
        for told, pattern in zip(rank["told"], wanted, strict=True):
            assert told.startswith("PipelineError")
            assert re.search(pattern, told)


def test_plans_that_do_not_fit_or_differ_are_refused_by_all_ranks(four):
    wanted = [
        r"must be a multiple of the stages \(ranks=4, stages=3\)",
        "that of rank 2 has 2 stages, that of rank 0 has 4",
        r"same plan: stage 2 \(rank 2\) has gpipe stages=4 chunks=1 microbatches=2",
        r"stage 1 \(rank 1\): the plan was made for another model",
        r"same codec: stage 3 \(rank 3\) has QSGD",
    ]
    for rank in four.do("refused_plans"):
        for told, pattern in zip(rank, wanted, strict=True):
            assert told.startswith("PipelineError")
            assert re.search(pattern, told)


def test_models_that_differ_only_in_the_sizes_of_tensors_are_refused_by_all_ranks(four):
    for rank in four.do("refused_sizes"):
        for told, samples in zip(rank["told"], (3, 1), strict=True):
            assert told.startswith("PipelineError")
            assert re.search(rf"the same tensor sizes for {samples} samples: stage 1 \(rank 1\) has", told)
        assert 0 < rank["loss"] < 10


@pytest.mark.parametrize(
    ("where", "rank", "own", "others"),
    [
        ("loss", 3, "KeyError.*in the loss function", r"stage 3 \(rank 3\) has failed: KeyError: 'no such class'"),
        ("shape", 3, "the loss function must return one number", "the loss function must return one number"),
        ("detached", 3, "must return a loss with a gradient", "must return a loss with a gradient"),
        ("layer", 1, "LookupError: my layer fails in forward of micro-batch 0 in stage 1", "rank 1.*my layer fails"),
    ],
)
def test_what_fails_in_the_users_own_code_is_raised_there_and_told_to_all_at_once(four, where, rank, own, others):
    found = four.do("failing", where=where)
    for place, told in enumerate(found):
        assert re.search(own if place == rank else others, told["told"])
        assert told["took"] < 60  # and not the deadline, which is 120
        assert "must be made anew" in told["again"]


# -- the rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule", "samples"), [("dropout", "1f1b", 16), ("fixed", "interleaved", 10), ("row", "gpipe", 8)]
)
def test_predictions_are_those_of_the_model_in_eval_mode_on_every_rank(four, name, schedule, samples):
    found = four.do("predicted", name=name, schedule=schedule, samples=samples)
    assert found[0]["far"] < CLOSE
    assert all(all(rank["modes"]) for rank in found)  # it trains on
    assert {rank["sum"] for rank in found} == {found[0]["sum"]}
    assert {rank["refused"] for rank in found} == {found[0]["refused"]}
    assert "something else in eval mode" in found[0]["refused"]


def test_outputs_may_have_several_rows_for_each_sample_and_must_begin_with_the_samples(four):
    for rank in four.do("turned", samples=10):
        assert rank["far"] < CLOSE
        for told in rank["told"]:
            assert re.search(r"PipelineError.*\[\[4, 4, 2\]\] with 4 samples, \[\[4, 5, 2\]\] with 5", told)


def test_a_whole_state_goes_into_another_pipeline_whose_ranks_keep_only_their_own(four, names):
    found = four.do("saved")
    saved, _ = names("tied")
    assert [rank["whole"] for rank in found] == [saved, None, None, None]
    assert sorted({name for rank in found for name in rank["held"]}) == saved
    for rank in found:
        assert rank["held"] != saved
        assert rank["far"] == 0
        assert rank["own"] == 0
        assert rank["losses"] < CLOSE
        assert "it has no embed.weight" in rank["missing"]


def test_a_weight_with_two_names_on_a_later_stage_is_collected_once(four, names):
    found = four.do("saved_again")
    assert found[1] is None
    assert sorted(found[0]) == names("again")[0]
    assert set(found[0].values()) == {0.0}


def test_a_model_too_big_for_one_device_trains_in_two_stages_that_fit(four):
    found = four.do("in_memory")
    assert [rank["planned"] for rank in found] == [found[0]["planned"], found[1]["planned"]] * 2  # one plan for all
    for rank in found:
        assert rank["alone"] > rank["limit"]
        assert re.search("needs|need ", rank["refused"])
        assert rank["planned"] <= rank["limit"]
        assert rank["weights"] + rank["activations"] <= rank["planned"]  # buffers of messages are in the plan too
        assert rank["weights"] + rank["activations"] > rank["planned"] / 2
        assert rank["losses"][-1] < rank["losses"][0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_spans_are_what_the_schedule_orders(four, schedule):
    found = four.do("recorded", schedule=schedule)
    chunks = SCHEDULES[schedule].chunks
    for stage, (rank, order) in enumerate(zip(found, orders(schedule, 4, 4, chunks), strict=True)):
        done = [(piece, kind, microbatch) for _, piece, kind, microbatch, _, _ in rank["spans"]]
        assert {span[0] for span in rank["spans"]} == {stage}
        expected = [tuple(action) for action in order]
        if schedule == "zero-bubble" and stage == 0:  # its inputs need no gradient: the whole backward is one part
            expected = [action for action in expected if action[1] != "W"]
        assert done == expected
        assert rank["off"] == 0
        times = [time for span in rank["spans"] for time in span[4:]]
        assert times == sorted(times)


def test_a_plan_is_measured_once_for_the_ranks_of_a_process_group(four):
    first, second, third, fourth = four.do("planned_in_pairs")
    assert first == second
    assert third == fourth
    assert first[0] != first[1]  # measured anew
    assert first[0] != third[0]


def test_a_killed_rank_is_named_by_all_others(four, tmp_path):
    """The last one: it leaves three of the four."""
    four.tell("until_killed", folder=str(tmp_path))
    until_there(*(tmp_path / str(rank) for rank in range(4)))  # all take steps
    four.kill(1)
    for told in four.answers([0, 2, 3]):
        assert re.search(r"stage 1 \(rank 1\) is gone", told["told"])
        assert told["took"] < 60  # and not the deadline, which is 120
