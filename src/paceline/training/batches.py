"""Which samples a worker meets in its batch number `draw`: from the seed, the worker and the draw alone.

Where samples are pruned, also from the losses of the batches before: then batches come in rising order, each worker's
losses are told (`judge`), and whoever joins begins anew (`joined`). Else these two do nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.data import BatchOrder
from paceline.randomness import seed_for, torch_generator
from paceline.training.pruned import PrunedOrders
from paceline.training.task import Training
from paceline.workers.assignment import Assignment


class Batches:
    """Any worker's batches, in any order unless they are pruned; in rising order is the quick way.

    >>> from paceline.recipes import Recipe
    >>> from paceline.recipes.assembly import load_data, make_training
    >>> batches = Batches(make_training(Recipe(), load_data(Recipe())))
    >>> len(batches.assignment(worker=3, draw=7).inputs)
    32
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._orders: dict[int, tuple[int, BatchOrder]] = {}
        self._drawn: dict[int, int] = {}
        self.pruned = PrunedOrders(training) if training.pruning.on else None

    def assignment(
        self, *, worker: int, draw: int, shard: int | None = None, blocks: int | None = None, blocks_done: int = 1
    ) -> Assignment:
        """A worker's batch number `draw`; workers hold the shard of their own number unless told otherwise."""
        training = self.training
        indices, weights = self._drawn_by(worker, worker if shard is None else shard, draw)
        generator = torch_generator(training.seed, "augment", worker, draw)
        return Assignment(
            inputs=training.augmentation(training.dataset.train.inputs[indices], generator),
            targets=training.dataset.train.targets[indices],
            weights=weights,
            blocks=training.blocks if blocks is None else blocks,
            blocks_done=blocks_done,
            seed=seed_for(training.seed, "pass", worker, draw),
        )

    def _drawn_by(self, worker: int, shard: int, draw: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.pruned is not None:
            batch = self.pruned.next(worker=worker, shard=shard, draw=draw)
            return batch.indices, batch.weights
        order = self._order(worker, shard)
        if self._drawn[worker] != draw:
            passes, position = divmod(draw * self.training.batch_size, order.samples)
            order.load_state_dict({"passes": passes, "position": position})
        self._drawn[worker] = draw + 1
        return order.next(), None

    def _order(self, worker: int, shard: int) -> BatchOrder:
        held = self._orders.get(worker)
        if held is None or held[0] != shard:
            training = self.training
            order = BatchOrder(training.shards[shard], training.batch_size, seed=training.seed, worker=worker)
            self._orders[worker], self._drawn[worker] = (shard, order), 0
            return order
        return held[1]

    # -- pruning -----------------------------------------------------------------------------------------------

    def joined(self, worker: int, *, draw: int) -> None:
        """A worker joins, or comes back: its next batch is number `draw`, and it knows nothing of its samples."""
        if self.pruned is not None:
            self.pruned.joined(worker, draw)

    def judge(self, *, worker: int, draw: int, losses: torch.Tensor) -> None:
        """The losses of the samples that were done of a worker's last batch, whose gradient was sent."""
        if self.pruned is not None:
            self.pruned.judge(worker=worker, draw=draw, losses=losses)

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on that does not follow from the number of a draw: empty unless samples are pruned."""
        return {} if self.pruned is None else self.pruned.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        if self.pruned is not None:
            self.pruned.load_state_dict(state)
