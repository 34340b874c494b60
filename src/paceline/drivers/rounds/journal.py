"""The journal of rounds on ranks, as that of a server: kept by rank 0, which decides, on its training thread.

    RunBegan  WorkerJoined (each rank)  StepRecord ...  Arrived  Checkpointed  StepRecord ...  RunEnded

A step is written when rank 0 has applied it, with the fingerprint of the parameters after it. Ranks neither come nor
go: all of them join when the rounds begin, and again when the launch was started anew.

At a checkpoint all ranks are at one place, and gradients that have arrived late are in it. They are written before it
(`Arrived`), so that they are valid for whoever goes on from there, and the next step takes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.drivers.rounds.decider import ENDED
from paceline.drivers.rounds.outcomes import NOT_FINITE
from paceline.drivers.rounds.synchronizer import ClosedRound, Flushed
from paceline.events import Drop
from paceline.traces.journal import (
    Arrived,
    Checkpointed,
    Dropped,
    Evaluated,
    Extended,
    Refused,
    Resumed,
    RunBegan,
    RunEnded,
    StepRecord,
    WorkerJoined,
)
from paceline.traces.journal_files import JournalWriter, effective, read_journal
from paceline.traces.records import Evaluation
from paceline.training import fingerprint
from paceline.workers.flat import FlatModel

log = logging.getLogger("paceline.rounds")

STARTED_AGAIN = "the ranks were started again"


class RoundsJournal:
    """Writes the records of a run of ranks.

    `path` is written anew, unless the run goes on: then `resume` comes first. `measured` are the rounds after which the
    model was measured before.
    """

    def __init__(self, path: Path, began: RunBegan, *, model: FlatModel, goes_on: bool) -> None:
        self._path, self._model = path, model
        self.measured: set[int] = set()
        self._opened_seconds = 0.0
        self._hosts: list[str] = []
        self._rounds, self._saved = began.recipe.get("rounds"), set[int]()
        if not goes_on:
            with suppress(FileNotFoundError):  # of an attempt of this launch that came to no checkpoint
                path.unlink()
        elif path.is_file():
            earlier = read_journal(path)
            self._rounds = self._rounds if earlier.extended is None else earlier.extended.rounds
            self._saved = {record.version for record in effective(earlier.records) if isinstance(record, Checkpointed)}
        self.writer = JournalWriter(path, append=goes_on)
        if self.writer.empty:
            self.writer.write(began)

    def resume(self, *, version: int, at_seconds: float, rounds: int) -> None:
        """Note that all ranks go on from their checkpoints of this version, to so many rounds in all."""
        if version not in self._saved:  # rank 0 was killed after it had saved it, and before it could note it
            self.writer.write(Checkpointed(at_seconds=at_seconds, version=version))
        self.writer.write(Resumed(at_seconds=at_seconds, version=version, reason=STARTED_AGAIN))
        if rounds != self._rounds:
            self.writer.write(Extended(at_seconds=at_seconds, version=version, rounds=rounds, changes={}))
        self._opened_seconds = at_seconds
        valid = effective(read_journal(self._path).records)
        self.measured = {record.round for record in valid if isinstance(record, Evaluated)}

    def join(
        self,
        *,
        at_seconds: float,
        threads: Sequence[int],
        hosts: Sequence[str],
        draws: Sequence[int],
        samples: Sequence[int] | None = None,
    ) -> None:
        """Note the ranks, in their order: the threads of each, its machine, and its next batch.

        `samples` is where these batches begin, where batches are by speed.
        """
        self._hosts = list(hosts)
        for rank, (count, host, draw) in enumerate(zip(threads, hosts, draws, strict=True)):
            self.writer.write(
                WorkerJoined(
                    at_seconds=at_seconds,
                    worker=rank,
                    shard=rank,
                    first_draw=draw,
                    threads=count,
                    host=host,
                    first_sample=None if samples is None else samples[rank],
                )
            )

    def round_closed(self, closed: ClosedRound) -> None:
        """Note a round that this rank has just applied."""
        step = closed.step
        dropped = self._without_refused(closed.dropped, step.at_seconds)
        self.writer.write(
            StepRecord(
                at_seconds=step.at_seconds,
                version=step.version,
                opened_seconds=self._opened_seconds,
                fresh=tuple((share.worker, share.version) for share in step.fresh),
                late=tuple((share.worker, share.version) for share in step.late),
                dropped=dropped,
                arrivals=closed.arrivals,
                fingerprint=fingerprint(self._model.parameters),
                sent_bytes=closed.sent_bytes,
                received_bytes=0,
            )
        )
        self._opened_seconds = step.at_seconds

    def flushed(self, flushed: Flushed, at_seconds: float) -> None:
        """Note what has arrived since the last round, or was dropped; what the end drops follows from the end."""
        dropped = self._without_refused([drop for drop in flushed.dropped if drop.reason != ENDED], at_seconds)
        if flushed.arrivals or dropped:
            self.writer.write(Arrived(arrivals=flushed.arrivals, dropped=dropped))

    def _without_refused(self, drops: Sequence[Drop], at_seconds: float) -> tuple[Dropped, ...]:
        """Write down gradients that were not finite as refused, as a server does; return the others."""
        for drop in drops:
            if drop.reason == NOT_FINITE:
                host = self._hosts[drop.worker]
                self.writer.write(Refused(at_seconds=at_seconds, worker=drop.worker, peer=host, reason="not finite"))
        return tuple(
            Dropped(worker=drop.worker, version=drop.version, reason=drop.reason)
            for drop in drops
            if drop.reason != NOT_FINITE
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        """Note a measurement."""
        self.writer.write(
            Evaluated(
                at_seconds=evaluation.seconds,
                round=evaluation.round,
                loss=evaluation.loss,
                accuracy=evaluation.accuracy,
                test_loss=evaluation.test_loss,
            )
        )

    def checkpointed(self, version: int, at_seconds: float) -> None:
        """Note that this rank's checkpoint is on the disk."""
        self.writer.write(Checkpointed(at_seconds=at_seconds, version=version))

    def ended(self, rounds_done: int, at_seconds: float, *, diverged: bool) -> None:
        """Note the end."""
        reason = "diverged" if diverged else "all rounds are done"
        self.writer.write(RunEnded(at_seconds=at_seconds, reason=reason, rounds_done=rounds_done, diverged=diverged))

    def close(self) -> None:
        """Close the file, and tell what of the run is not in it."""
        self.writer.close()
        if self.writer.error:
            log.error("%d records of the trace are lost: %s", self.writer.lost, self.writer.error)
