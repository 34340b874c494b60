"""The batch sampler that lets samples sit out, and the one call that tells it how they did.

    epoch e      decide ──> order of those who take part ──> batches ──> loader, which fetches ahead
                                                                            │
                 judge  <── losses at the places of the order  <── observe(losses), batch by batch

An epoch counts once its last batch is observed: then all its losses are judged together, by the same code and in the
same order on every rank (ranks add up what each has seen). Until then nothing is learned from it. So an epoch that is
broken off is simply begun again, and what resumes in the middle of one needs its losses so far and nothing else.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.data.pruning import saved
from paceline.data.pruning.checks import check_losses, refuse_not_finite
from paceline.data.pruning.dealing import Dealing
from paceline.data.pruning.ledger import Ledger, PruningError
from paceline.data.pruning.losses import Losses, seen_by_any, seen_only
from paceline.data.pruning.peers import Alone, Peers
from paceline.data.pruning.policy import Policy
from paceline.data.pruning.prepared import PreparedEpoch, prepare, with_order


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedSample:
    """A sample, how often it has sat out, and how hard it is (only the order of difficulties means anything).

    >>> PrunedSample(index=3, times_pruned=2, difficulty=2.5).index
    3
    """

    index: int
    times_pruned: int
    difficulty: float


class PrunedBatches(Sampler[list[int]]):
    """Batches of those who take part; `observe` each. `FinePruning` and `InfoBatch` are this with a policy.

    >>> from paceline.data.pruning.info_policy import InfoPolicy
    >>> pruning = PrunedBatches(InfoPolicy(10, seed=0), batch_size=4, epochs=8)
    >>> for epoch in range(3):
    ...     for batch in pruning:
    ...         loss = pruning.observe(torch.tensor([float(index) for index in batch]))
    >>> pruning.epoch, pruning.hardest(2)[0].index
    (4, 9)
    """

    def __init__(
        self,
        policy: Policy,
        *,
        batch_size: int,
        epochs: int | None = None,
        base: Iterable[int] | None = None,
        drop_last: bool = False,
        peers: Callable[[], Peers] = Alone,
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be at least 1 (epochs={epochs})")
        Dealing(batch_size=batch_size)  # refuses what is no batch size
        self.policy, self.batch_size, self.drop_last, self.epochs = policy, batch_size, drop_last, epochs
        self._base, self._find_peers = base, peers
        self.epoch = 1
        """The epoch that is under way, or comes next; counts from 1."""
        self._attempt = self._unobserved_passes = 0
        self._resume_at = 0
        self._ready: PreparedEpoch | None = None
        self._losses: Losses | None = None
        self._pass: Ledger | None = None
        self._last_losses: Callable[[], torch.Tensor | None] = lambda: None

    # -- batches ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many batches the pass under way has, or the next one."""
        first = self._pass.first if self._pass is not None else self._resume_at
        return self._prepared().steps - first

    def __iter__(self) -> Iterator[list[int]]:
        ready, ledger = self._begin()
        while ledger.handed_out < ledger.batches:
            yield ready.batch(ledger.hand_out()).tolist()
            if ledger.ended:
                return
            if self._pass is not ledger and not ledger.complete:
                raise PruningError("another pass over the loader has begun: this one cannot be gone on with")
        ledger.exhausted = True

    def _begin(self) -> tuple[PreparedEpoch, Ledger]:
        """Begin a pass: a new epoch, the one that was broken off, or the rest of the one that a state was saved in."""
        if self._pass is not None:
            self._break_off(self._pass)
        ready = self._prepared()
        if (peers := self._peers).ranks > 1:
            peers.agree(
                "begin an epoch",
                (self.epoch, self._attempt, self._resume_at, len(ready.order), ready.fingerprint),
                ("epoch", "attempt", "batches observed", "samples", "fingerprint of the order"),
            )
        if self._losses is None:
            self._losses = Losses(len(ready.order))
        self._pass = Ledger(batches=ready.steps, first=self._resume_at)
        return ready, self._pass

    def _break_off(self, left: Ledger) -> None:
        """The pass before was left before its end: begin the epoch again, and forget what was observed in it."""
        self._pass = None
        if left.observed == left.first:
            self._unobserved_passes += left.exhausted
            if self._unobserved_passes > 1:
                self._unobserved_passes = 0
                raise PruningError(
                    f"all batches of epoch {self.epoch} were taken twice, and observe() was never called: call "
                    "pruning.observe(losses) for every batch, with losses of reduction='none'"
                )
            return
        if not left.spoilt:
            missed = "observe() was not called for every batch, or the epoch was broken off" if left.exhausted else ""
            warnings.warn(
                f"epoch {self.epoch} was left with {left.observed} of {left.batches} batches observed: it is begun "
                f"again, and what was observed in it is forgotten; {missed or 'end_epoch() ends an epoch early'}",
                stacklevel=4,
            )
        self._attempt += 1
        self._resume_at, self._ready, self._losses = 0, None, None

    def _prepared(self) -> PreparedEpoch:
        if self._ready is None:
            set_epoch = getattr(self._base, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch - 1)
            self._ready = prepare(
                self.policy,
                self._dealing,
                epoch=self.epoch,
                attempt=self._attempt,
                progress=self._progress(self.epoch),
                base=self._base,
            )
        return self._ready

    def _progress(self, epoch: int) -> float:
        """The share of the run before an epoch; 0 where nobody said how many there are."""
        return 0.0 if self.epochs is None else min(1.0, (epoch - 1) / self.epochs)

    @property
    def _peers(self) -> Peers:
        return self._find_peers()

    @property
    def _dealing(self) -> Dealing:
        peers = self._peers
        return Dealing(batch_size=self.batch_size, rank=peers.rank, ranks=peers.ranks, drop_last=self.drop_last)

    # -- losses ----------------------------------------------------------------------------------------------------

    def observe(self, losses: torch.Tensor) -> torch.Tensor:
        """Take the losses of a batch's samples, one each; returns their mean, weighted where the policy weighs."""
        ready, ledger, kept = self._under_way()
        step = ledger.expect()
        start, stop = ready.places(step)
        check_losses(losses, stop - start, step, again=ledger.may_repeat and losses is self._last_losses())
        weights = ready.batch_weights(step)
        mean = losses.mean() if weights is None else (losses * weights.to(losses)).mean()
        if losses.is_cpu and not math.isfinite(mean.item()):  # one look at the mean is a look at all of them
            refuse_not_finite(losses.detach(), ready.batch(step), f"batch {step + 1} of epoch {self.epoch}")
        kept.put(start, losses.detach())
        self._last_losses = weakref.ref(losses)
        ledger.done()
        if ledger.complete:
            self._complete()
        return mean

    def skip(self) -> None:
        """Leave out the batch that would be observed next: nothing is learned from it."""
        _, ledger, _ = self._under_way()
        ledger.expect()
        ledger.done()
        if ledger.complete:
            self._complete()

    def end_epoch(self) -> None:
        """End the epoch here: what was observed counts, the batches that are left do not come any more."""
        _, ledger, _ = self._under_way()
        ledger.ended = True
        self._complete()

    def _under_way(self) -> tuple[PreparedEpoch, Ledger, Losses]:
        if self._pass is None or self._ready is None or self._losses is None:
            done = f"all batches of epoch {self.epoch - 1} have been observed, and " if self.epoch > 1 else ""
            raise PruningError(f"no batch is waiting: {done}no new pass over the loader has begun")
        return self._ready, self._pass, self._losses

    def _complete(self) -> None:
        """All ranks put together what they have seen, and judge it."""
        ready, ledger, kept = self._under_way()
        self._unobserved_passes = 0
        self._peers.agree(
            "end an epoch",
            (self.epoch, self._attempt, ledger.observed, len(ready.order), 0),
            ("epoch", "attempt", "batches observed", "samples", ""),
        )
        values = seen_by_any(kept.values, self._peers)
        self._pass = self._ready = self._losses = None
        samples, losses, ends = seen_only(ready.order, values, ready.dealing.ends(len(ready.order)))
        if len(samples):
            self.policy.judge(self.epoch, samples, losses, ends)
        self.policy.completed(ready.keep)
        self.epoch += 1
        self._attempt = self._resume_at = 0

    # -- what is known of the samples ------------------------------------------------------------------------------

    @property
    def times_pruned(self) -> NDArray[np.uint16]:
        """How often each sample has sat out."""
        return self.policy.times_pruned

    def difficulty(self) -> NDArray[np.float32]:
        """How hard each sample is; only the order means anything."""
        return self.policy.difficulty()

    def hardest(self, n: int) -> list[PrunedSample]:
        """The n hardest samples, the hardest first."""
        if n < 0:
            raise ValueError(f"n must be at least 0 (n={n})")
        difficulty = self.policy.difficulty()
        chosen = np.argsort(-difficulty, kind="stable")[:n]
        return [
            PrunedSample(index=int(i), times_pruned=int(self.times_pruned[i]), difficulty=float(difficulty[i]))
            for i in chosen
        ]

    # -- going on later --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on in the same order, also from the middle of an epoch.

        Between epochs the state is the same on all ranks. In the middle of one every rank has its own: save all.
        """
        peers = self._peers
        state: dict[str, Any] = {
            "policy": saved.with_tensors(self.policy.state_dict() | {"name": self.policy.name}),
            "epoch": self.epoch,
            "attempt": self._attempt,
            "observed": self._resume_at if self._pass is None else self._pass.observed,
        }
        if state["observed"] and self._ready is not None and self._losses is not None:
            state |= {"rank": peers.rank, "world_size": peers.ranks, "batch_size": self.batch_size}
            state["losses"] = torch.from_numpy(self._losses.values.copy())
            state["order"] = torch.from_numpy(self._ready.order.copy())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another sampler with the same settings stood; a state that does not fit changes nothing."""
        found = saved.checked(state, self.policy, self._dealing)
        if found.observed:
            decision = self.policy.decide(found.epoch, self._progress(found.epoch))
            ready = with_order(decision, self._dealing, found.order)
            losses = Losses(len(found.order))
            losses.put(0, torch.from_numpy(found.losses))
            self._ready, self._losses = ready, losses
        else:
            self._ready = self._losses = None
        self.epoch, self._attempt, self._resume_at = found.epoch, found.attempt, found.observed
        self._pass = None
