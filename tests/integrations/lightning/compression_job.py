"""What each rank of the compression tests runs."""

from __future__ import annotations

import os
import warnings

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline.lightning import Averaging, Compress
from tests.integrations.lightning.averaging_job import Counted, Twofold
from tests.integrations.lightning.small import Module, digest, loader, own_loader, trainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
WIDE = 400


def job(part, **settings):
    return globals()[part](**settings)


class Wide(LightningModule):
    """One layer of 160,000 parameters."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDE, WIDE, bias=False)

    def training_step(self, batch, batch_idx):
        return self.layer(torch.randn(2, WIDE)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


KINDS = {kind.__name__: kind for kind in (Module, Counted, Twofold, Wide)}
STRATEGIES = {
    "ddp": lambda: "ddp",
    "auto": lambda: "auto",
    "hook": lambda: DDPStrategy(ddp_comm_hook=allreduce_hook),
    "averaging": lambda: Averaging("hpsgd"),
}


def fit(
    folder,
    codec="qsgd",
    kind="Module",
    strategy="ddp",
    options=None,
    samples=32,
    ckpt=None,
    save=None,
    fits=1,
    scaled=False,
):
    compress = Compress(codec) if codec else None
    model, told = KINDS[kind](), {}
    callbacks = [compress] if compress else []
    given = {"use_distributed_sampler": False} | (options or {})
    if save:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, **save))
        given["enable_checkpointing"] = True
    if scaled:
        given["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))]

    class Look(Callback):
        """Looks at the figures before the compression is let go of."""

        def on_train_end(self, trainer, module):
            if compress and compress.compression:
                told.update(compress.compression.figures())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(fits):
            fitted = trainer(folder, WORLD, strategy=STRATEGIES[strategy](), callbacks=callbacks, **given)
            fitted.callbacks.append(Look())
            fitted.fit(model, own_loader(samples), loader(16, 8) if kind != "Wide" else None, ckpt_path=ckpt)
    return {
        "model": digest(model),
        "global_step": fitted.global_step,
        "validated": getattr(model, "validated", []),
        "told": told,
        "warnings": [str(each.message) for each in caught if each.category.__name__ == "PacelineWarning"],
    }


def refused(**settings):
    try:
        fit(**settings)
    except Exception as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("nothing was refused")


def read(ckpt):
    """Return what a checkpoint holds of the codecs."""
    state = torch.load(ckpt, weights_only=True)["callbacks"]["Compress"]
    return {"ranks": state["ranks"], "numbers": [each["rank"] for each in state["states"]]}
