"""paceline inside Hugging Face's Trainer and Accelerate.

paceline.huggingface.average(trainer, "hpsgd")        ranks that average, in place of DistributedDataParallel
paceline.huggingface.take_rounds(trainer, "lgc", k=3) ranks that take rounds, likewise
paceline.huggingface.prepare(accelerator, ...)        for a loop of one's own: accelerate without that wrapper
"""

from __future__ import annotations

from paceline.huggingface.accelerator import prepare
from paceline.huggingface.averaging import TrainerAveraging, average
from paceline.huggingface.checkpoints import load_rank_state, save_rank_state
from paceline.huggingface.rounds import TrainerRounds, take_rounds
from paceline.huggingface.trainer_sync import TrainerError

__all__ = [
    "TrainerAveraging",
    "TrainerError",
    "TrainerRounds",
    "average",
    "load_rank_state",
    "prepare",
    "save_rank_state",
    "take_rounds",
]
