"""What each rank of the averaging tests runs."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer, WeightAveraging

from paceline.lightning import Averaging
from tests.integrations.lightning.small import RANK, Module, digest, loader, own_loader, trainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def job(part, **settings):
    return globals()[part](**settings)


# -- modules -----------------------------------------------------------------------------------------------------------


class Counted(Module):
    """Trains on numbers that rank and batch alone decide, so that a run that goes on trains on what it would have."""

    def training_step(self, batch, batch_idx):
        place = self.trainer.fit_loop.epoch_loop.total_batch_idx
        generator = torch.Generator().manual_seed(1000 * place + RANK)
        inputs = torch.randn(4, 16, generator=generator)
        self.seen += 1
        return torch.nn.functional.mse_loss(self(inputs), inputs.sum(1, keepdim=True))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.seen += 1


class Twofold(Manual):
    def configure_optimizers(self):
        first, *_, last = self.net
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, last)]


class Logging(Module):
    """Logs a value that differs between ranks, in every step."""

    def training_step(self, batch, batch_idx):
        self.log("rank", float(RANK), on_step=True, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)


class Gathering(Module):
    def training_step(self, batch, batch_idx):
        self.all_gather(torch.ones(1))
        return super().training_step(batch, batch_idx)


class Failing(Module):
    def training_step(self, batch, batch_idx):
        if RANK == 1 and batch_idx == 3:
            raise KeyError("rank 1 has had enough")
        return super().training_step(batch, batch_idx)


class Terminated(Module):
    def training_step(self, batch, batch_idx):
        if RANK == 1 and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


class Unequal(Module):
    """Rank 0 waits in its second batch until rank 1 has trained all of its own."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        done = Path(self.trainer.default_root_dir, "rank-1-is-done")
        if RANK == 1 and batch_idx == self.trainer.num_training_batches - 1:
            done.touch()
        deadline = time.monotonic() + 60
        while RANK == 0 and batch_idx == 1 and not done.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 1 waits for rank 0")
            time.sleep(0.01)


class Stopping(Module):
    """Rank 0 alone wants to stop, in the middle of its first epoch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if RANK == 0 and batch_idx == 2:
            self.trainer.should_stop = True


class StoppingLate(Module):
    """Rank 0 alone wants to stop, when all have come together at the end of an epoch."""

    def on_train_epoch_end(self):
        self.trainer.should_stop = RANK == 0


KINDS = {kind.__name__: kind for kind in (Module, Counted, Manual, Twofold, Logging, Gathering, Failing, Terminated)}
KINDS |= {kind.__name__: kind for kind in (Unequal, Stopping, StoppingLate)}


# -- one fit -----------------------------------------------------------------------------------------------------------


def fit(
    folder,
    method="hpsgd",
    averaging=None,
    samples=32,
    options=None,
    validate=True,
    kind="Module",
    ckpt=None,
    save=None,
    stop=False,
    timer=False,
    smooth=False,
):
    """Train; return what is worth comparing."""
    model, strategy = KINDS[kind](), Averaging(method, **(averaging or {}))
    given, callbacks = {"use_distributed_sampler": False} | (options or {}), []
    if save:
        callbacks.append(ModelCheckpoint(**{"dirpath": folder, "filename": "{step}", "save_top_k": -1} | save))
        given["enable_checkpointing"] = True
    if stop:
        callbacks.append(EarlyStopping("val_loss", patience=0, min_delta=1e9))
    if smooth:
        callbacks.append(WeightAveraging())
    if timer:
        callbacks.append(Timer(duration={"minutes": 10}))
    fitted = trainer(folder, WORLD, strategy=strategy, callbacks=callbacks, **given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = samples[RANK] if isinstance(samples, list) else samples
        fitted.fit(model, own_loader(mine), loader(16, 8) if validate else None, ckpt_path=ckpt)
    momentum = [each["momentum_buffer"].sum().item() for each in fitted.optimizers[0].state.values()]
    return {
        "model": digest(model),
        "validated": model.validated,
        "seen": model.seen,
        "steps": strategy.averager.steps,
        "averages": strategy.averager.averages,
        "merged": strategy.averager.merged_steps,
        "global_step": fitted.global_step,
        "lr": fitted.optimizers[0].param_groups[0]["lr"],
        "momentum": momentum,
        "metrics": {name: float(value) for name, value in fitted.callback_metrics.items()},
        "best": fitted.checkpoint_callback.best_model_path if save else "",
        "warnings": [str(each.message) for each in caught if each.category.__name__ == "PacelineWarning"],
        "callbacks": len(fitted.callbacks),
    }


def several(fits):
    """Take several fits in one process."""
    return [fit(**each) for each in fits]


def refused(expected="ValueError", **settings):
    """Return the error that a fit ends with."""
    try:
        fit(**settings)
    except Exception as error:
        return [type(error).__name__, str(error)]
    raise AssertionError("nothing was refused")


def ssgd_and_ddp(folder):
    """Return the parameters that ssgd and Lightning's own DDP come to."""
    found = []
    for strategy in (Averaging("ssgd"), "ddp"):
        model = Module(norm=False)
        fitted = trainer(folder, WORLD, strategy=strategy, use_distributed_sampler=False)
        fitted.fit(model, own_loader(30))
        found.append(torch.cat([each.detach().flatten() for each in model.parameters()]).tolist())
    return found


def plain(folder, ckpt):
    """Go on from a checkpoint of averaging, on one device, without paceline; and load it for inference."""
    model = Counted()
    fitted = trainer(folder, 1, max_epochs=4)
    fitted.fit(model, own_loader(32), ckpt_path=ckpt)
    loaded = Counted.load_from_checkpoint(ckpt, weights_only=True)
    saved = torch.load(ckpt, weights_only=True)
    return {"epoch": fitted.current_epoch, "loaded": digest(loaded), "ranks": saved["paceline_averaging"]["ranks"]}


def nodes(folder):
    """Be a node of two, each with one device."""
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=str(RANK), LOCAL_WORLD_SIZE="1")
    model, strategy = Module(), Averaging("hpsgd")
    fitted = trainer(folder, 1, num_nodes=2, strategy=strategy)
    fitted.fit(model, loader(32), loader(16, 8))
    return {"model": digest(model), "seen": model.seen, "steps": strategy.averager.merged_steps}


def broken(folder):
    """Fail on rank 1, with a checkpoint that is saved because of that; go on from it."""
    checkpoint = ModelCheckpoint(dirpath=folder, filename="broken", save_on_exception=True)
    given = {"enable_checkpointing": True, "use_distributed_sampler": False}
    fitted = trainer(folder, WORLD, strategy=Averaging("hpsgd"), callbacks=[checkpoint], **given)
    try:
        fitted.fit(Failing(), own_loader(4000))
    except Exception as error:
        return [type(error).__name__, sorted(torch.load(Path(folder, "broken.ckpt"), weights_only=True))]
    raise AssertionError("nothing has failed")
