"""Which samples a worker meets in its batch number `draw`: from the seed, the worker and the draw alone."""

from __future__ import annotations

from paceline.data import BatchOrder
from paceline.randomness import seed_for, torch_generator
from paceline.training.task import Training
from paceline.workers.assignment import Assignment


class Batches:
    """Any worker's batches, in any order; in rising order is the quick way.

    >>> from paceline.recipes import Recipe
    >>> from paceline.recipes.assembly import load_data, make_training
    >>> batches = Batches(make_training(Recipe(), load_data(Recipe())))
    >>> len(batches.assignment(worker=3, draw=7).inputs)
    32
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._orders: dict[int, tuple[int, BatchOrder]] = {}
        self._drawn: dict[int, int] = {}

    def assignment(
        self, *, worker: int, draw: int, shard: int | None = None, blocks: int | None = None, blocks_done: int = 1
    ) -> Assignment:
        """A worker's batch number `draw`; workers hold the shard of their own number unless told otherwise."""
        training = self._training
        order = self._order(worker, worker if shard is None else shard)
        if self._drawn[worker] != draw:
            passes, position = divmod(draw * training.batch_size, order.samples)
            order.load_state_dict({"passes": passes, "position": position})
        indices = order.next()
        self._drawn[worker] = draw + 1
        generator = torch_generator(training.seed, "augment", worker, draw)
        return Assignment(
            inputs=training.augmentation(training.dataset.train.inputs[indices], generator),
            targets=training.dataset.train.targets[indices],
            blocks=training.blocks if blocks is None else blocks,
            blocks_done=blocks_done,
            seed=seed_for(training.seed, "pass", worker, draw),
        )

    def _order(self, worker: int, shard: int) -> BatchOrder:
        held = self._orders.get(worker)
        if held is None or held[0] != shard:
            training = self._training
            order = BatchOrder(training.shards[shard], training.batch_size, seed=training.seed, worker=worker)
            self._orders[worker], self._drawn[worker] = (shard, order), 0
            return order
        return held[1]
