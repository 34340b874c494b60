"""What each rank of the averaging tests runs."""

from __future__ import annotations

import os
import warnings

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from paceline.lightning import Averaging
from tests.integrations.lightning.small import RANK, Module, digest, loader, own_loader, trainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def job(part, **settings):
    return globals()[part](**settings)


def fit(folder, method="hpsgd", averaging=None, samples=32, options=None, validate=True, kind="Module", precision=None):
    """Train; return what is worth comparing."""
    model = globals()[kind]() if kind != "Module" else Module()
    strategy = Averaging(method, **(averaging or {}))
    given = {"use_distributed_sampler": False} | (options or {})
    if precision:
        given["precision"] = precision
    fitted = trainer(folder, WORLD, strategy=strategy, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(samples, list):
            samples = samples[RANK]
        fitted.fit(model, own_loader(samples), loader(16, 8) if validate else None)
    return {
        "model": digest(model),
        "validated": model.validated,
        "seen": model.seen,
        "steps": strategy.averager.steps,
        "averages": strategy.averager.averages,
        "merged": strategy.averager.merged_steps,
        "global_step": fitted.global_step,
        "loss": float(fitted.callback_metrics["val_loss"]) if validate else None,
        "warnings": [str(each.message) for each in caught if "ranks" in str(each.message)],
    }
