"""Small files in the formats of the published data sets."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_idx_dataset(folder: Path, *, labels: list[int], opened: Callable = open, suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
    for part in ("train", "t10k"):
        for name, values in (("images-idx3", images), ("labels-idx1", np.array(labels, dtype=np.uint8))):
            with opened(folder / f"{part}-{name}-ubyte{suffix}", "wb") as file:
                file.write(idx_bytes(values))
