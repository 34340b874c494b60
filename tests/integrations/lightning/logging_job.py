"""What each rank of the tests of loggers and of LARS runs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import paceline
from paceline.lightning import Averaging, Compress, Prune
from tests.integrations.lightning.averaging_job import Counted
from tests.integrations.lightning.pruning_job import Pruned, sampler
from tests.integrations.lightning.small import Module, Numbers, digest, loader, own_loader, trainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
EVERY = 3


def job(part, **settings):
    return globals()[part](**settings)


def figures(folder, which):
    """Train with a part; return the figures that each logger has, by their names, and at which steps."""
    loggers = [CSVLogger(folder, "csv"), TensorBoardLogger(folder, "tensorboard")]
    options = {"logger": loggers, "log_every_n_steps": EVERY, "use_distributed_sampler": False, "max_epochs": 3}
    if which == "pruning":
        pruning = sampler()
        train = torch.utils.data.DataLoader(Numbers(90), batch_sampler=pruning)
        fitted = trainer(folder, WORLD, callbacks=[Prune(pruning)], strategy="ddp", **options)
        fitted.fit(Pruned(pruning), train)
    else:
        averages = which == "averaging"
        strategy = Averaging("hpsgd") if averages else "ddp"
        callbacks = [] if averages else [Compress("qsgd")]
        fitted = trainer(folder, WORLD, callbacks=callbacks, strategy=strategy, **options)
        fitted.fit(Module(), own_loader(32), loader(16, 8))
    return [_in_csv(folder), _in_tensorboard(folder)] if fitted.is_global_zero else None


def _in_csv(folder):
    import csv

    (path,) = Path(folder).glob("csv/version_0/metrics.csv")
    found = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if name.startswith("paceline/") and value:
                    found.setdefault(name, []).append([int(row["step"]), float(value)])
    return found


def _in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(Path(folder, "tensorboard", "version_0")))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith("paceline/")]
    return {name: [[event.step, event.value] for event in events.Scalars(name)] for name in names}


class Scaled(Counted):
    """Trains by LARS, with a warm-up at every step."""

    def configure_optimizers(self):
        optimizer = paceline.LARS(self.parameters(), lr=0.5, momentum=0.9)
        schedule = paceline.warmup_poly(optimizer, warmup_steps=4, total_steps=16)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lars(folder, ckpt=None):
    checkpoint = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=5)
    fitted = trainer(
        folder, WORLD, callbacks=[checkpoint], enable_checkpointing=True, strategy="ddp", use_distributed_sampler=False
    )
    model = Scaled(norm=False)  # under DDP each rank has statistics of its own
    fitted.fit(model, own_loader(32), ckpt_path=ckpt)
    return [digest(model), fitted.optimizers[0].param_groups[0]["lr"], model.seen]
