r"""Gradients of Trainer's own DistributedDataParallel that travel encoded.

    trainer = Trainer(model, args, train_dataset=data)
    paceline.huggingface.compress(trainer, "qsgd levels=7")
    trainer.train()

Trainer has accelerate wrap the model in `trainer.train()`, and no callback sees the wrapper:

    trainer.train() ─> accelerator.prepare(model) ─> DistributedDataParallel(model, **ddp_handler.to_kwargs())
                                                     ddp_handler.register_comm_hook(model)
                                                         └─> paceline.compress(model, codec)     one that asks the old
                                                                                                 handler for the rest
    checkpoint-500/paceline-compression-0-of-2.pt        what rank 0's codecs remember: saved with the random numbers

`accelerator.ddp_handler` is asked for these two things and for nothing else (accelerate 1.15, `prepare_model`). A
subclass of DistributedDataParallelKwargs would not do: accelerate looks handlers up by their exact class. So a stand-in
for the handler stands there, and the handler's own settings (`find_unused_parameters`, `bucket_cap_mb`) stay in force.

With gradient accumulation Trainer runs all micro-batches but the last under `no_sync`, where DDP calls no hook.

A run that goes on from a checkpoint goes on to the bit where DDP keeps its buckets. It does with
`find_unused_parameters=True`, which Trainer sets unless activations are checkpointed. Otherwise DDP puts parameters
into other buckets after its first step, again in every run: the first step after a resumption has the buckets of a
first step, a codec chooses within others, and the bits differ. Nothing that was held back is lost
(paceline.drivers.ddp).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from paceline.codecs import Codec
from paceline.codecs.naming import resolve_codec
from paceline.distributed import check_limits
from paceline.drivers.ddp import TIMEOUT_SECONDS, Compression
from paceline.drivers.ddp import compress as compress_model
from paceline.exchanges.plans import AUTO, check_plan
from paceline.huggingface.checkpoints import load_rank_state_together, save_with_checkpoints
from paceline.huggingface.figures import add_part, check_part
from paceline.huggingface.hooks import TrainerSetupError, around, check_not_begun, check_trainer

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger("paceline.huggingface")

PART = "compression"


def compress(
    trainer: Trainer,
    codec: Codec | str,
    *,
    plan: str = AUTO,
    seed: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> TrainerCompression:
    """Let the gradients of a Trainer's ranks travel encoded; call it between `Trainer(...)` and `trainer.train()`.

    `codec`, `plan`, `seed` and `timeout_seconds` are those of `paceline.compress`. With one rank nothing travels:
    training is plain, and the log says so.

    >>> import tempfile, torch, transformers
    >>> args = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True)
    >>> trainer = transformers.Trainer(torch.nn.Linear(3, 2), args)
    >>> compress(trainer, "qsgd levels=7")
    TrainerCompression(QSGD(levels=7, bucket=512, norm='max', lossless='packed'), no step yet)
    """
    check_trainer(trainer, "compress()")
    check_not_begun(trainer, "compress()")
    check_part(trainer, PART)
    check_limits(timeout_seconds=timeout_seconds)
    codec = resolve_codec(codec)
    check_plan(plan, codec)
    _refuse_scaled_gradients(trainer)
    _refuse_other_hook(trainer)
    if isinstance(trainer.model_wrapped, DistributedDataParallel):
        raise TrainerSetupError(
            "this trainer's model is in a DistributedDataParallel already, and keeps it: call compress() on a new "
            "Trainer, before its first train()"
        )
    part = TrainerCompression(trainer, codec, plan, seed, timeout_seconds)
    add_part(trainer, PART, part)
    return part


class TrainerCompression:
    """What `compress` returns: the compression of the run under way, once training has begun."""

    def __init__(self, trainer: Trainer, codec: Codec, plan: str, seed: int, timeout_seconds: float) -> None:
        self.codec, self.plan, self.seed, self.timeout_seconds = codec, plan, seed, timeout_seconds
        self.compression: Compression | None = None
        """What `paceline.compress` returned for the model that is trained; None with one rank, and before training."""
        self._trainer = trainer
        self._model: DistributedDataParallel | None = None
        self._install()
        around(trainer, "create_accelerator_and_postprocess", self._install_again)  # each trial of a search has its own
        around(trainer, "_prepare_for_training", self._prepare)
        save_with_checkpoints(trainer, PART, self._take_state)

    def __repr__(self) -> str:
        if self.compression is None:
            return f"TrainerCompression({self.codec!r}, no step yet)"
        return f"Trainer{self.compression!r}"

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now; nothing before training."""
        return {} if self.compression is None else self.compression.figures()

    # -- around Trainer's methods ----------------------------------------------------------------------------------

    def _install(self) -> None:
        accelerator = self._trainer.accelerator
        accelerator.ddp_handler = HookedHandler(accelerator.ddp_handler, self._register)

    def _install_again(self, plain: Callable[..., None]) -> None:
        plain()
        _refuse_other_hook(self._trainer)
        self._install()

    def _register(self, model: DistributedDataParallel) -> None:
        """Compress the gradients of the model that accelerate has just wrapped."""
        self._model = model
        if self._trainer.args.world_size > 1:  # torchrun with one process: there is a wrapper, and nobody to send to
            self.compression = compress_model(
                model, self.codec, plan=self.plan, seed=self.seed, timeout_seconds=self.timeout_seconds
            )

    def _prepare(
        self, plain: Callable[..., Any], max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        prepared = plain(max_steps, train_dataloader, resume_from_checkpoint)
        wrapped = next((part for part in prepared[0].modules() if isinstance(part, DistributedDataParallel)), None)
        if self._trainer.args.world_size == 1:
            log.warning("one rank: no gradients travel, and compress() has nothing to encode")
        elif wrapped is None or wrapped is not self._model:
            raise TrainerSetupError(
                "Trainer did not wrap the model in the DistributedDataParallel that compress() has prepared: its "
                "gradients would travel as they are. Leave the wrapping to Trainer and accelerate"
            )
        if resume_from_checkpoint is not None:
            self._load(resume_from_checkpoint)
        return prepared

    def _take_state(self) -> dict[str, Any] | None:
        return None if self.compression is None else self.compression.state_dict()

    def _load(self, folder: str) -> None:
        rank, world = self._trainer.args.process_index, self._trainer.args.world_size
        load = None if self.compression is None else self.compression.load_state_dict
        state = load_rank_state_together(folder, PART, load, rank=rank, world=world)
        if self.compression is not None and state is None:
            log.warning("%s was saved without compress(): codecs begin with nothing held back", folder)


class HookedHandler:
    """Stands in for accelerate's handler of DDP's settings, and compresses the model that was wrapped with them.

    >>> handler = HookedHandler(None, register=lambda model: print("compress", model))
    >>> handler.to_kwargs()
    {}
    >>> handler.register_comm_hook("model")
    compress model
    """

    def __init__(self, handler: Any, register: Callable[[DistributedDataParallel], None]) -> None:
        self.handler, self._register = handler, register

    def to_kwargs(self) -> dict[str, Any]:
        """Return what the user and Trainer want DistributedDataParallel to be given."""
        kwargs: dict[str, Any] = {} if self.handler is None else self.handler.to_kwargs()
        return kwargs

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Register the codec's hook; one that the user's own handler registers is refused by `paceline.compress`."""
        if self.handler is not None:
            self.handler.register_comm_hook(model)
        self._register(model)


# -- what is refused ---------------------------------------------------------------------------------------------------


def _refuse_scaled_gradients(trainer: Trainer) -> None:
    if trainer.accelerator.scaler is not None or trainer.accelerator.mixed_precision == "fp16":
        raise TrainerSetupError(
            "fp16 scales the loss, and lets gradients overflow to find the largest scale: a codec refuses gradients "
            "that are not finite, and what it holds back would be of another scale than the next ones. Train with "
            "bf16=True, or in float32"
        )


def _refuse_other_hook(trainer: Trainer) -> None:
    handler = trainer.accelerator.ddp_handler
    hook = getattr(handler, "comm_hook", None)
    if hook is not None and str(getattr(hook, "value", hook)) != "no":
        raise TrainerSetupError(
            f"accelerate is to register a communication hook already (comm_hook={getattr(hook, 'value', hook)}), and a "
            "DistributedDataParallel model takes one: leave it out, and give compress() a codec"
        )
