"""`Prune`: Lightning's loops with epochs whose lengths differ, and the sampler's state in its checkpoints.

    pruning = paceline.InfoBatch(dataset, batch_size=64, epochs=30)
    trainer = Trainer(use_distributed_sampler=False, callbacks=[paceline.lightning.Prune(pruning)])
    # in training_step:   return pruning.observe(losses)           losses: one for each sample

Lightning takes the length of an epoch once, when a fit begins, and keeps to it: limits of the loader, the fraction of
`val_check_interval`, the progress bar, and the last batch, on which gradients that were accumulated are stepped and
validation runs. A pruned epoch is shorter, and one after a resumed pruned epoch is longer. So this callback measures
every epoch before Lightning begins it:

    epoch 1 (64 batches)   ──> observed: judged ──> epoch 2 (41 batches): limits, bar, last batch, validation

In the middle of an epoch Lightning resumes by counting: it has done k batches, and goes on to the length that the
loader says. A sampler that was resumed says how many batches are left, R: Lightning would stop after R - k of them. It
is told k + R instead.

                    k done         R left
    saved           ####|
    resumed             |########|              length: k + R, and not R

And Lightning makes batch samplers anew, around a DistributedSampler, unless `use_distributed_sampler=False`: what the
new one learns the script's own never hears of. That is refused.
"""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage

from paceline.data.pruning.policy import PruningError
from paceline.data.pruning.sampler import PrunedBatches
from paceline.distributed import check_limits
from paceline.errors import PacelineWarning
from paceline.lightning.rank_states import TIMEOUT_SECONDS, gather_states
from paceline.lightning.trainer import LightningError, check_trainer, log_figures

MIDDLE = ("policy", "settings", "epoch", "attempt", "base")  # of a state, what holds between epochs too


class Prune(Callback):
    """Lets Lightning train by a pruning sampler (`paceline.InfoBatch`, `paceline.FinePruning`), every epoch whole.

    Give the sampler to one training DataLoader (`batch_sampler=pruning`), call `pruning.observe(losses)` once in every
    `training_step`, and return what it returns. Checkpoints hold every rank's state, also in the middle of an epoch;
    for at most `timeout_seconds` a rank waits for the others then.

    >>> import paceline
    >>> Prune(paceline.InfoBatch(100, batch_size=10, epochs=8))
    Prune(InfoBatch(100 samples, batch_size=10, epoch 1, 0.0% sat out so far))
    """

    def __init__(self, pruning: PrunedBatches, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        if not isinstance(pruning, PrunedBatches):
            raise LightningError(
                f"pruning must be a sampler such as paceline.InfoBatch (it is a {type(pruning).__name__})"
            )
        check_limits(timeout_seconds=timeout_seconds)
        self.pruning, self.timeout_seconds = pruning, timeout_seconds
        self._trainer: Trainer | None = None
        self._fits = False
        self._observed_before = 0

    def __repr__(self) -> str:
        return f"Prune({self.pruning!r})"

    # -- one fit -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a Trainer that would replace the sampler, before anything starts."""
        check_trainer(trainer, "Prune")
        self._trainer, self._fits = trainer, stage == "fit"
        connector = trainer._accelerator_connector
        if self._fits and connector.is_distributed and connector.use_distributed_sampler:
            raise LightningError(
                "give Trainer(use_distributed_sampler=False): Lightning would make the pruning sampler anew, around a "
                "DistributedSampler, and pruning splits every batch among the ranks itself. (Validation loaders are "
                "then not split either: give those a DistributedSampler of your own)"
            )
        if self._fits and trainer.overfit_batches:
            raise LightningError(
                f"overfit_batches={trainer.overfit_batches} wants the same batches in every epoch, and pruning gives "
                "others: leave Prune and its sampler out for that"
            )
        for name, value in pl_module.hparams.items():
            if isinstance(value, PrunedBatches):
                raise LightningError(
                    f"the sampler is among the module's hyperparameters ({name!r}), which checkpoints hold as they "
                    f"are: write self.save_hyperparameters(ignore=[{name!r}]); Prune saves the sampler's state"
                )
        callbacks = trainer.callbacks  # first, so that a progress bar finds the length of an epoch; none is left out:
        callbacks.remove(self)  # Lightning goes through this list by number, and those after this one stay
        callbacks.insert(0, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse loaders that do not use the sampler; where a fit goes on in the middle of an epoch, say how far."""
        loaders = trainer.fit_loop._combined_loader.flattened
        samplers = [getattr(each, "batch_sampler", None) for each in loaders]
        if len(samplers) != 1 or samplers[0] is not self.pruning:
            found = ", ".join(type(each).__name__ for each in samplers)
            raise LightningError(
                "Prune needs one training DataLoader, with its sampler: DataLoader(dataset, batch_sampler=pruning); "
                f"the training loaders have: {found}"
            )
        loop = trainer.fit_loop.epoch_loop
        if not loop.restarting:
            return
        done = loop.batch_progress.current.completed + loop.restarted_on_train_batch_end
        if loop.batch_progress.is_last_batch:  # it was saved at its end: Lightning compares the two to see that
            trainer.fit_loop.max_batches = done
            return
        fetcher = trainer.fit_loop._data_fetcher
        fetcher.length = self._measure(trainer, done)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell Lightning how long this epoch is."""
        if not trainer.fit_loop.epoch_loop.restarting:
            self.pruning.set_epoch(trainer.current_epoch)
            self._measure(trainer, 0)

    def _measure(self, trainer: Trainer, done: int) -> int:
        """Return the length of an epoch of which so many batches are done, after Lightning was told of it."""
        left, fit_loop = len(self.pruning), trainer.fit_loop
        whole = done + left
        batches = int(_parse_num_batches(RunningStage.TRAINING, whole, trainer.limit_train_batches))
        fit_loop._combined_loader.limits = [max(0, batches - done)]
        fit_loop.max_batches = batches
        interval = trainer.val_check_interval
        if trainer._val_check_time_interval is None:
            if isinstance(interval, int):
                trainer.val_check_batch = interval
                if trainer.check_val_every_n_epoch is not None:
                    trainer.val_check_batch = min(interval, max(1, batches))
            else:
                trainer.val_check_batch = max(1, int(batches * interval))
        return batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the end of the epoch and the last batch together."""
        self._observed_before = self.pruning.observed_batches
        if trainer.fit_loop._data_fetcher.length is not None:
            trainer.fit_loop.max_batches = trainer.fit_loop._data_fetcher.length

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refuse a batch that was not observed; give the figures to the loggers."""
        pruning = self.pruning
        if not pruning.last_batch and pruning.observed_batches != self._observed_before + 1:
            raise PruningError(
                f"batch {batch_idx} of epoch {trainer.current_epoch} was not observed: training_step must call "
                "pruning.observe(losses) once, with one loss for each sample, and return what that returns"
            )
        log_figures(trainer, pruning.figures())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End an epoch that `limit_train_batches` cuts; one that max_steps or a stop breaks off can be gone on with."""
        if self.pruning.observed_batches and trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self.pruning.end_epoch()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's state of all ranks, on rank 0; between epochs they are equal, and one is enough."""
        trainer = self._trainer
        if trainer is None or not self._fits or trainer.interrupted:  # then one rank saves alone
            return {}
        state = self.pruning.state_dict()
        if trainer.global_rank and not state["observed"]:
            state = {}
        return gather_states(state, "the pruning", self.timeout_seconds)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from this rank's state; with another number of ranks, an epoch that was broken off begins again."""
        trainer, states = self._trainer, state_dict["states"]
        if trainer is None or not self._fits:
            return
        first, fits = states[0], state_dict["ranks"] == trainer.world_size
        if first["observed"] and not fits:
            first = {name: first[name] for name in MIDDLE if name in first} | {"observed": 0}
            first["attempt"] += 1
            if trainer.is_global_zero:
                warnings.warn(
                    f"the checkpoint is of {state_dict['ranks']} ranks in the middle of epoch {first['epoch']}, and "
                    f"here are {trainer.world_size}: that epoch begins again, without what was observed in it",
                    PacelineWarning,
                    stacklevel=2,
                )
        state = states[trainer.global_rank] if fits else {}
        self.pruning.load_state_dict(state or first)
