"""`Averaging`: a strategy in which every rank trains alone, and the ranks average what they have learned.

    Trainer(strategy=paceline.lightning.Averaging("hpsgd"), devices=4)

It launches ranks and joins them as Lightning's DDPStrategy does, and never wraps the model: gradients stay where they
are, and one of paceline's averagers (`HPSGD` and its family) hooks on the step of torch's own optimiser.

    rank 0   batch batch batch batch ─┬─ validation, checkpoint ─ batch batch batch ...
    rank 1   batch  batch  batch batch┘     all models equal, to the bit
             averages on their way     flush

What of Lightning would bring the waiting back, or break:

- At every batch Lightning broadcasts from rank 0 whether that has received SIGTERM (`_broadcast_sigterm_tensor`), and
  so nobody would be ahead of rank 0; ranks with unequal numbers of batches would hang in it. Here each rank heeds its
  own signal, and averaging's heartbeats tell the others.
- Every other collective of Lightning's goes through the strategy. Ranks that are apart come together for it first
  (`TrainingPlace`). In the middle of a step they cannot: a flush would change the parameters between forward and
  backward. There a reduction of a logged value is this rank's own value, with one warning, and anything else is
  refused.
- A checkpoint file has rank 0's optimiser. Here it also has every rank's: momenta differ.
- `optimizer.step(closure)` runs forward and backward inside the step; ssgd, which averages gradients just before the
  step, therefore runs the closure first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from paceline.codecs import Codec
from paceline.codecs.naming import resolve_codec
from paceline.distributed import check_limits
from paceline.drivers.averaging.averager import AVERAGERS, TIMEOUT_SECONDS, Averager
from paceline.drivers.averaging.loop import OnAverage
from paceline.errors import PacelineWarning
from paceline.exchanges.plans import AUTO, check_plan
from paceline.lightning.places import BETWEEN_EPOCHS, RankPlace, TrainingPlace, check_places
from paceline.lightning.rank_states import gather_states, state_of
from paceline.lightning.trainer import LightningError, check_trainer, has_gradient_scaler, log_figures, tell
from paceline.strategies.averaging import make_averaging

KEY = "paceline_averaging"  # in a checkpoint
PER_RANK = ("optimizer_states", "lr_schedulers", "loops")  # parts of a checkpoint that each rank has of its own
PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")  # of a ModelCheckpoint
LOADER_BARRIER = "train_dataloader()"  # Lightning's, between two epochs with reload_dataloaders_every_n_epochs
ENDLESS = -1  # the number of batches of data without a length


class AveragingStrategy(DDPStrategy):
    """A strategy of Lightning's, by the name `Averaging`: ranks train alone, and average by one of paceline's methods.

    `method` is "hpsgd", "local-sgd", "diloco", "bmuf", "psgd" or "ssgd"; `period`, `overlap`, `rebase`, `normalize`,
    `outer_rate` and `outer_momentum` are its own settings (None: its own default; one that it does not have is
    refused). `codec`, `plan`, `seed`, `timeout_seconds`, `silence_seconds`, `record` and `on_average` are those of all
    averagers. The others are DDPStrategy's, of which `timeout` is that of Lightning's own collectives.

    As long as a fit goes on, `averager` is the averager.

    >>> Averaging("local-sgd", period=16, codec="one-bit")
    Averaging('local-sgd', period=16, codec=ErrorFeedback(OneBit()))
    >>> Averaging("hpsgd", outer_rate=0.7)
    Traceback (most recent call last):
    ValueError: outer_rate is no setting of hpsgd; it has period, normalize, rebase
    """

    wraps_model: ClassVar[bool] = False

    def __init__(
        self,
        method: str = "hpsgd",
        *,
        period: int | None = None,
        overlap: bool | None = None,
        rebase: bool | None = None,
        normalize: bool | None = None,
        outer_rate: float | None = None,
        outer_momentum: float | None = None,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        seed: int = 0,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        record: bool = False,
        on_average: OnAverage | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        given = {
            "period": period,
            "overlap": overlap,
            "rebase": rebase,
            "normalize": normalize,
            "outer_rate": outer_rate,
            "outer_momentum": outer_momentum,
        }
        self.method = method
        self._settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        make_averaging(method, **self._settings)  # refuses what the method has not, and values that it cannot have
        self._codec = resolve_codec(codec)
        check_plan(plan, self._codec)
        check_limits(timeout_seconds=timeout_seconds, silence_seconds=silence_seconds)
        self._timeout_seconds = timeout_seconds
        self._common: dict[str, Any] = {
            "codec": self._codec,
            "plan": plan,
            "seed": seed,
            "timeout_seconds": timeout_seconds,
            "silence_seconds": silence_seconds,
            "record": record,
            "on_average": on_average,
        }
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.averager: Averager | None = None
        self._trainer: Trainer | None = None
        self._to_load: dict[str, Any] | None = None  # this rank's state in a checkpoint, until there is an averager
        self._open = self._apart = self._in_step = False
        self._epochs_are_over = False  # on all ranks, when they were last together
        self._collective_step = -1  # the step at which ranks last came together for a collective
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        settings = "".join(f", {name}={value!r}" for name, value in self._settings.items())
        return f"Averaging({self.method!r}{settings}, codec={self._codec!r})"

    # -- one fit -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Move the model to its device, make the optimisers, and begin to average."""
        check_trainer(trainer, "Averaging")
        self._trainer = trainer
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._layer_sync is not None:
            raise LightningError(
                "sync_batchnorm=True lets ranks wait for each other in every forward pass, and Averaging averages the "
                "statistics of BatchNorm itself: leave it out"
            )
        if fits and self.method == "ssgd" and has_gradient_scaler(trainer):
            raise LightningError(
                "ssgd averages the gradients of all ranks at every step, and a gradient scaler (float16) lets one rank "
                "leave a step out: give Trainer(precision='bf16-mixed') or 32, or another method"
            )
        for callback in trainer.callbacks if fits else ():
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise LightningError(
                    f"{type(callback).__name__} averages the models that this rank alone has had, step by step: ranks "
                    "would evaluate and save different ones. Leave it out"
                )
        super().setup(trainer)
        if fits:
            self._begin(trainer)

    def configure_ddp(self) -> None:
        """Leave the model as it is: nobody reduces its gradients."""

    def _begin(self, trainer: Trainer) -> None:
        optimizers = [each.optimizer if isinstance(each, LightningOptimizer) else each for each in self.optimizers]
        if len(optimizers) != 1:
            raise LightningError(
                f"Averaging takes one optimizer, and configure_optimizers returns {len(optimizers)}: ranks that wait "
                "in one's average would be missing in the other's. Put the parameters into groups of one optimizer"
            )
        self.averager = AVERAGERS[self.method](self.lightning_module, optimizers[0], **self._settings, **self._common)
        self._open, self._apart, self._in_step, self._epochs_are_over = True, False, False, False
        trainer.callbacks.insert(0, PlaceCallback(self))
        _heed_own_signals(trainer)
        if self.world_size == 1:
            tell("one rank has nobody to average with: training is plain")

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; for ssgd the closure (forward, backward, clipping) comes first, and then the step by the mean."""
        if self.method != "ssgd":
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        outcome = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return outcome

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a step; until its batch is over, ranks cannot come together."""
        self._in_step = self._open
        return super().training_step(*args, **kwargs)

    def end_training(self) -> None:
        """End the averaging, with all ranks; what callbacks do to the model after that is theirs."""
        self.meet(TrainingPlace.TRAINING_END)
        self._close()

    def on_train_end(self) -> None:
        """Let all ranks know the files that were written."""
        super().on_train_end()
        self._share_paths()

    def on_exception(self, exception: BaseException) -> None:
        """End the averaging at once; the others hear why."""
        super().on_exception(exception)
        if self._open and self.averager is not None:
            self._open = self._apart = self._in_step = False
            self.averager.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Let go of everything."""
        self._close()
        if self._trainer is not None:
            callbacks = self._trainer.callbacks
            callbacks[:] = [each for each in callbacks if not isinstance(each, PlaceCallback)]
        super().teardown()

    def _close(self) -> None:
        if self._open and self.averager is not None:
            self._open = self._apart = self._in_step = False
            self.averager.close()

    def _share_paths(self) -> None:
        """Let all ranks know rank 0's files by their names: a name has the step in it, and ranks may be at others."""
        for callback in self._trainer.checkpoint_callbacks if self._trainer is not None else ():
            for name in PATHS:
                if hasattr(callback, name):
                    setattr(callback, name, self.broadcast(getattr(callback, name)))

    # -- places --------------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """From here on ranks are apart."""
        self._apart = self._open

    def end_batch(self) -> None:
        """The step is over: ranks can come together again."""
        self._in_step = False
        if self._open and self.averager is not None and self._trainer is not None:
            log_figures(self._trainer, self.averager.figures())

    def begin_training(self) -> None:
        """Refuse limits that ranks with unequal numbers of batches would reach at different places."""
        trainer, averager = self._trainer, self.averager
        if not self._open or trainer is None or averager is None:
            return
        batches = trainer.num_training_batches
        number = ENDLESS if batches == float("inf") else int(batches)
        numbers = [row[0] for row in averager.gather_numbers([number])]
        if len(set(numbers)) > 1 and trainer.max_steps != -1:
            words = ", ".join("no end" if number == ENDLESS else f"{number}" for number in numbers)
            raise LightningError(
                f"ranks have unequal numbers of batches ({words}), and would reach max_steps={trainer.max_steps} in "
                "different epochs: give max_epochs alone, or all ranks as many batches"
            )

    def meet(self, place: TrainingPlace) -> None:
        """Flush, so that all ranks have the shared model; raise on all if they are not at the same place.

        Between two epochs ranks are together already, and only compare their places: a flush would be one more average,
        which a run that goes on from there does not have.
        """
        trainer, averager = self._trainer, self.averager
        if not self._open or trainer is None or averager is None or trainer.interrupted:
            return
        others_may_train = place is TrainingPlace.EPOCH_END and not self._epochs_are_over
        if self._apart or others_may_train:
            averager.flush()
        elif place not in BETWEEN_EPOCHS:
            return
        loop = trainer.fit_loop
        stops = bool(trainer.should_stop and loop._can_stop_early)
        ours = RankPlace(place, trainer.current_epoch, loop.epoch_loop._num_ready_batches_reached(), stops)
        try:
            places = check_places(averager.gather_numbers([int(number) for number in ours]))
        except LightningError as error:
            self.on_exception(error)
            raise
        begins = place is TrainingPlace.EPOCH_START  # Lightning still counts the batches of the epoch before
        self._apart, self._epochs_are_over = False, not begins and all(reached.epoch_is_over for reached in places)

    @property
    def _alone(self) -> bool:
        """Whether this rank saves or tidies up after an error: the others do not come."""
        return self._trainer is not None and self._trainer.interrupted

    def _come_together(self, request: str) -> None:
        if not self._open or not self._apart or self.averager is None:
            return
        if self._in_step:
            raise LightningError(
                f"{request} in the middle of a training step: ranks are at different steps, and train apart. Do it at "
                "the end of the epoch or in validation, or train with strategy='ddp'"
            )
        step, before = self.averager.steps, self._collective_step
        if 0 <= step - before <= 1 and before >= 0 and self.world_size > 1:
            self._warn_once(
                f"{request} at every batch: ranks wait for each other at each of them, which Averaging is there to "
                "avoid (callbacks such as Timer and ModelCheckpoint(train_time_interval=...) ask for it)"
            )
        self._collective_step = step
        self.meet(TrainingPlace.COLLECTIVE)

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned and self.is_global_zero:
            warnings.warn(sentence, PacelineWarning, stacklevel=4)
        self._warned.add(sentence)

    # -- Lightning's collectives ---------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks; in the middle of a training step it stays this rank's own."""
        if self._alone or not isinstance(tensor, torch.Tensor):
            return tensor
        if self._in_step and self._apart and self.world_size > 1:
            self._warn_once(
                "a value is to be reduced over ranks in a training step, as by self.log(..., sync_dist=True): ranks "
                "are at different steps, so it is this rank's own; on_epoch=True reduces it at the end of the epoch"
            )
            return tensor
        self._come_together("a reduction over ranks")
        return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together; in the middle of a training step this is refused."""
        if self._alone:
            return decision
        self._come_together("a decision of all ranks")
        decided: bool = super().reduce_boolean_decision(decision, all)
        return decided

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; before loaders are made again for an epoch, see that none of them has stopped."""
        if not self._alone:
            self._come_together("a barrier")
            if name == LOADER_BARRIER:
                self.meet(TrainingPlace.EPOCH_START)
            super().barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` has."""
        if self._alone:
            return obj
        self._come_together("a broadcast")
        return super().broadcast(obj, src)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return every rank's tensor."""
        if not self._alone:
            self._come_together("an all-gather")
        gathered: torch.Tensor = super().all_gather(tensor, group, sync_grads)
        return gathered

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the shared model: a checkpoint begins with it, on every rank."""
        self.meet(TrainingPlace.SAVING)
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the checkpoint on rank 0, with what each rank has of its own."""
        if self.averager is not None and "optimizer_states" in checkpoint and not self._alone and self.world_size > 1:
            state = {name: checkpoint[name] for name in PER_RANK}
            state["averager"] = self.averager.state_dict(settle=False)
            states = gather_states(state, "averaging's state", self._timeout_seconds)
            if states:
                checkpoint[KEY] = states
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; where it has states of as many ranks, this rank's take the places of rank 0's."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        saved, self._to_load = checkpoint.pop(KEY, None), None
        if saved is None or not self._is_fitting:
            return checkpoint
        state = state_of(saved, self.global_rank, self.world_size)
        if state is not None:
            self._to_load = state["averager"]
            checkpoint.update({name: state[name] for name in PER_RANK})
        elif self.is_global_zero:
            warnings.warn(
                f"{checkpoint_path} holds the averaging of {saved['ranks']} ranks, and here are {self.world_size}: all "
                "go on from the shared model and rank 0's optimizer; the other optimizers' states, what codecs held "
                "back and the outer momentum are left out",
                PacelineWarning,
                stacklevel=2,
            )
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Give the optimiser its state, and then the averager: it checks that the model is what it was."""
        super().load_optimizer_state_dict(checkpoint)
        state, self._to_load = self._to_load, None
        if state is not None and self._open and self.averager is not None:
            try:
                self.averager.load_state_dict(state)
            except ValueError as error:
                raise LightningError(
                    f"{error}. Go on as it was saved, or take the model alone: load_from_checkpoint(path)"
                ) from error

    @property
    def _is_fitting(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make Trainer(strategy="paceline-hpsgd") and the like known; importing `paceline.lightning` does."""
        for method in AVERAGERS:
            if f"paceline-{method}" not in strategy_registry:
                strategy_registry.register(f"paceline-{method}", cls, f"averaging by {method}", method=method)


Averaging = AveragingStrategy
"""The strategy's name in scripts; `paceline.strategies` has a class of that name, an averaging as pure rules."""


class PlaceCallback(Callback):
    """Tells an `AveragingStrategy` how far its rank is; it stands before all other callbacks, and comes with a fit.

    Strategies have no hook at the end of a batch or an epoch, and where they have one, callbacks have been before.
    """

    def __init__(self, strategy: AveragingStrategy) -> None:
        self._strategy = strategy

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the ranks' numbers of batches."""
        self._strategy.begin_training()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare: another rank may have stopped."""
        self._strategy.meet(TrainingPlace.EPOCH_START)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to train apart."""
        self._strategy.begin_batch()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End a step."""
        self._strategy.end_batch()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Come together: the shared model is what is evaluated."""
        self._strategy.meet(TrainingPlace.VALIDATION)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Come together."""
        self._strategy.meet(TrainingPlace.EPOCH_END)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Come together for the last time."""
        self._strategy.end_training()


def _heed_own_signals(trainer: Trainer) -> None:
    """Let this rank heed its own SIGTERM alone, without the broadcasts of rank 0 at every batch and in the handler."""

    def notify(connector: Any, signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(signum)
        connector.received_sigterm = True

    def look(loop: Any) -> None:
        if trainer.received_sigterm:
            raise SIGTERMException

    loop, connector = trainer.fit_loop.epoch_loop, trainer._signal_connector
    loop._broadcast_sigterm_tensor = MethodType(look, loop)
    connector._sigterm_notifier_fn = MethodType(notify, connector)


AveragingStrategy.register_strategies(StrategyRegistry)
