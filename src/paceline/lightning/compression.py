"""`Compress`: the gradients of Lightning's DDP travel encoded.

    Trainer(strategy="ddp", devices=4, callbacks=[paceline.lightning.Compress("qsgd levels=7")])

Lightning has an argument for communication hooks, `DDPStrategy(ddp_comm_hook=...)`, and registers such a hook on CUDA
alone: on any other device it is left out, without a word. And it gives the hook to the model before a checkpoint's
optimisers are restored, but forgets what the hook remembers. So this callback registers the hook itself, and keeps its
memories:

    setup                 Lightning loads the checkpoint's model and callbacks: our state waits
    strategy.setup        the model is wrapped in DistributedDataParallel
    on_fit_start          the hook is registered, and takes this rank's state; no backward pass has been yet
    batches               with accumulate_grad_batches only the last of them sends: DDP's no_sync() holds the others
    checkpoints           the memories of all ranks, gathered by rank 0
    teardown              Lightning takes DDP down; the memories wait for the next fit
"""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import Codec
from paceline.codecs.naming import resolve_codec
from paceline.distributed import check_limits
from paceline.distributed.agreement import describe
from paceline.drivers.ddp import TIMEOUT_SECONDS, Compression, compress
from paceline.errors import PacelineWarning
from paceline.exchanges.plans import AUTO, check_plan
from paceline.lightning.rank_states import gather_states, state_of
from paceline.lightning.trainer import LightningError, check_trainer, has_gradient_scaler, log_figures, tell

DDP = "Trainer(strategy='ddp'), or a DDPStrategy"


class Compress(Callback):
    """Lets the gradients of Lightning's DDPStrategy travel encoded, on any device; otherwise training is as it was.

    `codec` is a codec or words that name it, `plan` how ranks come to the sum; both, `seed` and `timeout_seconds` are
    those of `paceline.compress`. `compression` is what that has returned, as long as a fit goes on. On one rank there
    is nothing to send: a line says so, and training is plain.

    >>> Compress("qsgd levels=7")
    Compress(QSGD(levels=7, bucket=512, norm='max', lossless='packed'))
    """

    def __init__(
        self,
        codec: Codec | str,
        *,
        plan: str = AUTO,
        seed: int = 0,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.codec, self.plan, self.seed, self.timeout_seconds = resolve_codec(codec), plan, seed, timeout_seconds
        check_plan(plan, self.codec)
        check_limits(timeout_seconds=timeout_seconds)
        self.compression: Compression | None = None
        self._trainer: Trainer | None = None
        self._saved: dict[str, Any] = {}  # of a checkpoint, until there is a hook to take it
        self._kept: dict[str, Any] | None = None  # of the last fit

    def __repr__(self) -> str:
        return f"Compress({describe(self.compression or self.codec)})"

    # -- one fit -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be compressed, before anything starts."""
        check_trainer(trainer, "Compress")
        self._trainer, self._saved = trainer, {}
        if stage != "fit":
            return
        strategy = trainer.strategy
        if trainer.world_size > 1 and not _is_ddp(strategy):
            raise LightningError(
                f"Compress encodes the gradients of DistributedDataParallel, and this Trainer's strategy is "
                f"{type(strategy).__name__}: give {DDP}, or leave Compress out"
            )
        if getattr(strategy, "_ddp_comm_hook", None) is not None:
            raise LightningError(
                "DDPStrategy(ddp_comm_hook=...) is a communication hook, and so is Compress; a model takes one: leave "
                "one of the two out"
            )
        if has_gradient_scaler(trainer):
            raise LightningError(
                "gradients are scaled (float16), and may overflow: the scaler would leave such a step out, but codecs "
                "refuse it; give Trainer(precision='bf16-mixed') or 32"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook: the model is wrapped by now, and no backward pass has been."""
        model = trainer.strategy.model
        if trainer.world_size == 1 or not isinstance(model, DistributedDataParallel):
            tell("one rank sends no gradients: Compress does nothing, and training is plain")
            return
        optimizers = len(trainer.optimizers)
        if optimizers > 1 and _remembers(self.codec):
            raise LightningError(
                f"{describe(self.codec)} holds back what it could not send until the next backward pass, and with "
                f"{optimizers} optimizers that may be of other parameters: give a codec without memory (qsgd, "
                "bfloat16), or one optimizer"
            )
        compression = compress(model, self.codec, plan=self.plan, seed=self.seed, timeout_seconds=self.timeout_seconds)
        state = self._state_to_load(trainer)
        if state is not None:
            compression.load_state_dict(state)
        self.compression, self._kept, self._saved = compression, None, {}

    def _state_to_load(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return what this rank goes on from: a checkpoint's state, that of the last fit, or nothing."""
        if not self._saved:
            return self._kept
        state = state_of(self._saved, trainer.global_rank, trainer.world_size)
        codec, ranks = self._saved["states"][0]["codec"], self._saved["ranks"]
        if state is not None and codec == describe(self.codec):
            return state
        if trainer.is_global_zero:
            warnings.warn(
                f"the checkpoint holds what {ranks} ranks remembered of {codec}; here are {trainer.world_size} with "
                f"{describe(self.codec)}, which begin anew: at most the last step's rest of each is lost",
                PacelineWarning,
                stacklevel=2,
            )
        return None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Give the figures to the loggers."""
        if self.compression is not None:
            log_figures(trainer, self.compression.figures())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the hook, and keep its memories for another fit."""
        if self.compression is not None:
            self._kept, self.compression = self.compression.state_dict(), None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the hook; what it remembers of a broken step is nothing to go on from."""
        self.compression = self._kept = None

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks remember, on rank 0; every rank calls it when Lightning makes a checkpoint."""
        if self._trainer is None or self._trainer.interrupted:  # then one rank saves alone, and the others do not come
            return {}
        state = self._kept if self.compression is None else self.compression.state_dict()
        return {} if state is None else gather_states(state, "the codecs' memories", self.timeout_seconds)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state until there is a hook to take it."""
        self._saved = dict(state_dict)


def _is_ddp(strategy: object) -> bool:
    """Whether Lightning will wrap the model; a strategy of ours comes from DDPStrategy, and does not."""
    return isinstance(strategy, DDPStrategy) and getattr(type(strategy), "wraps_model", True)


def _remembers(codec: Codec) -> bool:
    """Whether a codec keeps something from one gradient to the next.

    >>> _remembers(resolve_codec("qsgd")), _remembers(resolve_codec("one-bit"))
    (False, True)
    """
    import torch

    tried = codec.fresh([torch.Size([8])])
    tried.encode(torch.arange(8.0))
    return bool(tried.state_dict())
