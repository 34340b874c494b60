"""paceline inside Hugging Face's Trainer and Accelerate.

average(trainer, "hpsgd")           ranks that average, in place of DistributedDataParallel
take_rounds(trainer, "lgc", k=3)    ranks that take rounds, likewise
compress(trainer, "qsgd")           gradients of Trainer's own DistributedDataParallel, encoded
prune(trainer, "info-batch")        samples that sit epochs out
prepare(accelerator, ...)           a loop of one's own: accelerate without DistributedDataParallel
"""

from __future__ import annotations

from paceline.huggingface.accelerator import prepare
from paceline.huggingface.averaging import TrainerAveraging, average
from paceline.huggingface.checkpoints import load_rank_state, save_rank_state
from paceline.huggingface.compression import TrainerCompression, compress
from paceline.huggingface.figures import PartsError
from paceline.huggingface.hooks import TrainerSetupError
from paceline.huggingface.pruning import TrainerPruning, prune
from paceline.huggingface.rounds import TrainerRounds, take_rounds

__all__ = [
    "PartsError",
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
