"""A whole run on the server's side: the streams, and beside them measuring, checkpoints, signals and the end.

    event loop:      streams -> conductor -> steps          `_changed` after each
    two threads:     measure the model, write checkpoints: always copies of it, so that no round waits for them

What is not finished when the next is due makes the next be left out; the last of a run never is.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.drivers.served.conductor import Conductor
from paceline.drivers.served.server import Server
from paceline.drivers.served.transport import allow_many_files, keep_memory
from paceline.traces.checkpoints import Checkpoint, write_checkpoint
from paceline.traces.journal import Checkpointed, Evaluated, RunEnded
from paceline.traces.journal_files import JournalWriter

log = logging.getLogger("paceline.served")

Measure = Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]
VIEW_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStanding:
    """How one worker is doing.

    >>> WorkerStanding(worker=0, alive=True, last="on time", used=3, late=1, dropped=0, refused=0).used
    3
    """

    worker: int
    alive: bool
    last: str
    used: int
    late: int
    dropped: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How the run is doing.

    >>> Standing(round=1, rounds=10, seconds=0.5, loss=None, accuracy=None, begun=True, workers=()).round
    1
    """

    round: int
    rounds: int
    seconds: float
    loss: float | None
    accuracy: float | None
    begun: bool
    workers: tuple[WorkerStanding, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    >>> Outcome(reason="all rounds are done", finished=True, diverged=False, errors=()).finished
    True
    """

    reason: str
    finished: bool
    diverged: bool
    errors: tuple[str, ...]


class Run:
    """Serves until all steps are taken, or somebody stops it."""

    def __init__(
        self,
        conductor: Conductor,
        server: Server,
        journal: JournalWriter,
        *,
        folder: Path,
        steps_per_round: int,
        signature: str,
        codec: str,
        measure: Measure | None = None,
        evaluate_every: int = 10,
        checkpoint_every: int = 50,
    ) -> None:
        self.conductor, self.server = conductor, server
        self._journal, self._folder = journal, folder
        self._steps_per_round, self._about = steps_per_round, {"signature": signature, "codec": codec}
        self._measure, self._evaluate_every, self._checkpoint_every = measure, evaluate_every, checkpoint_every
        self._seen_version = conductor.trainee.version
        self._loss: float | None = None
        self._accuracy: float | None = None
        self._measurer = ThreadPoolExecutor(1, thread_name_prefix="paceline-measurer")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="paceline-saver")
        self._measuring: Future[Any] | None = None
        self._saving: Future[Any] | None = None
        self._saved_version = -1
        self._disk_refuses = False
        self._journal_told = False
        self._errors: list[str] = []
        self._stop: str | None = None
        self._signals = 0
        self._finished = asyncio.Event()

    @property
    def rounds_done(self) -> int:
        """Rounds that are over."""
        return self.conductor.trainee.version // self._steps_per_round

    @property
    def standing(self) -> Standing:
        """How the run is doing."""
        return Standing(
            round=self.rounds_done,
            rounds=self.conductor.total_steps // self._steps_per_round,
            seconds=self.server.now(),
            loss=self._loss,
            accuracy=self._accuracy,
            begun=self.conductor.begun,
            workers=tuple(
                WorkerStanding(
                    worker=number,
                    alive=member.alive,
                    last=member.last,
                    used=member.used,
                    late=member.late,
                    dropped=member.dropped,
                    refused=member.refused,
                )
                for number, member in sorted(self.conductor.members.items())
            ),
        )

    async def serve(
        self,
        address: str,
        credentials: Any = None,
        *,
        on_open: Callable[[int], None] = lambda port: None,
        on_standing: Callable[[Standing], None] = lambda standing: None,
        reason_to_stop: Callable[[Standing], str | None] = lambda standing: None,
    ) -> Outcome:
        """Open the doors, and return when it is over, or when somebody has a `reason_to_stop`."""
        keep_memory()
        allow_many_files()
        self.server.changed = self._changed
        port = await self.server.open(address, credentials)
        undo = self._catch_signals()
        try:
            if self.conductor.trainee.version == 0:
                self._save(self.server.now())  # there is always something to resume from
                self._evaluate(self.server.now())
            on_open(port)
            self._changed()
            while not self._finished.is_set():
                on_standing(self.standing)
                if (reason := reason_to_stop(self.standing)) is not None:
                    self.stop(reason)
                try:
                    await asyncio.wait_for(self._finished.wait(), VIEW_SECONDS)
                except TimeoutError:
                    continue
            if self.server.failure is not None:
                await self.server.close("return", "the server failed")
                raise self.server.failure
            return await self._end(on_standing)
        finally:
            undo()
            self._saver.shutdown(wait=True)
            self._measurer.shutdown(wait=False, cancel_futures=True)
            self._journal.close()

    def stop(self, reason: str) -> None:
        """End the run early; it can be gone on with later."""
        self._stop = self._stop or reason
        self._finished.set()

    # -- beside the rounds -------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Something happened; after a step, see what is due."""
        if self.server.failure is not None:
            self._finished.set()
            return
        version = self.conductor.trainee.version
        if version != self._seen_version:
            self._seen_version = version
            if version % self._steps_per_round == 0 and not self.conductor.done:
                now = self.server.now()
                if self.rounds_done % self._evaluate_every == 0:
                    self._evaluate(now)
                if self.rounds_done % self._checkpoint_every == 0:
                    self._save(now)
            self._tell_journal()
        if self.conductor.done:
            self._finished.set()

    def _tell_journal(self) -> None:
        """The trace has holes: say so when the first is there, not when the run is over."""
        if self._journal.error and not self._journal_told:
            self._journal_told = True
            log.error("%s; training goes on", self._journal.error)

    def _evaluate(self, now: float) -> None:
        if self._measure is None or (self._measuring is not None and not self._measuring.done()):
            return
        model = self.conductor.trainee.model
        measured = self.rounds_done
        self._measuring = self._measurer.submit(self._measure, model.parameters.clone(), model.buffers.clone())
        self._when_done(self._measuring, lambda result: self._evaluated(measured, now, result))

    def _evaluated(self, measured: int, now: float, result: tuple[float, float]) -> None:
        self._loss, self._accuracy = result
        self._journal.write(Evaluated(at_seconds=now, round=measured, loss=result[0], accuracy=result[1]))

    def _save(self, now: float) -> None:
        if self._saving is not None and not self._saving.done():
            return
        checkpoint = self._checkpoint(now)
        self._saving = self._saver.submit(write_checkpoint, self._folder, checkpoint)
        self._when_done(self._saving, lambda _: self._saved(checkpoint.version), self._not_saved)

    def _checkpoint(self, now: float) -> Checkpoint:
        plain, tensors = self.conductor.trainee.state()
        state = {"trainee": plain, "seconds": now, **self._about, **self.conductor.boundary}
        return Checkpoint(
            version=self.conductor.trainee.version,
            tensors={name: tensor.clone() for name, tensor in tensors.items()},
            state=json.loads(json.dumps(state)),
        )

    def _saved(self, version: int) -> None:
        self._saved_version = max(version, self._saved_version)
        if self._disk_refuses:
            self._disk_refuses = False
            log.info("checkpoint %d is written: the disk takes them again", version)
        self._journal.write(Checkpointed(at_seconds=self.server.now(), version=version))

    def _not_saved(self, reason: str) -> None:
        if not self._disk_refuses:  # once, not with every checkpoint that is tried
            self._disk_refuses = True
            self._failed(f"{reason}; training goes on")

    def _when_done(
        self, future: Future[Any], then: Callable[[Any], None], otherwise: Callable[[str], None] | None = None
    ) -> None:
        loop = asyncio.get_running_loop()

        def settle() -> None:
            try:
                then(future.result())
            except Exception as error:  # a full disk, or a user's own way of measuring: training goes on
                (otherwise or self._failed)(str(error) or type(error).__name__)

        future.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(settle))

    def _failed(self, reason: str) -> None:
        log.error("%s", " ".join(reason.split()))
        if len(self._errors) < 100:
            self._errors.append(reason)

    # -- the end -----------------------------------------------------------------------------------------------

    async def _end(self, on_standing: Callable[[Standing], None]) -> Outcome:
        now = self.server.now()
        finished = self.conductor.done
        self.conductor.stop()
        reason = "diverged" if self.conductor.diverged else "all rounds are done" if finished else str(self._stop)
        log.info("ends after %d rounds: %s", self.rounds_done, reason)
        await self.server.close("over" if finished else "return", reason)
        self.conductor.flush()
        await self._settled(measured=finished)
        if finished:
            self._evaluate(now)
        if self._saved_version != self.conductor.trainee.version and not self.conductor.diverged:
            self._save(now)
        await self._settled(measured=finished)
        if self._disk_refuses:
            self._failed(f"the model after step {self.conductor.trainee.version} is in no checkpoint")
        self._journal.write(
            RunEnded(at_seconds=now, reason=reason, rounds_done=self.rounds_done, diverged=self.conductor.diverged)
        )
        on_standing(self.standing)
        if self._journal.error:
            self._failed(f"{self._journal.lost} records of the trace are lost: {self._journal.error}")
        return Outcome(reason=reason, finished=finished, diverged=self.conductor.diverged, errors=tuple(self._errors))

    async def _settled(self, *, measured: bool) -> None:
        """Wait for what goes on beside the rounds; a run that is stopped does not wait to be measured."""
        under_way = (self._saving, self._measuring if measured else None)
        futures = [asyncio.wrap_future(future) for future in under_way if future is not None]
        await asyncio.gather(*futures, return_exceptions=True)
        await asyncio.sleep(0)  # let what waits for them run

    def _catch_signals(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        caught = []

        def stop(name: str) -> None:
            self._signals += 1
            if self._signals > 1:
                os._exit(130)  # asked twice: now, whatever is being measured or written
            self.stop(f"stopped by {name}")

        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, stop, number.name)
                caught.append(number)
            except (ValueError, RuntimeError):  # not in the main thread: whoever started us stops us
                break

        def undo() -> None:
            for number in caught:
                loop.remove_signal_handler(number)

        return undo
