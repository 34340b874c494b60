"""Batch samplers that let samples sit out, for one process or for the ranks of torch.distributed.

    pruning = paceline.FinePruning(len(dataset), batch_size=128)
    loader = DataLoader(dataset, batch_sampler=pruning, num_workers=4, persistent_workers=True)
    for epoch in range(200):
        for inputs, targets in loader:
            losses = loss_function(model(inputs), targets)      # reduction="none"
            pruning.observe(losses).backward()

With ranks, each takes its part of every step: `batch_size` is that of one rank, as for DDP. All take the same number of
steps, and who sits out is what one process with `batch_size * world_size` would have decided.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sized
from typing import TYPE_CHECKING

from paceline.data.pruning.fine_policy import FinePolicy
from paceline.data.pruning.info_policy import InfoPolicy
from paceline.data.pruning.plan import Plan, plan_fine, plan_info
from paceline.data.pruning.sampler import PrunedBatches
from paceline.data.pruning.schedule import FineSchedule
from paceline.drivers.collective.pruning_peers import TIMEOUT_SECONDS, FindPeers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PER_CENT = 100


class FinePruning(PrunedBatches):
    """Data fine-pruning: those whose losses are often above their batch's mean sit some epochs out.

        loader = DataLoader(dataset, batch_sampler=FinePruning(dataset, batch_size=128), num_workers=4)

    Of every `window` epochs those from `starting_point` on may be pruned (the starting point is divided by
    `attenuation` from window to window), `count` of every `block`; then the `prune` samples (a share below 1, or a
    whole number of samples) that were most often above `(1 + tolerance)` times the mean sit out. `plan(epochs)` says
    which epochs that are; with the defaults the first is the 32nd.

    `samples` is their number, or the data set. `batch_size` is that of one rank. `base` is a sampler of your own that
    draws for all ranks; the default is a new order for every epoch.

    >>> import torch
    >>> pruning = FinePruning(8, batch_size=4, window=6, starting_point=2, block=2, count=2, prune=0.25)
    >>> for epoch in range(2):
    ...     for batch in pruning:
    ...         mean = pruning.observe(torch.tensor(batch).float())
    >>> [sample.times_pruned for sample in pruning.hardest(3)]
    [1, 1, 0]
    >>> pruning.plan(12).pruned_epochs
    (2, 3, 4, 5, 7, 8, 9, 10, 11)
    """

    def __init__(
        self,
        samples: int | Sized,
        *,
        batch_size: int,
        window: int = 60,
        starting_point: int = 30,
        attenuation: float = 2,
        block: int = 4,
        count: int = 2,
        prune: float | int = 0.3,
        tolerance: float = 0.0,
        seed: int = 0,
        base: Iterable[int] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        group: ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.schedule = FineSchedule(
            window=window,
            starting_point=starting_point,
            attenuation=attenuation,
            block=block,
            count=count,
            prune=prune,
        )
        policy = FinePolicy(_number(samples), self.schedule, tolerance=tolerance, seed=seed)
        peers = FindPeers(rank, world_size, group, timeout_seconds)
        super().__init__(policy, batch_size=batch_size, base=base, drop_last=drop_last, peers=peers)
        left = policy.samples - policy.prune_num
        if drop_last and base is None and left < self.batch_size:
            raise ValueError(
                f"{left} samples take part in a pruned epoch, and with drop_last a batch takes {batch_size}: give a "
                "smaller batch_size, prune less, or leave drop_last out"
            )
        if isinstance(prune, int) and 0 < prune <= PER_CENT and prune * PER_CENT < policy.samples:
            warnings.warn(
                f"prune={prune} is a number of samples, of {policy.samples:,}: write {prune / PER_CENT} for a share of "
                f"{prune} %",
                stacklevel=2,
            )

    def plan(self, epochs: int) -> Plan:
        """Which of so many epochs are pruned, what that saves, and what the paper's formulas say of it.

        >>> FinePruning(1000, batch_size=100).plan(200).share_saved
        0.1065
        """
        plan = plan_fine(
            self.schedule,
            self.policy.samples,
            epochs=epochs,
            batch_size=self._dealing.step_size,
            drop_last=self.drop_last,
        )
        return self._of_a_base(plan)


class InfoBatch(PrunedBatches):
    """InfoBatch: of those below the mean loss, `ratio` sit out, drawn anew each epoch; the others of them weigh more.

    From the share `delta` of the `epochs` on everybody takes part. Train on what `observe` returns: it is weighted.
    `samples` is their number, or the data set. `batch_size` is that of one rank. `base` is a sampler of your own that
    draws for all ranks.

    >>> import torch
    >>> pruning = InfoBatch(8, batch_size=4, epochs=8)
    >>> for epoch in range(2):
    ...     for batch in pruning:
    ...         mean = pruning.observe(torch.tensor(batch).float())
    >>> bool((pruning.times_pruned[4:] == 0).all())
    True
    """

    def __init__(
        self,
        samples: int | Sized,
        *,
        batch_size: int,
        epochs: int,
        ratio: float = 0.5,
        delta: float = 0.875,
        seed: int = 0,
        base: Iterable[int] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        group: ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        policy = InfoPolicy(_number(samples), ratio=ratio, delta=delta, seed=seed)
        self.ratio, self.delta = policy.ratio, policy.delta
        peers = FindPeers(rank, world_size, group, timeout_seconds)
        super().__init__(policy, batch_size=batch_size, epochs=epochs, base=base, drop_last=drop_last, peers=peers)

    def plan(self, epochs: int | None = None) -> Plan:
        """Which epochs may be pruned, and at most how much that saves: how much depends on the losses.

        The default is the sampler's own number of epochs.

        >>> InfoBatch(1000, batch_size=100, epochs=8).plan().pruned_epochs
        (2, 3, 4, 5, 6, 7)
        """
        plan = plan_info(
            self.policy.samples,
            epochs=epochs if epochs is not None else self.epochs or 1,
            ratio=self.ratio,
            delta=self.delta,
            batch_size=self._dealing.step_size,
            drop_last=self.drop_last,
        )
        return self._of_a_base(plan)


def _number(samples: int | Sized) -> int:
    return len(samples) if isinstance(samples, Sized) else samples
