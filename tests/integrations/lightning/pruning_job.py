"""What each rank of the pruning tests runs."""

from __future__ import annotations

import os
import warnings

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from torch.utils.data import DataLoader

import paceline
from paceline.lightning import Averaging, Prune
from tests.integrations.lightning.small import Module, Numbers, digest, loader, trainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SAMPLES, BATCH, EPOCHS = 89, 8, 6  # a whole epoch leaves one sample over


class Pruned(Module):
    """A model that gives every sample's loss to a sampler."""

    def __init__(self, pruning):
        super().__init__()  # with a BatchNorm, which refuses a batch of one sample
        self.pruning, self.lengths, self.taken = pruning, [], []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        self.taken.append(len(inputs))
        return self.pruning.observe((self(inputs) - targets).square().mean(1))

    def on_train_epoch_start(self):
        self.lengths.append(self.trainer.num_training_batches)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Saving(Pruned):
    """Has the sampler among its hyperparameters."""

    def __init__(self, pruning):
        super().__init__(pruning)
        self.save_hyperparameters("pruning")


class Forgetful(Pruned):
    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Progress(TQDMProgressBar):
    """Notes how far the bar was, and how far it was to go, at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.bars = []

    def on_train_epoch_end(self, *args):
        self.bars.append([self.train_progress_bar.n, self.train_progress_bar.total])
        super().on_train_epoch_end(*args)


class PerEpoch(Callback):
    """Counts batches and optimiser steps of each epoch."""

    def __init__(self):
        self.batches, self.steps, self.before = [], [], (0, 0)

    def on_train_epoch_end(self, trainer, module):
        now = len(module.taken), trainer.global_step
        self.batches.append(now[0] - self.before[0])
        self.steps.append(now[1] - self.before[1])
        self.before = now


def sampler(kind="InfoBatch", epochs=EPOCHS, samples=SAMPLES):
    options = {"window": 3, "starting_point": 1, "block": 2, "count": 1} if kind == "FinePruning" else {}
    return getattr(paceline, kind)(samples, batch_size=BATCH, epochs=epochs, **options)


def job(part, **settings):
    return globals()[part](**settings)


def fit(
    folder,
    kind="InfoBatch",
    options=None,
    callback=True,
    workers=0,
    ckpt=None,
    save=None,
    averaging=None,
    module="Pruned",
    other=False,
):
    pruning = sampler(kind)
    model, counts, progress = globals()[module](pruning), PerEpoch(), Progress()
    callbacks = [progress, counts] + ([Prune(pruning)] if callback else [])
    given = {"use_distributed_sampler": False, "max_epochs": EPOCHS, "enable_progress_bar": True}
    if WORLD > 1:
        given["strategy"] = Averaging(**averaging) if averaging else "ddp"
    if save:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, **save))
        given["enable_checkpointing"] = True
    fitted = trainer(folder, WORLD, callbacks=callbacks, **given | (options or {}))
    train = DataLoader(Numbers(SAMPLES), batch_sampler=pruning, num_workers=workers, persistent_workers=workers > 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted.fit(model, loader() if other else train, loader(16, 8), ckpt_path=ckpt)
    return {
        "model": digest(model),
        "epoch": pruning.epoch,
        "times": pruning.times_pruned.tolist(),
        "taken": sum(model.taken),
        "lengths": model.lengths,
        "batches": counts.batches,
        "steps": counts.steps,
        "bars": progress.bars,
        "validations": len(model.validated),
        "lr": fitted.optimizers[0].param_groups[0]["lr"],
        "warnings": [str(each.message) for each in caught if "begin" in str(each.message)],
    }


def several(fits):
    """Take several fits in one process."""
    return [fit(**each) for each in fits]


def refused(**settings):
    try:
        fit(**settings)
    except Exception as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("nothing was refused")


def plain(kind="InfoBatch"):
    """Train the same in a loop of one's own: what a fit on one rank must come to, to the bit."""
    pruning = sampler(kind)
    model, batches, taken = Pruned(pruning), [], 0
    (optimizer,), (schedule,) = model.configure_optimizers()
    train = DataLoader(Numbers(SAMPLES), batch_sampler=pruning)
    for _ in range(EPOCHS):
        count = 0
        for inputs, targets in train:
            loss = pruning.observe((model(inputs) - targets).square().mean(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            count, taken = count + 1, taken + len(inputs)
        schedule.step()
        batches.append(count)
    return {"model": digest(model), "batches": batches, "taken": taken, "times": pruning.times_pruned.tolist()}
