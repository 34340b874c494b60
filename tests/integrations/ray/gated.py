"""A loss that is slow until a file is there, so that a run lasts until a test has seen what it waits for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

SLOW_SECONDS = 0.15


def loss(outputs, targets):
    if not Path(os.environ["PACELINE_GATE"]).exists():
        time.sleep(SLOW_SECONDS)
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
