"""Trainer's ranks that average: equal where they evaluate, save and end; no collective between; resumed to the bit."""

from __future__ import annotations

import json

import pytest

from tests.integrations.ranks import JobError, launch

JOB = "tests.integrations.huggingface.training_job"
EVALUATING = {"eval_strategy": "steps", "eval_steps": 4, "logging_steps": 2}


def run(*cases, world=2, **given):
    """Return every rank's answers, case by case."""
    answers = launch(JOB, {"cases": list(cases)}, world=world, **given)
    return [list(each) for each in zip(*answers, strict=True)]


of_one_launch = pytest.mark.xdist_group("huggingface-averaging")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Several trainings on the same two ranks, by name."""
    folder = lambda name: str(tmp_path_factory.mktemp(name))  # noqa: E731
    saving = {"save_strategy": "steps", "save_steps": 4, "load_best_model_at_end": True, "save_total_limit": 1}
    best = EVALUATING | saving | {"report_to": "tensorboard"}
    accumulated = {"gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_steps": -1, "max_grad_norm": 0.0}
    accumulated["logging_steps"] = 1
    exact = {"momentum": 0.0, "samples": 40}
    cases = {
        "ddp": {"training": EVALUATING | {"save_strategy": "steps", "save_steps": 4}},
        "hpsgd": {"average": {"strategy": "hpsgd", "codec": "qsgd levels=7"}, "training": best},
        "ddp accumulated": exact | {"training": accumulated},
        "local-sgd accumulated": exact | {"average": {"strategy": "local-sgd", "period": 1}, "training": accumulated},
        "bf16 adamw": {
            "average": {"strategy": "diloco", "period": 2}, "own_optimizer": False, "model": "Linear",
            "training": {"bf16": True, "include_num_input_tokens_seen": "all", "lr_scheduler_type": "cosine"},
        },
        "compiled": {
            "average": {"strategy": "bmuf", "period": 2}, "gathers": True,
            "training": {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 3},
        },
    }  # fmt: skip
    often = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    hpsgd = {"strategy": "hpsgd", "timeout_seconds": 30.0}
    cases["a step left out"] = {"average": hpsgd, "training": often, "skips": [1, 1]}
    pruned = {"max_steps": -1, "num_train_epochs": 4, "save_strategy": "epoch", "logging_steps": 2}
    cases["pruned"] = {"average": {"strategy": "hpsgd"}, "prune": {"policy": "info-batch"}, "training": pruned}
    cases["from ddp"] = {"average": {"strategy": "ssgd"}, "training": EVALUATING, "again": True}
    boards = {"TENSORBOARD_LOGGING_DIR": folder("boards")}
    cases = {name: case | {"folder": folder(name.replace(" ", "-"))} for name, case in cases.items()}
    cases["from ddp"]["resume"] = f"{cases['ddp']['folder']}/checkpoint-4"
    return dict(zip(cases, run(*cases.values(), environment=boards, seconds=240), strict=True)) | {"boards": boards}


@of_one_launch
def test_ranks_are_equal_where_trainer_evaluates_and_at_the_end(trained):
    first, second = trained["hpsgd"]
    assert first["sync"] == "HPSGD"
    assert first["evaluated"] == second["evaluated"]
    assert [step for step, _ in first["evaluated"]] == [4, 6]
    assert first["digest"] == second["digest"]
    assert first["optimizer"] != second["optimizer"], "each rank has momenta of its own"
    assert first["train_loss"] == second["train_loss"]
    assert first["flos"] == second["flos"] > 0


@of_one_launch
def test_the_model_is_in_no_ddp_and_no_collective_is_in_a_step(trained):
    plain, averaged, accumulated = (trained[name][0] for name in ("ddp", "hpsgd", "local-sgd accumulated"))
    assert plain["ddp"], "else nothing here says anything"
    # DDP: the tokens of each step, two numbers at each log. Else: at evaluations, at the beginning and at the end.
    assert plain["between"] >= plain["step"]
    for each in (averaged, accumulated):
        assert not each["ddp"]
        assert each["between"] == 0


@of_one_launch
def test_the_best_model_is_loaded_after_the_ranks_are_done_with_each_other(trained):
    first, second = trained["hpsgd"]
    best = dict(first["evaluated"])
    step = int(first["best"].rpartition("-")[2])
    assert first["digest"] == second["digest"] == best[step]


@of_one_launch
def test_figures_are_in_trainers_log_and_in_tensorboard(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logs = [each for each in trained["hpsgd"][0]["log"] if "loss" in each]
    assert [each["step"] for each in logs] == [2, 4, 6]
    assert all(each["paceline/sent_bytes"] >= 0 and "paceline/averages" in each for each in logs)
    assert logs[-1]["paceline/steps"] == 6
    events = EventAccumulator(trained["boards"]["TENSORBOARD_LOGGING_DIR"])
    events.Reload()
    written = [event.step for event in events.Scalars("train/paceline/sent_bytes")]
    assert written == [2, 4, 6, 6]  # and with the numbers at the end


@of_one_launch
def test_local_sgd_of_every_step_is_what_ddp_computes_with_accumulated_batches_too(trained):
    ddp, local = trained["ddp accumulated"][0], trained["local-sgd accumulated"][0]
    assert ddp["step"] == local["step"] == 4  # five batches a rank: one step of four, and one of the rest, twice
    assert local["weights"] == pytest.approx(ddp["weights"], abs=1e-5)
    assert local["rate"] == ddp["rate"]
    assert local["train_loss"] == pytest.approx(ddp["train_loss"], rel=1e-3)


@of_one_launch
def test_mixed_precision_schedulers_tokens_and_models_of_ones_own(trained):
    first, second = trained["bf16 adamw"]
    assert first["digest"] == second["digest"]
    assert first["sync"] == "DiLoCo"
    assert first["rate"] == pytest.approx(0.0, abs=1e-9)
    tokens = [each["num_input_tokens_seen"] for each in first["log"] if "loss" in each]
    assert tokens == [3 * 4 * 9, 6 * 4 * 9], "this rank's own"


@of_one_launch
def test_a_compiled_model_and_a_script_that_gathers_in_its_steps(trained):
    first, second = trained["compiled"]
    assert first["wrapped"] == "OptimizedModule"
    assert first["digest"] == second["digest"]
    assert first["step"] == 3


@of_one_launch
def test_ranks_meet_where_one_of_them_has_left_a_step_out(trained):
    first, second = trained["a step left out"]
    assert [first["figures"]["steps"], second["figures"]["steps"]] == [3, 2]
    assert first["evaluated"] == second["evaluated"]
    assert [step for step, _ in first["evaluated"]] == [1, 2, 3]
    assert first["digest"] == second["digest"]


@of_one_launch
def test_a_run_of_ddp_is_gone_on_from_and_one_trainer_trains_twice(trained):
    first, second = trained["from ddp"]
    assert first["steps"] == [5, 6, 1, 2, 3, 4, 5, 6]
    assert first["digest"] == second["digest"]
    assert first["figures"]["steps"] == 6


@of_one_launch
def test_ranks_that_average_prune_as_well(trained):
    first, second = trained["pruned"]
    assert first["digest"] == second["digest"]
    assert first["steps"] == second["steps"] == list(range(1, first["step"] + 1))
    assert 12 < first["step"] < 24
    assert first["epoch"] == 4
    logs = [each for each in first["log"] if "loss" in each]
    assert all({"paceline/pruned_share", "paceline/averages"} <= each.keys() for each in logs)


# -- checkpoints -------------------------------------------------------------------------------------------------------

SAVING = {"save_strategy": "steps", "save_steps": 5, "max_steps": 9, "logging_steps": 4}
FEEDBACK = {"strategy": "local-sgd", "period": 2, "codec": "one-bit"}


def test_a_run_that_goes_on_is_the_run_that_was_not_interrupted(tmp_path):
    cases = []  # seven batches in an epoch: step 5 is in its middle
    for place, settings in enumerate((FEEDBACK, {"strategy": "diloco", "period": 3}, {"strategy": "ssgd"})):
        folder = str(tmp_path / str(place))
        case = {"folder": folder, "average": settings, "training": SAVING, "dropout": 0.2, "samples": 56}
        cases.append(case | {"own_optimizer": place == 0})
    saved = tmp_path / "0" / "checkpoint-5"
    wholes = run(*cases)
    assert sorted(path.name for path in saved.glob("paceline-*")) == [
        "paceline-averaging-0-of-2.pt",
        "paceline-averaging-1-of-2.pt",
    ]
    going_on = [case | {"resume": f"{case['folder']}/checkpoint-5"} for case in cases]
    for whole, resumed in zip(wholes, run(*going_on), strict=True):
        for before, after in zip(whole, resumed, strict=True):
            assert before["step"] == after["step"] == 9
            assert after["digest"] == before["digest"]
            assert after["optimizer"] == before["optimizer"]
            for figure in ("steps", "averages", "sent_bytes"):
                assert after["figures"][figure] == before["figures"][figure] > 0
    assert wholes[0][0]["optimizer"] != wholes[0][1]["optimizer"]
    with pytest.raises(JobError, match="holds the averaging of 2 ranks"):
        run(going_on[0], world=3)
    (saved / "paceline-averaging-1-of-2.pt").unlink()
    answers = launch(JOB, {"cases": going_on[:1]}, check=False)
    assert all("rank 1" in str(each) and "paceline-averaging-1-of-2.pt" in str(each) for each in answers)


def test_three_ranks_one_of_them_slow_are_equal_after_a_flush(tmp_path):
    case = {"average": {"strategy": "hpsgd"}, "training": EVALUATING | {"save_strategy": "steps", "save_steps": 4}}
    (answers,) = run(case | {"folder": str(tmp_path), "slow": [2, 0.05]}, world=3)
    assert len({each["digest"] for each in answers}) == 1
    assert len({json.dumps(each["evaluated"]) for each in answers}) == 1
    assert sorted(path.name for path in (tmp_path / "checkpoint-4").glob("paceline-*")) == [
        f"paceline-averaging-{rank}-of-3.pt" for rank in range(3)
    ]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_ends_the_others_with_its_words(tmp_path):
    case = {"folder": str(tmp_path), "average": {"strategy": "local-sgd", "period": 1}, "broken": [1, 2, "raise"]}
    answers = launch(JOB, {"cases": [case]}, check=False)
    assert all(isinstance(each, JobError) for each in answers)
    assert "rank 1" in str(answers[0])
    assert "the dog ate this batch" in str(answers[0])


@pytest.mark.parametrize(
    ("part", "steps"),
    [({"average": {"strategy": "local-sgd", "period": 8}}, 4), ({"rounds": {"strategy": "lgc", "k": 1}}, 8)],
)
def test_a_rank_that_stops_alone_ends_all_with_an_error_that_says_where_they_are(tmp_path, part, steps):
    case = {"folder": str(tmp_path), "training": EVALUATING | {"max_steps": 18}, "stops": [0, 3]} | part
    for answer in launch(JOB, {"cases": [case]}, check=False, seconds=100):
        assert "rank 0 at the end of training, step" in str(answer)
        assert f"rank 1 at an evaluation, step {steps}" in str(answer)


def test_ranks_with_different_numbers_of_batches_are_refused_on_all_ranks(tmp_path):
    training = {"accelerator_config": {"even_batches": False}, "num_train_epochs": 1, "max_steps": -1}
    case = {"folder": str(tmp_path), "average": {"strategy": "hpsgd"}, "samples": 44, "training": training}
    for answer in launch(JOB, {"cases": [case]}, check=False):
        assert "TrainerSetupError: all ranks must train alike, and the number of steps of rank 1 is 5" in str(answer)


def test_data_that_rank_0_would_hand_out_are_refused_on_all_ranks(tmp_path):
    case = {"folder": str(tmp_path), "average": {"strategy": "hpsgd"}, "iterable": True}
    answers = launch(JOB, {"cases": [case]}, check=False)
    assert all("dispatch_batches" in str(each) and "TrainerSetupError" in str(each) for each in answers)
    training = {"accelerator_config": {"dispatch_batches": False}}
    ((first, second),) = run(case | {"training": training})
    assert first["digest"] == second["digest"]
    assert first["step"] == 6
