"""Where paceline stands in a Trainer: around single methods of this one trainer, of whatever class it is.

    around(trainer, "_save_rng_state", then)        self._save_rng_state(folder)
                                                        └─> then(plain, folder) ─> plain(folder)   Trainer's own

Callbacks of Trainer's see neither the wrapped model nor the folder of a checkpoint nor the loss of a batch. A subclass
would see them, but users have subclasses of their own. So methods are replaced on the instance: `self.method(...)`
finds what stands there first, and a subclass's own method is what `plain` then calls.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import transformers

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from transformers import Trainer

SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP", "XLA")  # of accelerate's DistributedType
SIZES = ("tp_size", "cp_size", "sp_size", "dp_shard_size")


class TrainerSetupError(PacelineError, ValueError):
    """A Trainer, or one of its settings, with which a part of paceline cannot be right.

    >>> raise TrainerSetupError("fp16 scales gradients")
    Traceback (most recent call last):
    paceline.huggingface.hooks.TrainerSetupError: fp16 scales gradients
    """


def around(trainer: Trainer, method: str, then: Callable[..., Any]) -> None:
    """Let `then(plain, ...)` take the place of the trainer's `plain(...)`.

    >>> class Trainer:
    ...     def epochs(self):
    ...         return 3
    >>> trainer = Trainer()
    >>> around(trainer, "epochs", lambda plain: plain() + 1)
    >>> trainer.epochs()
    4
    """
    plain = getattr(trainer, method, None)
    if plain is None:
        raise TrainerSetupError(
            f"Trainer of transformers {transformers.__version__} has no {method}, which paceline stands around: "
            "install the transformers that paceline[huggingface] asks for"
        )
    setattr(trainer, method, functools.wraps(plain)(functools.partial(then, plain)))


def check_trainer(trainer: Trainer, caller: str) -> None:
    """Refuse what is no Trainer, one whose model is not whole on every rank, and one that does not see the launch.

    >>> check_trainer("trainer", "compress()")
    Traceback (most recent call last):
    paceline.huggingface.hooks.TrainerSetupError: compress() wants a transformers.Trainer (this is a str)
    """
    if not isinstance(trainer, transformers.Trainer):
        raise TrainerSetupError(f"{caller} wants a transformers.Trainer (this is a {type(trainer).__name__})")
    flags = {"is_fsdp_enabled": "FSDP", "is_deepspeed_enabled": "DEEPSPEED"}
    flags["is_distributed_loading_by_transformers"] = "distributed_config"
    split = [label for flag, label in flags.items() if getattr(trainer, flag, False)]
    check_whole(trainer.accelerator, caller, split)
    launched = os.environ.get("WORLD_SIZE") or "1"  # torchrun's
    if trainer.args.world_size == 1 and launched != "1":
        raise TrainerSetupError(
            f"{launched} ranks were launched, and Trainer takes each for the only one, so that each would train alone: "
            "on machines without a GPU give TrainingArguments(use_cpu=True); if nothing was launched, unset WORLD_SIZE"
        )


def check_whole(accelerator: Any, caller: str, split: Sequence[str] = ()) -> None:
    """Refuse an accelerator with which a rank does not hold the whole model; `split` names other signs of it."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    parallel = getattr(accelerator, "parallelism_config", None)
    sizes = {name: getattr(parallel, name, 1) or 1 for name in SIZES}
    found = [*split] or [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if kind in SHARDED:
        found = [kind]
    if found:
        raise TrainerSetupError(
            f"{caller} wants the whole model on every rank, as under DDP (here: {', '.join(found)}): "
            "train without FSDP, DeepSpeed and tensor, context or sequence parallelism"
        )


def check_not_begun(trainer: Trainer, caller: str) -> None:
    """Refuse a trainer that is training already: the part would come too late."""
    if trainer.is_in_train:
        raise TrainerSetupError(
            f"{caller} comes right after Trainer(...), before trainer.train(): this one trains already"
        )
