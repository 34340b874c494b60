"""paceline inside Hugging Face's Trainer and Accelerate."""

from __future__ import annotations

from paceline.huggingface.compression import TrainerCompression, compress

__all__ = ["TrainerCompression", "compress"]
