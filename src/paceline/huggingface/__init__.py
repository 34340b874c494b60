"""paceline inside Hugging Face's Trainer and Accelerate."""

from __future__ import annotations

from paceline.huggingface.compression import TrainerCompression, compress
from paceline.huggingface.figures import PartsError
from paceline.huggingface.hooks import TrainerSetupError
from paceline.huggingface.pruning import TrainerPruning, prune

__all__ = ["PartsError", "TrainerCompression", "TrainerPruning", "TrainerSetupError", "compress", "prune"]
