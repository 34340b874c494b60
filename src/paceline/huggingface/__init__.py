"""paceline inside Hugging Face's Trainer and Accelerate: one line between `Trainer(...)` and `trainer.train()`.

compress(trainer, "qsgd")           gradients of Trainer's own DistributedDataParallel travel encoded
average(trainer, "hpsgd")           ranks that average, in place of DistributedDataParallel
take_rounds(trainer, "lgc", k=3)    ranks that take rounds, likewise
prune(trainer, "info-batch")        samples that sit epochs out
prepare(accelerator, ...)           a loop of one's own: accelerate without DistributedDataParallel

hooks           where the parts stand in a Trainer: around single methods of this one trainer
figures         the parts that a Trainer carries, which go together, and their figures in its log
checkpoints     what each rank keeps in Trainer's checkpoints
trainer_sync    Trainer's loop with ranks that train on their own, for averaging and rounds
losses          the loss of each sample, for pruning
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import lazy_names, need_extra

need_extra("huggingface", "transformers", "accelerate")

if TYPE_CHECKING:
    from paceline.huggingface.accelerator import prepare
    from paceline.huggingface.averaging import TrainerAveraging, average
    from paceline.huggingface.checkpoints import RankStateError, load_rank_state, save_rank_state
    from paceline.huggingface.compression import TrainerCompression, compress
    from paceline.huggingface.figures import PartsError
    from paceline.huggingface.hooks import TrainerSetupError
    from paceline.huggingface.pruning import TrainerPruning, prune
    from paceline.huggingface.rounds import TrainerRounds, take_rounds

_HOMES = {
    "prepare": "accelerator",
    "average": "averaging",
    "TrainerAveraging": "averaging",
    "load_rank_state": "checkpoints",
    "save_rank_state": "checkpoints",
    "RankStateError": "checkpoints",
    "compress": "compression",
    "TrainerCompression": "compression",
    "PartsError": "figures",
    "TrainerSetupError": "hooks",
    "prune": "pruning",
    "TrainerPruning": "pruning",
    "take_rounds": "rounds",
    "TrainerRounds": "rounds",
}

__all__ = [
    "PartsError",
    "RankStateError",
    "TrainerAveraging",
    "TrainerCompression",
    "TrainerPruning",
    "TrainerRounds",
    "TrainerSetupError",
    "average",
    "compress",
    "load_rank_state",
    "prepare",
    "prune",
    "save_rank_state",
    "take_rounds",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
