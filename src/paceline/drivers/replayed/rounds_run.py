"""A recorded run of rounds on ranks, decided and computed again in one process.

Decisions, batches and gradients are replayed as those of a server's run are. What differs is how a step is taken, which
is as the ranks took it: each has kept its own gradients and weighs them (`RankGradients`), gloo adds up what they
contribute (`LocalSum`), and the sum goes through the optimiser (`RankModel`). Where a codec encodes contributions, each
rank has its side of the exchange (`RoundSum`), with all that it holds back and as many threads as it had; what a ring
adds up is added up by gloo.

A checkpoint of ranks holds late gradients, which the next step takes: whoever goes on from it goes on with them. So all
that a checkpoint holds is remembered where the journal says that it was written.

Another version of torch may add up, or compute, in another order. Then bits may differ, and the replay goes on:
`inexact_since` is the first step after which the weights were not the same.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from paceline.codecs.floats import Identity
from paceline.codecs.payload import NotFiniteError
from paceline.codecs.requests import AllReduce, Request
from paceline.distributed import first_line
from paceline.distributed.local_sum import LocalSum
from paceline.drivers.replayed.served_run import Replay, ReplayError, RunDifference, SentGradient
from paceline.events import Step
from paceline.exchanges import ExchangeProtocol, TroubleError
from paceline.exchanges.lockstep import answered, sum_in_lockstep
from paceline.strategies import LGC, Strategy
from paceline.traces.journal import Arrival, Checkpointed, JournalRecord, Resumed, RunBegan, StepRecord, WorkerJoined
from paceline.training import Training, all_finite
from paceline.training.contributions import RankGradients, VectorPool
from paceline.training.rank_model import RankModel
from paceline.training.replica import averaged_buffers
from paceline.training.round_sums import make_round_sum
from paceline.workers.flat import FlatModel
from paceline.workers.gradients import Assignment


class RoundsReplay(Replay):
    """The journal of a run on ranks being replayed: iterate over it, then ask for the `verdict`."""

    def __init__(self, records: Sequence[JournalRecord], training: Training, strategy: Strategy, **how: Any) -> None:
        super().__init__(records, replace(training, codec=Identity()), strategy, **how)  # models do not travel
        began = next(record for record in records if isinstance(record, RunBegan))
        if began.workers != len(training.shards):
            raise ReplayError(f"the trace is of {began.workers} ranks, and its recipe of {len(training.shards)}")
        self.other_torch = began.torch if began.torch != torch.__version__ else ""
        self.inexact_since: int | None = None
        self._model = _rank_model(self.train_state.model, self.train_state.step_optimizer)
        self._worker_model = _rank_model(self._engine.model, lambda: None)
        layout = self._model.layout
        self._vectors = VectorPool(layout.size, self._model.dtype, torch.device("cpu"))
        self._ranks = [
            RankGradients(rank, layout, self._vectors, compensates=isinstance(strategy, LGC))
            for rank in range(began.workers)
        ]
        self._sums = [
            make_round_sum(
                training.codec,
                self.train_state.model.shapes,
                layout,
                place=rank,
                world=began.workers,
                plan=training.plan,
                seed=training.seed,
            )
            for rank in range(began.workers)
        ]
        self._checkpoints: dict[int, dict[str, Any]] = {}

    def __iter__(self) -> Iterator[int]:
        try:
            ranks = LocalSum(len(self._ranks))
        except RuntimeError as error:  # each of them has a connection to each
            raise ReplayError(
                f"cannot add up as {len(self._ranks)} ranks in one process: {first_line(error)}"
            ) from error
        with ranks as self._adding:
            yield from super().__iter__()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _compute(
        self, arrival: Arrival, assignment: Assignment, parameters: torch.Tensor, buffers: torch.Tensor
    ) -> tuple[SentGradient, torch.Tensor]:
        self._engine.model.load_buffers(buffers)
        self._worker_model.take_buffers()
        losses = self._engine.compute(parameters, buffers, [assignment]).sample_losses[0]
        message = self._worker_model.pack(self._vectors.take())
        self._engine.model.attach_gradient()
        if not all_finite(message):
            raise NotFiniteError("a gradient is not finite")
        return (message, message[:0]), losses

    def _take(self, step: Step) -> None:
        for share in (*step.late, *step.fresh):
            message, _ = self._pending[share.worker, share.version].pop(0)()
            self._ranks[share.worker].keep(share.version, message)
        first = self._joins[min(self._joins)]
        torch.set_num_threads(first.threads)
        brings = [rank.has_part_in(step) for rank in self._ranks]
        vectors = [rank.contribute(step) for rank in self._ranks]
        protocols = [
            _with_threads(self._joins.get(rank, first).threads, each.add_up(vector, step.version, brings=brought))
            for rank, (each, vector, brought) in enumerate(zip(self._sums, vectors, brings, strict=True))
        ]
        try:
            total = sum_in_lockstep(self._sums[0].plan, protocols, answering=self._answered)
        except (TroubleError, NotFiniteError) as error:
            raise RunDifference(f"step {step.version}: the contributions cannot be added up here ({error})") from None
        torch.set_num_threads(first.threads)
        self._model.apply(total)
        for vector in vectors:
            self._vectors.give(vector)
        self.train_state.advance()

    def _answered(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        if not isinstance(requests[0], AllReduce):
            return answered(requests, shared=True)
        tensors = [request.tensor for request in requests]
        self._adding.add_up(tensors, largest=requests[0].largest)
        return tensors

    def _compare(self, record: StepRecord) -> None:
        try:
            super()._compare(record)
        except RunDifference:
            if not self.other_torch:
                raise
            self.inexact_since = record.version if self.inexact_since is None else self.inexact_since

    # -- going on from a checkpoint ------------------------------------------------------------------------------------

    def _joined(self, record: WorkerJoined) -> None:
        if record.worker >= len(self._ranks):
            raise ReplayError(f"rank {record.worker} joined, and the run has ranks 0 to {len(self._ranks) - 1}")
        if record.worker in self._strategy.state_dict()["alive"]:  # it is in the checkpoint that all went on from
            self._note_join(record)
        else:
            super()._joined(record)

    def _checkpointed(self, record: Checkpointed) -> None:
        if record.version in self._resumed_from and record.version == self.train_state.version:
            pending = {key: [gradient() for gradient in waiting] for key, waiting in self._pending.items()}
            self._checkpoints[record.version] = copy.deepcopy(
                {
                    "strategy": self._strategy.state_dict(),
                    "ranks": [rank.state_dict() for rank in self._ranks],
                    "sums": [each.state_dict() for each in self._sums],
                    "pending": pending,
                    "batches": self.batches.state_dict(),
                }
            )

    def _resumed(self, record: Resumed) -> None:
        if record.version not in self._checkpoints:
            raise ReplayError(f"the run went on from step {record.version}, and the trace has no checkpoint of it")
        super()._resumed(record)
        self._model.take_buffers()
        kept = copy.deepcopy(self._checkpoints[record.version])
        self._strategy.load_state_dict(kept["strategy"])
        for rank, state in zip(self._ranks, kept["ranks"], strict=True):
            rank.load_state_dict(state)
        for each, state in zip(self._sums, kept["sums"], strict=True):
            each.load_state_dict(each.plan, state)
        self._pending = {
            key: [partial(_same, gradient) for gradient in waiting] for key, waiting in kept["pending"].items()
        }
        self.batches.load_state_dict(kept["batches"])


def _same(gradient: SentGradient) -> SentGradient:
    return gradient


def _with_threads(threads: int, protocol: ExchangeProtocol) -> ExchangeProtocol:
    """Run a protocol with as many threads as its rank had: the last bits of some codecs depend on their number."""
    torch.set_num_threads(threads)
    try:
        request = next(protocol)
        while True:
            answer = yield request
            torch.set_num_threads(threads)
            request = protocol.send(answer)
    except StopIteration as end:
        total: torch.Tensor = end.value
        return total


def _rank_model(model: FlatModel, step: Any) -> RankModel:
    return RankModel(list(model.offsets), averaged_buffers(model.module), step)
