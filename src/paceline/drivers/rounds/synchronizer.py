"""The public interface of rounds: `LGCSync`, `FastestKSync` and `FullSync`, each around a model and its optimiser.

    with paceline.LGCSync(model, optimizer, k=7, scheduler=scheduler) as sync:
        for epoch in range(epochs):
            for inputs, targets in sync.epoch(loader):          # ends at the same round on all ranks
                for x, y in sync.blocks(inputs, targets):       # ends early once the round has closed
                    loss_function(model(x), y).backward()
                sync.step()                                     # report; wait for the round; apply its update
            sync.flush()                                        # all ranks at one place: evaluate, save

What happens in `step`, on the training thread:

    pack        .grad and the change of the buffers become this rank's message of the version that it computed at
    report      "my gradient is ready", a few bytes, to the rank that decides
    wait        until the round has closed and its update is there; a late rank finds it there already
    apply       all updates that have come since, in order, through the optimiser; then the schedulers

Where somebody watches the steps of the model (traces/step_clock.py), its clock hears of the wait, also in a flush, of
the updates, which are its optimiser's time, and of each update's sum, as a bucket.

Each strategy is a class at the end of this file, with its own settings beside those of `RoundSync`.
"""

from __future__ import annotations

import atexit
import copy
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from paceline.codecs import Codec
from paceline.codecs.floats import Identity
from paceline.data.batch_samplers import count_of
from paceline.decoding import Count, decode
from paceline.distributed import check_limits
from paceline.distributed.agreement import describe
from paceline.distributed.stores import private_store
from paceline.drivers.ranks.group import ROUNDS, RankGroup
from paceline.drivers.ranks.lifecycle import RankLifecycle, reason_of
from paceline.drivers.ranks.tracked_model import IN_USE, TrackedModel, plain_optimizer
from paceline.drivers.rounds.batches import BatchSource, OpenBatch, rounds_in
from paceline.drivers.rounds.clipping import ClippingCheck
from paceline.drivers.rounds.exchange import Update
from paceline.drivers.rounds.loop import RoundLoop, RoundsError
from paceline.drivers.rounds.messages import AllWaiting, GradientReady, Waiting
from paceline.drivers.rounds.outcomes import Outcomes
from paceline.drivers.rounds.preparation import (
    Scheduler,
    as_list,
    check_k,
    describe_optimizer,
    learning_rates,
    prepare,
    refuse_collective_sampler,
)
from paceline.drivers.rounds.sampler import SampleCounter, TakenBatches
from paceline.drivers.rounds.switching import release_lock_often, release_lock_rarely
from paceline.events import Drop, Step
from paceline.exchanges.plans import ALL_REDUCE, AUTO
from paceline.loggers import GuardedLog, Log
from paceline.strategies import LGC, STRATEGIES, FastestK, Full, Strategy
from paceline.strategies.lgc import ScalePartial, settled, weighing_in
from paceline.strategies.shares import BatchSizes, SharesBySpeed
from paceline.traces.journal import Arrival, Seconds
from paceline.traces.step_clock import clock_of, in_phase
from paceline.training.rank_model import RankModel
from paceline.training.round_sums import make_round_sum
from paceline.training.saved_state import refusing
from paceline.training.train_state import all_finite
from paceline.workers.blocks import count_samples, cut_batch

log = logging.getLogger("paceline.rounds")

TIMEOUT_SECONDS = 600.0
CODEC, SHARES = "codec", "shares"  # in what ranks, and states, must have alike
OPTIMIZER = "optimizer"  # in what ranks must have alike
ROUNDS_LEFT, NO_EPOCH = "rounds_left", -1  # of an epoch, in a state that was taken within one


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedRound:
    """One round that this rank has applied: its step, what was dropped since the one before, and this rank's moments.

    `arrivals` are known to the rank that decides, and empty elsewhere. `done` is when the sum was complete, `applied`
    when this rank had applied the update, by its `time.perf_counter()`. `sent_bytes` is what all ranks together have
    given to the network; where payloads vary in size, as if those of all were of the size of this rank's.

    >>> ClosedRound(step=Step(version=3, fresh=()), dropped=(), arrivals=(), done=1.0, applied=1.5).number
    3
    """

    step: Step
    dropped: tuple[Drop, ...]
    arrivals: tuple[Arrival, ...]
    done: float
    applied: float
    sent_bytes: int = 0

    @property
    def number(self) -> int:
        """The number of the round: the version of the model that its fresh gradients are of."""
        return self.step.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """A flush of all ranks at `version`, for good if they are `leaving`: what was dropped since the last round closed.

    `arrivals` since then are known to the rank that decides, and empty elsewhere: late gradients, for the next round.

    >>> Flushed(version=40, leaving=False, dropped=(), arrivals=()).version
    40
    """

    version: int
    leaving: bool
    dropped: tuple[Drop, ...]
    arrivals: tuple[Arrival, ...]


OnRound = Callable[[ClosedRound], None]
OnFlush = Callable[[Flushed], None]


class RoundSync(RankLifecycle):
    """Trains one model in rounds with the ranks of a process group; `LGCSync` and the others fix the strategy.

    Every rank constructs it, with equal settings, after its model is on its device; all begin with the model of the
    group's first rank. Any optimiser of torch.optim will do that needs no closure. Its steps are taken by `step` alone,
    and so are those of the schedulers: what else changes parameters on one rank is named in the next round.

    Every rank takes part in one sum for each round, on a thread of its own; collectives of the script itself
    belong after a `flush`. `version` is how many rounds this rank has applied, `draws` how many batches it has computed
    and `outcomes` what became of them: used, late, dropped by reason. After an error no round is taken any more.

    Args:
        model: The model of this rank.
        optimizer: Its optimiser, which `step` steps once for each update.
        strategy: The strategy, or a function that makes it.
        scheduler: A scheduler, or several: stepped once a round, on all ranks alike.
        blocks: Into how many equal parts `blocks` cuts a batch; a late rank stops between two.
        most_behind: How many updates a slow rank may be behind before the others wait for it; each takes the memory of
            a model.
        codec: Compresses what ranks contribute: words that name a codec ("identity": not at all), or a Codec.
        plan: How ranks come to the sum: "all-reduce", "gather", "two-step", or the quickest of them ("auto").
        process_group: The ranks that take part; None: all.
        timeout_seconds: The longest that a round may stay open.
        silence_seconds: A rank without a heartbeat for so long counts as gone.
        seed: The seed of codecs that round at random.
        shares: How ranks get batches by their speed (`samples`); None: all of them have the same size.
        record: Whether to keep every `ClosedRound` in `history`.
        on_round: Called with each `ClosedRound`, when this rank has applied it.
        on_flush: Called with each `Flushed`, when all ranks are at one place.
        log: Called with `figures()` and the number of rounds after each round (paceline.loggers).
    """

    has_ended, error_type = "rounds have ended", RoundsError

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy | Callable[[], Strategy],
        *,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        blocks: int = 4,
        most_behind: int = 10,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        shares: SharesBySpeed | None = None,
        record: bool = False,
        on_round: OnRound | None = None,
        on_flush: OnFlush | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__()
        optimizer = plain_optimizer(optimizer)
        made: tuple[Strategy, TrackedModel, Codec] | Exception
        try:
            check_limits(timeout_seconds=timeout_seconds, silence_seconds=silence_seconds)
            self._log = GuardedLog(log)
            made = prepare(
                model,
                optimizer,
                strategy,
                schedulers=as_list(scheduler),
                codec=codec,
                plan=plan,
                blocks=blocks,
                most_behind=most_behind,
                shares=shares,
            )
        except Exception as error:  # the others must hear of it, whatever it is: they would wait
            made = error
        refusal = made if isinstance(made, Exception) else None
        self._group = RankGroup(process_group, timeout_seconds, refusal, purpose=ROUNDS)
        if isinstance(made, Exception):
            raise made
        self._asked, self._tracked, self._codec = made
        self.strategy, self._blocks, self._watched = settled(self._asked), blocks, model
        self._sizes = BatchSizes(getattr(self.strategy, SHARES))
        self._optimizer, ranks, rank = optimizer, self._group.ranks, self._group.rank
        self._schedulers, self._place = as_list(scheduler), ranks.index(rank)
        self._scheduled: dict[int, int | None] = {}  # of each scheduler: where it stood after its last step here
        tracked = self._tracked
        with self._constructing():
            description = {"model": tracked.description(), "strategy": describe(self.strategy)}
            travel = {CODEC: describe(self._codec), "plan": plan, SHARES: describe(self._sizes.shares)}
            travel |= {OPTIMIZER: describe_optimizer(optimizer)}
            self._name = name = self._group.agree(description | travel, tracked.device)
            check_k(self.strategy, self._group.world)
            self._group.begin_equal(tracked.everything())
            self._begin_heartbeats(name, silence_seconds)
            self._model = RankModel(tracked.parameters, tracked.buffers, self._take_step, variances=tracked.variances)
            self._make_sum = partial(
                make_round_sum,
                self._codec,
                [parameter.shape for parameter in tracked.parameters],
                self._model.layout,
                place=self._place,
                world=self._group.world,
                plan=plan,
                seed=seed,
            )
            self._sum = self._make_sum()
            self._loop = RoundLoop(
                self._model,
                self.strategy,
                self._group,
                self._heartbeats,
                name,
                round_sum=self._sum,
                device=tracked.device,
                most_behind=most_behind,
                timeout_seconds=timeout_seconds,
            )
            self.version = self.draws = 0
            self._k, self._waited_seconds, self._warned_of_blocks, self._stepping = 0, 0.0, False, False
            kind = next(name for name, kind in STRATEGIES.items() if isinstance(self.strategy, kind))
            self.outcomes = Outcomes(ranks, self._place, strategy=f"{kind}@ranks")
            self.history: list[ClosedRound] = []
            self._record, self._on_round, self._on_flush = record, on_round, on_flush
            self._rates, self._clipping, self._batch = learning_rates(optimizer), ClippingCheck(), OpenBatch()
            self._held_since, self._behind_seconds = time.perf_counter(), 0.0  # and how long the model had lain there
            self._source: BatchSource | None = None
            self._loader_state: dict[str, Any] = {}  # where a loader stood at a checkpoint, until epoch() has it
            # Samplers, and the states of a checkpoint for those that are still to be made.
            self._samplers, self._sampler_states = list[TakenBatches](), list[dict[str, Any]]()
            self._epochs = self._epoch_ends = 0  # begun; the round after the last of the one that this rank is in, or 0
            # The last round at which all are, or will be; how many rounds the epochs of this loader have; and where all
            # ranks were at one place last: the version, and this rank's batches until then.
            self._aligned, self._agreed_rounds, self._met = 0, 0, (0, 0)
            self._saved: dict[str, Any] | None = None  # this rank's state there, as long as the version is the same
            self._hook = optimizer.register_step_pre_hook(self._refuse_step)
            IN_USE.add(optimizer)
            release_lock_often()
            atexit.register(self._abandon)

    def __repr__(self) -> str:
        place = f"rank {self._group.rank}, {self._group.world} ranks"
        return f"{type(self).__name__}({self.strategy}; {place}; {self.version:,} rounds)"

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has given to the network for sums so far; an all-reduce goes around a ring."""
        return self._loop.exchange.sent_bytes

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now.

        `k` is how many gradients closed the last round; `used`, `late` and `dropped` count gradients of all ranks since
        this launch began; `wait_seconds` is how long this rank has waited for rounds, and `sent_bytes` what it has
        given to the network.
        """
        ranks = self.outcomes.workers
        return {
            "rounds": self.version,
            "k": self._k,
            "used": sum(rank.used for rank in ranks),
            "late": sum(rank.late for rank in ranks),
            "dropped": sum(rank.dropped for rank in ranks),
            "sent_bytes": self.sent_bytes,
            "wait_seconds": self._waited_seconds,
        }

    @property
    def plan(self) -> str:
        """How ranks come to the sum of a round."""
        return self._sum.plan

    @property
    def seconds(self) -> float:
        """The seconds since the first round began, also those before a checkpoint."""
        return self._loop.seconds()

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self._group.world

    @property
    def samples(self) -> int:
        """How many samples the next batch of this rank should have, by its speed; 0 where shares are equal."""
        return self._sizes.samples(self._place)

    # -- batches ---------------------------------------------------------------------------------------------------

    def sampler(self, data: int | Sized, *, shuffle: bool = True, seed: int = 0) -> TakenBatches:
        """Return a batch sampler whose batches follow this rank's speed: `DataLoader(data, batch_sampler=...)`.

        All ranks take their batches from one order of the data, and each sample is taken once in an epoch. Where the
        epoch stands is part of `state_dict`. `data` is the data set, or how many samples it has.
        """
        if self._sizes.shares is None:
            raise RoundsError(
                "sampler() deals batches by speed: give shares=paceline.SharesBySpeed(batch_size=...), or a loader of "
                "your own to epoch()"
            )
        number = len(self._samplers)
        words = f"{count_of(data, 'sync.sampler'):,} samples, seed {seed}, shuffle {shuffle}"
        counter = SampleCounter(private_store(f"rounds/{self._name}/taken/{number}"), words)
        whole = self._sizes.shares.batch_size * self._group.world
        fewest = self._sizes.shares.multiple + 1  # so many make blocks of which not all have one sample
        made = TakenBatches(data, counter, lambda: self.samples, whole=whole, fewest=fewest, shuffle=shuffle, seed=seed)
        if number < len(self._sampler_states):
            made.load_state_dict(self._sampler_states[number])
        self._samplers.append(made)
        self._saved = None
        return made

    def epoch(self, loader: Iterable[Any], rounds: int | None = None) -> Iterator[Any]:
        """Yield batches until the epoch's last round has closed: at the same round on all ranks.

        An epoch has as many rounds as the longest of the ranks' loaders has batches, unless `rounds` says otherwise,
        the same on all ranks; they agree, and so meet, where a loader is new. A rank with fewer batches begins its
        loader again; one that was too slow for all of its own gets the rest first in the next epoch. The length is kept
        while the loader is the same object: where a sampler prunes, later passes are shorter, an epoch still has the
        rounds of the first pass, and the loader is begun again within it. After `load_state_dict` the rest of the epoch
        comes, unless `rounds` is given, with the batches that are left of the pass. All ranks begin an epoch at one
        round: call `flush` before it if an epoch was left early, or steps were taken outside.
        """
        self._check_alive()
        refuse_collective_sampler(loader, self._group.world)
        if self.version != self._aligned:
            raise RoundsError(
                "an epoch begins at the same round on all ranks, and they may be at different ones: call flush() after "
                "an epoch that was left early, and after steps outside of epochs"
            )
        with self._guarded():
            self._start()
            length = self._rounds_of_epoch(loader, rounds)
            self._epochs += 1
            number, self._epoch_ends = self._epochs, self.version + length
            self._aligned = self._epoch_ends
            self._rates = learning_rates(self._optimizer)  # all ranks are at one place: they may set them by hand
            self._apply_updates()  # those that came after the end of the epoch before
        try:
            while self._epochs == number and self.version < self._epoch_ends:
                before = self.draws
                yield self._next_batch()
                if self.draws == before:
                    raise RoundsError("a batch of epoch() was not followed by step()")
        finally:
            if self._epochs == number:  # a generator that is kept may end long after the next epoch has begun
                self._epoch_ends = 0

    @property
    def _sampler_in_use(self) -> TakenBatches | None:
        """The sampler whose batches are trained: that of the loader of epoch(), or the only one that was made."""
        loader = None if self._source is None else self._source.loader
        sampler = getattr(loader, "batch_sampler", None)
        if isinstance(sampler, TakenBatches):
            return sampler
        return self._samplers[0] if len(self._samplers) == 1 and loader is None else None

    def _next_batch(self) -> Any:
        assert self._source is not None
        self._clipping.end()
        return self._source.next()

    def _rounds_of_epoch(self, loader: Iterable[Any], given: int | None) -> int:
        """Return the rounds of this epoch, unless given those of the longest loader: all agree when it is a new one."""
        ours, new = rounds_in(loader, given), self._source is None or self._source.loader is not loader
        left = NO_EPOCH
        if new:
            state, self._loader_state = self._loader_state, {}
            if ROUNDS_LEFT in state:
                left = decode(Count, state[ROUNDS_LEFT], ROUNDS_LEFT)
            self._source = BatchSource(loader, state)
        if given is not None:
            return ours
        if new or not self._agreed_rounds:
            numbers = self._loop.gather("begin an epoch", [ours, left])
            self._agreed_rounds, left = (max(each) for each in zip(*numbers, strict=True))
        return self._agreed_rounds if left == NO_EPOCH else left

    def _loader_place(self) -> dict[str, Any]:
        """Return where the loader of epoch() stands, and within an epoch how many rounds of it are left."""
        if self._source is None:
            return dict(self._loader_state)
        left = {ROUNDS_LEFT: max(0, self._epoch_ends - self.version)} if self._epoch_ends else {}
        return self._source.state_dict() | left

    def blocks(self, *batch: Any) -> Iterator[Any]:
        """Yield a batch in equal blocks; end early once the round has closed. Then `.grad` is the gradient to clip.

        A batch is tensors of one length, or one dict of them. One that does not divide evenly comes in fewer blocks,
        and no block is a single sample unless the batch is.
        """
        blocks = cut_batch(batch, self._blocks)
        if len(blocks) == 1 < self._blocks and not self._warned_of_blocks:
            self._warned_of_blocks = True
            log.warning(
                "a batch cannot be cut into equal blocks, and a late rank computes it whole: give a batch size that "
                "%d divides",
                self._blocks,
            )
        self.begin_batch(len(blocks), samples=count_samples(batch))
        self._batch.left_early = True
        for block in blocks:
            yield block
            if not self.block_done():
                break
        self._batch.left_early = False
        with torch.no_grad():
            for parameter in self._tracked.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(len(blocks))  # the sum over the blocks done of a block's mean, by all blocks

    def begin_batch(self, blocks: int, *, samples: int = 0, first_sample: int = 0) -> None:
        """Begin a batch of so many blocks, for a loop that does not use `blocks`: what is left in .grad is dropped.

        `samples` is the size of the whole batch, by which its gradient is weighed; `first_sample` is where it begins in
        this rank's order, for the journal.
        """
        self._check_alive()
        self._clipping.end()
        with self._guarded():
            self._start()
        for parameter in self._tracked.parameters:
            parameter.grad = None
        self._batch.begin(blocks, samples=samples, first_sample=first_sample)

    def block_done(self) -> bool:
        """Note that a block is done, and return whether to go on with the next: not once the round has closed."""
        self._batch.done += 1
        return self._loop.exchange.next_version <= self.version

    # -- rounds ----------------------------------------------------------------------------------------------------

    def step(self, losses: torch.Tensor | None = None, *, samples: int | None = None) -> bool:
        """Report the gradient in `.grad`, wait until its round has closed, and apply all updates that have come.

        `losses`, of every sample done, help to choose K where it is "auto". `samples` is the size of the whole batch,
        where the script does not use `blocks`, which counts it: gradients weigh as much as their batches have samples,
        and alike where that is not known. Return whether the gradient was reported: not if it is not finite; then the
        next batch is computed at the same model, unless its round has closed.
        """
        self._check_alive()
        self._clipping.end()
        if self._batch.left_early:
            raise RoundsError("the loop over sync.blocks(...) was left early: it ends by itself when it is time")
        if all(parameter.grad is None for parameter in self._tracked.parameters):
            raise RoundsError("step() comes after a batch, and no parameter has a gradient: call backward() before")
        done, blocks = self._batch.done, self._batch.blocks
        if 0 < done < blocks and self._loop.exchange.next_version <= self.version:
            raise RoundsError(
                f"{done} of the {blocks} blocks of this batch are done, and its round is still open: go on as long as "
                "block_done() is true"
            )
        self._tracked.check_trained()
        batch_samples = self._batch.samples if samples is None else samples
        if batch_samples < 0 or (self._sizes.by_speed and not batch_samples):
            raise RoundsError(
                f"step() needs the size of the batch where shares are by speed: go through sync.blocks(...), or give "
                f"step(samples=len(inputs)) (samples={batch_samples})"
            )
        with self._guarded():
            self._check_rates()
            self._start()
            finite = self._report(losses, batch_samples)
            if finite:
                began = time.perf_counter()
                with in_phase(self._watched, "wait"):
                    self._loop.wait_for_round(self.version)
                self._waited_seconds += time.perf_counter() - began
            else:  # it waits for nobody, and would never hear that all have failed
                self._loop.check_failure(f"round {self.version}")
            self._apply_updates()
        self._clipping.begin()
        return finite

    def _check_rates(self) -> None:
        """Refuse a learning rate that was set in the loop: a late rank applies several updates with one."""
        rates, before = learning_rates(self._optimizer), self._rates
        waits_for_all = getattr(self.strategy, "k", self._group.world) == self._group.world
        if rates != before and self.draws != self._met[1] and not waits_for_all:
            for place, scheduler in enumerate(self._schedulers):
                self._check_schedule(place, scheduler)
            raise RoundsError(
                f"the learning rate was set in the loop in round {self.version} ({before} before, {rates} now), by "
                "hand or by a scheduler: a late rank applies several updates at once, so ranks would apply one with "
                "different rates. Give the synchronizer the scheduler (scheduler=torch.optim.lr_scheduler.LambdaLR("
                "optimizer, ...)), or set the rate on all ranks alike, before epoch() or after a flush()"
            )
        self._rates = rates

    def _report(self, losses: torch.Tensor | None, batch_samples: int) -> bool:
        first_sample = self._batch.first_sample
        blocks_done, blocks, work_seconds = self._batch.end(held_since=self._held_since)
        message = self._model.pack(self._loop.vectors.take())
        layout = self._model.layout
        finite = all_finite(message[: layout.gradient + layout.buffers])
        draw, self.draws = self.draws, self.draws + 1
        if (sampler := self._sampler_in_use) is not None:
            sampler.mark_trained()
        if self._source is not None:
            self._source.mark_trained()
        if finite:
            self._loop.gradients.keep(self.version, message)
        else:
            self._loop.vectors.give(message)
            self._model.restore_buffers()
            log.warning("round %d: a gradient of this rank is not finite, and is dropped", self.version)
        self._loop.report(
            GradientReady(
                rank=self._place,
                version=self.version,
                draw=draw,
                blocks_done=blocks_done,
                blocks=blocks,
                work_seconds=work_seconds,
                held_seconds=time.perf_counter() - self._held_since,
                fingerprint=self._model.fingerprint(),
                samples=0 if losses is None else losses.numel(),
                loss_mean=None if losses is None else _finite(losses.mean()),
                loss_variance=None if losses is None else _finite(losses.var(correction=0)),
                finite=finite,
                epoch=self._epochs if self._epoch_ends else 0,
                epoch_ends=self._epoch_ends,
                batch_samples=batch_samples,
                first_sample=first_sample,
                behind_seconds=self._behind_seconds if self._sizes.by_speed else 0.0,
                rates=self._rates,
            )
        )
        return finite

    def _apply_updates(self, *, beyond_epoch: bool = False) -> None:
        """Apply what has come, in order; in an epoch no further than to its end, where all ranks are equal."""
        began, done = time.perf_counter(), math.inf
        while (update := self._loop.exchange.next_update()) is not None:
            if self._epoch_ends and self.version >= self._epoch_ends and not beyond_epoch:
                break
            with in_phase(self._watched, "optimiser"):
                self._apply(update)
            done = update.done
        self._held_since, self._behind_seconds = time.perf_counter(), max(0.0, began - done)

    def _apply(self, update: Update) -> None:
        if (clock := clock_of(self._watched)) is not None:
            clock.bucket_between(update.begun, update.done)
        if update.event is not None:
            torch.cuda.current_stream(self._tracked.device).wait_event(update.event)
        self._model.apply(update.vector)
        step, dropped = update.notice.step, update.notice.dropped
        self.version, self._saved = step.version + 1, None
        self._loop.exchange.applied(update)
        self.outcomes.add(step, dropped)
        self._k = len(step.fresh)
        if update.notice.assign is not None:
            self._sizes.assign(update.notice.assign)
        arrivals = self._loop.next_arrivals()
        if self._loop.deciding is not None:
            self.outcomes.warn_of_drops(arrivals)
        if self._record or self._on_round is not None:
            closed = ClosedRound(
                step=step,
                dropped=dropped,
                arrivals=arrivals,
                done=update.done,
                applied=time.perf_counter(),
                sent_bytes=update.sent_bytes,
            )
            if self._record:
                self.history.append(closed)
            if self._on_round is not None:
                self._on_round(closed)
        if self._log:
            self._log(self.figures(), self.version)

    def _take_step(self) -> None:
        self._stepping = True
        try:
            self._optimizer.step()
            for place, scheduler in enumerate(self._schedulers):
                self._check_schedule(place, scheduler)
                scheduler.step()
                self._scheduled[place] = getattr(scheduler, "last_epoch", None)
            self._rates = learning_rates(self._optimizer)
        finally:
            self._stepping = False

    def _check_schedule(self, place: int, scheduler: Scheduler) -> None:
        """Refuse a scheduler that somebody else steps too: rates would fall twice as fast."""
        expected = self._scheduled.get(place)
        if expected is not None and getattr(scheduler, "last_epoch", expected) != expected:
            raise RoundsError(
                "the scheduler was given to the synchronizer, which steps it once a round, and is stepped in the loop "
                "as well: leave out scheduler.step()"
            )

    # -- everybody at one place ------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Bring all ranks to the newest version: then they are equal to the bit. All of them must call it.

        Late gradients stay, for the next round. After it the script may use collectives of its own. In an epoch it is
        called at versions (`if sync.version % 100 == 0`). It ends at the same version on all ranks: a later one, if a
        rank that began its epoch late had passed that.

        Return whether all ranks have met here. A rank whose batches since they last did were all dropped, as not
        finite, is at the same version still. In an epoch the others have gone on: it is not held up, and False is
        returned. Elsewhere they may be about to call it too; it waits until one of them trains on, or all have come.
        """
        self._check_alive()
        return not self._has_gone_on and self._meet_others()

    @property
    def _has_met_here(self) -> bool:
        """Whether all ranks were at this version before the last batches of this one, which led to no other."""
        version, draws = self._met
        return self.version == version and self.draws > draws

    @property
    def _has_gone_on(self) -> bool:
        """Whether the others have: in an epoch all meet at versions, and they were at this one before."""
        return bool(self._epoch_ends) and self._has_met_here

    def _meet_others(self) -> bool:
        self._tracked.check()
        with self._guarded():
            self._start()
            return self._meet(leaving=False)

    def _meet(self, *, leaving: bool) -> bool:
        self._model.forget_gradients()
        apply = partial(self._apply_updates, beyond_epoch=True)
        apply()
        waiting = Waiting(
            rank=self._place,
            version=self.version,
            fingerprint=self._model.fingerprint(),
            leaving=leaving,
            again=self._has_met_here and not leaving,
        )
        with in_phase(self._watched, "wait"):
            return self._loop.meet(waiting, while_waiting=apply, released=self._released)

    def _released(self, release: AllWaiting) -> None:
        if self.version != release.version:
            raise RoundsError(f"a flush ended at round {release.version}, and this rank is at {self.version}")
        self._aligned = max(self.version, self._epoch_ends)
        self._met = (self.version, self.draws)
        self.outcomes.add_drops(release.dropped)
        arrivals = self._loop.next_arrivals()
        if self._on_flush is not None:
            dropped, leaving = release.dropped, release.leaving
            self._on_flush(Flushed(version=self.version, leaving=leaving, dropped=dropped, arrivals=arrivals))

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, in the order of the ranks. All ranks must call it, right after a flush."""
        self._check_alive()
        with self._guarded():
            return self._loop.gather("tell where it is", numbers)

    def close(self) -> None:
        """Flush, and end: late gradients are dropped, and training is plain from here on. All ranks must call it."""
        if self._ended:
            return
        self._epoch_ends = 0
        try:
            if self._failure is None:
                with self._guarded():
                    self._start()
                    self._meet(leaving=True)
                    self._loader_state = self._loader_place()
        finally:
            self._end()

    def _abandon(self) -> None:
        """End because the interpreter does: threads must not outlive it, nor it wait for them."""
        error = getattr(sys, "last_value", None)  # what ended the script, if it was an error
        self._fail(error or RoundsError("the end of its script, without close()"))
        self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        try:
            self._loop.close(reason_of(self._failure))  # first of all: the others hear why
        except BaseException:  # so do they if that fails
            self._heartbeats.stop(reason_of(self._failure))
            raise
        finally:
            self._clipping.end()
            self._hook.remove()
            self._source = None
            IN_USE.discard(self._optimizer)
            release_lock_rarely()
            atexit.unregister(self._abandon)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on later besides model, optimiser and scheduler; call it before theirs.

        All ranks must call it: it flushes first. It holds this rank's own fresh and late gradients, what its codec
        remembers and holds back, and on the rank that decides the strategy's state. Where `flush` would not wait, it is
        the state of this version that was taken when all ranks were here.
        """
        if self._failure is not None:
            raise RoundsError("rounds have ended with an error: they have no state") from self._failure
        if self._ended:
            return self._take_state()
        saved = self._saved if self._has_met_here else None
        if saved is not None and (self._has_gone_on or not self._meet_others()):
            return dict(saved)
        if saved is None:
            self._meet_others()
        state = self._take_state()
        self._meet_others()  # nobody goes on before all have taken theirs: a round that closed would be in some of them
        self._saved = state
        return state

    def _take_state(self) -> dict[str, Any]:
        place = self._loader_place()
        return {
            "about": self.about(),
            "version": self.version,
            "draws": self.draws,
            "seconds": self._loop.seconds(),
            "gradients": self._loop.gradients.state_dict(),
            "codec": self._sum.state_dict(),
            "plan": self._sum.plan,
            "decider": self._loop.decider_state(),
            "outcomes": self.outcomes.state_dict(),
            "fingerprint": self._model.fingerprint(),
            **({"assigned": self._sizes.state_dict()} if self._sizes.by_speed else {}),
            **({"loader": place} if place else {}),
            **({"samplers": [sampler.state_dict() for sampler in self._samplers]} if self._samplers else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this rank's `state_dict`; load the model and the optimiser before, but after the construction.

        A state that is refused changes nothing.
        """
        if self._loop.started:
            raise RoundsError("a state is loaded before the first round: construct, load, then train")
        with refusing("the state of the rounds"):
            # Earlier releases had no codec, and say none; nor do rounds of equal shares say theirs.
            before = {CODEC: describe(Identity()), SHARES: describe(None)} | state["about"]
            strategy = settled(self._asked, weighing_in(str(before.get("strategy"))))  # it goes on as it began
            mine = {SHARES: describe(None)} | self.about() | {"strategy": describe(strategy)}
            for key, text in mine.items():
                if before.get(key) != text:
                    raise ValueError(f"it is of other rounds: its {key} is {before.get(key)}, and this one's is {text}")
            if state["fingerprint"] != self._model.fingerprint():
                raise ValueError(
                    "the model is not what it was when it was taken. Save: first the rounds' state_dict(), then "
                    "the model's. Load: construct the rounds, load the model's state, then the rounds'"
                )
            version, draws = decode(Count, state["version"], "version"), decode(Count, state["draws"], "draws")
            seconds = decode(Seconds, state["seconds"], "seconds")
            sizes, round_sum = copy.copy(self._sizes), self._make_sum()
            sizes.load_state_dict(state.get("assigned", ()))
            copy.copy(self.outcomes).load_state_dict(state["outcomes"])  # a trial: it may refuse
            round_sum.load_state_dict(state.get("plan", ALL_REDUCE), state.get("codec", {}))
            sampler_states, loader_state = list(state.get("samplers", ())), dict(state.get("loader", {}))
            decode(Count, loader_state.get(ROUNDS_LEFT, 0), ROUNDS_LEFT)
            in_use = list(zip(self._samplers, sampler_states, strict=False))
            for sampler, kept in in_use:
                sampler.check(kept)
            self._loop.load(
                version,
                strategy=strategy,
                round_sum=round_sum,
                gradients=state["gradients"],
                decider=state["decider"],
                seconds=seconds,
            )
            # Nothing refuses from here on.
            self.strategy, self._sum, self._sizes = strategy, round_sum, sizes
            self.outcomes.load_state_dict(state["outcomes"])
            self._model.take_buffers()
            self._sampler_states, self._loader_state, self._source = sampler_states, loader_state, None
            for sampler, kept in in_use:
                sampler.load_state_dict(kept)
            self.version, self._aligned, self.draws = version, version, draws
            self._met = (version, draws)

    def about(self) -> dict[str, str]:
        """Return what all ranks must have alike to take rounds together, and what a state must fit, in words."""
        shares = self._sizes.shares
        return {
            "model": self._tracked.description(),
            "strategy": describe(self.strategy),
            **({} if shares is None else {SHARES: describe(shares)}),
            CODEC: describe(self._codec),
            "rank": str(self._group.rank),
            "number of ranks": str(self._group.world),
        }

    # -- what can go wrong -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the threads with the first batch: a state can be loaded before, and nobody waits for the batch."""
        if not self._loop.started:
            self._tracked.check()
            self._model.take_buffers()  # the script may have loaded weights since the construction
            self._saved = self._take_state()
            self._loop.start()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """After an error nothing is exchanged any more; the others hear of it at once."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            self._end()
            raise

    def _refuse_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._stepping:
            raise RoundsError(
                "the optimizer takes its steps in sync.step(), with what all ranks have added up: leave out "
                "optimizer.step() (and scaler.step(optimizer): call scaler.unscale_(optimizer) before sync.step())"
            )


def _finite(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if number - number == 0 else None


# -- the public classes ------------------------------------------------------------------------------------------------


class LGCSync(RoundSync):
    """The fastest `k` ranks close a round; the work of the others is added one round late. `k` may be "auto".

    The first `warmup_rounds` wait for all. `scale_partial` says what a late gradient of r out of s blocks counts: as
    much as its samples are of all samples that were computed ("samples", and "auto" where a run begins), r/s of a whole
    one (True, the paper), or as a whole one (False). With "auto" a state that is loaded goes on as it began.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        k: int | Literal["auto"],
        warmup_rounds: int = 0,
        scale_partial: ScalePartial = "auto",
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        blocks: int = 4,
        most_behind: int = 10,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        shares: SharesBySpeed | None = None,
        record: bool = False,
        on_round: OnRound | None = None,
        on_flush: OnFlush | None = None,
        log: Log | None = None,
    ) -> None:
        strategy = partial(LGC, k=k, warmup_rounds=warmup_rounds, scale_partial=scale_partial)
        super().__init__(
            model,
            optimizer,
            strategy,
            scheduler=scheduler,
            blocks=blocks,
            most_behind=most_behind,
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            shares=shares,
            record=record,
            on_round=on_round,
            on_flush=on_flush,
            log=log,
        )


class FastestKSync(RoundSync):
    """The fastest `k` ranks make the update, and the work of the others is thrown away (backup workers)."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        k: int | Literal["auto"],
        warmup_rounds: int = 0,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        blocks: int = 4,
        most_behind: int = 10,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        shares: SharesBySpeed | None = None,
        record: bool = False,
        on_round: OnRound | None = None,
        on_flush: OnFlush | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            partial(FastestK, k=k, warmup_rounds=warmup_rounds),
            scheduler=scheduler,
            blocks=blocks,
            most_behind=most_behind,
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            shares=shares,
            record=record,
            on_round=on_round,
            on_flush=on_flush,
            log=log,
        )


class FullSync(RoundSync):
    """Every round waits for all ranks: what DistributedDataParallel does, to compare with."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        blocks: int = 4,
        most_behind: int = 10,
        codec: Codec | str = "identity",
        plan: str = AUTO,
        process_group: dist.ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 15.0,
        seed: int = 0,
        shares: SharesBySpeed | None = None,
        record: bool = False,
        on_round: OnRound | None = None,
        on_flush: OnFlush | None = None,
        log: Log | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            Full,
            scheduler=scheduler,
            blocks=blocks,
            most_behind=most_behind,
            codec=codec,
            plan=plan,
            process_group=process_group,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            seed=seed,
            shares=shares,
            record=record,
            on_round=on_round,
            on_flush=on_flush,
            log=log,
        )


SYNCHRONIZERS: dict[str, type[RoundSync]] = {"lgc": LGCSync, "fastest-k": FastestKSync, "full": FullSync}
"""The public classes by the names of their strategies, for frameworks in which a strategy is named."""
