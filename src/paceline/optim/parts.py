"""How much each part of a batch weighs: its samples counted, and the arithmetic of a group. No torch here.

The weights are those of `accumulate.py`: until the last part they are shares of what is expected, and the last part
corrects what came before it. For parts of 4, 4 and 2 samples, three expected:

    part        1        2        3, the last
    so far      * 1      * 1      * 12/10
    this part   4/12     4/12     2/10             together 4/10, 4/10, 2/10
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Group:
    """The parts of one batch so far, of `steps` that are expected.

    >>> group = Group(steps=3)
    >>> group.add(4, last=False), group.add(4, last=False), group.add(2, last=True)
    ((1.0, 0.3333333333333333), (1.0, 0.3333333333333333), (1.2, 0.2))
    """

    steps: int
    parts: int = 0
    samples: float = 0.0
    expected: float = 0.0

    def add(self, samples: float, *, last: bool) -> tuple[float, float]:
        """What the gradients so far are multiplied with, and what this part's mean is."""
        self.parts += 1
        self.samples += samples
        if self.parts == 1:
            self.expected = samples * (1 if last else self.steps)
        if not last:
            return 1.0, samples / self.expected
        return self.expected / self.samples, samples / self.samples


def count_samples(part: object) -> int | None:
    """The length of the first tensor or array in a part, in dicts, lists and tuples too; None if there is none.

    >>> import torch
    >>> count_samples({"id": "a", "pair": [torch.zeros(3, 5), torch.zeros(4)]})
    3
    """
    shape: Any = getattr(part, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if hasattr(part, "batch_sizes"):  # a PackedSequence: a tuple whose first tensor has steps of all sequences in it
        return None
    inner: Any = part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
    return next((found for each in inner if (found := count_samples(each)) is not None), None)


def checked_samples(told: Any, counted: int | None) -> float:
    """How many samples a part has: what the caller tells, or else what was counted.

    >>> checked_samples(None, 4), checked_samples(2.5, 4)
    (4.0, 2.5)
    """
    samples = counted if told is None else told
    if samples is None:
        raise ValueError("cannot see how many samples this part has: backward(loss, samples=...) says it")
    if not math.isfinite(samples) or samples <= 0:
        raise ValueError(f"samples must be more than 0, and finite (samples={samples})")
    return float(samples)
