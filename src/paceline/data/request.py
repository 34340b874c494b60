"""What the caller asked for, in one frozen object that every loader takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of `load_dataset`; each loader reads those that concern it.

    >>> Request(download=False).samples
    2000
    """

    directory: Path | None = None
    download: bool = True
    mirror: str | None = None
    seed: int = 0
    samples: int = 2000
    classes: int = 10
    channels: int = 3
    size: int = 16
