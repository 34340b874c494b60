"""Lightning's Trainer with `Averaging`: ranks train alone and are equal where they come together, and go on later."""

from __future__ import annotations

import pytest

from tests.integrations.ranks import JobError, launch

JOB = "tests.integrations.lightning.averaging_job"


def fit(folder, world=2, **settings):
    return launch(JOB, {"part": "fit", "folder": str(folder), **settings}, world=world)


def same(found, *names):
    """Whether all ranks have the same."""
    return all(each[name] == found[0][name] for each in found for name in names)


def test_every_method_evaluates_and_ends_with_one_model(tmp_path):
    methods = [("hpsgd", {}), ("local-sgd", {"period": 3}), ("diloco", {"period": 3}), ("bmuf", {"overlap": True})]
    methods += [("psgd", {}), ("ssgd", {"codec": "qsgd"})]
    fits = [{"folder": str(tmp_path), "method": name, "averaging": given} for name, given in methods]
    first, second = launch(JOB, {"part": "several", "fits": fits})
    momenta = []
    for one, other in zip(first, second, strict=True):
        assert one["model"] == other["model"]
        assert one["validated"] == other["validated"]
        assert len(one["validated"]) == 2
        assert one["metrics"] == other["metrics"]
        assert (one["steps"], one["merged"], one["global_step"]) == (16, 32, 16)
        assert one["callbacks"] == 0, "the strategy's own callback left with the fit"
        momenta.append(one["momentum"] == other["momentum"])
    assert len({each["model"] for each in first}) == len(methods)
    assert momenta == [False] * 5 + [True], "each rank has momenta of its own, except where gradients are averaged"


def test_ssgd_trains_as_ddp_does(tmp_path):
    for ours, ddp in launch(JOB, {"part": "ssgd_and_ddp", "folder": str(tmp_path)}):
        assert ours == pytest.approx(ddp, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("method", ["hpsgd", "local-sgd"])
def test_ranks_with_unequal_numbers_of_batches(tmp_path, method):
    options = {"max_epochs": 3, "val_check_interval": 0.5}
    found = fit(tmp_path, world=3, method=method, samples=[20, 48, 32], options=options)
    assert same(found, "model", "validated", "metrics")
    assert [each["seen"] for each in found] == [15, 36, 24]
    assert {each["merged"] for each in found} == {15 + 36 + 24}


def test_nobody_waits_for_rank_0_between_averages(tmp_path):
    # Lightning's broadcast of rank 0's SIGTERM, at every batch, would hold rank 1 up at its third.
    found = fit(tmp_path, kind="Unequal", options={"max_epochs": 1})
    assert same(found, "model")


def test_accumulation_clipping_schedules_and_bf16(tmp_path):
    shared = {"folder": str(tmp_path), "samples": 40, "kind": "Counted"}
    four = {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "precision": "bf16-mixed"}
    fits = [shared | {"options": four, "method": name} for name in ("hpsgd", "ssgd")]
    fits += [shared | {"options": {"accumulate_grad_batches": 1, "gradient_clip_val": 0.1}}]
    found = launch(JOB, {"part": "several", "fits": fits})
    for each in zip(*found, strict=True):
        assert same(each, "model", "validated", "lr")
    assert [(each["seen"], each["steps"], each["global_step"]) for each in found[0]] == [(20, 6, 6)] * 2 + [
        (20, 20, 20)
    ]
    assert found[0][0]["lr"] == pytest.approx(0.005 * 0.8**2)


def test_one_rank_trains_plainly_and_manual_optimization_works(tmp_path):
    alone = fit(tmp_path, world=1)[0]
    assert (alone["steps"], alone["averages"]) == (16, 0)
    found = fit(tmp_path, kind="Manual")
    assert same(found, "model", "validated")
    assert found[0]["steps"] == 16


def test_one_device_on_each_of_two_nodes(tmp_path):
    found = launch(JOB, {"part": "nodes", "folder": str(tmp_path)})
    assert same(found, "model")
    assert [(each["seen"], each["steps"]) for each in found] == [(8, 16)] * 2, "Lightning has split the data"


def test_early_stopping_and_the_best_checkpoint_are_of_all_ranks(tmp_path):
    save = {"monitor": "val_loss", "save_top_k": 1}
    found = fit(tmp_path, world=3, samples=[20, 24, 32], save=save, stop=True, options={"max_epochs": 5})
    assert same(found, "model", "best", "metrics")
    assert found[0]["best"]
    assert found[0]["seen"] == 10, "all stopped after two epochs"


def test_values_logged_in_a_step_are_reduced_at_the_end_of_the_epoch(tmp_path):
    found = fit(tmp_path, kind="Logging")
    assert [each["metrics"]["rank_step"] for each in found] == [0.0, 1.0], "each rank's own, in a step"
    assert [each["metrics"]["rank_epoch"] for each in found] == [0.5, 0.5]
    assert ["sync_dist=True" in warning for warning in found[0]["warnings"]] == [True]


def test_a_collective_at_every_batch_works_and_is_warned_of(tmp_path):
    found = fit(tmp_path, timer=True)
    assert same(found, "model")
    assert any("at every batch" in warning for warning in found[0]["warnings"])


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [{"every_n_train_steps": 5}, {"every_n_epochs": 1}], ids=["mid-epoch", "epoch"])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path, save):
    settings = {"method": "local-sgd", "averaging": {"period": 3, "codec": "top-k fraction=0.2"}, "kind": "Counted"}
    settings |= {"samples": 28, "save": save, "options": {"max_epochs": 3}}
    whole = fit(tmp_path / "whole", **settings)
    step = 10 if "every_n_train_steps" in save else 7
    again = fit(tmp_path / "again", ckpt=f"{tmp_path}/whole/step={step}.ckpt", **settings)
    assert [each["seen"] for each in again] == [21 - step] * 2
    for one, other in zip(whole, again, strict=True):
        for name in ("model", "momentum", "steps", "merged", "averages", "lr", "global_step"):
            assert one[name] == other[name], name
    assert whole[0]["momentum"] != whole[1]["momentum"]


def test_hpsgd_goes_on_with_unequal_ranks_and_with_other_numbers_of_them(tmp_path):
    settings = {"kind": "Counted", "averaging": {"codec": "one-bit"}, "save": {"every_n_epochs": 1}}
    whole = fit(tmp_path / "whole", samples=[20, 32], **settings)
    ckpt = f"{tmp_path}/whole/step=5.ckpt"
    again = fit(tmp_path / "again", samples=[20, 32], ckpt=ckpt, **settings)
    assert same(again, "model")
    assert [each["seen"] for each in again] == [5, 8]
    assert [each["steps"] for each in again] == [each["steps"] for each in whole] == [10, 16]
    fewer = fit(tmp_path / "fewer", world=1, ckpt=ckpt, **settings)
    assert fewer[0]["seen"] == 8
    assert "holds the averaging of 2 ranks" in fewer[0]["warnings"][0]
    more = fit(tmp_path / "more", world=3, ckpt=ckpt, **settings)
    assert same(more, "model")
    assert "here are 3" in more[0]["warnings"][0]
    plain = launch(JOB, {"part": "plain", "folder": str(tmp_path), "ckpt": ckpt}, world=1)[0]
    assert plain == {"epoch": 4, "loaded": whole[0]["validated"][0], "ranks": 2}


# -- what cannot be ----------------------------------------------------------------------------------------------------


def refused(folder, world=2, **settings):
    found = launch(JOB, {"part": "refused", "folder": str(folder), **settings}, world=world)
    assert all(kind == found[0][0] for kind, _ in found), found
    return found[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"averaging": {"outer_rate": 0.5}}, "outer_rate is no setting of hpsgd; it has period"),
        ({"averaging": {"period": 0}}, "period must be"),
        ({"averaging": {"codec": "qsdg"}}, "did you mean 'qsgd'"),
        ({"method": "hp-sgd"}, "did you mean 'hpsgd'"),
        ({"options": {"sync_batchnorm": True}}, "averages the statistics of BatchNorm itself"),
        ({"smooth": True}, "WeightAveraging averages the models that this rank alone has had"),
        ({"kind": "Twofold"}, "takes one optimizer, and configure_optimizers returns 2"),
        ({"kind": "Gathering"}, "an all-gather in the middle of a training step"),
        ({"samples": [20, 32], "options": {"max_steps": 9, "max_epochs": -1}}, "5, 8.*max_steps=9 in different epochs"),
        (
            {"samples": [20, 32], "options": {"val_check_interval": 4}},
            "rank 0 has come to the end of epoch 0, and rank 1 to a validation in epoch 0: give all ranks as many",
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:24],
)
def test_what_cannot_be_right_is_refused_by_all(tmp_path, settings, words):
    kind, text = refused(tmp_path, **settings)
    assert kind in ("LightningError", "ValueError")
    with pytest.raises(ValueError, match=words):
        raise ValueError(text)


@pytest.mark.parametrize(
    ("kind", "validate", "method"),
    [("Stopping", False, "hpsgd"), ("Stopping", True, "psgd"), ("StoppingLate", True, "hpsgd")],
)
def test_a_stop_of_one_rank_alone_is_refused_by_all(tmp_path, kind, validate, method):
    settings = {"kind": kind, "validate": validate, "method": method, "options": {"max_epochs": 1000}}
    if kind == "StoppingLate":  # Lightning waits for all ranks before it asks for the loader again
        settings["options"]["reload_dataloaders_every_n_epochs"] = 1
    found = launch(JOB, {"part": "refused", "folder": str(tmp_path), **settings}, seconds=60)
    assert [error for error, _ in found] == ["LightningError"] * 2
    for _, text in found:
        assert "rank 0 has come to the end of training in epoch 1, and rank 1 to the beginning of epoch 1" in text
        assert "should_stop" in text


def test_a_checkpoint_of_another_averaging_is_refused(tmp_path):
    fit(tmp_path, averaging={"codec": "one-bit"}, save={"every_n_epochs": 1})
    ckpt = str(tmp_path / "step=8.ckpt")
    kind, text = refused(tmp_path, averaging={"codec": "qsgd"}, ckpt=ckpt)
    assert kind == "LightningError"
    assert "its codec is ErrorFeedback(OneBit())" in text
    assert "load_from_checkpoint" in text


@pytest.mark.parametrize(("kind", "reason"), [("Failing", "rank 1 has had enough"), ("Terminated", "SIGTERMException")])
def test_a_rank_that_ends_ends_all(tmp_path, kind, reason):
    settings = {"part": "fit", "folder": str(tmp_path), "kind": kind, "samples": 4000, "method": "local-sgd"}
    found = launch(JOB, settings, seconds=60, check=False)
    assert all(isinstance(each, JobError) for each in found)
    assert "rank 1" in str(found[0])
    assert reason in str(found[0]), "rank 0 says who has gone, and why"


def test_a_checkpoint_of_a_broken_run_waits_for_nobody(tmp_path):
    first, second = launch(JOB, {"part": "broken", "folder": str(tmp_path)}, seconds=60, check=False)
    assert first[0] == "RankGoneError"
    assert "optimizer_states" in first[1]
    assert "paceline_averaging" not in first[1], "of the other ranks there is nothing in it"
    assert isinstance(second, JobError) or second[0] == "KeyError"  # rank 0 may not have written the file yet
