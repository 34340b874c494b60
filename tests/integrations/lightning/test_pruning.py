"""Lightning's Trainer with `Prune`: every epoch is trained whole, however long it is, and can be gone on with."""

from __future__ import annotations

import math

import pytest

from tests.integrations.ranks import launch

JOB = "tests.integrations.lightning.pruning_job"
SAMPLES, EPOCHS = 89, 6


def fit(folder, world=1, **settings):
    return launch(JOB, {"part": "fit", "folder": str(folder), **settings}, world=world)


def several(folder, world, *fits):
    """Return what each rank found in each of some fits, which it takes in one process."""
    found = launch(JOB, {"part": "several", "fits": [{"folder": str(folder), **each} for each in fits]}, world=world)
    return list(zip(*found, strict=True))


def check_whole(found):
    """Every epoch came to its end, was as long as Lightning had been told, and pruned epochs are shorter."""
    assert found["epoch"] == EPOCHS + 1
    assert found["lengths"] == found["batches"]
    assert len(found["batches"]) == EPOCHS
    assert min(found["batches"]) < found["batches"][0]
    assert found["warnings"] == []


@pytest.mark.parametrize("kind", ["InfoBatch", "FinePruning"])
def test_one_rank_trains_as_a_loop_of_ones_own(tmp_path, kind):
    (own,) = launch(JOB, {"part": "plain", "kind": kind}, world=1)
    (found,) = fit(tmp_path, kind=kind, options={"num_sanity_val_steps": 2})
    check_whole(found)
    assert {name: found[name] for name in own} == own
    assert found["bars"] == [[batches, batches] for batches in own["batches"]]
    assert found["validations"] == EPOCHS
    assert found["lr"] == pytest.approx(0.005 * 0.9**EPOCHS)
    (fetched,) = fit(tmp_path, kind=kind, workers=2)
    assert fetched["model"] == own["model"]


def test_two_ranks_share_every_epoch(tmp_path):
    found = fit(tmp_path, 2)
    for each in found:
        check_whole(each)
    assert found[0]["model"] == found[1]["model"]
    assert found[0]["times"] == found[1]["times"]
    assert sum(each["taken"] for each in found) >= SAMPLES * EPOCHS - sum(found[0]["times"])
    averaged = fit(tmp_path, 2, averaging={"method": "local-sgd", "period": 3})
    for each in averaged:
        check_whole(each)
    assert averaged[0]["model"] == averaged[1]["model"]


def test_accumulation_steps_on_the_last_batch_of_every_epoch(tmp_path):
    for world in (1, 2):
        for found in fit(tmp_path, world, options={"accumulate_grad_batches": 4}):
            check_whole(found)
            assert found["steps"] == [math.ceil(batches / 4) for batches in found["batches"]]


def test_limits_and_validation_intervals_are_those_of_each_epoch(tmp_path):
    options = [{"val_check_interval": 0.5}, {"val_check_interval": 10}, {"limit_train_batches": 5}]
    options += [{"limit_train_batches": 0.5, "reload_dataloaders_every_n_epochs": 2}]
    halves, tens, cut, shares = (found for (found,) in several(tmp_path, 1, *({"options": each} for each in options)))
    check_whole(halves)
    assert halves["validations"] == sum(batches // (batches // 2) for batches in halves["batches"])
    check_whole(tens)
    assert tens["validations"] == EPOCHS, "also in epochs of fewer than 10 batches"
    assert (cut["batches"], cut["epoch"], cut["warnings"]) == ([5] * EPOCHS, EPOCHS + 1, [])
    assert shares["batches"][0] == 5  # of 11
    assert shares["lengths"] == shares["batches"]
    assert shares["warnings"] == []


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tmp_path, world):
    settings = {"save": {"every_n_train_steps": 1}}
    whole = fit(tmp_path / "whole", world, **settings)
    lengths = whole[0]["batches"]
    ends = lengths[0] + lengths[1]
    steps = [3, ends - 1, ends, ends + 1]  # a whole epoch's middle; a pruned one's last but one, end and beginning
    again = [settings | {"ckpt": f"{tmp_path}/whole/step={step}.ckpt"} for step in steps]
    for step, found in zip(steps, several(tmp_path / "again", world, *again), strict=True):
        for one, other in zip(whole, found, strict=True):
            for name in ("model", "times", "epoch", "lr"):
                assert one[name] == other[name], (step, name)
        assert sum(found[0]["batches"]) == sum(lengths) - step


def test_with_other_ranks_a_broken_epoch_begins_again(tmp_path):
    fit(tmp_path, 2, save={"every_n_train_steps": 1})
    (found,) = fit(tmp_path, ckpt=str(tmp_path / "step=8.ckpt"))
    assert found["epoch"] == EPOCHS + 1
    assert len(found["warnings"]) == 1
    assert "2 ranks in the middle of epoch 2, and here are 1: that epoch begins again" in found["warnings"][0]
    (between,) = fit(tmp_path, ckpt=str(tmp_path / "step=6.ckpt"))
    assert between["warnings"] == []


@pytest.mark.parametrize(
    ("world", "settings", "kind", "words"),
    [
        (2, {"options": {"use_distributed_sampler": True}}, "LightningError", "give Trainer(use_distributed_sampler="),
        (
            2,
            {"options": {"use_distributed_sampler": True}, "callback": False, "kind": "FinePruning"},
            "PruningError",
            "in Lightning: Trainer(use_distributed_sampler=False)",
        ),
        (
            2,
            {"options": {"use_distributed_sampler": True}, "callback": False},
            "PruningError",
            "samples must be the number of samples or the data set, and this is a DistributedSampler",
        ),
        (1, {"other": True}, "LightningError", "Prune needs one training DataLoader, with its sampler"),
        (1, {"options": {"overfit_batches": 2}}, "LightningError", "overfit_batches=2 wants the same batches"),
        (1, {"module": "Forgetful"}, "PruningError", "batch 0 of epoch 0 was not observed"),
        (1, {"module": "Saving"}, "LightningError", "self.save_hyperparameters(ignore=['pruning'])"),
    ],
    ids=["sampler", "fine-pruning-alone", "info-batch-alone", "loader", "overfit", "observe", "hyperparameters"],
)
def test_what_cannot_be_right_is_refused_by_all(tmp_path, world, settings, kind, words):
    for found, text in launch(JOB, {"part": "refused", "folder": str(tmp_path), **settings}, world=world):
        assert found == kind, text
        assert words in text
