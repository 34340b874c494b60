"""The family under its names, each with the settings that it has.

Common to all: `codec` ("identity", or another by name, or a Codec) is what the changes travel by; `process_group` is
whose ranks average (all of them, if None); `timeout_seconds` the longest that an average may take; `silence_seconds`
after which a rank that is not heard of is gone; `seed` of codecs that round at random; `record` keeps a `history`, and
`on_average` is called with each `Average` as it is merged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from paceline.drivers.collective.averaging import Averager
from paceline.strategies.averaging import make_averaging


class SSGD(Averager):
    """All ranks step together, by the mean of their gradients: what DistributedDataParallel does."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **common: Any) -> None:
        super().__init__(model, optimizer, partial(make_averaging, "ssgd"), **common)


class LocalSGD(Averager):
    """Each rank trains alone for `period` steps, then all wait and go on from the mean.

    `normalize` scales every rank's change to the mean number of steps, for ranks that take unequal numbers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int = 8,
        normalize: bool = False,
        **common: Any,
    ) -> None:
        member = partial(make_averaging, "local-sgd", period=period, normalize=normalize)
        super().__init__(model, optimizer, member, **common)


class BMUF(Averager):
    """Local SGD whose mean change has momentum: 1 - 1/N of the change before, unless `outer_momentum` says otherwise.

    With `overlap` training does not wait for the average, and `rebase` is as for HPSGD.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int = 8,
        overlap: bool = False,
        rebase: bool | None = None,
        normalize: bool = False,
        outer_rate: float = 1.0,
        outer_momentum: float | None = None,
        **common: Any,
    ) -> None:
        settings = {"period": period, "overlap": overlap, "rebase": rebase, "normalize": normalize}
        outer = {"outer_rate": outer_rate, "outer_momentum": outer_momentum}
        super().__init__(model, optimizer, partial(make_averaging, "bmuf", **settings, **outer), **common)


class DiLoCo(Averager):
    """Local SGD with long periods, whose mean change is a Nesterov step.

    With `overlap` training does not wait for the average, and `rebase` is as for HPSGD.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int = 100,
        overlap: bool = False,
        rebase: bool | None = None,
        normalize: bool = False,
        outer_rate: float = 0.7,
        outer_momentum: float = 0.9,
        **common: Any,
    ) -> None:
        settings = {"period": period, "overlap": overlap, "rebase": rebase, "normalize": normalize}
        outer = {"outer_rate": outer_rate, "outer_momentum": outer_momentum}
        super().__init__(model, optimizer, partial(make_averaging, "diloco", **settings, **outer), **common)


class HPSGD(Averager):
    """Averages all the time, and training never waits: a fast rank takes more steps instead.

    With `rebase` a rank goes on from the shared model plus its own change in flight; without, from the shared model
    (the paper). `period` is the fewest steps between two averages.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        period: int = 1,
        rebase: bool = True,
        normalize: bool = False,
        **common: Any,
    ) -> None:
        member = partial(make_averaging, "hpsgd", period=period, rebase=rebase, normalize=normalize)
        super().__init__(model, optimizer, member, **common)


class PSGD(Averager):
    """Every rank for itself until a flush: the speed limit, to compare with."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, normalize: bool = False, **common: Any
    ) -> None:
        super().__init__(model, optimizer, partial(make_averaging, "psgd", normalize=normalize), **common)
