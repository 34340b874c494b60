"""Trainer in this process: one rank is plain training; what cannot be is refused before it starts; LARS in Trainer."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

import paceline
from paceline.huggingface import TrainerSetupError, average, prune, take_rounds
from paceline.huggingface.rounds import RepeatedLoader
from tests.integrations.huggingface.trainers import Tokens, arguments, digest, gpt2, state_digest, with_sgd


def trainer_of(folder, sgd=True, optimizer=None, samples=32, **settings):
    made = gpt2()
    optimizers = (with_sgd(made) if sgd else None, None)
    return Trainer(
        made,
        arguments(str(folder), **settings),
        train_dataset=Tokens(samples),
        eval_dataset=Tokens(8, seed=1),
        optimizers=optimizers,
        optimizer_cls_and_kwargs=optimizer,
    )


@pytest.mark.parametrize("part", ["average", "take_rounds"])
def test_one_rank_is_plain_training_and_says_so(tmp_path, caplog, part):
    settings = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    plain = trainer_of(tmp_path / "plain", **settings)
    plain.train()
    trainer = trainer_of(tmp_path / "part", **settings)
    made = average(trainer, "hpsgd") if part == "average" else take_rounds(trainer, "lgc", k=1)
    with caplog.at_level(logging.WARNING, "paceline.huggingface"):
        trainer.train()
    assert digest(trainer.model) == digest(plain.model)
    assert made.sync is None
    assert made.figures() == {}
    assert "one rank: training is plain" in caplog.text


class Sharded(torch.nn.Linear):
    is_distributed_loading_by_transformers = True


def pretend(**changed):
    def change(trainer):
        for name, value in changed.items():
            *path, last = name.split("__")
            owner = trainer
            for each in path:
                owner = getattr(owner, each)
            setattr(owner, last, value)

    return change


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"is_deepspeed_enabled": True}, "whole model .*DEEPSPEED"),
        ({"is_fsdp_enabled": True}, "whole model .*FSDP"),
        ({"is_model_parallel": True}, "device_map"),
        ({"is_distributed_loading_by_transformers": True}, "whole model .*distributed_config"),
        (
            {"accelerator__state__parallelism_config": SimpleNamespace(tp_size=2, total_size=2)},
            "whole model .*tp_size=2",
        ),
    ],
)
@pytest.mark.parametrize("part", [lambda trainer: average(trainer), lambda trainer: take_rounds(trainer, "full")])
def test_what_shards_a_model_is_refused(tmp_path, monkeypatch, changed, said, part):
    trainer = trainer_of(tmp_path)
    state = trainer.accelerator.state
    before = getattr(state, "parallelism_config", None)
    try:
        pretend(**changed)(trainer)
        with pytest.raises(TrainerSetupError, match=said):
            part(trainer)
    finally:
        state.parallelism_config = before  # it is shared by all accelerators of a process


@pytest.mark.parametrize("part", [average, lambda trainer: take_rounds(trainer, "full"), prune])
def test_a_trainer_that_does_not_see_its_launch_is_refused(tmp_path, monkeypatch, part):
    """Without a GPU and without use_cpu=True, Trainer trains each of torchrun's ranks alone, and says nothing of it."""
    trainer = trainer_of(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainerSetupError, match=r"2 ranks were launched.*use_cpu=True.*unset WORLD_SIZE"):
        part(trainer)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
    ],
)
def test_what_makes_ranks_wait_or_leave_alone_is_refused(tmp_path, monkeypatch, settings, said):
    if "enable_jit_checkpoint" in settings:
        import signal

        before = signal.getsignal(signal.SIGTERM)
    trainer = trainer_of(tmp_path, **settings)
    monkeypatch.setattr(type(trainer.args), "world_size", property(lambda self: 2))
    with pytest.raises(TrainerSetupError, match=said):
        average(trainer)
    if "enable_jit_checkpoint" in settings:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda trainer: average(trainer, "hpsdg"), "did you mean 'hpsgd'"),
        (lambda trainer: average(trainer, "ssgd", period=3), "period is no setting of ssgd"),
        (lambda trainer: average(trainer, "local-sgd", period=0), "period"),
        (lambda trainer: average(trainer, codec="qsdg"), "qsgd"),
        (lambda trainer: average(trainer, codec="qsgd", plan="all-reduce"), "cannot be exchanged by 'all-reduce'"),
        (lambda trainer: average(trainer, timeout_seconds=0), "timeout_seconds"),
        (lambda trainer: take_rounds(trainer, "lgc"), "needs k"),
        (lambda trainer: take_rounds(trainer, "lgc", k=0), "k"),
        (lambda trainer: take_rounds(trainer, "full", k=2), "k is no setting of full"),
        (lambda trainer: take_rounds(trainer, "async"), "strategy of rounds"),
        (lambda trainer: take_rounds(trainer, "full", blocks=0), "blocks"),
        (lambda trainer: average(torch.nn.Linear(1, 1)), "wants a transformers.Trainer"),
        (lambda trainer: [average(trainer), take_rounds(trainer, "full")], "averaging cannot be in one"),
        (lambda trainer: [average(trainer), average(trainer)], "averaging already"),
    ],
)
def test_settings_are_refused_where_they_are_given(tmp_path, call, said):
    with pytest.raises(ValueError, match=said):
        call(trainer_of(tmp_path))


def test_an_optimizer_that_swaps_weights_for_evaluation_is_refused_when_training_begins(tmp_path):
    class ScheduleFree(torch.optim.SGD):
        def train(self): ...
        def eval(self): ...

    trainer = trainer_of(tmp_path, sgd=False)
    trainer.optimizer = ScheduleFree(trainer.model.parameters(), lr=0.1)
    with pytest.raises(TrainerSetupError, match="replaces the weights for an evaluation"):
        average(trainer)._check_begin([])


def test_a_repeated_loader_goes_on_where_it_was_left_and_tells_its_passes():
    class Passes(list):
        seen = []  # noqa: RUF012

        def set_epoch(self, epoch):
            self.seen.append(epoch)

    loader = RepeatedLoader(Passes("abc"))
    found = []
    for epoch in (4, 5, 6):
        loader.set_epoch(epoch)
        batches = iter(loader)
        found.append([next(batches), next(batches)])
    assert found == [["a", "b"], ["c", "a"], ["b", "c"]]
    assert Passes.seen == [4, 5]
    with pytest.raises(TrainerSetupError, match="no batch"):
        next(iter(RepeatedLoader([])))


# -- LARS --------------------------------------------------------------------------------------------------------------

LARS = (paceline.LARS, {"lr": 0.5, "trust_coefficient": 0.02, "weight_decay": 1e-4})


def test_lars_takes_trainers_groups_and_schedules(tmp_path):
    settings = {"weight_decay": 0.01, "lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0}}
    settings |= {"max_steps": 60, "warmup_steps": 6, "per_device_train_batch_size": 16}
    trainer = trainer_of(tmp_path, sgd=False, optimizer=LARS, samples=256, **settings)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, paceline.LARS)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert all(parameter.ndim < 2 for parameter in optimizer.param_groups[1]["params"])
    assert optimizer.param_groups[0]["lr"] < 0.01
    assert trainer.evaluate()["eval_loss"] < before - 0.05


def test_lars_with_its_own_schedule_goes_on_from_a_checkpoint_to_the_bit(tmp_path):
    def made():
        model = gpt2(dropout=0.1)
        optimizer = paceline.LARS(model.parameters(), lr=4.0, weight_decay=1e-4)
        schedule = paceline.warmup_poly(optimizer, warmup_steps=2, total_steps=8)
        settings = arguments(str(tmp_path), max_steps=8, save_strategy="steps", save_steps=3)
        return Trainer(model, settings, train_dataset=Tokens(20), optimizers=(optimizer, schedule))

    whole, resumed = made(), made()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert digest(resumed.model) == digest(whole.model)
    assert state_digest(resumed.optimizer) == state_digest(whole.optimizer)
    rates = [each["learning_rate"] for each in whole.state.log_history if "learning_rate" in each]
    assert rates == [each["learning_rate"] for each in resumed.state.log_history if "learning_rate" in each]
