"""Averaging on torch.distributed: three real processes on gloo, for all of these tests."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.distributed.agreement import SHORT_CHARACTERS, short_text
from paceline.drivers.ranks.heartbeats import Heartbeats
from paceline.drivers.ranks.tracked_model import TrackedModel
from paceline.strategies.averaging import AVERAGING

pytestmark = pytest.mark.xdist_group("averaging")  # one trio for all of them


def all_alike(results):
    """What all ranks found, which must be the same."""
    assert all(each == results[0] for each in results), results
    return results[0]


# -- nothing is lost, nothing hangs -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 60])
def test_in_any_schedule_every_change_is_merged_exactly_once_and_all_ranks_are_equal_after_a_flush(trio, first):
    """All six members; epochs, flushes, checkpoints, lives that go on; unequal steps, and no two ranks at one pace."""
    count = min(60, settings.default.max_examples)
    found = all_alike(trio.do("schedules", first=first, last=first + count, seconds=120))
    assert found["wrong"] == []
    assert len(set(found["digests"])) > 0.8 * count


def test_two_ranks_average_while_a_third_is_not_among_them(trio):
    first, between, last = trio.do("ends", seeds=[1, 2, 3])
    assert between is None
    assert first["wrong"] == []
    assert first == last


@pytest.mark.parametrize(
    ("codec", "member", "settings"),
    [
        ("one-bit", "hpsgd", {}),
        ("qsgd error-feedback", "hpsgd", {"rebase": True, "head_start": True}),  # of one step alone it loses nothing
        ("elias+ef", "local-sgd", {"period": 2}),  # payloads of unequal sizes
        ("top-k fraction=0.01", "psgd", {}),
        ("power-sgd rank=1", "ssgd", {}),
        ("one-bit", "hpsgd", {"plan": "two-step", "marks": 512}),  # a shard for each rank
        ("elias+ef", "local-sgd", {"period": 2, "plan": "two-step", "marks": 512}),
        ("int8-sum error-feedback", "hpsgd", {"plan": "all-reduce", "marks": 512}),
        ("one-bit", "local-sgd", {"plan": "gather", "then": "two-step", "marks": 512}),
        ("power-sgd rank=1", "local-sgd", {"plan": "gather", "then": "all-reduce"}),
    ],
)
def test_what_is_merged_and_what_a_codec_holds_back_are_together_all_changes(trio, codec, member, settings):
    phases = [[3, 1, 2], [0, 4, 1], [2, 0, 0], [0, 0, 0]]
    results = trio.do("conserve", codec=codec, member=member, phases=phases, **settings)
    assert len({each["digest"] for each in results}) == 1
    found = results[0]["phases"]
    assert max(each["lost"] for each in found) < 1e-5
    assert max(each["held"] for each in found) > 0.001  # the codec is a rough one: it does hold something back
    assert {each["plan"] for each in results} == {settings.get("then") or settings.get("plan") or results[0]["plan"]}


# -- training -----------------------------------------------------------------------------------------------------


def test_local_sgd_of_period_one_and_ssgd_are_what_ddp_does(trio):
    found = all_alike(trio.do("alike", steps=6))
    for name, one in found.items():
        assert one["apart"] < 1e-6, name
        assert one["averages"] == 7  # one for each step, and the one in which all leave
    assert found["local-sgd"]["digest"] == found["plain bmuf"]["digest"]


def test_ssgd_is_ddp_for_any_optimiser_and_accumulated_gradients(trio):
    assert all_alike(trio.do("adam_too", steps=4)) < 1e-6


def test_one_worker_trains_plainly(trio):
    assert all_alike(trio.do("alone", steps=5)) == {name: [0.0, True] for name in AVERAGING}


@pytest.mark.parametrize("member", ["hpsgd", "ssgd", "local-sgd"])
def test_every_kind_of_model_ends_equal_on_all_ranks(trio, member):
    results = trio.do("kinds", member=member, steps=4)
    counted = [each.pop("counted") for each in results]
    found = all_alike(results)
    for name, one in found.items():
        assert one["moved"], name
        assert one["steps"] == 4 + 5 + 6, name
    assert found["norm"]["variance"] > 0
    assert found["float64 buffer"]["scale"] == pytest.approx(1.0 + 2.0**-30, rel=1e-15, abs=0)
    if member == "hpsgd":  # the last mean may be of an average that began before the last step
        assert 1 <= found["norm"]["batches"] <= 5
    else:
        assert found["norm"]["batches"] == 5
    if member != "ssgd":
        assert counted == [4, 4, 4]  # as long as it trains, a worker keeps its own statistics


@pytest.mark.parametrize(("member", "fused"), [("hpsgd", False), ("ssgd", False), ("ssgd", True)])
def test_a_step_that_a_gradient_scaler_leaves_out_is_none(trio, member, fused):
    results = trio.do("scaled", steps=4, member=member, fused=fused)
    assert [each["steps"] for each in results] == [4, 3, 4]
    assert {each["merged"] for each in results} == {11}
    assert len({each["digest"] for each in results}) == 1


def test_with_ssgd_a_flush_makes_ranks_equal_whose_learning_rates_differ(trio):
    first, apart, last = zip(*trio.do("drifting", counts=[2, 5, 3]), strict=True)
    assert len(set(first)) == 1
    assert len(set(apart)) > 1  # or there would be nothing to make equal
    assert len(set(last)) == 1


def test_a_fast_rank_takes_more_steps_and_does_not_wait_for_the_slow_one(trio):
    slow, *fast = trio.do("paces", slow_seconds=0.1)
    for one in fast:
        assert one["steps"] > slow["steps"]
        assert one["digest"] == slow["digest"]
        assert one["merged"] == slow["steps"] + sum(each["steps"] for each in fast)


def test_ranks_tell_each_other_numbers_where_all_are_at_one_place(trio):
    found = all_alike(trio.do("numbers"))
    assert found["before"] == [[rank, 10 * rank, -(2**40)] for rank in range(3)]
    assert found["settled"] == [[0], [1], [2]]
    assert "this rank has stepped" in found["stepped"]
    assert "this rank has stepped since the last flush" in found["alone"]
    assert "this was closed" in found["closed"]


def test_what_is_told_of_averages(trio):
    for rank, found in enumerate(trio.do("told", steps=5)):
        assert found["same"]
        assert found["ordered"]
        assert found["windows"] == [[[2, 0, 0]] * 3, [[2, 0, 0]] * 3, [[1, 0, 3]] * 3]
        assert found["shown"] == f"LocalSGD(local-sgd; rank {rank}, 3 ranks; 5 steps, 3 averages)"


# -- checkpoints --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "codec", "settings", "opened"),
    [
        ("hpsgd", "identity", {"period": 3}, 2),
        ("hpsgd", "one-bit", {"period": 3, "rebase": True}, 2),
        ("hpsgd", "identity", {}, 0),
        ("local-sgd", "elias", {"period": 3}, 2),
        ("diloco", "qsgd", {"period": 2, "overlap": True}, 1),
        ("hpsgd", "one-bit", {"period": 3, "plan": "two-step"}, 2),
        ("local-sgd", "power-sgd rank=1", {"period": 3, "plan": "all-reduce"}, 2),
    ],
)
def test_a_run_that_goes_on_from_the_middle_of_a_window_is_the_undisturbed_run(trio, member, codec, settings, opened):
    results = trio.do("resumed", member=member, codec=codec, **settings)
    assert len({each["ends"][0][0] for each in results}) == 1
    for found in results:
        two_lives, one_life = found["ends"]
        assert two_lives == one_life
        assert found["opened"] == opened


def test_the_documented_checkpoint_goes_on_as_if_nothing_had_been(trio, tmp_path):
    two_lives, one_life = all_alike(trio.do("documented", folder=str(tmp_path)))
    assert two_lives == one_life
    assert {path.name for path in tmp_path.iterdir()} == {*(f"checkpoint-{rank}.pt" for rank in range(3)), "model.pt"}


def test_states_of_something_else_are_refused(trio):
    for found in trio.do("wrong_states"):
        for key in ("member", "period", "codec", "rank", "number of ranks", "model"):
            assert f"its {key} is" in found[key]
        assert "load the model's state, then the averaging's" in found["moved"]
        different = "the ranks have loaded different checkpoints: rank 0 in average 2, rank 1 in average 5, rank 2 in"
        assert different in found["different"]
        assert found["ended"].startswith("AveragingError: averaging has ended with an error")


# -- misuse -------------------------------------------------------------------------------------------------------

SAID = {
    "ddp": "do not wrap the model in DistributedDataParallel",
    "strange": "a parameter that the model does not have",
    "untrained": "no trainable parameter",
    "optimizer": "must be a torch.optim.Optimizer",
    "codec": "unknown codec 'qsdg'",
    "float64": "float64 parameters",
    "float64 buffers": "this model has float64 buffers",
    "silence": "silence_seconds must be above 0",
    "period": "period must be between 1",
    "one period": "rank 1 cannot average: period must be between 1",
    "one timeout": "rank 1 cannot average: timeout_seconds must be above 0",
    "one codec": "rank 1 cannot average: no kernel for this machine",
    "plan": "cannot be exchanged by 'all-reduce'; choose from auto, gather, two-step",
    "no plan": "unknown plan 'ring'",
    "unlike plans": "the plan of rank 2 is gather, and that of rank 0 is auto",
    "normalized": "normalize does not go with error feedback",
    "unlike models": "the model of rank 2 is 36 elements",
    "unlike members": "the period of rank 2 is 2, and that of rank 0 is 1",
    "one refuses": "rank 1 cannot average: the optimizer has a parameter that the model does not have",
    "unlike codecs": "the codec of rank 2 is QSGD",
    "twice": "has an averaging or rounds already",
    "closed": "this was closed",
    "closure": "cannot be given a closure",
    "scaled": "call scaler.unscale_(optimizer) first",
    "unfrozen": "its changes are in no average: 0.weight",
    "added": "its changes are in no average: 0.weight",
}


def test_misuse_is_refused_on_all_ranks(trio):
    first, *others = trio.do("misused")
    for each in (first, *others):
        assert each.pop("closed twice") is None
        assert all(each.values())
    assert {key: first[key] for key, words in SAID.items() if words not in first[key]} == {}
    assert "the period of rank 0 is 1, and that of rank 2 is 2" in others[1]["unlike members"]


def test_without_a_process_group_it_says_how_to_start():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="torchrun"):
        paceline.HPSGD(model, torch.optim.SGD(model.parameters(), lr=0.1))


class DTensor(torch.Tensor):
    """Has the name of torch's, which is a part of a tensor."""


class FSDPModule(torch.nn.Linear):
    """Has the name of torch's."""


@pytest.mark.parametrize("sharded", ["parameter", "module"])
def test_a_sharded_model_is_refused(sharded):
    model = torch.nn.Sequential(FSDPModule(2, 2) if sharded == "module" else torch.nn.Linear(2, 2))
    if sharded == "parameter":
        model[0].weight = torch.nn.Parameter(model[0].weight.detach().as_subclass(DTensor))
    with pytest.raises(ValueError, match=f"{sharded} 0.* is sharded .* every rank holds a part of it"):
        TrackedModel(model, torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1))


@given(ranks=st.integers(2, 10_000), silence_seconds=st.floats(0.01, 1000))
def test_a_rank_has_four_looks_to_be_heard_in_however_many_there_are(ranks, silence_seconds):
    beats = Heartbeats(None, range(ranks), 0, silence_seconds=silence_seconds)
    assert beats.silence_seconds >= max(silence_seconds, 4 * beats.interval_seconds)


@given(st.text(max_size=400), st.text(max_size=400))
def test_what_is_described_stays_short_and_different(one, other):
    assert len(json.dumps(short_text(one))) <= 2 * SHORT_CHARACTERS + 2
    assert (short_text(one) == short_text(other)) == (one == other)


# -- step times --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("member", "settings"), [("local-sgd", {"period": 2}), ("hpsgd", {})])
def test_a_watched_model_s_clock_hears_of_waits_for_averages(trio, member, settings):
    """Where training waits, two fast ranks wait for the one that sleeps; in hpsgd nobody waits before the end."""
    steps, pause_seconds = 6, 0.05
    results = trio.do("watched", member=member, steps=steps, pause_seconds=pause_seconds, **settings)
    waits = [sum(wait for wait, *_ in found) for found in results]
    for found in results:
        assert len(found) == steps
        assert all(wait <= whole for wait, whole, _ in found)
        if member == "local-sgd":
            assert [len(buckets) for *_, buckets in found] == [0, 1] * 3
    if member == "hpsgd":
        assert waits == [0.0, 0.0, 0.0]
    else:
        assert min(waits[:2]) - waits[2] > steps * pause_seconds / 2
