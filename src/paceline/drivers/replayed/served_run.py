"""A served run computed again from its journal in one process, to see whether every step comes out the same.

    journal: joined, arrived, left  ->  strategy  ->  the same steps?       (fresh, late: who was in)
                                                      the same weights?     (a fingerprint after every step)

Gradients are computed as the workers computed them: the same batches, block by block, with as many threads. So what
differs is found, and the first step that does is named. Where workers have batches by their speed the strategy assigns
their sizes again, and each arrival must be of the size that its worker was given. Where the codec has a memory, or
samples are pruned, dropped gradients are computed too: they changed the memory of their worker. A gradient that was
refused is not in the journal: its worker drew its batch, and did not judge it.
"""

from __future__ import annotations

import bisect
import copy
import functools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.codecs.payload import NotFiniteError
from paceline.errors import PacelineError
from paceline.events import Assign, Drop, Event, Joined, Left, Step
from paceline.optim import make_optimizer, make_schedule
from paceline.strategies import Strategy, shares_of
from paceline.strategies.shares import BatchSizes, SharesBySpeed
from paceline.traces.journal import (
    Arrival,
    Arrived,
    Checkpointed,
    Extended,
    JournalRecord,
    Resumed,
    StepRecord,
    WorkerJoined,
    WorkerLeft,
)
from paceline.traces.replay_events import hear, without_workers
from paceline.training import Batches, Training, TrainState, WorkerCodecs, fingerprint
from paceline.training.batches import BatchPlace
from paceline.workers.gradients import Assignment, LoopGradients
from paceline.workers.threads import can_start


class ReplayError(PacelineError, ValueError):
    """A journal that cannot be replayed, in one line.

    >>> raise ReplayError("steps 3 to 5 are missing")
    Traceback (most recent call last):
    paceline.drivers.replayed.served_run.ReplayError: steps 3 to 5 are missing
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a replay: the number of steps that came out the same, and the first `difference`, None if there is
    none.

    `checkpoint` is the version of the checkpoint whose weights were compared, None if none was. `missing` says what of
    the run could not be compared: its trace does not reach its end, or there is no checkpoint of its last step.
    `redone` of the steps were taken again after the run had been resumed from an earlier one.
    `nearly` says how near the weights are where the order of a sum is not ours to know, so that bits may differ.

    >>> Verdict(steps=300, difference=None, checkpoint=300).identical
    True
    >>> Verdict(steps=25, difference=None, missing="the trace ends after step 25").identical
    False
    """

    steps: int
    difference: str | None
    nearly: str = ""
    checkpoint: int | None = None
    missing: str = ""
    redone: int = 0

    @property
    def identical(self) -> bool:
        """Whether the whole run was compared, and came out the same."""
        return self.difference is None and not self.missing


SentGradient = tuple[torch.Tensor, torch.Tensor]  # the gradient, and the change of the buffers


class RunDifference(Exception):  # noqa: N818 - a finding, not a fault
    """The first thing that came out differently from the run that was recorded."""


class PlaceCheck:
    """Holds the places of batches in a journal against the sizes that the strategy assigns when it is replayed.

    >>> places = PlaceCheck(SharesBySpeed(batch_size=12))
    >>> places.assign(Assign(samples=((0, 18), (1, 6))), version=5)
    >>> places.expected(worker=1, version=4), places.expected(worker=1, version=9)
    (12, 6)
    """

    def __init__(self, shares: SharesBySpeed | None) -> None:
        self._shares = shares
        self._sizes = [(0, BatchSizes(shares))]  # from which version on
        self._next: dict[int, tuple[int, int]] = {}  # of each worker: its next draw, and where that begins

    def assign(self, action: Assign, *, version: int) -> None:
        """Take over what the strategy assigns for batches from this version on."""
        sizes = BatchSizes(self._shares)
        sizes.assign(action)
        self._sizes.append((version, sizes))

    def go_back(self, version: int) -> None:
        """Forget what was assigned after this version, from which the run goes on."""
        self._sizes = [(first, sizes) for first, sizes in self._sizes if first <= version]
        self._next = {}

    def joined(self, record: WorkerJoined) -> None:
        """Note where a worker begins."""
        first_sample = record.first_sample
        if first_sample is None:
            first_sample = record.first_draw * (0 if self._shares is None else self._shares.batch_size)
        self._check_place(record.worker, record.first_draw, first_sample)
        self._next[record.worker] = record.first_draw, first_sample

    def expected(self, *, worker: int, version: int) -> int:
        """Return the size of a worker's batch at a version; 0 where batches are equal."""
        place = bisect.bisect_right(self._sizes, version, key=operator.itemgetter(0)) - 1
        return self._sizes[place][1].samples(worker)

    def check(self, arrival: Arrival) -> None:
        """Raise RunDifference for a batch of another size than the strategy gives, or one that lies elsewhere."""
        worker, version = arrival.worker, arrival.version
        expected = self.expected(worker=worker, version=version)
        if arrival.batch_samples != expected:
            raise RunDifference(
                f"round {version}: the strategy gives worker {worker} a batch of {_size(expected)}, and the run had "
                f"one of {_size(arrival.batch_samples)}"
            )
        if expected:
            self._check_place(worker, arrival.draw, arrival.first_sample)
            self._next[worker] = arrival.draw + 1, arrival.first_sample + arrival.batch_samples

    def _check_place(self, worker: int, draw: int, first: int) -> None:
        next_draw, end = self._next.get(worker, (draw, first))
        # A batch whose gradient was refused is in no arrival: its samples were drawn all the same.
        if first < end or (draw == next_draw and first != end):
            raise RunDifference(
                f"batch {draw} of worker {worker} begins at sample {first}, and the one before ends at {end}"
            )


def _size(samples: int) -> str:
    return f"{samples} samples" if samples else "the recipe's size"


class Replay:
    """A journal being replayed: iterate over it (it yields the steps taken), then ask for the `verdict`.

    `snapshot` is the parameters and buffers after `snapshot_version` steps; None if the replay did not come there.
    """

    def __init__(
        self,
        records: Sequence[JournalRecord],
        training: Training,
        strategy: Strategy,
        *,
        snapshot_version: int | None = None,
        extend: Callable[[Extended], Training] | None = None,
    ) -> None:
        self._records = records
        self.snapshot: dict[str, torch.Tensor] | None = None
        self._snapshot_version = snapshot_version
        module = copy.deepcopy(training.module)
        optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
        self._optimizer, self._extend = optimizer, extend or (lambda record: training)
        self.train_state = TrainState(module, optimizer, schedule, codec=training.codec, seed=training.seed)
        self._codecs = WorkerCodecs(training.codec, self.train_state.model.shapes, seed=training.seed)
        self._strategy = strategy.start()
        self._engine = LoopGradients(copy.deepcopy(training.module), training.loss, block_by_block=True)
        self.batches = Batches(training)
        self._at_once = self._codecs.remember or self.batches.pruned is not None
        self._places = PlaceCheck(shares_of(strategy))
        self._joins: dict[int, WorkerJoined] = {}
        self._waiting: set[int] = set()
        self._startable = os.cpu_count() or 1  # threads that this machine is known to start
        self._started_seconds = 0.0
        self._pending: dict[tuple[int, int], list[Callable[[], SentGradient]]] = {}
        self._steps: list[Step] = []
        self._models: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last_use = _last_use(records, of_all=self._at_once)
        self._resumed_from = {record.version for record in records if isinstance(record, Resumed)}
        self._saved: dict[int, tuple[Any, Any, Any]] = {}
        self._trainings: dict[int, Training] = {}  # under which total each of them was saved
        self._taken = self._line = 0
        self._difference: str | None = None
        self._remember()

    @property
    def verdict(self) -> Verdict:
        """The result so far."""
        redone = max(0, self._taken - self.train_state.version) if self._difference is None else 0
        return Verdict(steps=self._taken, difference=self._difference, redone=redone)

    def __iter__(self) -> Iterator[int]:
        threads = torch.get_num_threads()
        try:
            for line, record in enumerate(self._records, 1):
                self._line = line
                match record:
                    case WorkerJoined():
                        self._joined(record)
                    case WorkerLeft():
                        self._left(record)
                    case Arrived():
                        self._arrived(record.arrivals)
                    case StepRecord():
                        self._arrived(record.arrivals)
                        self._stepped(record)
                        yield self._taken
                    case Checkpointed():
                        self._checkpointed(record)
                    case Resumed():
                        self._resumed(record)
                    case Extended():
                        self._extended(record)
        except RunDifference as found:
            self._difference = f"{found} (line {self._line} of the trace)"
        except ReplayError as error:
            raise ReplayError(f"line {self._line} of the trace: {error}") from None
        finally:
            torch.set_num_threads(threads)

    def _extended(self, record: Extended) -> None:
        """Go on with another total: nobody is there yet, and what depends on the total is as if it always had been."""
        self._follow(self._extend(record), steps_done=self.train_state.version)

    def _follow(self, training: Training, *, steps_done: int) -> None:
        total = training.total_steps
        schedule = make_schedule(training.optimizer, self._optimizer, total_steps=total, steps_done=steps_done)
        self.train_state.follow(schedule)
        self.batches.extend(training)

    # -- events ------------------------------------------------------------------------------------------------

    def _joined(self, record: WorkerJoined) -> None:
        self._note_join(record)
        self._codecs.joined(record.worker)
        self.batches.joined(record.worker, draw=record.first_draw)
        if record.at_seconds == self._started_seconds:  # the clock stands still until the first round begins
            self._waiting.add(record.worker)
        else:
            self._begin()
            self._handle(Joined(worker=record.worker, at_seconds=record.at_seconds))

    def _note_join(self, record: WorkerJoined) -> None:
        """Remember a worker's shard and threads, if this machine can do the same."""
        shards = len(self.batches.training.shards)
        if record.shard >= shards:
            raise ReplayError(
                f"worker {record.worker} has shard {record.shard}, and the run has shards 0 to {shards - 1}"
            )
        if record.threads > self._startable and not can_start(record.threads):
            why = f"worker {record.worker} computed with {record.threads} threads, and its bits depend on their number"
            raise ReplayError(f"{why}; this machine cannot start as many: replay the run on a larger one")
        self._startable = max(self._startable, record.threads)
        self._joins[record.worker] = record
        self._places.joined(record)

    def _begin(self) -> None:
        for worker in sorted(self._waiting):
            self._handle(Joined(worker=worker, at_seconds=self._started_seconds))
        self._waiting = set()

    def _left(self, record: WorkerLeft) -> None:
        if record.worker in self._waiting and record.at_seconds == self._started_seconds:
            self._waiting.discard(record.worker)
            return
        self._begin()
        self._handle(Left(worker=record.worker, at_seconds=record.at_seconds))

    def _arrived(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            self._begin()
            joined = self._joins.get(arrival.worker)
            if joined is None:
                raise ReplayError(f"a gradient of worker {arrival.worker} arrived, but it had never joined")
            if arrival.version > self.train_state.version:
                now = f"the model is at version {self.train_state.version}"
                raise ReplayError(f"a gradient of version {arrival.version} arrived when {now}")
            gradient = functools.cache(functools.partial(self._gradient, arrival, joined))
            if self._at_once:
                gradient()
            self._pending.setdefault((arrival.worker, arrival.version), []).append(gradient)
            self._places.check(arrival)
            self._handle(arrival)

    def _handle(self, heard: Event | Arrival) -> None:
        for action in hear(self._strategy, heard):
            if isinstance(action, Step):
                self._steps.append(action)
            elif isinstance(action, Assign):
                self._places.assign(action, version=self._steps[-1].version + 1)
            elif isinstance(action, Drop):
                self._pending[action.worker, action.version].pop()

    # -- steps -------------------------------------------------------------------------------------------------

    def _stepped(self, record: StepRecord) -> None:
        version = self.train_state.version
        if record.version != version:
            raise ReplayError(f"steps {version} to {record.version - 1} are missing in the trace")
        if not self._steps:
            raise RunDifference(f"step {version}: the run took it, and the strategy does not ask for it")
        step = self._steps.pop(0)
        for name, decided, written in (("on time", step.fresh, record.fresh), ("late", step.late, record.late)):
            who = tuple((share.worker, share.version) for share in decided)
            if who != written:
                raise RunDifference(f"step {version}: the strategy takes {who} {name}, and the run took {written}")
        self._take(step)
        self._compare(record)
        self._taken += 1
        self._remember()

    def _compare(self, record: StepRecord) -> None:
        if fingerprint(self.train_state.model.parameters) != record.fingerprint:
            raise RunDifference(f"step {record.version}: the weights after it are not the same")

    def _take(self, step: Step) -> None:
        vectors: dict[tuple[int, int], torch.Tensor] = {}
        changes = []
        for share in (*step.late, *step.fresh):
            vectors[share.worker, share.version], change = self._pending[share.worker, share.version].pop(0)()
            changes.append(change)
        if not self.train_state.take(step, lambda share: vectors[share.worker, share.version], changes):
            raise RunDifference(f"step {step.version}: the update is not finite here")

    def _gradient(self, arrival: Arrival, joined: WorkerJoined) -> SentGradient:
        """Compute what a worker sent, as whoever added it up got it."""
        if arrival.version not in self._models:
            raise ReplayError(f"a gradient of version {arrival.version} is used, which the trace did not say before")
        parameters, buffers = self._models[arrival.version]
        assignment = self.batches.assignment(
            worker=arrival.worker,
            shard=joined.shard,
            draw=arrival.draw,
            blocks=arrival.blocks,
            blocks_done=arrival.blocks_done,
            place=BatchPlace(first=arrival.first_sample, samples=arrival.batch_samples)
            if arrival.batch_samples
            else None,
        )
        torch.set_num_threads(joined.threads)
        try:
            sent, losses = self._compute(arrival, assignment, parameters, buffers)
        except NotFiniteError:
            raise RunDifference(
                f"step {self.train_state.version}: the gradient of worker {arrival.worker} is not finite"
            ) from None
        self.batches.judge(worker=arrival.worker, draw=arrival.draw, losses=losses)
        return sent

    def _compute(
        self, arrival: Arrival, assignment: Assignment, parameters: torch.Tensor, buffers: torch.Tensor
    ) -> tuple[SentGradient, torch.Tensor]:
        """Return what was sent for a batch, and the losses of its samples; NotFiniteError if that could not be."""
        result = self._engine.compute(parameters, buffers, [assignment])
        payload = self._codecs.encode(result.gradients[0], worker=arrival.worker, draw=arrival.draw)
        return (self._codecs.decode(payload), result.buffers[0] - buffers), result.sample_losses[0]

    # -- memory ------------------------------------------------------------------------------------------------

    def _remember(self) -> None:
        """Keep the model for the gradients that are still to come at it, and all else for a resumption from here."""
        version, model = self.train_state.version, self.train_state.model
        if version == self._snapshot_version:
            self.snapshot = {"parameters": model.parameters.clone(), "buffers": model.buffers.clone()}
        if version in self._last_use:
            self._models[version] = self.train_state.outgoing.held.clone(), model.buffers.clone()
        self._models = {v: kept for v, kept in self._models.items() if self._last_use[v] >= version or v == version}
        if version in self._resumed_from:
            plain, tensors = self.train_state.state()
            saved = plain, {name: tensor.clone() for name, tensor in tensors.items()}, self._strategy.state_dict()
            self._saved[version] = copy.deepcopy(saved)
            self._trainings[version] = self.batches.training

    def _resumed(self, record: Resumed) -> None:
        if record.version not in self._saved:
            raise ReplayError(f"the run went on from step {record.version}, which the trace does not reach")
        plain, tensors, strategy = self._saved[record.version]
        if self._trainings[record.version] is not self.batches.training:
            self._follow(self._trainings[record.version], steps_done=0)
        self.train_state.load_state(plain, tensors)
        self._strategy.load_state_dict(without_workers(strategy))
        self._places.go_back(record.version)
        self._pending, self._steps, self._joins, self._waiting = {}, [], {}, set()
        self._started_seconds, self._models = record.at_seconds, {}
        self.snapshot = None if record.version < (self._snapshot_version or 0) else self.snapshot
        self._remember()

    def _checkpointed(self, record: Checkpointed) -> None:
        """Note a checkpoint. That of a server holds what its last step left, which is remembered then."""


def _last_use(records: Sequence[JournalRecord], *, of_all: bool) -> dict[int, int]:
    """Return for each version the last step that takes a gradient of it (with `of_all`: before which one arrives)."""
    last: dict[int, int] = {}
    step = 0
    for record in records:
        used: list[int] = []
        if isinstance(record, StepRecord):
            step = record.version
            used += [version for _, version in (*record.late, *record.fresh)]
        elif isinstance(record, Resumed):
            step = record.version
        if of_all and isinstance(record, StepRecord | Arrived):
            used += [arrival.version for arrival in record.arrivals]
        for version in used:
            last[version] = max(step, last.get(version, 0))
        if isinstance(record, StepRecord):
            step += 1
    return last
