"""The batches of workers: which samples are in a worker's batch number `draw` follows from seed, worker and draw alone.

A worker meets its samples in an endless order (`data/batches.py`). Batch number `draw` is `batch_size` of them, from
place `draw * batch_size` on. Where workers have batches by their speed, whoever assigns a size keeps count, and says
where the batch begins and how many it has: its `BatchPlace`.

Where samples are pruned, it also follows from the losses of the batches before: then batches are drawn in rising order,
each worker's losses come in by `judge`, and a worker that joins begins anew (`joined`). Else these two do nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from paceline.data import BatchOrder
from paceline.randomness import seed_for, torch_generator
from paceline.training.pruned import PrunedOrders
from paceline.training.training import Training
from paceline.workers.gradients import Assignment


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlace:
    """Where a batch lies in its worker's endless order: so many samples, from place `first` on.

    >>> BatchPlace(first=40, samples=8).end
    48
    """

    first: int
    samples: int

    @property
    def end(self) -> int:
        """Where the next batch begins."""
        return self.first + self.samples


class Batches:
    """Any worker's batches, in any order unless they are pruned; in rising order is the quick way.

    >>> from paceline.data import load_dataset
    >>> from paceline.optim import OptimizerSettings
    >>> digits, network = load_dataset("digits"), torch.nn.Linear(64, 10)
    >>> shards = torch.arange(400).split(100)
    >>> training = Training(module=network, dataset=digits, shards=shards, optimizer=OptimizerSettings(), total_steps=1)
    >>> len(Batches(training).assignment(worker=3, draw=7).inputs)
    32
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._orders: dict[int, tuple[int, int, BatchOrder]] = {}  # of each worker: its shard, next place, and order
        self.pruned = PrunedOrders(training) if training.pruning.on else None

    def assignment(
        self,
        *,
        worker: int,
        draw: int,
        shard: int | None = None,
        blocks: int | None = None,
        blocks_done: int = 1,
        place: BatchPlace | None = None,
    ) -> Assignment:
        """Return a worker's batch number `draw`, from the shard with the worker's number unless another is given.

        `place` says where it lies, where batches are of different sizes.
        """
        training = self.training
        if place is None:
            place = BatchPlace(first=draw * training.batch_size, samples=training.batch_size)
        indices, weights = self._drawn_by(worker, worker if shard is None else shard, draw, place)
        generator = torch_generator(training.seed, "augment", worker, draw)
        inputs, targets = training.dataset.train.take(indices, seed=seed_for(training.seed, "read", worker, draw))
        return Assignment(
            inputs=training.augmentation(inputs, generator),
            targets=targets,
            weights=weights,
            blocks=training.blocks if blocks is None else blocks,
            blocks_done=blocks_done,
            seed=seed_for(training.seed, "pass", worker, draw),
        )

    def _drawn_by(
        self, worker: int, shard: int, draw: int, place: BatchPlace
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.pruned is not None:
            batch = self.pruned.next(worker=worker, shard=shard, draw=draw)
            return batch.indices, batch.weights
        held_shard, next_place, order = self._orders.get(worker, (None, 0, None))
        if order is None or held_shard != shard:
            shard_samples, batch_size = self.training.shards[shard], self.training.batch_size
            next_place, order = 0, BatchOrder(shard_samples, batch_size, seed=self.training.seed, worker=worker)
        if next_place != place.first:
            passes, position = divmod(place.first, order.samples)
            order.load_state_dict({"passes": passes, "position": position})
        self._orders[worker] = shard, place.end, order
        return order.next(place.samples), None

    def extend(self, training: Training) -> None:
        """Go on with a training of another total; whoever draws next has joined since."""
        self.training = training
        if self.pruned is not None:
            self.pruned.extend(training)

    # -- pruning -----------------------------------------------------------------------------------------------

    def joined(self, worker: int, *, draw: int) -> None:
        """Note that a worker joins, or comes back: its next batch is number `draw`, and no sample is judged yet."""
        if self.pruned is not None:
            self.pruned.joined(worker, draw)

    def judge(self, *, worker: int, draw: int, losses: torch.Tensor) -> None:
        """Take in the losses of those samples of a worker's last batch that are in the gradient it sent."""
        if self.pruned is not None:
            self.pruned.judge(worker=worker, draw=draw, losses=losses)

    def figures(self) -> dict[str, float]:
        """Return what is worth logging: the share of samples that has sat out, where samples are pruned."""
        return {} if self.pruned is None else {"pruned_share": self.pruned.share_pruned}

    def state_dict(self) -> dict[str, Any]:
        """Return what does not follow from the number of a draw: nothing unless samples are pruned."""
        return {} if self.pruned is None else self.pruned.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        if self.pruned is not None:
            self.pruned.load_state_dict(state)
