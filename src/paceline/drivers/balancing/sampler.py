"""The batches of an epoch, each rank its own part of every step, as large as its share.

An epoch is one order of all samples, the same on all ranks, and a step is the next `batch_size` of them. So every
sample comes once in an epoch, whoever computes it; and an epoch goes on where it was left with any number of ranks: all
there is to know is how many samples are done. A last step of fewer samples than one rank needs is joined to the step
before it.

Epochs count themselves: a pass over the loader of which something was trained is one, a look at its first batch is
none. `set_epoch`, where a script calls it as for a DistributedSampler, says the number instead.
"""

from __future__ import annotations

import operator
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.data.batch_samplers import DrawnBatches, count_of
from paceline.data.pruning.policy import count_steps
from paceline.data.pruning.sampler import PrunedBatches
from paceline.decoding import Count, decode
from paceline.drivers.balancing.passes import BatchPass
from paceline.drivers.balancing.schedule import BalanceError, DealtBatch
from paceline.randomness import torch_generator

if TYPE_CHECKING:
    from paceline.drivers.balancing.balance import Balance

STATE = {"epoch": Count, "done_samples": Count, "samples": Count, "seed": int, "shuffle": bool, "order": Count}


class BalancedBatches(Sampler[list[int]]):
    """A batch sampler over a data set, of which each rank gets batches of its share. `Balance.sampler` makes it.

    `len()` is the number of batches of the next pass, the same on all ranks.
    """

    def __init__(
        self,
        balance: Balance,
        data: int | Sized | Iterable[int],
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self._balance, self._seed, self._drop_last = balance, operator.index(seed), bool(drop_last)
        self._base: Iterable[int] | None = None
        if isinstance(data, Sampler):
            if hasattr(data, "num_replicas"):
                raise TypeError(
                    f"a sampler must draw for all ranks (this is a {type(data).__name__}, which draws for one of "
                    "several): give the data set; Balance deals its samples to the ranks"
                )
            if isinstance(data, torch.utils.data.BatchSampler):
                raise TypeError("give the data set or a sampler of single samples: Balance makes the batches")
            self._base = data
        self._shuffle = bool(shuffle) and self._base is None
        self.samples = count_of(data, "Balance.sampler")
        balance.check_samples(self.samples, drop_last=self._drop_last)
        self._epoch = 0  # of the next pass
        self._done_samples = 0  # of that epoch, before the next pass
        self._pass: BatchPass | None = None
        self._pass_began_at = 0  # samples of its epoch that were done before it
        self._fingerprint = 0  # of the order of the epoch that is under way
        self._expected: int | None = None  # fingerprint of the order that a loaded state goes on with

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next; counts from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Say the number of the next epoch, from which its order follows; a resumed one is gone on with."""
        self._settle()
        if epoch != self._epoch:
            self._epoch, self._done_samples = operator.index(epoch), 0

    def __len__(self) -> int:
        """Return the batches of the pass that is under way, or, between passes, of the next one."""
        if self._pass is not None and self._pass.done < self._pass.steps:
            return self._pass.steps
        left = self.samples - (0 if self._pass is not None else self._done_samples)
        return self._steps(left)

    def _steps(self, samples: int) -> int:
        balance = self._balance
        return count_steps(samples, balance.batch_size, drop_last=self._drop_last, joined=balance.least - 1)

    def __iter__(self) -> Iterator[list[int]]:
        return DrawnBatches(self, self._begin, self._drawn_state, self.load_state_dict)

    def _begin(self) -> BatchPass:
        self._settle()
        if self._done_samples and not self._steps(self.samples - self._done_samples):  # less than a batch is left
            self._epoch, self._done_samples = self._epoch + 1, 0
        order, began = self._order(), self._done_samples
        self._fingerprint = zlib.crc32(order.tobytes())
        if began and self._expected is not None and self._expected != self._fingerprint:
            raise BalanceError(
                f"{began} samples of this epoch are done, and the sampler draws another order than the one that they "
                "came in: the rest would hold some of them again. Give a sampler whose order follows from "
                "set_epoch(), or leave the order to Balance"
            )
        self._expected = None
        rest = order[began:]
        self._balance.check_samples(len(rest), drop_last=self._drop_last)
        steps, size = self._steps(len(rest)), self._balance.batch_size

        def take(step: int) -> tuple[list[int], DealtBatch] | None:
            if step >= steps:
                return None
            start = step * size
            whole = self._drop_last or step < steps - 1
            dealt = self._balance.deal((new.number, step), size if whole else len(rest) - start)
            first = start + dealt.first
            indices = rest[first : first + dealt.samples]
            # One that gets none computes on the epoch's first samples, and its gradient counts for nothing.
            return (indices if dealt.samples else order[: self._balance.least]).tolist(), dealt

        fingerprint = self._fingerprint
        facts = {"epoch": self._epoch, "samples done": began, "samples": len(order), "steps": steps}
        new = self._balance.begin_pass(take, steps, lambda: facts | {"order": fingerprint})
        self._pass, self._pass_began_at = new, began
        return new

    def _order(self) -> NDArray[np.int64]:
        if self._base is not None:
            set_epoch = getattr(self._base, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
            order = np.fromiter((operator.index(index) for index in self._base), np.int64)
            self.samples = len(order)
            return order
        if not self._shuffle:
            return np.arange(self.samples)
        generator = torch_generator(self._seed, "balance", "order", self._epoch)
        return np.asarray(torch.randperm(self.samples, generator=generator).numpy())

    def _settle(self) -> None:
        """Count the pass before as an epoch, if anything of it was trained."""
        ended, self._pass = self._pass, None
        if ended is not None and ended.done:
            self._epoch, self._done_samples = self._epoch + 1, 0

    # -- going on later --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where this epoch stands, after the last batch that was trained; the same on all ranks.

        It can be loaded with any number of ranks, and with another batch size.
        """
        return self._state_after(0 if self._pass is None else self._pass.done)

    def _drawn_state(self) -> dict[str, Any]:
        """Return where this epoch stands after the last batch that a loader has drawn."""
        return self._state_after(0 if self._pass is None else self._pass.handed_out)

    def _state_after(self, steps: int) -> dict[str, Any]:
        epoch, done = self._epoch, self._done_samples
        if self._pass is not None:
            done = min(self.samples, self._pass_began_at + steps * self._balance.batch_size)
            if steps >= self._pass.steps:
                epoch, done = epoch + 1, 0
        return {
            "epoch": epoch,
            "done_samples": done,
            "samples": self.samples,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "order": self._fingerprint if done else 0,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler of the same data stood: the rest of its epoch comes next."""
        held = decode(STATE, dict(state), "the state of the balanced sampler")
        for name, ours in (("samples", self.samples), ("seed", self._seed), ("shuffle", self._shuffle)):
            if held[name] != ours:
                raise ValueError(
                    f"this state is of a sampler with {name}={held[name]}, and here it is {ours}: an epoch would not "
                    "go on with the samples that are left; give the same data set and settings"
                )
        if held["done_samples"] >= held["samples"]:
            raise ValueError(
                f"done_samples must be below samples (done_samples={held['done_samples']}, samples={held['samples']})"
            )
        self._pass = None
        self._epoch, self._done_samples, self._expected = held["epoch"], held["done_samples"], held["order"]


class BalancedPruning(Sampler[list[int]]):
    """The batches of a pruning sampler, of which each rank gets its share. `Balance.sampler` makes it.

    Who sits out, weights, epochs and states are the pruning sampler's, which the script goes on to use.
    """

    def __init__(self, balance: Balance, pruning: PrunedBatches) -> None:
        size = pruning.batch_size * balance.ranks
        if size != balance.batch_size:
            raise ValueError(
                f"batch_size of {type(pruning).__name__} is that of one rank, and Balance's is of all of them: "
                f"{pruning.batch_size} x {balance.ranks} ranks = {size} must be {balance.batch_size}"
            )
        if pruning.prunes_alone and balance.ranks > 1:
            raise ValueError(
                f"{type(pruning).__name__} was told that it is the only one (rank=0, world_size=1), and "
                f"{balance.ranks} ranks share its batches: leave rank and world_size out"
            )
        self._balance, self._pruning = balance, pruning
        self._pass: BatchPass | None = None
        self._last = threading.local()  # `dealt`: the batch that this thread was dealt last
        if not pruning.drop_last:
            balance.check_room()
        pruning.deal_by(self._deal, least=balance.least)

    def __len__(self) -> int:
        return len(self._pruning)

    def set_epoch(self, epoch: int) -> None:
        """Say so to the pruning sampler, which counts epochs by what was observed."""
        self._pruning.set_epoch(epoch)

    def _deal(self, step: int, samples: int) -> tuple[int, int]:
        """Return where this rank's batch begins and ends in a step of so many samples."""
        number = self._balance.next_pass if self._pass is None else self._pass.number
        self._last.dealt = dealt = self._balance.deal((number, step), samples)
        return (dealt.first, dealt.first + dealt.samples) if dealt.samples else (samples, samples + self._balance.least)

    def state_dict(self) -> dict[str, Any]:
        """Return the pruning sampler's state."""
        return self._pruning.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the pruning sampler."""
        self._pruning.load_state_dict(state)

    def __iter__(self) -> Iterator[list[int]]:
        return DrawnBatches(self, self._begin, self._pruning.refuse_to_be_saved_ahead, lambda state: None)

    def _begin(self) -> BatchPass:
        self._pass = None
        batches: Iterator[list[int]] = iter(self._pruning)

        def take(step: int) -> tuple[list[int], DealtBatch] | None:
            indices = next(batches, None)
            return None if indices is None else (indices, self._last.dealt)  # by _deal, which was just asked

        # The first place: of a new epoch 0, of a resumed one where it was left. A pass that was broken off begins anew.
        first = 0 if self._pruning.begins_anew else self._pruning.observed_batches
        steps = len(self._pruning)
        self._pass = self._balance.begin_pass(take, steps, dict, first=first)  # facts: the pruning sampler compares
        return self._pass
