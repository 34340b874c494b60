"""What a rank can refuse before it meets the others: what it would train, with which optimiser, schedulers and codec.

prepare ── refusal, if there is one ──> the group: all raise, or none
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from paceline.codecs import Codec
from paceline.codecs.naming import resolve_codec
from paceline.data.pruning.sampler import FinePruning, InfoBatch
from paceline.distributed.agreement import describe
from paceline.drivers.ranks.exchanging import try_codec
from paceline.drivers.ranks.group import ROUNDS
from paceline.drivers.ranks.tracked_model import IN_USE, TrackedModel
from paceline.exchanges.plans import check_plan
from paceline.strategies import LGC, FastestK, Full, Strategy
from paceline.strategies.shares import SharesBySpeed

_BatchNorm = torch.nn.modules.batchnorm._BatchNorm


HOW_IT_COMPUTES = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class Scheduler(Protocol):
    """A learning-rate scheduler, as far as a round is concerned."""

    def step(self) -> None:
        """Follow one step of the optimiser."""


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | Callable[[], Strategy],
    *,
    schedulers: Sequence[Scheduler],
    codec: Codec | str,
    plan: str,
    blocks: int,
    most_behind: int,
    shares: SharesBySpeed | None = None,
) -> tuple[Strategy, TrackedModel, Codec]:
    """Return the strategy, what is trained, and how it travels; an error says why this rank cannot take part."""
    made = strategy if isinstance(strategy, LGC | FastestK | Full) else strategy()  # type: ignore[operator]
    if not isinstance(made, LGC | FastestK | Full):
        raise ValueError(f"rounds are of LGC, FastestK or Full ({made!r}): the others have no round to add up")
    if shares is not None:
        if not isinstance(shares, SharesBySpeed):
            raise ValueError(f"shares must be a SharesBySpeed, or None for equal ones (shares={shares!r:.60})")
        shares = shares.in_blocks(blocks) if isinstance(blocks, int) and blocks > 0 else shares
        if isinstance(model, torch.nn.Module) and any(isinstance(each, _BatchNorm) for each in model.modules()):
            two_each = min(shares.batch_size, 2 * shares.multiple)  # BatchNorm refuses a block of one sample
            shares = replace(shares, least=max(shares.least, two_each))
        made = replace(made, shares=shares)
    found = resolve_codec(codec)
    check_plan(plan, found)
    for name, value in (("blocks", blocks), ("most_behind", most_behind)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of 1 or more ({name}={value})")
    for where, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise ValueError(
                f"{where or 'the model'} is a SyncBatchNorm, which waits for all ranks in every forward pass, and "
                "ranks are in different rounds: use BatchNorm; rounds average its statistics"
            )
    tracked = TrackedModel(model, optimizer, purpose=ROUNDS)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{type(optimizer).__name__} computes gradients by itself (a closure): rounds give it theirs")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError("SparseAdam takes sparse gradients, and rounds add up dense ones: use Adam")
    for each in schedulers:
        if not callable(getattr(each, "step", None)):
            raise ValueError(f"scheduler must have a step() (it is a {type(each).__name__})")
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError(
                "ReduceLROnPlateau needs a metric in each step: leave it out here, and step it after a flush(), with "
                "the same metric on all ranks"
            )
    if optimizer in IN_USE:
        raise ValueError("this optimizer has an averaging or rounds already; close() that one first")
    try_codec(found, plan, tracked.parameters, tracked.buffers)
    return made, tracked, found


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimiser in words: its settings, but for those of how it computes.

    >>> describe_optimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9))
    'SGD(lr=0.1, momentum=0.9, dampening=0, weight_decay=0, nesterov=False, maximize=False)'
    """
    groups = [
        ", ".join(f"{name}={describe(value)}" for name, value in group.items() if name not in HOW_IT_COMPUTES)
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Return the learning rates of an optimiser's groups."""
    return tuple(float(group.get("lr", 0.0)) for group in optimizer.param_groups)


def check_k(strategy: Strategy, world: int) -> None:
    """Refuse a K above the number of ranks: every round would wait for all of them."""
    k = getattr(strategy, "k", 1)
    if k != "auto" and k > world:
        raise ValueError(f'k must be at most the number of ranks, {world}, or "auto" (k={k})')


def refuse_collective_sampler(loader: Iterable[Any], world: int, *, even_alone: bool = False) -> None:
    """Refuse a sampler that meets all ranks at the end of its passes.

    One that prunes the shard of its own rank alone meets nobody; `even_alone` refuses it too, where a framework deals
    out the batches of one sampler among the ranks.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if world < 2 or not isinstance(sampler, FinePruning | InfoBatch):
        return
    if even_alone or not sampler.prunes_alone:
        raise ValueError(
            f"{type(sampler).__name__} agrees with all ranks at the end of an epoch, and ranks that take rounds come "
            "there at different times: it would wait for ever. Give each rank a Subset of its own and its sampler "
            "rank=0, world_size=1 (with the whole data instead, every rank would draw the same batches), or prune with "
            "DistributedDataParallel, or in a recipe"
        )


def as_list(scheduler: Scheduler | Sequence[Scheduler] | None) -> list[Scheduler]:
    """Return one scheduler, several or none as a list."""
    if scheduler is None:
        return []
    return list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
