"""The pruned batches of all workers of a recipe: each worker has a policy of its own, over its shard; and the totals.

    worker 0   joins ── batches (draws) 0, 1, 2 ... ── is lost    joins again: a new policy, a new pass ── 17, 18 ...
                            |
                            the policy judges the losses of the gradients that it sent

A worker's policy starts without any losses whenever the worker joins, as a codec's memory does (`worker_codecs.py`). So
a journal of joins and arrived gradients is enough to draw every batch again. A batch whose gradient was never sent, or
was refused because it was not finite, is drawn and not judged.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.pruning.groups import OF_CLASSES, Groups, are_classes, targets_of, usable
from paceline.data.pruning.order import PrunedBatch, PrunedOrder
from paceline.data.pruning.policy import whole_number
from paceline.errors import PacelineWarning
from paceline.training.training import Training

if TYPE_CHECKING:
    from paceline.data.samples import Dataset
    from paceline.training.batches import Batches

_WARNED: weakref.WeakSet[Dataset] = weakref.WeakSet()  # data sets whose classes or tails were told of
MOST_SKIPPED = 10_000  # draws between two that are asked for; a journal with more is damaged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PruningTotals:
    """For every sample of the training data: how often it sat out, the whole passes over the shards that it is in, and
    how hard it is for the workers that hold it now (only the order means anything).

    >>> PruningTotals(times_pruned=np.zeros(2, np.uint16), passes=np.full(2, 3, np.int32),
    ...               difficulty=np.zeros(2, np.float32)).passes
    array([3, 3], dtype=int32)
    """

    times_pruned: NDArray[np.uint16]
    passes: NDArray[np.int32]
    difficulty: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Membership:
    """A worker's order over a shard, from when it joined until it is lost."""

    worker: int
    shard: int
    order: PrunedOrder


class PrunedOrders:
    """The pruned orders of any number of workers; each only goes forward.

    >>> from paceline.data import load_dataset
    >>> from paceline.data.pruning import PruningSettings
    >>> from paceline.optim import OptimizerSettings
    >>> training = Training(
    ...     module=torch.nn.Identity(), dataset=load_dataset("digits"), shards=torch.arange(1500).split(150),
    ...     optimizer=OptimizerSettings(), total_steps=300, pruning=PruningSettings(name="info-batch"),
    ... )
    >>> len(PrunedOrders(training).next(worker=3, shard=3, draw=0).indices)
    32
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._members: dict[int, _Membership] = {}
        self._first: dict[int, int] = {}
        self._times_pruned = np.zeros(len(training.dataset.train), np.int64)  # in memberships that have ended
        self._passes = np.zeros(len(training.dataset.train), np.int64)
        self._ended_passes: dict[int, int] = {}
        self._groups = groups_of(training)

    def joined(self, worker: int, draw: int) -> None:
        """Start a worker at batch number `draw` with a new policy; what its old one pruned goes into the totals."""
        member = self._members.pop(worker, None)
        if member is not None:
            self._end(member)
        self._first[worker] = draw

    def _end(self, member: _Membership) -> None:
        held, order = self._training.shards[member.shard].numpy(), member.order
        self._times_pruned[held] += order.policy.times_pruned
        self._passes[held] += order.whole_passes
        self._ended_passes[member.worker] = self._ended_passes.get(member.worker, 0) + order.whole_passes

    def next(self, *, worker: int, shard: int, draw: int) -> PrunedBatch:
        """Return a worker's batch number `draw`; batches between the last one and this are drawn, and not judged."""
        order = self._order(worker, shard, draw)
        if not order.draw <= draw <= order.draw + MOST_SKIPPED:
            raise ValueError(
                f"worker {worker} goes on with draw {order.draw}, and asks for draw {draw}: where samples are pruned "
                "batches come in order"
            )
        while order.draw < draw:
            order.next()
        batch = order.next()
        if order.unequal:
            self._warn(worker, order.unequal)
        return batch

    def _warn(self, worker: int, unequal: str) -> None:
        """Warn once of each data set, whatever runs on it: the runs of a race say the same."""
        data = self._training.dataset
        if self._groups is None or data in _WARNED:
            return
        _WARNED.add(data)
        remedy = 'protect = "classes" takes the same share of each class; ' if self._groups.remedy == OF_CLASSES else ""
        warnings.warn(
            f"worker {worker}: {unequal}. {remedy}info-batch leaves out low losses instead",
            PacelineWarning,
            stacklevel=2,
        )

    def _order(self, worker: int, shard: int, draw: int) -> PrunedOrder:
        member = self._members.get(worker)
        if member is not None and member.shard != shard:
            self.joined(worker, draw)
            member = None
        if member is None:
            member = _Membership(
                worker=worker, shard=shard, order=self._fresh(worker, shard, self._first.pop(worker, draw))
            )
            self._members[worker] = member
        return member.order

    def _fresh(self, worker: int, shard: int, draw: int) -> PrunedOrder:
        training = self._training
        return PrunedOrder(
            training.shards[shard],
            training.batch_size,
            training.pruning,
            seed=training.seed,
            worker=worker,
            draws=training.worker_draws or training.total_steps,
            first_draw=draw,
            passes=training.passes,
            groups=None if self._groups is None else self._groups.within(training.shards[shard].numpy()),
        )

    def extend(self, training: Training) -> None:
        """Go on with a training of another total; the orders of those who are there stay as they are."""
        self._training = training

    def judge(self, *, worker: int, draw: int, losses: torch.Tensor) -> None:
        """Learn from the losses of a worker's batch, which must be its last."""
        member = self._members.get(worker)
        if member is None or member.order.draw != draw + 1:
            last = "none" if member is None else member.order.draw - 1
            raise ValueError(f"worker {worker}: draw {draw} cannot be judged, its last is {last}")
        member.order.judge(losses.detach().cpu().float().numpy())

    # -- totals ------------------------------------------------------------------------------------------------

    @property
    def sat_out(self) -> int:
        """The number of samples that sat out, in all whole passes of all workers together."""
        return int(self._times_pruned.sum()) + sum(member.order.sat_out for member in self._members.values())

    @property
    def share_pruned(self) -> float:
        """The share of the samples that sat out, of those that whole passes would have met."""
        shards = self._training.shards
        met = int(self._passes.sum()) + sum(
            member.order.whole_passes * len(shards[member.shard]) for member in self._members.values()
        )
        return self.sat_out / met if met else 0.0

    @property
    def passes(self) -> tuple[int, ...]:
        """The whole passes of each worker that drew anything, by its number."""
        workers = sorted({*self._members, *self._ended_passes})
        now = {worker: member.order.whole_passes for worker, member in self._members.items()}
        return tuple(self._ended_passes.get(worker, 0) + now.get(worker, 0) for worker in workers)

    @property
    def all_passes_made(self) -> bool:
        """Whether every worker has made the passes after which the run ends; never, where it ends by its rounds."""
        wanted, made = self._training.passes, self.passes
        return wanted is not None and len(made) == len(self._training.shards) and min(made) >= wanted

    def totals(self, shards: Sequence[torch.Tensor]) -> PruningTotals:
        """Return the totals of every sample of the training data, over all workers."""
        times, passes = self._times_pruned.copy(), self._passes.copy()
        difficulty = np.zeros(len(times), np.float32)
        for member in self._members.values():
            held, policy = shards[member.shard].numpy(), member.order.policy
            times[held] += policy.times_pruned
            passes[held] += member.order.whole_passes
            difficulty[held] = np.maximum(difficulty[held], policy.difficulty())
        return PruningTotals(
            times_pruned=np.minimum(times, np.iinfo(np.uint16).max).astype(np.uint16),
            passes=passes.astype(np.int32),
            difficulty=difficulty,
        )

    # -- going on later ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the orders of the workers that take part now.

        Workers that have left are not in it, so the totals of a run that is resumed from it lack them.
        """
        return {
            str(worker): {"shard": member.shard, "order": member.order.state_dict()}
            for worker, member in self._members.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; one that is refused changes nothing."""
        members: dict[int, _Membership] = {}
        for name, kept in state.items():
            worker, shard = (
                int(name),
                whole_number("shard", kept["shard"], least=0, most=len(self._training.shards) - 1),
            )
            order = self._fresh(worker, shard, 0)
            order.load_state_dict(kept["order"])
            members[worker] = _Membership(worker=worker, shard=shard, order=order)
        self._members = members


def groups_of(training: Training) -> Groups | None:
    """Return the classes that are to be protected, or the groups that can be looked at; None where nobody needs any.

    No sample is read to look at them: a data set of a user's own is, once, for classes that are to be protected.
    """
    pruning, data = training.pruning, training.dataset.train
    if pruning.name != "fine-pruning" or (pruning.protect is None and data.reads and "targets" not in vars(data)):
        return None
    targets = usable(targets_of(data), len(data))
    if pruning.protect is not None and (targets is None or not are_classes(targets)):
        raise ValueError(
            f"pruning.protect = {pruning.protect!r} needs the class of each sample, and data set "
            f"{training.dataset.name!r} has targets that are no classes: leave it out"
        )
    return None if targets is None else Groups.of_targets(targets)


def pruning_of(batches: Batches, training: Training) -> PruningTotals:
    """Return the totals of every sample of the training data in a run that pruned."""
    if batches.pruned is None:
        raise ValueError("this run prunes nothing: its recipe has pruning.name = none")
    return batches.pruned.totals(training.shards)
