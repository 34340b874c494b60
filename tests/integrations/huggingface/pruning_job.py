"""Trainers whose samples sit epochs out."""

from __future__ import annotations

import os
import warnings

import numpy as np
import torch
from transformers import TrainerCallback

from paceline.huggingface import compress, prune
from tests.integrations.huggingface.tiny import Sentences, StopAt, Trainer, bits, make_args, make_model

INFO = {"policy": "info-batch", "ratio": 0.5, "delta": 0.875}
FINE = {"policy": "fine-pruning", "window": 4, "starting_point": 1, "block": 2, "count": 2, "prune": 0.25}


def job(parts, **settings):
    """Run several parts one after the other in one launch: [name, settings] of each; return their answers."""
    return [globals()[name](**(settings | more)) for name, more in parts]


class Numbered(torch.utils.data.Dataset):
    """Remembers which samples were fetched, in their order."""

    def __init__(self, data):
        self.data, self.fetched = data, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.fetched.append(int(index))
        return self.data[index]


class Epochs(TrainerCallback):
    """Remembers the steps of each epoch, what Trainer says of them, and the learning rates."""

    def __init__(self):
        self.steps, self.ends, self.fractions, self.rates, self.evaluated = [], [], [], [], 0

    def on_step_end(self, args, state, control, optimizer, **others):
        self.fractions.append(state.epoch)
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.steps.append(state.global_step)

    def on_epoch_end(self, args, state, control, **others):
        self.ends.append(state.global_step)

    def on_evaluate(self, args, state, control, **others):
        self.evaluated += 1


class EndEpochAt(TrainerCallback):
    """Ends an epoch before its end."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **others):
        control.should_epoch_stop |= state.global_step == self.step


def train(
    policy=None, head="causal-lm", samples=48, folder=None, stop=None, resume=None, codec=None, end_epoch_at=None,
    evaluated=False, dropout=0.1, base=None, own_losses=False, **settings,
):  # fmt: skip
    """Train; return the bits that came of it, the epochs, and who sat out."""
    pruning_settings = {name: settings.pop(name) for name in list(settings) if name in {*INFO, *FINE}}
    data, epochs = Numbered(Sentences(samples, labelled=head != "causal-lm")), Epochs()
    callbacks = [epochs, *([StopAt(stop)] if stop else []), *([EndEpochAt(end_epoch_at)] if end_epoch_at else [])]
    args = make_args(folder, **{"num_train_epochs": 4} | settings)
    more = {"eval_dataset": Sentences(10, seed=5)} if evaluated else {}
    trainer = Trainer(make_model(head, dropout=dropout), args, train_dataset=data, callbacks=callbacks, **more)
    losses = (lambda outputs, inputs: _own_losses(outputs, inputs)) if own_losses else None
    part = prune(trainer, policy, losses=losses, **pruning_settings) if policy else None
    if codec:
        compress(trainer, codec)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return {
        "bits": bits(trainer),
        "global_step": trainer.state.global_step,
        "max_steps": trainer.state.max_steps,
        "ends": epochs.ends,
        "steps": epochs.steps,
        "fractions": epochs.fractions,
        "rates": epochs.rates,
        "rate_after": trainer.lr_scheduler.get_last_lr()[0],
        "losses": [line["loss"] for line in lines],
        "shares": [line.get("paceline/pruned_share") for line in lines],
        "fetched": data.fetched,
        "epoch": part.sampler.epoch if part else None,
        "times": part.sampler.times_pruned.tolist() if part else None,
        "difficulty": np.nan_to_num(part.sampler.difficulty()).tolist() if part else None,
        "checkpoints": sorted(os.listdir(folder)) if folder else [],
        "warnings": [str(each.message) for each in caught if "epoch" in str(each.message)],
        "evaluations": [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line],
    }


def _own_losses(outputs, inputs):
    logits, labels = outputs["logits"][:, :-1], inputs["labels"][:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.sum(1) / labels.ne(-100).sum(1)
