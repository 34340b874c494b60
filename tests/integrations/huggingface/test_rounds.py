"""Trainer's ranks that take rounds: full is DDP; a late rank is at the same step where all meet; resumed to the bit."""

from __future__ import annotations

import json

import pytest

from tests.integrations.huggingface.test_averaging import JOB, run
from tests.integrations.ranks import JobError, launch

EPOCHS = {"num_train_epochs": 2, "max_steps": -1, "max_grad_norm": 0.0, "logging_steps": 1}
ACCUMULATED = EPOCHS | {"gradient_accumulation_steps": 4}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "epoch", "logging_steps": 2}
of_one_launch = pytest.mark.xdist_group("huggingface-rounds")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    late = EVALUATING | {"max_steps": 14, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}
    late["eval_on_start"] = True
    cases = {
        "ddp": {"training": ACCUMULATED, "samples": 40},
        "full": {"training": ACCUMULATED, "samples": 40, "rounds": {"strategy": "full"}},
        "ddp cut": {"training": EPOCHS, "samples": 32, "model": "Plain"},
        "full cut": {"training": EPOCHS, "samples": 32, "model": "Plain", "rounds": {"strategy": "full", "blocks": 4}},
        "classes": {"training": EPOCHS, "samples": 32, "model": "classifier", "rounds": {"strategy": "full"}},
        "late": {"training": late, "samples": 80, "rounds": {"strategy": "lgc", "k": 1}, "slow": [1, 0.03]},
        "not finite": {
            "training": EPOCHS | {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4},
            "samples": 32, "rounds": {"strategy": "lgc", "k": 2}, "broken": [1, 3, "nan"],
        },
    }  # fmt: skip
    cases["not finite, evaluated by epochs"] = cases["not finite"] | {
        "training": EPOCHS | {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 4},
        "rounds": {"strategy": "lgc", "k": 2, "timeout_seconds": 30.0}, "broken": [1, 3, "nan"],
    }  # fmt: skip
    still = {"max_steps": 10, "logging_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    cases["losses"] = cases["late"] | {"training": still, "rate": 0.0}
    cases["classes cut"] = cases["classes"] | {"rounds": {"strategy": "full", "blocks": 4}}
    cases["again"] = {"rounds": {"strategy": "full"}, "training": {"max_steps": 3}, "again": True}
    cases = {
        name: case | {"folder": str(tmp_path_factory.mktemp(name.replace(" ", "-")))} for name, case in cases.items()
    }
    return dict(zip(cases, run(*cases.values(), seconds=240), strict=True))


@of_one_launch
@pytest.mark.parametrize("cut", ["", " cut"])
def test_full_is_what_ddp_computes_and_the_schedule_goes_by_rounds(trained, cut):
    ddp, full = trained[f"ddp{cut}"][0], trained[f"full{cut}"][0]
    assert ddp["ddp"]
    assert not full["ddp"]
    assert full["between"] == 0
    assert full["step"] == ddp["step"] == (8 if cut else 4)
    assert full["steps"] == ddp["steps"]
    assert full["epoch"] == ddp["epoch"] == 2
    assert full["weights"] == pytest.approx(ddp["weights"], abs=1e-5)
    assert full["rate"] == ddp["rate"]
    assert full["scheduler_steps"] == ddp["scheduler_steps"] == ddp["step"]
    assert full["train_loss"] == pytest.approx(ddp["train_loss"], rel=1e-3)
    first, second = trained[f"full{cut}"]
    assert first["digest"] == second["digest"]
    assert first["optimizer"] == second["optimizer"]


@of_one_launch
def test_a_batch_in_blocks_has_the_gradient_of_a_whole_one_where_a_head_divides_by_its_own_batch(trained):
    whole, cut = trained["classes"][0], trained["classes cut"][0]
    for key in ("loss", "grad_norm"):
        expected = [each[key] for each in whole["log"] if key in each]
        assert len(expected) == 8
        assert [each[key] for each in cut["log"] if key in each] == pytest.approx(expected, rel=1e-3)
    assert cut["weights"] == pytest.approx(whole["weights"], abs=1e-5)


@of_one_launch
def test_a_late_rank_is_at_the_same_round_where_all_evaluate_save_and_end(trained):
    first, second = trained["late"]
    assert first["sync"] == "LGCSync"
    assert first["step"] == second["step"] == 14
    assert first["evaluated"] == second["evaluated"]
    assert [step for step, _ in first["evaluated"]] == [0, 4, 8, 12, 14]
    assert first["digest"] == second["digest"]
    assert first["optimizer"] == second["optimizer"]
    assert first["scheduler_steps"] == second["scheduler_steps"] == 14
    assert second["steps"] == sorted(set(second["steps"]))
    assert len(second["steps"]) < len(first["steps"]), "the slow rank has applied several rounds in one step"
    assert first["figures"]["late"] > 0
    logs = [each for each in first["log"] if "loss" in each]
    assert all("paceline/k" in each and "paceline/late" in each for each in logs)


@of_one_launch
def test_a_late_ranks_losses_are_means_over_rounds(trained):
    for each in trained["losses"]:
        losses = [line["loss"] for line in each["log"] if "loss" in line]
        assert losses
        assert [*losses, each["train_loss"]] == pytest.approx([2.465] * (len(losses) + 1), rel=0.05), "at rate 0"
    assert len(trained["losses"][1]["steps"]) < 8


@of_one_launch
@pytest.mark.parametrize("evaluated", ["", ", evaluated by epochs"])
def test_a_gradient_that_is_not_finite_leaves_no_rank_behind(trained, evaluated):
    first, second = trained[f"not finite{evaluated}"]
    assert first["step"] == second["step"] == 8
    assert first["evaluated"] == second["evaluated"]
    assert [step for step, _ in first["evaluated"]] == [4, 8]
    assert first["digest"] == second["digest"]
    assert second["steps"] == [1, 2, 3, 3, 4, 5, 6, 7, 8], "a batch without a round, and a round without a batch"
    assert first["figures"]["used"] == 15


@of_one_launch
def test_one_trainer_trains_twice(trained):
    first, second = trained["again"]
    assert first["steps"] == [1, 2, 3, 1, 2, 3]
    assert first["digest"] == second["digest"]
    assert first["figures"]["rounds"] == 3


def test_rounds_that_go_on_are_those_that_were_not_interrupted(tmp_path):
    training = {"save_strategy": "steps", "save_steps": 5, "max_steps": 9, "logging_steps": 4}
    case = {"folder": str(tmp_path), "training": training, "samples": 56}
    case["rounds"] = {"strategy": "full", "codec": "one-bit"}
    (whole,) = run(case)
    assert sorted(path.name for path in (tmp_path / "checkpoint-5").glob("paceline-*")) == [
        "paceline-rounds-0-of-2.pt",
        "paceline-rounds-1-of-2.pt",
    ]
    (resumed,) = run(case | {"resume": str(tmp_path / "checkpoint-5")})
    for before, after in zip(whole, resumed, strict=True):
        assert before["step"] == after["step"] == 9
        assert after["digest"] == before["digest"]
        assert after["optimizer"] == before["optimizer"]
        assert after["steps"] == [6, 7, 8, 9]
        assert after["scheduler_steps"] == 9


def test_three_ranks_fastest_two(tmp_path):
    case = {"folder": str(tmp_path), "training": EVALUATING | {"num_train_epochs": 2, "max_steps": -1}, "samples": 60}
    (answers,) = run(case | {"rounds": {"strategy": "fastest-k", "k": 2}, "slow": [0, 0.02]}, world=3)
    assert len({each["digest"] for each in answers}) == 1
    assert len({json.dumps(each["evaluated"]) for each in answers}) == 1
    assert {each["step"] for each in answers} == {10}
    assert {each["epoch"] for each in answers} == {2}


def test_a_script_that_gathers_in_its_steps_is_refused(tmp_path):
    case = {"folder": str(tmp_path), "rounds": {"strategy": "lgc", "k": 1}, "gathers": True}
    answers = launch(JOB, {"cases": [case]}, check=False)
    assert all(isinstance(each, JobError) for each in answers)
    assert any("accelerator.gather is called in a training step" in str(each) for each in answers)
