"""Batch samplers that let samples sit epochs out, for one process or for the ranks of torch.distributed.

    pruning = paceline.FinePruning(len(dataset), batch_size=128)
    loader = DataLoader(dataset, batch_sampler=pruning, num_workers=4, persistent_workers=True)
    for epoch in range(200):
        for inputs, targets in loader:
            losses = loss_function(model(inputs), targets)      # reduction="none"
            pruning.observe(losses).backward()

What happens in an epoch:

    epoch e      decide ──> order of those who take part ──> batches ──> loader, which fetches ahead
                                                                            │
                 judge  <── losses at the places of the order  <── observe(losses), batch by batch

An epoch counts once its last batch is observed or skipped, or `end_epoch` is called. Then the ranks merge their losses,
and when the sampler is next used the policy judges all of them together, by the same code and in the same order on
every rank. Until then the policy learns nothing from the epoch. So an epoch that is broken off is begun again (once in
the same order, after that in a new one). The state in the middle of an epoch is that before the epoch, and this rank's
order, weights and losses so far.

With ranks, each takes its part of every step: `batch_size` is that of one rank, as for DDP. All take the same number of
steps, and who sits out is what one process with `batch_size * world_size` would have decided.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from paceline.data.batch_samplers import DrawnBatches, count_of
from paceline.data.pruning import EPOCHS_STARTING_POINT, EPOCHS_WINDOW, window_refusal
from paceline.data.pruning.epoch import (
    DAMAGED,
    BaseSampler,
    BatchLayout,
    Deal,
    EpochLosses,
    PreparedEpoch,
    prepare,
    restored_epoch,
    seen_only,
    with_tensors,
)
from paceline.data.pruning.fine_pruning import FinePolicy, FineSchedule
from paceline.data.pruning.groups import GroupOf, Groups, find_groups
from paceline.data.pruning.info_batch import InfoPolicy
from paceline.data.pruning.passes import AbandonedPasses, OutstandingBatches
from paceline.data.pruning.plan import PruningPlan, plan_fine, plan_info
from paceline.data.pruning.policy import Policy, PruningError, saved_array, whole_number
from paceline.data.pruning.ranks import TIMEOUT_SECONDS, FindRanks, GroupFinder, agree, seen_by_any, single_process
from paceline.data.pruning.watched import History, WatchedLosses
from paceline.renaming import renamed

if TYPE_CHECKING:
    from paceline.distributed.agreement import ProcessGroup

PER_CENT = 100
MOST_COUNT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedSample:
    """A sample, how often it has sat out, and how hard it is (only the order of difficulties means anything)."""

    index: int
    times_pruned: int
    difficulty: float


class PrunedBatches(Sampler[list[int]]):
    """A batch sampler over the samples that a policy keeps. The public samplers are this with a policy.

    Call `observe` with the losses of every batch.

    >>> from paceline.data.pruning.info_batch import InfoPolicy
    >>> pruning = PrunedBatches(InfoPolicy(10, seed=0), batch_size=4, epochs=8)
    >>> for epoch in range(3):
    ...     for batch in pruning:
    ...         loss = pruning.observe(torch.tensor([float(index) for index in batch]))
    >>> pruning.epoch, pruning.hardest(2)[0].index
    (4, 9)
    """

    _ends_with_epochs = True  # whether nobody sits out after `epochs`

    def __init__(
        self,
        policy: Policy,
        *,
        batch_size: int,
        epochs: int | None = None,
        base: Iterable[int] | None = None,
        drop_last: bool = False,
        find_ranks: FindRanks = single_process,
        watch: Iterable[int] = (),
        groups: Groups | None = None,
    ) -> None:
        self.batch_size, self.drop_last = whole_number("batch_size", batch_size, least=1), bool(drop_last)
        self.epochs = None if epochs is None else whole_number("epochs", epochs, least=1)
        self._policy, self._groups = policy, groups  # groups: of which it is told if one loses more than its share
        self._watched = WatchedLosses(watch, samples=policy.samples)
        self._base = None if base is None else BaseSampler(base, samples=policy.samples)
        self._find_ranks = find_ranks
        self._epoch, self._attempt, self._resume_at = 1, 0, 0
        self._abandoned = AbandonedPasses()
        self._prepared: PreparedEpoch | None = None
        self._losses: EpochLosses | None = None
        self._pass: OutstandingBatches | None = None
        self._finished: OutstandingBatches | None = None
        self._to_judge: tuple[PreparedEpoch, NDArray[np.float32]] | None = None
        self._last_losses: weakref.ref[torch.Tensor] | None = None
        self._deal: Deal | None = None
        self._least = 1  # samples that a rank is dealt
        self._share_sitting_out = 0.0  # in the last epoch that has begun

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next; counts from 1."""
        self._judge()
        return self._epoch

    @property
    def prunes_alone(self) -> bool:
        """Whether it was told that it is the only one (`rank=0, world_size=1`), and so never meets other ranks."""
        return isinstance(self._find_ranks, GroupFinder) and self._find_ranks.world_size == 1

    @property
    def policy(self) -> Policy:
        """The policy that decides who sits out, with all that it has learned."""
        self._judge()
        return self._policy

    @property
    def last_batch(self) -> bool:
        """Whether the batch that was observed last is the last of its epoch, for loops that accumulate gradients."""
        return self._finished is not None

    @property
    def observed_batches(self) -> int:
        """The batches of the epoch under way that were observed or skipped; 0 between epochs."""
        return self._resume_at if self._pass is None else self._pass.observed

    @property
    def begins_anew(self) -> bool:
        """Whether the next pass begins its epoch at the first batch: it is a new one, or was broken off."""
        return self._pass.begun if self._pass is not None else not self._resume_at

    def set_epoch(self, epoch: int) -> None:
        """Take it that a new pass comes next, so that `len` is of that; epochs are counted by what was observed."""
        self._finished = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._policy.samples:,} samples, batch_size={self.batch_size}, "
            f"epoch {self.epoch}, {self.share_pruned:.1%} sat out so far)"
        )

    # -- batches ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches of the pass under way, or, between passes, of the next one."""
        if (current := self._pass or self._finished) is not None:
            return current.size
        return self._prepare().steps - self._resume_at

    @property
    def batches_ahead(self) -> int:
        """The number of batches of the next pass over the loader: of a whole epoch, or of the rest of a resumed one."""
        return self._prepare().steps - self._resume_at

    def __iter__(self) -> Iterator[list[int]]:
        self._finished = None  # now, and not with the first batch: a loop may ask for the length before it
        return DrawnBatches(self, self._batches, self.refuse_to_be_saved_ahead, lambda state: None)

    def refuse_to_be_saved_ahead(self) -> dict[str, Any]:
        """Refuse a loader that asks where a pass stands while losses of batches that were drawn are not known."""
        if self._pass is not None and self._pass.handed_out > self._pass.observed:
            kind = type(self).__name__
            raise PruningError(
                f"a loader asks where {kind} stands, and {self._pass.handed_out - self._pass.observed} batches that it "
                "has drawn are not observed: it would go on without their losses. A StatefulDataLoader that fetches "
                "ahead asks so. Give it num_workers=0, or take torch.utils.data.DataLoader, and save "
                f"{kind}.state_dict() yourself, which is exact however far a loader has fetched"
            )
        return {}

    def _batches(self) -> Iterator[list[int]]:
        prepared, batches = self._begin()
        while not batches.exhausted:
            batches.trains |= torch.is_grad_enabled()
            yield prepared.batch(batches.hand_out()).tolist()
            if batches.ended:
                break
            if self._pass is not batches and not batches.complete:
                raise PruningError("another pass over the loader has begun: this one cannot be gone on with")
        if self._finished is batches:  # it was not fetched ahead: the loop is over
            self._finished = None

    def _begin(self) -> tuple[PreparedEpoch, OutstandingBatches]:
        """Begin a pass: a new epoch, the one that was broken off, or the rest of the one that a state was saved in."""
        if self._pass is not None:
            abandoned, self._pass = self._pass, None
            if abandoned.begun:  # the epoch begins again, without what was observed in it
                self._attempt += 1
                self._resume_at, self._prepared, self._losses = 0, None, None
            self._abandoned.add(abandoned, epoch=self._epoch)
        self._finished = None
        prepared = self._prepare()
        over = self.epochs is not None and self._epoch == self.epochs + 1
        if over and self._ends_with_epochs and not self._attempt:
            warnings.warn(f"the {self.epochs} epochs are over: from now on nobody sits out", stacklevel=4)
        if (ranks := self._find_ranks()) is not None:
            agree(
                ranks,
                "begin an epoch",
                epoch=self._epoch,
                attempt=self._attempt,
                batches_observed=self._resume_at,
                samples=len(prepared.order),
                steps=prepared.steps,
                fingerprint_of_the_order=prepared.fingerprint,
            )
        if self._losses is None:
            self._losses = EpochLosses(prepared.order)
        groups, keep = self._groups, prepared.keep
        if (
            groups is not None
            and keep is not None
            and prepared.layout.rank == 0
            and (found := groups.unequal_shares(keep))
        ):
            remedy = f"{groups.remedy} takes the same share of each group; InfoBatch leaves out low losses instead"
            warnings.warn(f"{found}. {remedy}", stacklevel=4)
            self._groups = None  # it is said once
        whole = self._policy.population if self._base is None else self._base.population
        self._share_sitting_out = max(0.0, 1 - len(prepared.order) / whole) if whole else 0.0
        self._pass = OutstandingBatches(batches=prepared.steps, first=self._resume_at)
        return prepared, self._pass

    def _prepare(self) -> PreparedEpoch:
        self._judge()
        layout = self._layout
        if self._prepared is None or (not self._resume_at and self._prepared.layout != layout):
            self._prepared = prepare(
                self._policy,
                layout,
                epoch=self._epoch,
                attempt=self._attempt,
                progress=0.0 if self.epochs is None else min(1.0, (self._epoch - 1) / self.epochs),
                base=self._base,
            )
        return self._prepared

    @property
    def _layout(self) -> BatchLayout:
        ranks = self._find_ranks()
        rank, number = (0, 1) if ranks is None else (ranks.rank, ranks.ranks)
        return BatchLayout(
            batch_size=self.batch_size,
            rank=rank,
            ranks=number,
            drop_last=self.drop_last,
            deal=self._deal,
            least=self._least,
        )

    def deal_by(self, deal: Deal, *, least: int) -> None:
        """Let a balance say which part of every step this rank computes, at least `least` samples or none.

        It is called before anything is handed out.
        """
        if self._pass is not None:
            raise PruningError("a pass over the loader has begun: batches are dealt by speed from the first one on")
        self._deal, self._least = deal, least
        if self._prepared is not None:  # of a state that was loaded: the same order, dealt otherwise
            self._prepared = replace(self._prepared, layout=self._layout)

    # -- losses ----------------------------------------------------------------------------------------------------

    def observe(self, losses: torch.Tensor, indices: Any = None) -> torch.Tensor:
        """Take the losses of a batch's samples, one each; return the mean of weight * loss (all weights 1: the mean).

        Call `backward()` on the mean that it returns, not on one of your own. If the numbers of the samples are given
        as `indices`, it is checked that they are those of this batch.
        """
        prepared, batches, kept = self._under_way()
        step = batches.expect()
        start, stop = prepared.places(step)
        if type(losses) is not torch.Tensor or losses.shape != (stop - start,) or losses.dtype is not torch.float32:
            check_losses(losses, stop - start, step)  # nearly always there is nothing to ask
        if batches.same_batch_again:
            self._refuse_again(losses, batches)
        if indices is not None:
            check_indices(indices, prepared.batch(step), step)
        mean = prepared.mean(losses, start, stop)
        if losses.is_cpu and not math.isfinite(mean.item()):  # one look at the mean is a look at all of them
            refuse_not_finite(losses.detach(), prepared.batch(step), f"batch {step + 1} of epoch {self._epoch}")
        kept.put(start, losses.detach())
        self._last_losses = weakref.ref(losses)
        batches.mark_observed()
        if batches.complete:
            self._complete()
        return mean

    def next_weights(self) -> torch.Tensor | None:
        """Return the weights of the samples that the next `observe` is for, one each; None where all are 1.

        They are for a loss that is not the mean over samples: one in which every token counts the same, say.
        """
        prepared, batches, _ = self._under_way()
        return prepared.weights(*prepared.places(batches.expect()))

    def skip(self) -> None:
        """Leave out the batch that would be observed next: nothing is learned from it."""
        _, batches, _ = self._under_way()
        batches.expect()
        batches.mark_observed()
        if batches.complete:
            self._complete()

    def end_epoch(self) -> None:
        """End the epoch here: what was observed counts. Leave the loop over the loader right after it.

        This does nothing where the epoch has just come to its end by itself.
        """
        if self._finished is None:
            _, batches, _ = self._under_way()
            batches.ended = True
            self._complete()

    def _under_way(self) -> tuple[PreparedEpoch, OutstandingBatches, EpochLosses]:
        if self._pass is not None and self._prepared is not None and self._losses is not None:
            return self._prepared, self._pass, self._losses
        if self._to_judge is not None:  # one more than there are batches: some of these losses are another batch's
            self._to_judge = None
            self._attempt += 1
            raise PruningError(
                f"all batches of epoch {self._epoch} had been observed: observe() was called twice for one of them "
                "(what was observed in this epoch is forgotten; begin it again)"
            )
        what = "no batch is waiting: no new pass over the loader has begun"
        if self._epoch == 1 and not self._attempt and not self._resume_at:
            what += (
                "; this sampler was never asked for a batch: if a framework has made another loader of yours (Ray's "
                "prepare_data_loader does), let it keep the batch sampler (paceline.ray.prepare_data_loader)"
            )
        raise PruningError(what)

    def _refuse_again(self, losses: torch.Tensor, batches: OutstandingBatches) -> None:
        """Refuse a tensor that is the same object as the last one, unless a CUDA graph may be reusing its buffer."""
        last = None if self._last_losses is None else self._last_losses()
        if losses is last and (losses.is_cpu or not batches.exhausted):
            raise PruningError(
                f"these losses were observed before, as batch {batches.observed}: call observe() once for every batch"
            )

    def _complete(self) -> None:
        """End the epoch: all ranks put together the losses that they have seen."""
        prepared, batches, kept = self._under_way()
        ranks = self._find_ranks()
        agree(
            ranks,
            "end an epoch",
            epoch=self._epoch,
            attempt=self._attempt,
            batches_observed=batches.observed,
            samples=len(prepared.order),
            steps=prepared.steps,
        )
        self._to_judge = prepared, seen_by_any(kept.values, ranks)
        self._finished, self._pass, self._prepared, self._losses = batches, None, None, None
        self._resume_at = 0
        self._abandoned.clear()

    def _judge(self) -> None:
        """Let the policy learn from the completed epoch.

        This is done when the sampler is next used, not in `_complete`: one `observe` too many still discards the epoch.
        """
        if self._to_judge is None:
            return
        (prepared, values), self._to_judge = self._to_judge, None
        samples, losses, ends = seen_only(prepared.order, values, prepared.layout.ends(len(prepared.order)))
        if len(samples):
            self._policy.judge(self._epoch, samples, losses, ends)
            self._watched.add(self._epoch, samples, losses)
        keep = prepared.keep
        if self._base is not None:
            self._policy.population = self._base.population
            keep = None if keep is None else keep | ~self._base.drawn  # who is never drawn does not sit out either
        self._policy.end_epoch(keep)
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

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now: the epoch, and which share of samples sits out in it, and has so far.

        >>> from paceline.data.pruning.info_batch import InfoPolicy
        >>> PrunedBatches(InfoPolicy(10, seed=0), batch_size=4, epochs=8).figures()
        {'epoch': 1, 'pruned_share': 0.0, 'pruned_share_of_all': 0.0}
        """
        policy = self._policy  # as it is: to ask must not end an epoch that may still be taken back
        met = policy.population * (self._epoch - 1)
        pruned = float(policy.times_pruned.sum(dtype=np.int64))
        return {
            "epoch": self._epoch,
            "pruned_share": self._share_sitting_out,
            "pruned_share_of_all": pruned / met if met else 0.0,
        }

    @property
    def loss_history(self) -> History:
        """The (epoch, loss) of every sample of `watch`, by its number; none of epochs in which the sample sat out.

        >>> from paceline.data.pruning.info_batch import InfoPolicy
        >>> pruning = PrunedBatches(InfoPolicy(4, seed=0), batch_size=4, epochs=8, watch=[2])
        >>> for batch in pruning:
        ...     mean = pruning.observe(torch.tensor(batch).float())
        >>> pruning.loss_history
        {2: [(1, 2.0)]}
        """
        self._judge()
        return {sample: list(kept) for sample, kept in self._watched.history.items()}

    def difficulty(self) -> NDArray[np.float32]:
        """Return how hard each sample is; only the order means anything."""
        self._judge()
        return self._policy.difficulty()

    def hardest(self, n: int) -> list[PrunedSample]:
        """Return the n hardest samples, the hardest first."""
        difficulty, times = self.difficulty(), self.times_pruned
        chosen = np.argsort(-difficulty, kind="stable")[: whole_number("n", n, least=0)]
        return [PrunedSample(index=int(i), times_pruned=int(times[i]), difficulty=float(difficulty[i])) for i in chosen]

    def _epochs_to_plan(self, epochs: int | None) -> int:
        epochs = self.epochs if epochs is None else epochs
        if epochs is None:
            raise ValueError(
                f"give epochs, to plan() or to {type(self).__name__}: pruning goes on for ever, and a plan does not"
            )
        return epochs

    def _with_base_remark(self, plan: PruningPlan) -> PruningPlan:
        """Add to a plan, which counts every sample once, that it is not known what a base will draw."""
        if self._base is None:
            return plan
        remark = "With a base of your own the epochs are these, and the samples are those that it draws."
        return dataclasses.replace(plan, remarks=(*plan.remarks, remark))

    # -- going on later --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from, also in the middle of an epoch: then after the last batch that was observed.

        Between epochs the state is the same on all ranks, and one is enough, also for another number of ranks. In the
        middle of an epoch every rank has its own state, which only the same rank, world and batch size can load.
        """
        self._judge()
        observed, attempt = self._resume_at, self._attempt
        if self._pass is not None:
            observed, attempt = (0, attempt + 1) if self._pass.failed else (self._pass.observed, attempt)
        state: dict[str, Any] = {
            "policy": with_tensors(self._policy.state_dict() | {"name": self._policy.name}),
            "settings": dict(self._policy.settings),
            "epoch": self._epoch,
            "attempt": attempt,
            "observed": observed,
        }
        if self._watched.history:
            state |= self._watched.state_dict()
        if self._base is not None:
            state["base"] = self._base.state(to_draw_again=self._prepared is not None and not observed)
        if observed and self._prepared is not None and self._losses is not None:
            state |= self._prepared.state(self._losses.values)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another sampler with the same settings stood; a state that does not fit changes nothing."""
        self._judge()
        try:
            self._load(state)
        except KeyError as missing:
            raise ValueError(f"{missing} is missing: {DAMAGED}") from None

    def _load(self, state: Mapping[str, Any]) -> None:
        """Read the whole state before anything is changed; the policy's part is the last that can be refused."""
        policy, learned, base = self._policy, state["policy"], state.get("base")
        if not isinstance(learned, Mapping):
            raise ValueError(f"policy must be what a policy has learned (it is a {type(learned).__name__}): {DAMAGED}")
        if learned["name"] != policy.name:
            raise ValueError(f"this state is of {learned['name']}, and the sampler prunes by {policy.name}")
        policy.check_samples(dict(learned))
        observed = whole_number("observed", state["observed"], least=0, most=MOST_COUNT)
        middle = restored_epoch(state, policy.samples, self._layout, observed) if observed else None
        epoch = whole_number("epoch", state["epoch"], least=1, most=MOST_COUNT)
        attempt = whole_number("attempt", state["attempt"], least=0, most=MOST_COUNT)
        drawn = None if base is None else saved_array(base["given"], np.bool_, policy.samples, "given")
        sampler_state = None if base is None else base["sampler"]
        history = self._watched.histories_in(state)
        policy.load_state_dict(dict(learned))
        self._warn_of_other_settings(state.get("settings", {}))  # states of version 0.1 say none
        self._prepared = self._losses = self._pass = self._finished = None
        if middle is not None:
            self._prepared, self._losses = middle[0], EpochLosses(middle[0].order)
            self._losses.put(0, torch.from_numpy(middle[1]))
        if self._base is not None and drawn is not None:
            self._base.restore(drawn, sampler_state)
            policy.population = self._base.population or policy.samples
        self._epoch, self._attempt, self._resume_at, self._watched.history = epoch, attempt, observed, history

    def _warn_of_other_settings(self, saved: Mapping[str, Any]) -> None:
        ours = self._policy.settings
        names = [name for name in {**ours, **saved} if saved and saved.get(name) != ours.get(name)]
        changed = [f"{name}={saved.get(name, 'none')}, here {ours.get(name, 'none')}" for name in names]
        if changed:
            warnings.warn(
                f"this state was saved by a sampler with other settings ({'; '.join(changed)}): from now on samples "
                "sit out by those given here",
                stacklevel=4,
            )


def check_losses(losses: torch.Tensor, size: int, step: int) -> None:
    """Refuse what is not one loss for each of `size` samples.

    >>> check_losses(torch.tensor(0.3), 4, 0)
    Traceback (most recent call last):
    ValueError: losses must be one for each sample, and this is a single number: give the loss ... reduction='none'
    """
    if not isinstance(losses, torch.Tensor):
        raise TypeError(f"losses must be a tensor (it is a {type(losses).__name__})")
    if losses.shape != (size,):
        if losses.ndim == 0:
            raise ValueError(
                "losses must be one for each sample, and this is a single number: "
                "give the loss function reduction='none'"
            )
        raise ValueError(
            f"batch {step + 1} has {size} samples, and losses has the shape {tuple(losses.shape)}: give one loss for "
            "each sample"
        )
    if not losses.is_floating_point():
        raise ValueError(f"losses must be floating-point numbers (they are {losses.dtype})")


def check_indices(given: Any, batch: NDArray[np.int32], step: int) -> None:
    """Refuse losses of other samples than those of the batch.

    >>> check_indices([1, 2], np.array([2, 1], np.int32), 0)
    Traceback (most recent call last):
    paceline.data.pruning.policy.PruningError: these losses are not those of batch 1, which has the samples 2, 1: ...
    """
    if np.array_equal(np.asarray(given), batch):
        return
    few = ", ".join(map(str, batch[:4].tolist()))
    raise PruningError(
        f"these losses are not those of batch {step + 1}, which has the samples {few}{', ...' * (len(batch) > 4)}: "
        "observe batches in the order in which the loader gives them, and let it keep to its order (in_order=True)"
    )


def refuse_not_finite(losses: torch.Tensor, batch: NDArray[np.int32], where: str) -> None:
    """Raise an error that names the first sample whose loss is not finite.

    >>> refuse_not_finite(torch.tensor([1.0, torch.nan]), np.array([7, 9], np.int32), "batch 1 of epoch 2")
    Traceback (most recent call last):
    ValueError: the loss of sample 9 in batch 1 of epoch 2 is nan: nothing was learned from the batch; ...
    """
    bad = int(torch.isfinite(losses).logical_not().to(torch.uint8).argmax())  # the first, if only the sum overflows
    raise ValueError(
        f"the loss of sample {batch[bad]} in {where} is {float(losses[bad])}: nothing was learned from the batch; "
        "lower the learning rate, or leave the batch out with skip()"
    )


# -- the public samplers ----------------------------------------------------------------------------------------------

P = ParamSpec("P")


def _refusing_samplers(init: Callable[P, None]) -> Callable[P, None]:
    """Refuse a sampler in the place of the samples, before a missing setting is complained of.

    Lightning and others make batch samplers anew, as `kind(sampler, batch_size=..., drop_last=...)`: that would prune
    another data set than the script's.
    """

    @functools.wraps(init)
    def checked(*args: P.args, **settings: P.kwargs) -> None:
        for given in (*args[1:], settings.get("samples")):
            if isinstance(given, Sampler):
                raise PruningError(
                    f"samples must be the number of samples or the data set, and this is a {type(given).__name__}: "
                    "where a framework has put it here, keep it from that, for pruning splits batches among ranks "
                    "itself (in Lightning: Trainer(use_distributed_sampler=False))"
                )
        init(*args, **settings)

    return checked


class FinePruning(PrunedBatches):
    """A batch sampler for data fine-pruning: samples often above their batch's mean loss sit some epochs out.

        loader = DataLoader(dataset, batch_sampler=FinePruning(dataset, batch_size=128), num_workers=4)

    Of every `window` epochs those from `starting_point` on may be pruned (the starting point is divided by
    `attenuation` from window to window), `count` of every `block`; then the `prune` samples (a share below 1, or a
    whole number of samples) that were most often above `(1 + tolerance)` times the mean sit out. `plan(epochs)` says
    which epochs that are; with the defaults the first is the 32nd.

    `samples` is the number of samples, or the data set. `batch_size` is that of one rank. Windows go on for ever,
    whatever the length of your run; where `epochs` says it, `plan()` is of so many, and a run that is too short to be
    pruned at all is warned of. `base` is a sampler of your own that yields the indices of all ranks; the default is a
    random permutation, another one in every epoch. `window_at` are the epochs at which windows begin, in place of
    windows of one length: those at which your learning rate changes. The losses of the samples in `watch` are kept,
    epoch by epoch, in `loss_history`.

    On imbalanced data those with high losses are the rare cases. Where the data set says its targets, it is warned of
    once if a class, or the lowest or highest tenth of numbers, loses more than twice its share. `protect="classes"`
    takes the same share of each class, and a function of a sample's number the same share of each group that it says.

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

    _ends_with_epochs = False

    @_refusing_samplers
    def __init__(
        self,
        samples: int | Sized,
        *,
        batch_size: int,
        epochs: int | None = None,
        window: int = EPOCHS_WINDOW,
        starting_point: int = EPOCHS_STARTING_POINT,
        attenuation: float = 2,
        block: int = 4,
        count: int = 2,
        prune: float | int = 0.3,
        tolerance: float = 0.0,
        window_at: Sequence[int] = (),
        protect: str | GroupOf | None = None,
        watch: Iterable[int] = (),
        seed: int = 0,
        base: Iterable[int] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        group: ProcessGroup | None = None,
    ) -> None:
        process_group = renamed("group", group, "process_group", process_group, stacklevel=4)
        if len(window_at) and window != EPOCHS_WINDOW:
            raise ValueError(window_refusal(window, window_at))
        self.schedule = FineSchedule(
            window=window,
            window_at=tuple(window_at),
            starting_point=starting_point,
            attenuation=attenuation,
            block=block,
            count=count,
            prune=prune,
        )
        number = count_of(samples, type(self).__name__)
        groups = find_groups(samples, number, protect)
        protected = None if protect is None else groups
        policy = FinePolicy(number, self.schedule, tolerance=tolerance, seed=seed, protected=protected)
        finder = GroupFinder(rank, world_size, process_group, timeout_seconds)
        super().__init__(
            policy,
            batch_size=batch_size,
            epochs=epochs,
            base=base,
            drop_last=drop_last,
            find_ranks=finder,
            watch=watch,
            groups=groups if protect is None else None,
        )
        kept = policy.samples - policy.prune_num
        if drop_last and base is None and kept < self.batch_size:
            raise ValueError(
                f"{kept} samples take part in a pruned epoch, and with drop_last a batch takes {batch_size}: give a "
                "smaller batch_size, prune less, or leave drop_last out"
            )
        if isinstance(prune, int) and 0 < prune <= PER_CENT and prune * PER_CENT < policy.samples:
            warnings.warn(
                f"prune={prune} is a number of samples, of {policy.samples:,}: write {prune / PER_CENT} for a share of "
                f"{prune} %",
                stacklevel=3,
            )
        windows = f"window_at={list(self.schedule.window_at)}" if self.schedule.window_at else f"window={window}"
        if epochs is not None and not any(self.schedule.is_pruned(epoch) for epoch in range(1, epochs + 1)):
            warnings.warn(
                f"none of {epochs} epochs is pruned ({windows}, starting_point={starting_point}): give a smaller "
                "starting_point, and a window of about a third of the epochs",
                stacklevel=3,
            )

    def plan(self, epochs: int | None = None) -> PruningPlan:
        """Return which of so many epochs are pruned, what that saves, and what the paper's formulas say of it.

        The default is the sampler's own number of epochs.

        >>> FinePruning(1000, batch_size=100).plan(200).share_saved
        0.1065
        """
        epochs = self._epochs_to_plan(epochs)
        plan = plan_fine(
            self.schedule,
            self.policy.samples,
            epochs=epochs,
            batch_size=(layout := self._layout).step_size,
            drop_last=self.drop_last,
            joined=layout.joined,
        )
        return self._with_base_remark(plan)


class InfoBatch(PrunedBatches):
    """A batch sampler for InfoBatch: of those below the mean loss, `ratio` sit out, the others of them weigh more.

    Who sits out is drawn anew each epoch.

    After the first `delta` * `epochs` epochs no sample sits out; without `epochs` samples sit out to the end of the
    run. Call backward() on what `observe` returns: it is weighted. `samples` is the number of samples, or the data set.
    `batch_size` is that of one rank. `base` is a sampler of your own that yields the indices of all ranks. The losses
    of the samples in `watch` are kept in `loss_history`.

    >>> import torch
    >>> pruning = InfoBatch(8, batch_size=4, epochs=8)
    >>> for epoch in range(2):
    ...     for batch in pruning:
    ...         mean = pruning.observe(torch.tensor(batch).float())
    >>> bool((pruning.times_pruned[4:] == 0).all())
    True
    """

    @_refusing_samplers
    def __init__(
        self,
        samples: int | Sized,
        *,
        batch_size: int,
        epochs: int | None = None,
        ratio: float = 0.5,
        delta: float = 0.875,
        watch: Iterable[int] = (),
        seed: int = 0,
        base: Iterable[int] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        process_group: ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        group: ProcessGroup | None = None,
    ) -> None:
        process_group = renamed("group", group, "process_group", process_group, stacklevel=4)
        policy = InfoPolicy(count_of(samples, type(self).__name__), ratio=ratio, delta=delta, seed=seed)
        self.ratio, self.delta = policy.ratio, policy.delta
        finder = GroupFinder(rank, world_size, process_group, timeout_seconds)
        super().__init__(
            policy,
            batch_size=batch_size,
            epochs=epochs,
            base=base,
            drop_last=drop_last,
            find_ranks=finder,
            watch=watch,
        )

    def plan(self, epochs: int | None = None) -> PruningPlan:
        """Return which epochs may be pruned, and at most how much that saves: how much depends on the losses.

        The default is the sampler's own number of epochs; a sampler that was told none prunes to the last epoch.

        >>> InfoBatch(1000, batch_size=100, epochs=8).plan().pruned_epochs
        (2, 3, 4, 5, 6, 7)
        """
        epochs = self._epochs_to_plan(epochs)
        plan = plan_info(
            self.policy.samples,
            epochs=epochs,
            ratio=self.ratio,
            delta=self.delta if self.epochs is not None or not self.delta else 1.0,
            batch_size=(layout := self._layout).step_size,
            drop_last=self.drop_last,
            joined=layout.joined,
        )
        return self._with_base_remark(plan)
