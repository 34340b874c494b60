"""What a rank of a recipe does whose strategy takes rounds: its own batches, block by block; evaluations, checkpoints.

    batch ── sync.step ──> rounds applied, one by one ──> rank 0: the journal; every `evaluate_every` a copy to measure
                        └─ at a version that is due on all ranks:
                             checkpoint   all flush, each keeps its own state
                             the end      all flush, keep, leave

Rounds end at the same version on all ranks, so what is due at a version is due on all of them, whatever their speed: a
rank that comes there waits in the flush, and no round of that version closes before all have come.

Rank 0 measures a copy of the model, in a thread beside its training: nobody waits for it. A measurement that is due
while the one before is under way is left out; the last one never is.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from paceline import __version__
from paceline.decoding import Count, decode
from paceline.distributed import first_line
from paceline.distributed.stores import StoreGather
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.drivers.ranks.run import (
    OnStanding,
    RankJob,
    check_rounds,
    keep_checkpoint,
    load_optimizer,
    loading_together,
    rank_status,
)
from paceline.drivers.ranks.times import RankTimes
from paceline.drivers.rounds.journal import RoundsJournal
from paceline.drivers.rounds.loop import RoundsDivergedError
from paceline.drivers.rounds.synchronizer import ClosedRound, Flushed, RoundSync
from paceline.optim import make_optimizer
from paceline.strategies import Strategy
from paceline.traces.history import trace_of
from paceline.traces.journal import FORMAT, TRACE, RunBegan
from paceline.traces.journal_files import read_journal
from paceline.traces.records import Evaluation, Trace
from paceline.training import Batches
from paceline.training.batches import BatchPlace
from paceline.training.saved_state import check_model
from paceline.training.training import MeasuredCopy, Measurement, measure
from paceline.workers.flat import FlatModel
from paceline.workers.paced import compute_blocks

log = logging.getLogger("paceline.rounds")


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundsJob(RankJob):
    """The settings of a run of ranks that take rounds: those of a RankJob, and the strategy, named `label`."""

    strategy: Strategy
    label: str
    codec: str = "identity"  # in words, for the journal
    silence_seconds: float = 15.0


class RoundsRun:
    """One rank's side of a run in rounds; needs an initialised process group."""

    def __init__(self, job: RoundsJob, ranks: StoreGather, *, on_standing: OnStanding = lambda standing: None) -> None:
        training = job.training
        self._job, self._ranks, self._rank = job, ranks, ranks.rank
        self._module, self._flat = training.module, FlatModel(training.module)
        self._optimizer, self._schedule = make_optimizer(
            training.optimizer, self._module.parameters(), total_steps=job.rounds
        )
        self._batches = Batches(training)
        self._next_sample = 0  # where this rank's next batch begins, where batches are by speed
        self._checkpoints = RankCheckpoints(job.folder, ranks.rank)
        self._kept_version = 0
        self._sync = RoundSync(
            self._module,
            self._optimizer,
            job.strategy,
            scheduler=self._schedule,
            timeout_seconds=job.timeout_seconds,
            silence_seconds=job.silence_seconds,
            codec=training.codec,
            plan=training.plan,
            seed=training.seed,
            on_round=self._round_closed,
            on_flush=self._flushed,
        )
        self._times = RankTimes(self._module, ranks, job.folder, sync="rounds")
        self._journal: RoundsJournal | None = None
        self._measurements = _Measurements(job, self._flat) if self._rank == 0 else None
        self._on_standing = on_standing
        self._last_measured: Evaluation | None = None

    @property
    def module(self) -> torch.nn.Module:
        """This rank's model."""
        return self._module

    @property
    def parameters(self) -> torch.Tensor:
        """This rank's parameters in one vector; after the end, those of all ranks."""
        return self._flat.parameters

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, state: Mapping[str, Any] | None = None) -> Trace | None:
        """Train to the end, from a state that was kept or from the beginning; rank 0 returns what happened."""
        try:
            with self._times, self._sync:
                if state is not None:
                    self._load(state)
                self._begin(goes_on=state is not None)
                self._times.begin(step=self._sync.draws, seconds=self._sync.seconds)
                while (version := self._sync.version) < self._job.rounds:
                    self._take_batch()
                    self._collect()
                    self._keep_if_due()
                    self._show()
                    self._times.end_step(version=version)
                self._end()
        except RoundsDivergedError as error:
            log.error("%s", error)
            if self._journal is not None:
                self._journal.ended(self._sync.version, self._sync.seconds, diverged=True)
        finally:
            if self._measurements is not None:
                self._measurements.close()
            if self._journal is not None:
                self._journal.close()
        return trace_of(read_journal(self._job.folder / TRACE)) if self._rank == 0 else None

    def _begin(self, *, goes_on: bool) -> None:
        """Wait until all ranks are ready, so that their clocks start together."""
        sync, host = self._sync, f"{platform.node()[:200]} pid {os.getpid()}"
        words = {"threads": torch.get_num_threads(), "host": host, "draw": sync.draws, "sample": self._next_sample}
        if self._rank == 0:
            self._journal = self._open_journal(goes_on=goes_on)
        ranks = self._ranks.gather("begin its first round", words)
        if not goes_on:
            self._batches.joined(self._rank, draw=0)
        self._module.train()
        if self._journal is not None and self._measurements is not None:
            self._journal.join(
                at_seconds=sync.seconds,
                threads=[each["threads"] for each in ranks],
                hosts=[each["host"] for each in ranks],
                draws=[each["draw"] for each in ranks],
                samples=[each["sample"] for each in ranks] if sync.samples else None,
            )
            if sync.version % self._job.evaluate_every == 0 and sync.version not in self._journal.measured:
                self._measurements.begin(sync.version, sync.seconds)
        sync.flush()

    def _open_journal(self, *, goes_on: bool) -> RoundsJournal:
        job, sync = self._job, self._sync
        began = RunBegan(
            format=FORMAT,
            paceline=__version__,
            strategy=job.label,
            seed=job.training.seed,
            workers=sync.world,
            blocks=job.training.blocks,
            recipe=job.recipe,
            signature=sync.about()["model"],
            codec=job.codec,
            on="ranks",
            torch=torch.__version__,
        )
        journal = RoundsJournal(job.folder / TRACE, began, model=self._flat, goes_on=goes_on)
        if goes_on:
            journal.resume(version=sync.version, at_seconds=sync.seconds, rounds=job.rounds)
        return journal

    def _take_batch(self) -> None:
        sync, training, draw = self._sync, self._job.training, self._sync.draws
        first, samples = self._next_sample, sync.samples
        place = BatchPlace(first=first, samples=samples) if samples else None
        assignment = self._batches.assignment(worker=self._rank, draw=draw, blocks_done=training.blocks, place=place)
        sync.begin_batch(training.blocks, samples=samples, first_sample=first)
        self._next_sample += samples  # whatever becomes of this batch, the next begins after it
        self._flat.gradient.zero_()
        self._flat.attach_gradient()
        with self._times.computing("forward"):
            losses = compute_blocks(
                self._module,
                assignment,
                training.loss,
                least_seconds=self._job.delay_seconds(self._rank, draw, samples or None),
                block_done=sync.block_done,
            )
        if sync.step(losses):
            self._batches.judge(worker=self._rank, draw=draw, losses=losses)

    def _end(self) -> None:
        seconds = self._sync.seconds
        state = self._state()  # late gradients are in it: the run may be extended
        self._sync.close()
        self._times.end("all rounds are done")
        if self._measurements is not None:
            self._collect(wait=True)
            self._measurements.begin(self._sync.version, seconds)
            self._collect(wait=True)
        self._keep(state)
        if self._journal is not None:
            self._journal.ended(self._sync.version, seconds, diverged=False)

    # -- on rank 0 -----------------------------------------------------------------------------------------------------

    def _round_closed(self, closed: ClosedRound) -> None:
        if self._journal is None or self._measurements is None:
            return
        self._journal.round_closed(closed)
        done = closed.number + 1
        if done % self._job.evaluate_every == 0 and done < self._job.rounds:
            self._measurements.begin(done, closed.step.at_seconds)

    def _show(self) -> None:
        if self._rank == 0:
            sync = self._sync
            figures = sync.figures() | self._batches.figures()
            ranks = sync.outcomes.workers
            self._on_standing(
                rank_status(sync.version, self._job.rounds, sync.seconds, self._last_measured, ranks, figures)
            )

    def _flushed(self, flushed: Flushed) -> None:
        if self._journal is not None:
            self._journal.flushed(flushed, self._sync.seconds)

    def _collect(self, *, wait: bool = False) -> None:
        if self._measurements is not None and self._journal is not None:
            evaluation = self._measurements.collect(wait=wait)
            if evaluation is not None:
                self._journal.evaluated(evaluation)
                self._last_measured = evaluation
                self._show()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _keep_if_due(self) -> None:
        version = self._sync.version
        due = version % self._job.checkpoint_every == 0 and version != self._kept_version
        if due and version < self._job.rounds:
            self._keep(self._state())

    def _state(self) -> dict[str, Any]:
        sync = self._sync.state_dict()  # before the model's: all ranks come to one place here
        return {
            "model": dict(self._module.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "sync": sync,
            "pruning": self._batches.state_dict(),
            "recipe": dict(self._job.recipe),
            **({"next_sample": self._next_sample} if self._sync.samples else {}),
        }

    def _keep(self, state: dict[str, Any]) -> None:
        version = self._kept_version = self._sync.version
        keep_checkpoint(self._checkpoints, self._job, self._ranks.launch, version, state)
        if self._journal is not None:
            self._journal.checkpointed(version, self._sync.seconds)

    def _load(self, state: Mapping[str, Any]) -> None:
        with loading_together(self._checkpoints, self._ranks):
            load_optimizer(state, self._optimizer, self._schedule)
            check_model("model", state["model"], self._module.state_dict())
            self._module.load_state_dict(state["model"])
            self._sync.load_state_dict(state["sync"])
            self._batches.load_state_dict(state["pruning"])
            self._next_sample = decode(Count, state.get("next_sample", 0), "next_sample")
            check_rounds(state, self._sync.version)
        self._kept_version = self._sync.version


class _Measurements:
    """Measures copies of the model, in a thread, one at a time.

    Where samples are read by code of a user's, which may draw random numbers, measuring must not run beside training:
    torch's generator is one for all threads.
    """

    def __init__(self, job: RoundsJob, model: FlatModel) -> None:
        training, threads = job.training, torch.get_num_threads()
        self._model = model
        self._beside_nobody = training.dataset.train.reads or training.dataset.test.reads
        self._copy = MeasuredCopy(training.module, lambda module: measure(module, training))
        self._thread = ThreadPoolExecutor(1, "paceline-measurer", lambda: torch.set_num_threads(threads))
        self._under_way: tuple[int, float, Future[Measurement]] | None = None

    def begin(self, rounds_done: int, seconds: float) -> None:
        """Measure the model as it is now, unless the last measurement is still under way."""
        if self._under_way is None:
            self._copy.load(self._model)
            self._under_way = rounds_done, seconds, self._thread.submit(self._copy)
            if self._beside_nobody:
                wait([self._under_way[2]])

    def collect(self, *, wait: bool) -> Evaluation | None:
        """Return the measurement that was under way, once it is done; with `wait`, wait for it."""
        if self._under_way is None or not (wait or self._under_way[2].done()):
            return None
        (rounds_done, seconds, future), self._under_way = self._under_way, None
        try:
            measured = future.result()
        except Exception as error:  # a user's own network may not like to be measured: training goes on
            log.error("round %d was not measured: %s", rounds_done, first_line(error))
            return None
        return Evaluation(
            round=rounds_done,
            seconds=seconds,
            loss=measured.loss,
            accuracy=measured.accuracy,
            test_loss=measured.test_loss,
        )

    def close(self) -> None:
        """End the thread; a measurement under way is lost."""
        self._thread.shutdown(wait=False, cancel_futures=True)
