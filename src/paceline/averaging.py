"""Averaging in a script: each around a model and its optimiser, one for each rank of a launch (docs/averaging.md).

with paceline.averaging.HPSGD(model, optimizer) as sync:
    train_as_ever(model, optimizer)
    sync.flush()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import lazy_names

if TYPE_CHECKING:
    from paceline.distributed import RankGoneError
    from paceline.drivers.averaging.averager import BMUF, HPSGD, PSGD, SSGD, DiLoCo, LocalSGD
    from paceline.drivers.averaging.loop import MergedAverage
    from paceline.drivers.averaging.transport import AveragingError

_HOMES = {
    "HPSGD": "paceline.drivers.averaging.averager",
    "LocalSGD": "paceline.drivers.averaging.averager",
    "DiLoCo": "paceline.drivers.averaging.averager",
    "BMUF": "paceline.drivers.averaging.averager",
    "SSGD": "paceline.drivers.averaging.averager",
    "PSGD": "paceline.drivers.averaging.averager",
    "MergedAverage": "paceline.drivers.averaging.loop",
    "AveragingError": "paceline.drivers.averaging.transport",
    "RankGoneError": "paceline.distributed",
}

__all__ = [
    "BMUF",
    "HPSGD",
    "PSGD",
    "SSGD",
    "AveragingError",
    "DiLoCo",
    "LocalSGD",
    "MergedAverage",
    "RankGoneError",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
