"""DistributedDataParallel with codecs: two real processes on gloo, one pair for all of these tests."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks

pytestmark = pytest.mark.xdist_group("compress")  # one pair for all of them

FIXED = ["identity", "bfloat16", "qsgd", "one-bit+ef", "top-k+ef", "power-sgd+ef"]
VARYING = ["elias", "entropy", "sparsifier"]
WARM, STEPS, LR = 150, 150, 0.1


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("pair"), 2, "tests.ddp.jobs") as pair:
        yield pair


def both(results):
    """What both ranks found, which must be the same."""
    first, second = results
    assert first == second
    return first


# -- training -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(pair):
    found = both(pair.do("train", codec=None, steps=STEPS, lr=LR, warm=WARM))
    assert 0.01 < found["loss"] < found["before"] / 3 < 0.3  # it is learning, and has not learned everything
    return found["loss"]


# The comparison begins with a model that was trained plainly for a while. From the first step, one-bit and top-k lag:
# error feedback sends late what it holds back, and early in a run late costs most (300 steps from the beginning at the
# same learning rate: 12 % and 21 % above the loss without a codec; qsgd and power-sgd 0.3 % and 4 %).
# One seed is noisy. Loss over the loss without a codec, seeds 0 to 3: qsgd 1.00 to 1.01, power-sgd 0.99 to 1.01, top-k
# 0.94 to 1.02, one-bit 0.96 to 1.03. With twice the steps one-bit has 1.09 on one seed: its limit is wider.
LIMITS = {"qsgd": 1.05, "power-sgd+ef": 1.05, "top-k+ef": 1.05, "one-bit+ef": 1.15}


@pytest.mark.parametrize(("codec", "times"), [("qsgd", 7), ("one-bit+ef", 30), ("top-k+ef", 45), ("power-sgd+ef", 9)])
def test_a_run_with_a_codec_comes_close_to_the_loss_without(pair, plain, codec, times):
    found = both(pair.do("train", codec=codec, steps=STEPS, lr=LR, warm=WARM))
    assert found["loss"] < LIMITS[codec] * plain
    assert found["times"] > times
    assert found["steps"] == STEPS


def test_fifty_runs_with_new_hooks_end_with_equal_parameters(pair):
    digests = both(pair.do("short_runs", codecs=FIXED + VARYING, count=50, steps=3))
    assert len(set(digests)) == 50


def test_a_run_is_the_same_when_it_is_run_again(pair):
    first, second = (pair.do("train", codec="qsgd", steps=5, lr=LR) for _ in range(2))
    assert first == second
    assert first[0]["digest"] == first[1]["digest"]


def test_with_identity_every_kind_of_model_gets_the_gradients_of_ddp(pair):
    for differences in pair.do("kinds_of_models"):
        assert differences.pop("bfloat16") < 1e-2
        assert {kind: much for kind, much in differences.items() if not much < 1e-6} == {}


def test_the_hook_takes_a_group_of_the_callers_and_a_model_that_lives_on_some_ranks_only(pair):
    both(pair.do("groups"))


# -- what the codecs remember -------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["one-bit+ef", "top-k+ef", "power-sgd+ef"])
def test_error_feedback_loses_nothing_when_ddp_changes_its_buckets(pair, codec):
    for found in pair.do("nothing_is_lost", codec=codec, steps=4):
        assert found["changed"]
        assert found["buckets"][-1] > 1
        assert found["carried"] == 0
        assert found["lost"] < 1e-5 < found["held"]


@pytest.mark.parametrize("codec", ["qsgd", "one-bit+ef", "power-sgd+ef", "entropy"])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(pair, codec):
    for found in pair.do("resumed", codec=codec):
        assert found["same"]
        assert found["steps"] == 8
        of_rank, of_codec, of_size, of_name = found["errors"]
        assert "this state is of rank 7 (this is rank" in of_rank
        assert "this state is of QSGD() (this codec is" in of_codec
        assert "'0.weight' has 144 elements (there: 3)" in of_size
        assert "no parameter 'other'" in of_name
        assert len(found["untouched"]) == 9
        for damaged, error, same in found["untouched"]:
            assert error.startswith("SavedStateError: the state of compress() is refused: "), (damaged, error)
            assert same, damaged


# -- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "culprits"), [("qsgd", [1]), ("entropy", [1]), ("one-bit+ef", [0, 1])])
def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks_and_training_can_go_on(pair, codec, culprits):
    found = pair.do("not_finite", codec=codec, culprits=culprits)
    assert found[0]["digest"] == found[1]["digest"]
    for rank, result in enumerate(found):
        before, (kind, message, cause, stands_out), after = result["steps"]
        assert before is None
        assert after is None
        assert result["finite"]
        assert kind == "NotFiniteError"
        named = "rank 1:" if culprits == [1] else "ranks 0, 1:"
        assert message.startswith(f"{named} the gradient is not finite in bucket 0 of step 2 (")
        assert message.endswith('for a GradScaler to skip it, compress(..., not_finite="pass")')
        assert (cause is not None) == (rank in culprits)
        assert stands_out
        first, second, third = result["sizes"]
        assert first == second, "the step that was left out counts in no mean"
        if codec != "entropy":  # whose payloads vary
            assert third == pytest.approx(first, rel=0.02)  # in other buckets
        assert result["shown"].endswith("1 left out)")


def test_a_gradient_beyond_float16_is_not_called_infinite(pair):
    for result in pair.do("not_finite", codec="float16", culprits=[1], factor="1e8"):
        _, (kind, message, _, _), after = result["steps"]
        assert kind == "NotFiniteError"
        assert message.startswith("rank 1: the gradient is not finite, or beyond the 65,504 that float16 carries")
        assert after is None


@pytest.mark.parametrize(
    ("codec", "plan"),
    [
        ("identity", "gather"),
        ("qsgd", "auto"),
        ("one-bit+ef", "two-step"),
        ("top-k+ef", "gather"),
        ("power-sgd+ef", "auto"),
    ],
)
def test_a_gradient_scaler_leaves_a_step_out_on_all_ranks_and_training_goes_on(pair, codec, plan):
    first, second = pair.do("scaled", codec=codec, plan=plan, culprits=[1])
    assert first["digests"] == second["digests"], "replicas are equal after every step"
    for found in (first, second):
        assert found["scales"] == [65536.0] * 3 + [32768.0] * 5
        assert found["digests"][3] == found["digests"][2], "the step is left out"
        assert len(set(found["digests"])) == 7, "and all others are taken"
        assert found["kept"], "codecs remember what they did before it"
        assert found["all_nan"]
        assert found["sizes"][3] == found["sizes"][2]
        assert found["skipped"] == 1
        assert "8 steps" in found["shown"]


def test_with_identity_a_gradient_scaler_does_as_with_plain_ddp(pair):
    plain, ours = (pair.do("scaled", codec=codec, plan="gather", culprits=[0])[0] for codec in (None, "identity"))
    assert ours["scales"] == plain["scales"]
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)


@pytest.mark.parametrize("codec", ["qsgd", "power-sgd+ef"])
def test_autocast_to_bfloat16_needs_nothing(pair, codec):
    found = both(pair.do("lower_precision", codec=codec))
    assert found["after"] < 0.9 * found["before"]
    assert found["skipped"] == 0


def test_any_other_failure_to_encode_is_an_error_on_all_ranks(pair):
    for rank, (kind, message, cause) in enumerate(pair.do("clumsy")):
        assert kind == "RuntimeError"
        assert message.startswith("rank 1: the gradient could not be encoded")
        assert cause == ("ZeroDivisionError" if rank == 1 else "NoneType")


@pytest.mark.parametrize("codec", ["qsgd", "entropy"])
def test_a_rank_that_does_not_come_is_an_error_after_the_timeout_that_names_it_and_what_was_waited_for(pair, codec):
    message, seconds = pair.do("silent", codec=codec, timeout_seconds=1.0)[0]
    assert message.startswith("RankGoneError: rank 0 waited for the payloads of all 2 ranks for bucket 0 of step 1 (")
    assert message.endswith("for 1 s at most: rank 1 did not come in 1 s, and is alive")
    assert 1.0 <= seconds < 20.0


@pytest.mark.parametrize("first", ["memory", "lost", "not finite"])
def test_whatever_fails_on_the_way_of_an_error_ends_the_step_on_all_ranks_and_names_the_first(tmp_path, first):
    """Each call on that way fails in turn, on the rank that has the first error. Nobody waits for a time limit."""
    with Ranks(tmp_path, 2, "tests.ddp.jobs") as pair:
        others, culprits = pair.do("failing_twice", first=first, culprit=1)
    assert len(culprits) > 20
    errors = {"memory": "MemoryError", "lost": "ConnectionLostError", "not finite": "NotFiniteError"}
    left = tuple(f"rank 1 has left: {error}" for error in (errors[first], "InjectedError"))
    known = ("MemoryError: ", "NotFiniteError: rank 1: ", "TroubleError: NOT_FINITE at place 1", "InjectedError: ",
             "RankGoneError: ", "ConnectionLostError: ")  # fmt: skip
    for (_, theirs), (failed, ours) in zip(others, culprits, strict=True):
        assert ours[0] is not None, failed
        assert ours[0].startswith(known), failed
        if theirs[-1] is None:  # all have left out the step of the first error, and go on
            assert ours[-1] is None, failed
            assert theirs[0].startswith("NotFiniteError: rank 1: the gradient is not finite"), failed
        else:
            assert any(words in theirs[-1] for words in left), (failed, theirs)


def test_sparse_gradients_are_refused_where_compress_is_called(pair):
    for told, layout in pair.do("sparse", sparse=True):
        assert told.startswith("ValueError: compress encodes dense gradients, and the gradient of 0.weight is sparse")
        assert "sparse=False" in told
        assert layout == "torch.sparse_coo", "and DistributedDataParallel has it as before"
    assert pair.do("sparse", sparse=False) == [[None, "torch.strided"]] * 2


def test_misuse_is_told(pair):
    for rank, errors in enumerate(pair.do("misused")):
        assert errors["no ddp"] == "ValueError: compress wants a DistributedDataParallel model (this is a Sequential)"
        assert "has a communication hook already" in errors["twice"]
        assert "takes no communication hook" in errors["built in"]
        assert "unknown codec 'qsdg'; did you mean 'qsgd'?" in errors["unknown"]
        assert errors["none"] == "ValueError: codec must be a codec or the name of one (codec=None)"
        assert "codec must be a codec or the name of one (codec=<class" in errors["class"]
        assert "timeout_seconds must be above 0 and finite (timeout_seconds=0)" in errors["timeout"]
        assert f"the ranks of the model's own group (it has [{rank}])" in errors["group"]
        assert f"all ranks must compress alike: rank {1 - rank} with " in errors["unlike"]
        assert errors["not finite"] == 'ValueError: not_finite must be "raise" or "pass" (not_finite=\'skip\')'
        assert f'all ranks must compress alike: rank {1 - rank} with not_finite="' in errors["not finite on one"]


def test_identity_is_exact_in_every_type_and_doubles_are_rounded_only_where_that_is_asked_for(pair):
    found = both(pair.do("types_of_floats"))
    assert found.pop("rounded") == "torch.float64"
    refused = {case: found.pop(case) for case in ("qsgd auto", "bfloat16 auto", "identity gather")}
    for error in refused.values():
        assert error.startswith("ValueError: codecs carry float32, and this model has float64 parameters (codec=")
        assert error.endswith("or let it round them: compress(..., round_float64=True)")
    assert "plan='gather'" in refused["identity gather"]
    assert len(found) == 5
    assert found == dict.fromkeys(found, True)


def test_a_rank_that_does_not_call_compress_or_refuses_to_is_named_in_the_time_that_was_asked_for(pair):
    (alone, ours), (theirs,) = pair.do("absent", timeout_seconds=1.0)
    assert alone == "RankGoneError: rank 0 waited 1 s for rank 1 to compress"
    assert ours.startswith("ValueError: compress encodes dense gradients")
    assert theirs.startswith("ValueError: rank 0 cannot compress: compress encodes dense gradients")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_killed_or_stopped_is_named_by_all_others(tmp_path, how):
    with Ranks(tmp_path, 3, "tests.ddp.jobs") as three:
        three.do("prepare", codec="qsgd", timeout_seconds=2.0)
        (three.kill if how == "killed" else three.freeze)(2)
        messages = three.do("go_on", ranks=(0, 1))
    for message in messages:
        assert message.startswith("RankGoneError: ")
        assert "for 2 s at most: rank 2 is gone: not heard of for" in message
