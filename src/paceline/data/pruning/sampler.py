"""The batch sampler that lets samples sit out, and the one call that tells it how they did.

    epoch e      decide ──> order of those who take part ──> batches ──> loader, which fetches ahead
                                                                            │
                 judge  <── losses at the places of the order  <── observe(losses), batch by batch

An epoch counts once its last batch is observed: then all its losses are judged together, by the same code and in the
same order on every rank (ranks add up what each has seen). Until then nothing is learned from it. So an epoch that is
broken off is simply begun again, and what resumes in the middle of one needs its losses so far and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.data.pruning import saved
from paceline.data.pruning.base import Base
from paceline.data.pruning.checks import check_losses, check_samples, refuse_not_finite
from paceline.data.pruning.dealing import Dealing
from paceline.data.pruning.ledger import Ledger, PruningError
from paceline.data.pruning.left import LeftPasses
from paceline.data.pruning.losses import Losses, seen_by_any, seen_only
from paceline.data.pruning.numbers import whole
from paceline.data.pruning.peers import Alone, Peers
from paceline.data.pruning.plan import Plan
from paceline.data.pruning.policy import Policy
from paceline.data.pruning.prepared import PreparedEpoch, prepare


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
    """Batches of those who take part; `observe` each. The public samplers are this with a policy.

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
        self.batch_size, self.drop_last = whole("batch_size", batch_size, least=1), bool(drop_last)
        self.epochs = None if epochs is None else whole("epochs", epochs, least=1)
        self._policy = policy
        self._base, self._find_peers = None if base is None else Base(base, samples=policy.samples), peers
        self._epoch, self._attempt, self._resume_at = 1, 0, 0
        self._left = LeftPasses()
        self._ready: PreparedEpoch | None = None
        self._losses: Losses | None = None
        self._pass: Ledger | None = None
        self._finished: Ledger | None = None
        self._verdict: tuple[PreparedEpoch, NDArray[np.float32]] | None = None
        self._last_losses: weakref.ref[torch.Tensor] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next; counts from 1."""
        self._judge()
        return self._epoch

    @property
    def policy(self) -> Policy:
        """What decides who sits out, with all that it has learned."""
        self._judge()
        return self._policy

    @property
    def last_batch(self) -> bool:
        """Whether the batch that was observed last is the last of its epoch, for loops that accumulate gradients."""
        return self._finished is not None

    def set_epoch(self, epoch: int) -> None:
        """Does nothing, for loops with the habit of saying it: epochs are counted by what was observed."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._policy.samples:,} samples, batch_size={self.batch_size}, "
            f"epoch {self.epoch}, {self.share_pruned:.1%} sat out so far)"
        )

    # -- batches ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many batches the pass under way has, up to its end; else the next one."""
        if (of := self._pass or self._finished) is not None:
            return of.size
        return self._prepared().steps - self._resume_at

    def __iter__(self) -> Iterator[list[int]]:
        ready, ledger = self._begin()
        while not ledger.exhausted:
            ledger.trains |= torch.is_grad_enabled()
            yield ready.batch(ledger.hand_out()).tolist()
            if ledger.ended:
                break
            if self._pass is not ledger and not ledger.complete:
                raise PruningError("another pass over the loader has begun: this one cannot be gone on with")
        if self._finished is ledger:  # it was not fetched ahead: the loop is over
            self._finished = None

    def _begin(self) -> tuple[PreparedEpoch, Ledger]:
        """Begin a pass: a new epoch, the one that was broken off, or the rest of the one that a state was saved in."""
        if self._pass is not None:
            left, self._pass = self._pass, None
            self._left_before(left)
        self._finished = None
        ready = self._prepared()
        if self.epochs is not None and self._epoch == self.epochs + 1 and not self._attempt:
            warnings.warn(f"the {self.epochs} epochs are over: from now on nobody sits out", stacklevel=4)
        if (peers := self._peers).ranks > 1:
            peers.agree(
                "begin an epoch",
                (self._epoch, self._attempt, self._resume_at, len(ready.order), ready.steps, ready.fingerprint),
                ("epoch", "attempt", "batches observed", "samples", "steps", "fingerprint of the order"),
            )
        if self._losses is None:
            self._losses = Losses(ready.order)
        self._pass = Ledger(batches=ready.steps, first=self._resume_at)
        return ready, self._pass

    def _left_before(self, left: Ledger) -> None:
        """The pass before was left before its end: begin the epoch again, without what was observed in it."""
        if left.begun:
            self._attempt += 1
            self._resume_at, self._ready, self._losses = 0, None, None
        self._left.told(left, epoch=self._epoch)

    def _prepared(self) -> PreparedEpoch:
        self._judge()
        dealing = self._dealing
        if self._ready is None or (not self._resume_at and self._ready.dealing != dealing):
            self._ready = prepare(
                self._policy,
                dealing,
                epoch=self._epoch,
                attempt=self._attempt,
                progress=0.0 if self.epochs is None else min(1.0, (self._epoch - 1) / self.epochs),
                base=self._base,
            )
        return self._ready

    @property
    def _peers(self) -> Peers:
        return self._find_peers()

    @property
    def _dealing(self) -> Dealing:
        peers = self._peers
        return Dealing(batch_size=self.batch_size, rank=peers.rank, ranks=peers.ranks, drop_last=self.drop_last)

    # -- losses ----------------------------------------------------------------------------------------------------

    def observe(self, losses: torch.Tensor, indices: Any = None) -> torch.Tensor:
        """Take the losses of a batch's samples, one each; returns their mean, weighted where the policy weighs.

        What it returns is what is to be trained on: call `backward()` on it, not on a mean of your own. Who has the
        numbers of the samples can give them as `indices`, to have it checked that it is this batch.
        """
        ready, ledger, kept = self._under_way()
        step = ledger.expect()
        start, stop = ready.places(step)
        if type(losses) is not torch.Tensor or losses.shape != (stop - start,) or losses.dtype is not torch.float32:
            check_losses(losses, stop - start, step)  # nearly always there is nothing to ask
        if ledger.same_batch_again:
            self._refuse_again(losses, ledger)
        if indices is not None:
            check_samples(indices, ready.batch(step), step)
        mean = ready.mean(losses, start, stop)
        if losses.is_cpu and not math.isfinite(mean.item()):  # one look at the mean is a look at all of them
            refuse_not_finite(losses.detach(), ready.batch(step), f"batch {step + 1} of epoch {self._epoch}")
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
        """End the epoch here: what was observed counts. Leave the loop over the loader right after it.

        Does nothing where the epoch has just come to its end by itself.
        """
        if self._finished is None:
            _, ledger, _ = self._under_way()
            ledger.ended = True
            self._complete()

    def _under_way(self) -> tuple[PreparedEpoch, Ledger, Losses]:
        if self._pass is not None and self._ready is not None and self._losses is not None:
            return self._ready, self._pass, self._losses
        if self._verdict is not None:  # one more than there are batches: some of these losses are another batch's
            self._verdict = None
            self._attempt += 1
            raise PruningError(
                f"all batches of epoch {self._epoch} had been observed: observe() was called twice for one of them "
                "(what was observed in this epoch is forgotten; begin it again)"
            )
        raise PruningError("no batch is waiting: no new pass over the loader has begun")

    def _refuse_again(self, losses: torch.Tensor, ledger: Ledger) -> None:
        """Losses may come in one buffer from a captured graph; on the CPU, or while the loader fetches, they do not."""
        last = None if self._last_losses is None else self._last_losses()
        if losses is last and (losses.is_cpu or not ledger.exhausted):
            raise PruningError(
                f"these losses were observed before, as batch {ledger.observed}: call observe() once for every batch"
            )

    def _complete(self) -> None:
        """All ranks put together what they have seen."""
        ready, ledger, kept = self._under_way()
        if (peers := self._peers).ranks > 1:
            peers.agree(
                "end an epoch",
                (self._epoch, self._attempt, ledger.observed, len(ready.order), ready.steps, 0),
                ("epoch", "attempt", "batches observed", "samples", "steps", ""),
            )
        self._verdict = ready, seen_by_any(kept.values, peers)
        self._finished, self._pass, self._ready, self._losses = ledger, None, None, None
        self._resume_at = 0
        self._left.none()

    def _judge(self) -> None:
        """Learn from the epoch that is over; not before anybody asks, for one `observe` too many takes it back."""
        if self._verdict is None:
            return
        (ready, values), self._verdict = self._verdict, None
        samples, losses, ends = seen_only(ready.order, values, ready.dealing.ends(len(ready.order)))
        if len(samples):
            self._policy.judge(self._epoch, samples, losses, ends)
        keep = ready.keep
        if self._base is not None:
            self._policy.population = self._base.population
            keep = None if keep is None else keep | ~self._base.given  # who is never drawn does not sit out either
        self._policy.completed(keep)
        self._epoch, self._attempt = self._epoch + 1, 0

    # -- what is known of the samples ------------------------------------------------------------------------------

    @property
    def times_pruned(self) -> NDArray[np.uint16]:
        """How often each sample has sat out."""
        self._judge()
        return self._policy.times_pruned

    @property
    def share_pruned(self) -> float:
        """The share of all samples of all epochs so far that has sat out."""
        met = self._policy.population * (self.epoch - 1)
        return float(self.times_pruned.sum(dtype=np.int64)) / met if met else 0.0

    def difficulty(self) -> NDArray[np.float32]:
        """How hard each sample is; only the order means anything."""
        self._judge()
        return self._policy.difficulty()

    def hardest(self, n: int) -> list[PrunedSample]:
        """The n hardest samples, the hardest first."""
        difficulty, times = self.difficulty(), self.times_pruned
        chosen = np.argsort(-difficulty, kind="stable")[: whole("n", n, least=0)]
        return [PrunedSample(index=int(i), times_pruned=int(times[i]), difficulty=float(difficulty[i])) for i in chosen]

    def _of_a_base(self, plan: Plan) -> Plan:
        """A plan counts every sample once; what a base draws is not known before it draws."""
        if self._base is None:
            return plan
        told = "With a base of your own the epochs are these, and the samples are those that it draws."
        return dataclasses.replace(plan, remarks=(*plan.remarks, told))

    # -- going on later --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on in the same order, also from the middle of an epoch.

        Between epochs the state is the same on all ranks. In the middle of one every rank has its own: save all.
        """
        self._judge()
        observed, attempt = self._resume_at, self._attempt
        if self._pass is not None:
            observed, attempt = (0, attempt + 1) if self._pass.spoilt else (self._pass.observed, attempt)
        state: dict[str, Any] = {
            "policy": saved.with_tensors(self._policy.state_dict() | {"name": self._policy.name}),
            "epoch": self._epoch,
            "attempt": attempt,
            "observed": observed,
        }
        if self._base is not None:
            state["base"] = self._base.state(to_draw_again=self._ready is not None and not observed)
        if observed and self._ready is not None and self._losses is not None:
            state |= saved.middle(self._ready, self._losses.values)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler with the same settings stood; a state that does not fit changes nothing."""
        self._judge()
        found = saved.checked(state, self._policy, self._dealing)
        self._ready = self._losses = self._pass = self._finished = None
        if found.ready is not None:
            self._ready, self._losses = found.ready, Losses(found.ready.order)
            self._losses.put(0, torch.from_numpy(found.losses))
        if self._base is not None and found.given is not None:
            self._base.restore(found.given, found.sampler)
            self._policy.population = self._base.population or self._policy.samples
        self._epoch, self._attempt, self._resume_at = found.epoch, found.attempt, found.observed
