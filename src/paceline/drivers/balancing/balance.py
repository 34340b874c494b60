"""The public interface: `Balance`, around a model that is trained on ranks of different speeds.

    balance = paceline.Balance(model, batch_size=1024)                  # of all ranks together
    loader = DataLoader(dataset, batch_sampler=balance.sampler(dataset), num_workers=4)
    for inputs, targets in loader:                                      # each rank its own size
        loss_function(model(inputs), targets).backward()                # mean loss, as ever
        optimizer.step()
        optimizer.zero_grad()

Rank i computes b_i of the B samples of a step. What enters its model's output is multiplied by N b_i / B, so that the
mean over the N ranks, which DDP makes, is the mean over all B samples:

    (1/N) sum of (N b_i / B) g_i  =  sum of (b_i / B) g_i

Every `period` steps, at the end of a backward pass, where DDP has just brought all ranks together, they tell each other
how long their batches take and how far their loaders have fetched. All compute the same decision from the same numbers.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from paceline.data.pruning.sampler import PrunedBatches
from paceline.decoding import Count, decode
from paceline.distributed.agreement import Meetings, current_group, raise_difference, refusal_text, short_text
from paceline.drivers.balancing.hooks import BalanceHooks, BatchTimes
from paceline.drivers.balancing.passes import BatchPass, Habits
from paceline.drivers.balancing.report import ShareTable
from paceline.drivers.balancing.sampler import BalancedBatches, BalancedPruning
from paceline.drivers.balancing.schedule import BalanceError, DealtBatch, Place, ShareSchedule
from paceline.errors import PacelineWarning
from paceline.loggers import GuardedLog, Log
from paceline.lookup import unknown
from paceline.optim.rank_samples import RANK_SAMPLES
from paceline.strategies.shares import Cost, ShareDecision, Speed, SpeedEstimate, decide, divide
from paceline.strategies.shares.sharing import PERIOD

if TYPE_CHECKING:
    from paceline.distributed.agreement import ProcessGroup

log = logging.getLogger("paceline.balance")

TIMEOUT_SECONDS = 600.0
REDUCTIONS = ("mean", "sum")
KEPT_STEPS = 50
REMEDY = "give all ranks the same settings, data set and seed, and let them take the same steps"


class Balance:
    """Deals batches by speed to the ranks that train a model together, and weighs their gradients by samples.

    `batch_size` is that of all ranks together. Without a process group there is one rank, and training is plain.

    Args:
        model: What is trained: the DistributedDataParallel (or FSDP) module that the script calls.
        batch_size: The samples of a step, of all ranks together.
        most: The most samples that this rank can hold; each rank may give its own.
        least: The fewest samples of a rank; by default 1, or 2 where the model has a BatchNorm.
        period: Every so many batches ranks look at their times, and may change shares; None: shares stay.
        shares: How batches are dealt at first, in proportion: one number for each rank. By default equally.
        reduction: "mean" if the script's loss is a mean over its batch, "sum" if it is a sum: then ranks weigh alike.
        process_group: The ranks that take part; None: all.
        timeout_seconds: The longest wait for the other ranks.
        log: Called with `figures()` and the number of batches, every `period` batches (paceline.loggers).

    >>> balance = Balance(torch.nn.Linear(2, 1), batch_size=4)
    >>> sampler = balance.sampler(range(10), shuffle=False)
    >>> len(sampler), next(iter(sampler))
    (3, [0, 1, 2, 3])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        batch_size: int,
        most: int | None = None,
        least: int | None = None,
        period: int | None = PERIOD,
        shares: Sequence[float] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: ProcessGroup | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        log: Log | None = None,
    ) -> None:
        group = current_group(process_group)
        self._meetings = None if group is None else Meetings(group, timeout_seconds, purpose="balancing")
        self.rank, self.ranks = (0, 1) if self._meetings is None else (self._meetings.rank, self._meetings.ranks)
        self.batch_size, self.least, self._period = batch_size, 1 if least is None else least, period
        self._most: list[int | None] = [most]
        self._agree_on_settings(model, shares, least, reduction)
        self._reduction, self._log = reduction, GuardedLog(log)
        self._schedule = ShareSchedule(self._first_shares(shares), least=self.least, most=self._most)
        self._closed = False
        self._lock = threading.RLock()
        self._pass: BatchPass | None = None
        self._habits = Habits()
        self._facts: Callable[[], Mapping[str, int]] = dict
        self._compared = -1  # the last pass of which ranks have compared facts
        self.next_pass = 0  # how many passes were trained
        self._batches = 0  # that were trained
        self._looked = 0  # after how many of them ranks looked at their times
        self._index = -1  # of the batch under way, in its pass
        self._speed, self._speeds = SpeedEstimate(), list[Speed]()
        self._given_weight: float | None = None
        self._without_sampler = 0  # batches that were trained before any was dealt
        self._elsewhere = False  # the batch under way is of no loader of this Balance
        self._in_batch = False  # between a forward pass and the end of its backward pass
        self._by_group = 0  # how many loops weigh the samples of whole groups of batches themselves
        self._group_steps, self._parts = 1, 0  # batches of a group that have begun since the last forward pass
        self.decision: ShareDecision | None = None  # the last one that was computed
        self.changes: list[tuple[int, tuple[int, ...]]] = []  # (after how many batches, the new shares)
        self._step_seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self._step_ended: float | None = None
        self._times = BatchTimes(_device_of(model))
        self._hooks = BalanceHooks(model, _Told(self))
        for module in {model, getattr(model, "module", model)}:
            RANK_SAMPLES[module] = self

    def __repr__(self) -> str:
        return f"Balance(batch_size={self.batch_size}; rank {self.rank}, shares {list(self.shares)})"

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples of each rank in a step, of batches that are handed out from now on."""
        return self._schedule.newest

    def close(self) -> None:
        """Take the hooks off the model: from now on it is trained as if this had never been. Its loaders end."""
        self._hooks.close()
        self._closed = True
        for module in [module for module, held in RANK_SAMPLES.items() if held is self]:
            del RANK_SAMPLES[module]

    # -- settings --------------------------------------------------------------------------------------------------

    def _agree_on_settings(
        self, model: torch.nn.Module, shares: Sequence[float] | None, least: int | None, reduction: str
    ) -> None:
        """Refuse settings that cannot be right, on all ranks or on none."""
        refusal: Exception | None = None
        proportions: tuple[float, ...] | None = None
        try:
            self._check_settings(model, shares, reduction)
            proportions = None if shares is None else tuple(map(float, shares))
            if least is None and any(isinstance(each, _BatchNorm) for each in model.modules()):
                self.least = min(2, max(1, self.batch_size // self.ranks))  # BatchNorm refuses a batch of one
        except (TypeError, ValueError) as error:
            refusal = error
        if self._meetings is None:
            if refusal is not None:
                raise refusal
            return
        settings = self.batch_size, self.least, self._period, proportions, reduction
        told = {
            "settings": short_text(repr(settings)),
            "most": self._most[0] if refusal is None else None,
            "refusal": "" if refusal is None else refusal_text(refusal),
        }
        rows = self._meetings.gather("begin", told)
        if refusal is not None:
            raise refusal
        for rank, row in enumerate(rows):
            if row["refusal"]:
                raise BalanceError(f"rank {rank} refuses to share batches: {row['refusal']}")
        raise_difference(
            [{"settings": row["settings"]} for row in rows],
            "ranks must balance with the same (batch_size, least, period, shares, reduction): {who} has {theirs}, and "
            "{other} has {ours}",
            error=BalanceError,
        )
        self._most = [row["most"] for row in rows]

    def _check_settings(self, model: torch.nn.Module, shares: Sequence[float] | None, reduction: str) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"Balance takes the model that is trained (this is a {type(model).__name__})")
        held = RANK_SAMPLES.get(model)
        if held is not None:
            raise ValueError("this model has a Balance already: close() that one first")
        period = PERIOD if self._period is None else self._period
        for name, value in (("batch_size", self.batch_size), ("least", self.least), ("period", period)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of 1 or more ({name}={value!r})")
        most = self._most[0]
        if most is not None and (not isinstance(most, int) or most < self.least):
            raise ValueError(f"most must be a whole number of at least {self.least}, or None (most={most!r})")
        if self.batch_size < self.least * self.ranks:
            raise ValueError(
                f"batch_size is that of all ranks together, and must be at least {self.least} for each of "
                f"{self.ranks} (batch_size={self.batch_size})"
            )
        if shares is not None and (len(shares) != self.ranks or not all(0 < each < float("inf") for each in shares)):
            raise ValueError(f"shares must be {self.ranks} numbers above 0, one for each rank (shares={list(shares)})")
        if reduction not in REDUCTIONS:
            raise unknown("reduction", reduction, REDUCTIONS)
        if self.ranks > 1 and not averages_over_ranks(model):
            warnings.warn(
                f"Balance weighs gradients for the mean over ranks, and a {type(model).__name__} makes none: give it "
                "the DistributedDataParallel that the script calls (not what is inside), unless the script averages "
                "itself",
                PacelineWarning,
                stacklevel=4,
            )
        if any(isinstance(each, torch.nn.SyncBatchNorm) for each in model.modules()):
            log.warning("SyncBatchNorm was never tried with batches of different sizes")

    def _first_shares(self, shares: Sequence[float] | None) -> list[int]:
        proportions = [1.0] * self.ranks if shares is None else shares
        costs = [Cost(sample_seconds=1 / each) for each in proportions]
        return divide(self.batch_size, costs, least=self.least, most=self._most)

    def check_samples(self, samples: int, *, drop_last: bool) -> None:
        """Refuse samples that no epoch, or rest of an epoch, can be made of."""
        if samples < 1 or (drop_last and samples < self.batch_size):
            raise ValueError(
                f"a step takes {self.batch_size if drop_last else 1} samples, and there are {samples}: give a smaller "
                "batch_size, or leave drop_last out"
            )
        if not drop_last and samples < self.least:
            raise ValueError(
                f"the step has {samples} samples, and a rank needs {self.least} (BatchNorm refuses fewer than 2): "
                "give least=1 if the model can do with less"
            )
        if not drop_last and 0 < samples % self.batch_size < self.least:
            self.check_room()

    def check_room(self) -> None:
        """Refuse limits of the ranks that hold a batch, and not the few samples more that may be joined to the last."""
        joined = self.least - 1
        limits = [each for each in self._most if each is not None]
        if len(limits) == len(self._most) and sum(limits) < self.batch_size + joined:
            raise ValueError(
                f"ranks hold {sum(limits)} samples (most={limits}), and the last batch of an epoch may have "
                f"{self.batch_size + joined}, since a rank needs {self.least} (BatchNorm refuses fewer than 2): give "
                "drop_last=True, a larger most, or a smaller batch_size"
            )

    # -- batches ---------------------------------------------------------------------------------------------------

    def sampler(
        self,
        data: int | Sized | Iterable[int] | PrunedBatches,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> BalancedBatches | BalancedPruning:
        """Return a batch sampler for this rank's DataLoader: `DataLoader(dataset, batch_sampler=...)`.

        `data` is the data set, or how many samples it has; a sampler of your own that draws for all ranks; or
        FinePruning or InfoBatch, which then say themselves in which order and whether the rest is dropped.
        """
        if isinstance(data, PrunedBatches):
            return BalancedPruning(self, data)
        return BalancedBatches(self, data, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def begin_pass(
        self,
        take: Callable[[int], tuple[list[int], DealtBatch] | None],
        steps: int,
        facts: Callable[[], Mapping[str, int]],
        *,
        first: int = 0,
    ) -> BatchPass:
        """Begin a pass over the batches that `take` gives; ranks compare `facts` when its first batch is trained."""

        def take_if_current(step: int) -> tuple[list[int], DealtBatch] | None:
            if self._closed:
                raise BalanceError("this Balance is closed: its loaders hand out no more batches; make a plain one")
            if self._pass is not new:
                raise BalanceError(
                    "this loader is asked for its next batch, and meanwhile another pass over a loader of the same "
                    "Balance has begun: nobody knows which of the two a forward pass is of. Train one after the other, "
                    "or take a plain DataLoader for what is not trained"
                )
            return take(step)

        with self._lock:
            if self.ranks > 1 and self._pass is not None and self._pass.last_is_held:
                raise BalanceError(
                    "a pass over the loader begins, and the last batch of the pass before is fetched and not trained: "
                    "train each batch before the next one is drawn, also at the end of an epoch (or leave the rest "
                    "out: drop_last=True)"
                )
            self._schedule.forget((self.next_pass, 0))
            new = BatchPass(
                take_if_current, number=self.next_pass, steps=steps, lock=self._lock, first=first, habits=self._habits
            )
            self._pass, self._facts, self._index, self._parts = new, facts, -1, 0
            return new

    def deal(self, place: Place, samples: int) -> DealtBatch:
        """Return this rank's part of a step that has so many samples."""
        return self._schedule.deal(place, samples, rank=self.rank)

    # -- weights ---------------------------------------------------------------------------------------------------

    def weigh(self, samples: float) -> None:
        """Weigh the backward pass that comes by `samples` of this rank, of those that all ranks give. All must call it.

        For losses that are means over something else than samples: tokens, pixels that are not masked. Call it between
        the forward and the backward pass. It waits for all ranks; Accumulate.backward(loss, samples=...) does it once
        for a whole group of batches.
        """
        number = float(samples)
        if not 0 <= number < float("inf"):
            raise ValueError(f"samples must be 0 or more, and finite (samples={samples})")
        if not self._in_batch:
            raise BalanceError("weigh() belongs between the forward and the backward pass of a batch")
        if self._by_group:
            raise BalanceError(
                "Accumulate weighs its parts: give accumulate.backward(loss, samples=...) in place of weigh()"
            )
        dealt = self.rank_samples()
        if dealt is not None and not dealt[0]:  # it computes on samples of others, which count there
            number = 0.0
        self._given_weight = number / self.mean_of(number)

    def mean_of(self, samples: float) -> float:
        """Return the mean over all ranks of what each of them gives. All must call it."""
        mean = samples
        if self._meetings is not None:
            rows = self._meetings.gather("say how much its batch weighs", {"samples": samples})
            mean = sum(float(row["samples"]) for row in rows) / self.ranks
        if not mean > 0:
            raise ValueError("no rank has anything to weigh: samples are 0 on all of them")
        return mean

    def rank_samples(self) -> tuple[float, float] | None:
        """Return the samples of the batch under way, of this rank and on average over the ranks; None outside."""
        if self._pass is None or self._pass.trained < 0 or self._elsewhere:
            return None
        dealt = self._pass.dealt
        return float(dealt.samples), dealt.total / self.ranks

    @contextmanager
    def weighing_groups(self, steps: int) -> Iterator[None]:
        """Leave the weights to whoever adds up the gradients of `steps` batches, and changes to between such groups.

        Each time that it is entered, the next batch begins.
        """
        self._by_group += 1
        self._group_steps, self._parts = steps, self._parts + 1
        try:
            yield
        finally:
            self._by_group -= 1
            self._group_steps = 1 if not self._by_group else self._group_steps

    # -- what the hooks tell ---------------------------------------------------------------------------------------

    def _begin_forward(self) -> float:
        batches, self._in_batch, self._elsewhere = self._pass, True, False
        if batches is None:
            return 1.0
        before, parts = batches.trained, self._parts if self._by_group else None
        self._parts = 0
        trained = batches.begin_forward(parts)
        self._elsewhere = trained is None
        if self._elsewhere:
            return 1.0
        if trained != before:
            self._given_weight = None  # of a batch that had no backward pass
            self._begin_batch(batches)
        if self._by_group or self._reduction == "sum":
            return 1.0 if batches.dealt.samples else 0.0
        return batches.dealt.weight

    def _begin_batch(self, batches: BatchPass) -> None:
        if self._compared != batches.number:
            self._compared, self.next_pass = batches.number, batches.number + 1
            if self._meetings is not None:
                shares = zlib.crc32(repr(self._schedule.newest).encode())
                facts = {"pass": batches.number, "fingerprint of shares": shares, **self._facts()}
                self._meetings.compare("begin an epoch", facts, remedy=REMEDY, error=BalanceError)
            self._times.disturb()
            self._step_ended = None

    def _backward_over(self) -> None:
        batches = self._pass
        self._given_weight, self._in_batch = None, False
        if batches is None or self._elsewhere:
            self._count_without_sampler()
        elif batches.trained >= 0:
            batches.end_backward()
            if batches.trained != self._index:  # a batch may have several backward passes
                self._index = batches.trained
                self._end_batch(batches)
        self._times.begin()

    def _count_without_sampler(self) -> None:
        """Say once that batches come from elsewhere: nothing would be balanced, without a word."""
        self._without_sampler += 1
        if self._without_sampler == PERIOD and self.ranks > 1 and self.rank == 0:
            log.warning(
                "%d batches were trained, and none of them is of this Balance: ranks weigh alike, and shares stay as "
                "they are. Give DataLoader(dataset, batch_sampler=balance.sampler(dataset))",
                self._without_sampler,
            )

    def _end_batch(self, batches: BatchPass) -> None:
        self._batches += 1
        dealt, now = batches.dealt, time.perf_counter()
        whole = dealt.samples if dealt.total == self.batch_size else 0
        self._times.end_batch(whole)
        if self._step_ended is not None and whole:
            self._step_seconds.append(now - self._step_ended)
        for samples, seconds in self._times.known():
            self._speed.observe(samples, seconds)
        if self._period is not None and self._batches - self._looked >= self._period:
            self._looked = self._batches
            if self.ranks > 1:
                self._look(batches)
            if self._log:
                self._log(self.figures(), self._batches)
            now = time.perf_counter()
        self._step_ended = now

    # -- shares ----------------------------------------------------------------------------------------------------

    def _look(self, batches: BatchPass) -> None:
        """Tell each other how long batches take; deal otherwise from a place on that nobody has handed out."""
        assert self._meetings is not None
        with self._lock:
            speed, place = self._speed.speed, batches.place
            told = {
                "batches": self._batches,
                "place": place,
                "speed": [speed.samples, speed.seconds, speed.error_seconds, speed.offset, speed.known],
            }
            rows = self._meetings.gather("say how long its batches take", told)
            counts = [{"number of batches": row["batches"]} for row in rows]
            raise_difference(
                counts,
                "ranks must train the same number of batches: the {key} is {theirs} on {who}, {ours} on {other}",
                error=BalanceError,
            )
            self._speeds = [
                Speed(samples=int(b), seconds=float(t), error_seconds=float(e), offset=float(o), known=int(n))
                for b, t, e, o, n in (row["speed"] for row in rows)
            ]
            decision = decide(self._speeds, self.shares, least=self.least, most=self._most)
            if decision is None:
                return
            self.decision = decision
            if decision.pays:
                furthest = max((int(row["place"][0]), int(row["place"][1])) for row in rows)
                self._change(furthest, decision)

    def _change(self, furthest: Place, decision: ShareDecision) -> None:
        number, step = furthest
        step += -step % self._group_steps  # between two groups of batches that make one step of the optimiser
        self._schedule.change((number, step), decision.shares)
        self.changes.append((self._batches, decision.shares))
        if self.rank == 0:
            log.info(
                "after %d batches: shares %s; the slowest rank takes %.4g s instead of %.4g s (equal shares: %.4g s)",
                self._batches,
                " ".join(map(str, decision.shares)),
                decision.seconds,
                decision.present_seconds,
                decision.equal_seconds,
            )

    # -- what it came to -------------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps' seconds, from one backward pass to the next; None before there are any."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now, as of the last look.

        `share` is this rank's part of a batch, between 0 and 1; `predicted_seconds`, `equal_seconds` and `step_seconds`
        are as in `table`.
        """
        figures: dict[str, float] = {
            "share": self.shares[self.rank] / self.batch_size,
            "share_changes": len(self.changes),
        }
        if self.decision is not None:
            figures |= {
                "predicted_seconds": max(self._predicted(self.shares)),
                "equal_seconds": self.decision.equal_seconds,
            }
        if self.step_seconds is not None:
            figures["step_seconds"] = self.step_seconds
        return figures

    def _predicted(self, shares: Sequence[int]) -> list[float]:
        return [speed.predict(share) for speed, share in zip(self._speeds, shares, strict=True)]

    def table(self) -> ShareTable:
        """Return the shares, how long ranks take for theirs, and what equal shares would take; printing it draws it."""
        known = self.decision is not None
        return ShareTable(
            shares=self.shares,
            predicted_seconds=tuple(self._predicted(self.shares)) if known else (),
            equal_seconds=tuple(self._predicted(self._first_shares(None))) if known else (),
            step_seconds=self.step_seconds,
            changes=len(self.changes),
        )

    # -- going on later --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the shares, the same on all ranks. Where an epoch stands is in the sampler's own state."""
        return {"batch_size": self.batch_size, "shares": list(self.shares)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the shares of another run, from the next pass over a loader on; all ranks must load the same.

        With another number of ranks or limits they are dealt anew.
        """
        held = decode({"batch_size": Count, "shares": tuple[Count, ...]}, dict(state), "the state of the balance")
        if len(held["shares"]) == self.ranks and all(each >= 1 for each in held["shares"]):
            shares = self._first_shares([float(each) for each in held["shares"]])
            with self._lock:
                begun = self._pass is not None and self._pass.number == self.next_pass
                self._schedule.change((self.next_pass + begun, 0), shares)


class _Told:
    """What the hooks of a model tell its balance."""

    def __init__(self, balance: Balance) -> None:
        self._balance = balance

    def begin_forward(self) -> float:
        return self._balance._begin_forward()

    def given_weight(self) -> float | None:
        return self._balance._given_weight

    def backward_through(self) -> None:
        self._balance._times.end_part()

    def backward_over(self) -> None:
        self._balance._backward_over()

    def evaluated(self) -> None:
        self._balance._times.disturb()
        self._balance._step_ended = None

    def is_unseen(self) -> bool:
        batches = self._balance._pass
        return self._balance.ranks > 1 and batches is not None and batches.handed_out > 0 > batches.trained

    def refuse_step(self) -> None:
        raise BalanceError(
            "the optimizer steps, and no forward pass of the model that Balance was given has been seen: its gradients "
            "are not weighed by samples. Give Balance the module that the script calls (the DistributedDataParallel, "
            "not what is inside), and compile before: DistributedDataParallel(torch.compile(network))"
        )

    @property
    def several(self) -> bool:
        return self._balance.ranks > 1

    def waits(self, *, begins: bool) -> None:
        self._balance._times.wait(begins=begins)


_BatchNorm = torch.nn.modules.batchnorm._BatchNorm


def averages_over_ranks(model: torch.nn.Module) -> bool:
    """Return whether a model averages its gradients over the ranks in its backward pass: DDP, or either FSDP.

    >>> averages_over_ranks(torch.nn.Linear(2, 1))
    False
    """
    wrapped = getattr(model, "_orig_mod", model)  # of torch.compile
    return any(hasattr(wrapped, name) for name in ("no_sync", "set_requires_gradient_sync"))


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
