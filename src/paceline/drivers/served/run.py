"""A whole run on the server's side: opened anew or from a checkpoint, served, measured, saved, ended.

    event loop:      streams -> coordinator -> steps        `_changed` after each
    two threads:     measure a copy of the model; write checkpoints, from the memory that is trained: the next step
                     waits for that, but not for long (`Snapshot`)

An evaluation or checkpoint that is due while the one before is still being made is left out; the last one never is.

Checkpoints are taken between rounds, where nothing is half-done: no gradient waits, and the strategy's state is a few
numbers. Work of an open round that is lost with a server is computed again, from the same batches. A checkpoint is read
from the memory that is trained, because copies of parameters, optimiser and compensation would be three more models.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import signal
import ssl
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.codecs.naming import parse_codec
from paceline.decoding import DecodingError, decode
from paceline.drivers.served.admission import Guard
from paceline.drivers.served.coordinator import Coordinator
from paceline.drivers.served.membership import Seats
from paceline.drivers.served.messages import model_signature
from paceline.drivers.served.security import AddressError, is_loopback
from paceline.drivers.served.server import Server
from paceline.drivers.served.settings import EvaluateError, ServeError, ServerSettings
from paceline.drivers.served.times import RunTimes
from paceline.files import discard
from paceline.optim import catch_up
from paceline.strategies import LGC
from paceline.strategies.lgc import SAMPLES, settled
from paceline.traces.checkpoints import (
    Checkpoint,
    CheckpointWriteError,
    Snapshot,
    checkpoint_name,
    most_tensor_bytes,
    read_newest,
    write_checkpoint,
)
from paceline.traces.journal import (
    FORMAT,
    TRACE,
    Checkpointed,
    Evaluated,
    Extended,
    Resumed,
    RunBegan,
    RunEnded,
    Seconds,
)
from paceline.traces.journal_files import JournalWriter, read_journal
from paceline.traces.run_folder import check_free, make_folder
from paceline.traces.run_settings import difference, remedy, with_defaults
from paceline.traces.run_status import RunStatus
from paceline.traces.worker_counts import DropWatch
from paceline.training import Measurement, TrainState
from paceline.training.outgoing import warm_up
from paceline.training.saved_state import refusing

log = logging.getLogger("paceline.served")

VIEW_SECONDS = 0.2
SNAPSHOT_SECONDS = 1.0  # that a step waits for a checkpoint to be read


# -- opening ------------------------------------------------------------------------------------------------------


def open_run(settings: ServerSettings, *, resume: bool = False) -> ServerRun:
    """Make a run ready to be served; a folder that holds a run is resumed from its newest checkpoint, or refused."""
    trace = settings.folder / TRACE
    if not resume:
        check_free(settings.folder)
    checkpoint = _newest(settings) if resume else None
    settings = _as_begun(settings, checkpoint)
    if checkpoint is not None:
        _check_same_run(settings, checkpoint)
    codec = parse_codec(settings.codec)
    train_state = TrainState(
        settings.module,
        settings.optimizer,
        settings.schedule,
        compensates=isinstance(settings.strategy, LGC),
        codec=codec,
        seed=settings.seed,
    )
    train_state.state()  # what no checkpoint can hold is said now, and not after fifty rounds
    warm_up(codec, train_state.model.shapes)
    codec = codec.fresh(train_state.model.shapes)
    if resume and not settings.recipe and trace.exists() and trace.stat().st_size:
        read_journal(trace)  # a script's; whoever resumes a recipe has read it. An altered line is told now
    make_folder(settings.folder)
    journal = JournalWriter(trace, append=resume)
    coordinator = Coordinator(
        strategy=settings.strategy,
        train_state=train_state,
        codec=codec,
        seats=Seats(shards=settings.workers, most=settings.most_workers or 2 * settings.workers),
        total_steps=settings.rounds * settings.strategy.updates_per_round(settings.workers),
        wait_for=settings.workers,
        most_bad_gradients=settings.limits.most_bad_gradients,
        write=journal.write,
    )
    server = Server(
        coordinator,
        settings,
        signature=model_signature(settings.module),
        started_seconds=_seconds(checkpoint, settings.folder) if checkpoint else 0.0,
        times=RunTimes(settings.folder, workers=settings.workers, host=platform.node()),
    )
    if checkpoint is not None:
        try:
            _load(settings, checkpoint, coordinator)
        except BaseException:
            journal.close()  # else this process could not open it again
            raise
    _begin_journal(journal, settings, checkpoint)
    run = ServerRun(coordinator, server, journal, settings)
    if checkpoint is None:
        run.write_first_checkpoint()
    return run


def _newest(settings: ServerSettings) -> Checkpoint:
    folder, module = settings.folder, settings.module
    numbers = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    checkpoint, refused = read_newest(folder, most_bytes=most_tensor_bytes(numbers))
    for reason in refused:
        log.warning("%s", reason)
    if checkpoint is None:
        why = f" ({refused[0]})" if refused else ""
        raise ServeError(f"{folder} has no whole checkpoint to resume from{why}")
    return checkpoint


def _as_begun(settings: ServerSettings, checkpoint: Checkpoint | None) -> ServerSettings:
    """Return the settings with what a run began with, where they leave it open; earlier releases scaled partial work.

    What a checkpoint says is believed only if it is a weighing; the check of the run refuses the rest.
    """
    began = None
    if checkpoint is not None:
        run = checkpoint.state.get("run")
        began = run.get("scale_partial", True) if isinstance(run, dict) else True
    known = isinstance(began, bool) or began == SAMPLES
    return replace(settings, strategy=settled(settings.strategy, began if known else None))


def _check_same_run(settings: ServerSettings, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of a run with other settings; an older one does not say what they were."""
    name, state = f"checkpoint {checkpoint.version} of {settings.folder}", checkpoint.state
    recipe, run = state.get("recipe", {}), state.get("run", {})
    if not isinstance(recipe, dict) or not isinstance(run, dict):
        raise ServeError(f"{name} is refused: its recipe and its run must be objects")
    if recipe and settings.recipe:
        different = difference(with_defaults(recipe, settings.recipe_defaults), settings.recipe)
    else:
        different = difference(run, {key: value for key, value in settings.identity.items() if key in run})
    if different:
        raise ServeError(f"{name} is of another run: {different}; {remedy(different)}")


def _seconds(checkpoint: Checkpoint, folder: Path) -> float:
    """Return how long the run had taken when a checkpoint was made."""
    with refusing(f"checkpoint {checkpoint.version} of {folder}"):
        seconds: float = decode(Seconds, checkpoint.state["seconds"], "seconds")
    return seconds


def _load(settings: ServerSettings, checkpoint: Checkpoint, coordinator: Coordinator) -> None:
    """Go on from a checkpoint; one of another model or strategy is refused before anything is written."""
    name, state = f"checkpoint {checkpoint.version} of {settings.folder}", checkpoint.state
    if state.get("signature") != model_signature(settings.module):
        raise ServeError(f"{name} is of another model: names, shapes, kinds or frozen values of its parameters differ")
    if state.get("codec", settings.codec) != settings.codec:
        raise ServeError(
            f"{name} is of a run with codec {state['codec']!r} (this one has {settings.codec!r}); resume with the same"
        )
    if coordinator.total_steps < checkpoint.version:
        done = checkpoint.version * settings.rounds // coordinator.total_steps
        raise ServeError(f"rounds must be at least {done}, which are done (rounds={settings.rounds})")
    with refusing(name):
        try:
            strategy = coordinator.strategy
            held = decode(dict[str, Any], state["strategy"], "strategy")
            decode(strategy.form, strategy.added | held, "strategy")
        except DecodingError as error:
            raise ServeError(f"it is of another strategy, or of none: {error}") from None
        if not state["trainee"]["version"] == state["strategy"]["version"] == checkpoint.version:
            raise ServeError("its parts are not of the same step")
        if _is_extended(settings, checkpoint):
            _load_extended(settings, checkpoint, coordinator.train_state)
        else:
            coordinator.train_state.load_state(state["trainee"], checkpoint.tensors)
        coordinator.load_boundary(state)
    log.info("goes on from checkpoint %d", checkpoint.version)


def _is_extended(settings: ServerSettings, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of another total; an older one is of the recipe's, or does not say."""
    recorded = {"rounds": settings.recipe.get("rounds", settings.rounds), "changes": {}}
    return bool(checkpoint.state.get("total", recorded) != json.loads(json.dumps(settings.total)))


def _load_extended(settings: ServerSettings, checkpoint: Checkpoint, train_state: TrainState) -> None:
    """Load a checkpoint of another total: the schedule is the new one, as if it had always been followed."""
    groups, names = settings.optimizer.param_groups, {"lr", "initial_lr"}
    rates = [{name: value for name, value in group.items() if name in names} for group in groups]
    fresh = train_state.state()[0]["schedule"]
    train_state.load_state({**checkpoint.state["trainee"], "schedule": fresh}, checkpoint.tensors)
    if settings.schedule is not None:
        for group, rate in zip(settings.optimizer.param_groups, rates, strict=True):
            group.update(rate)
        catch_up(settings.schedule, checkpoint.version)


def _begin_journal(journal: JournalWriter, settings: ServerSettings, checkpoint: Checkpoint | None) -> None:
    if journal.empty:
        journal.write(
            RunBegan(
                format=FORMAT,
                paceline=__version__,
                strategy=settings.strategy_name,
                seed=settings.seed,
                workers=settings.workers,
                blocks=settings.blocks,
                recipe=settings.recipe,
                signature=model_signature(settings.module),
                codec=settings.codec,
            )
        )
    if checkpoint is not None:
        seconds = _seconds(checkpoint, settings.folder)
        journal.write(Resumed(at_seconds=seconds, version=checkpoint.version, reason="the server was started again"))
        if _is_extended(settings, checkpoint):
            journal.write(Extended(at_seconds=seconds, version=checkpoint.version, **settings.total))


# -- serving ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """How a run ended.

    >>> RunOutcome(reason="all rounds are done", finished=True, diverged=False, errors=()).finished
    True
    """

    reason: str
    finished: bool
    diverged: bool
    errors: tuple[str, ...]
    lost: tuple[str, ...] = ()  # the errors that say what is not on the disk, now that all is over


class ServerRun:
    """Serves until all steps are taken, or somebody stops it."""

    def __init__(
        self,
        coordinator: Coordinator,
        server: Server,
        journal: JournalWriter,
        settings: ServerSettings,
    ) -> None:
        self.coordinator, self.server = coordinator, server
        self._journal, self._settings = journal, settings
        self._steps_per_round = coordinator.total_steps // settings.rounds
        self._seen_version = coordinator.train_state.version
        self._measured: Measurement | None = None  # the last one
        threads = torch.get_num_threads()  # those who decode have one each, which torch takes for new threads too
        self._measurer = ThreadPoolExecutor(1, "paceline-measurer", lambda: torch.set_num_threads(threads))
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="paceline-saver")
        self._measuring: Future[Any] | None = None
        self._saving: Future[Any] | None = None
        self._saved_version = -1
        self._disk_refuses = False
        self._lost_reported = self._times_reported = False
        self._rewritten = 0  # how often the journal was, as far as checkpoints have followed
        self._errors: list[str] = []
        self._stop: str | None = None
        self._reason = "the server failed"  # why the run ended, once it has
        self._signals = 0
        self._is_new = False
        self._wrong_evaluation: EvaluateError | None = None
        self._finished = asyncio.Event()
        self._drops = DropWatch(settings.strategy_name)

    @property
    def rounds_done(self) -> int:
        """Rounds that are over."""
        return self.coordinator.train_state.version // self._steps_per_round

    @property
    def status(self) -> RunStatus:
        """The state of the run, for whoever watches it."""
        measured = self._measured
        return RunStatus(
            round=self.rounds_done,
            rounds=self._settings.rounds,
            seconds=self.server.now(),
            loss=None if measured is None else measured.loss,
            accuracy=None if measured is None else measured.accuracy,
            test_loss=None if measured is None else measured.test_loss,
            begun=self.coordinator.begun,
            workers=tuple(member.status for _, member in sorted(self.coordinator.members.items())),
            figures=dict(self.coordinator.figures),
            begins_within_seconds=None if self.coordinator.begun else self.server.gathering_seconds_left,
        )

    async def serve(
        self,
        address: tuple[str, int],
        credentials: ssl.SSLContext | None = None,
        *,
        open: bool = False,
        on_open: Callable[[int], None] = lambda port: None,
        on_standing: Callable[[RunStatus], None] = lambda standing: None,
        reason_to_stop: Callable[[RunStatus], str | None] = lambda standing: None,
    ) -> RunOutcome:
        """Listen, and return when the run is over or `reason_to_stop` gives a reason.

        On loopback without keys workers show that they are of this user, unless it is `open` to all of this machine.
        """
        self.server.changed = self._changed
        try:
            if credentials is None and not open and is_loopback(address[0]):
                self.server.guard = Guard(self._settings.folder)
            port = await self.server.open(*address, credentials)
        except BaseException:
            if self.server.guard is not None:
                self.server.guard.close()
            self._journal.close()
            if self._is_new:
                self._discard()
            raise
        undo = self._catch_signals()
        try:
            if self.coordinator.train_state.version == 0:
                self._evaluate(self.server.now())
            on_open(port)
            self._changed()
            while not self._finished.is_set():
                on_standing(self.status)
                self._warn_of_drops()
                if (reason := reason_to_stop(self.status)) is not None:
                    self.stop(reason)
                try:
                    await asyncio.wait_for(self._finished.wait(), VIEW_SECONDS)
                except TimeoutError:
                    continue
            if self.server.failure is not None:
                await self.server.close("return", "the server failed")
                raise self.server.failure
            if self._wrong_evaluation is not None and self._is_new and self.coordinator.train_state.version == 0:
                await self.server.close("return", "the server cannot measure its model")
                self._discard()
                raise self._wrong_evaluation
            outcome = await self._end(on_standing)
            if self._wrong_evaluation is not None and not outcome.finished:
                raise self._wrong_evaluation
            return outcome
        finally:
            undo()
            self.server.let_go()
            self._saver.shutdown(wait=True)
            self._measurer.shutdown(wait=False, cancel_futures=True)
            self._journal.close()
            if self.server.times is not None:
                self.server.times.close(self.server.now(), self._reason)

    def _warn_of_drops(self) -> None:
        for sentence in self._drops.sentences(member.counts for member in self.coordinator.members.values()):
            log.warning("%s", sentence)

    def stop(self, reason: str) -> None:
        """End the run early; it can be resumed later."""
        self._stop = self._stop or reason
        self._finished.set()

    # -- measuring and saving -----------------------------------------------------------------------------------

    def write_first_checkpoint(self) -> None:
        """Write checkpoint 0, so that there is always something to resume from; a disk that refuses it is an error.

        Nobody computes yet. The journal of a run that cannot begin is removed, so that its folder is free again.
        """
        now = self.server.now()
        try:
            if self._journal.error:
                raise CheckpointWriteError(self._journal.error)
            write_checkpoint(self._settings.folder, self._checkpoint(now))
        except CheckpointWriteError as error:
            self._journal.remove()
            raise CheckpointWriteError(
                f"{error}; the run has not begun: make room there, or give another folder"
            ) from error
        self._is_new = True
        self._saved(0)

    def _discard(self) -> None:
        """Remove a run in which nothing was computed, so that its folder is free again."""
        self._journal.remove()
        if self.server.times is not None:
            self.server.times.remove()
        discard(self._settings.folder / checkpoint_name(0))
        with suppress(OSError):
            self._settings.folder.rmdir()

    def _changed(self) -> None:
        """After a step, begin what is due."""
        if self.server.failure is not None:
            self._finished.set()
            return
        version = self.coordinator.train_state.version
        if version != self._seen_version:
            self._seen_version = version
            if version % self._steps_per_round == 0 and not self.coordinator.done:
                now = self.server.now()
                if self.rounds_done % self._settings.evaluate_every == 0:
                    self._evaluate(now)
                if self.rounds_done % self._settings.checkpoint_every == 0 or self._checkpoints_gone:
                    self._save(now)
            if self._journal.error and not self._lost_reported:  # when the first is lost, not when the run is over
                self._lost_reported = True
                log.error("%s%s", self._journal.error, "" if self.coordinator.done else "; training goes on")
            if self.server.times is not None and self.server.times.error and not self._times_reported:
                self._times_reported = True
                log.error("%s; training goes on, and its step times are not whole", self.server.times.error)
        if self.coordinator.done:
            self._finished.set()

    def _evaluate(self, now: float) -> None:
        measure = self._settings.measure
        if measure is None or (self._measuring is not None and not self._measuring.done()):
            return
        measured = self.rounds_done
        measure.load(self.coordinator.train_state.model)
        self._measuring = self._measurer.submit(measure)
        self._when_done(self._measuring, lambda result: self._evaluated(measured, now, result))

    def _evaluated(self, round_measured: int, now: float, result: Measurement) -> None:
        self._measured = result
        self._journal.write(
            Evaluated(
                at_seconds=now,
                round=round_measured,
                loss=result.loss,
                accuracy=result.accuracy,
                test_loss=result.test_loss,
            )
        )

    def _save(self, now: float) -> None:
        if self._saving is not None and not self._saving.done():
            return
        if self._checkpoints_gone:
            self._rewritten = self._journal.rewritten
            if self.server.times is not None:
                self.server.times.begin_again()
            try:
                if self.server.guard is not None:
                    self.server.guard.write()
            except (OSError, AddressError) as error:  # who is in, stays in
                self._failed(f"workers of this user cannot join any more: the key was not written ({error})")
            self._failed(f"{self._settings.folder} was deleted or moved: its trace is written anew, and a checkpoint")
        checkpoint = self._checkpoint(now)
        snapshot = Snapshot(checkpoint.tensors)
        self.coordinator.before_step = lambda: snapshot.settle(SNAPSHOT_SECONDS)
        self._saving = self._saver.submit(self._write_checkpoint, checkpoint, snapshot)
        self._when_done(self._saving, lambda _: self._saved(checkpoint.version), self._not_saved)

    def _write_checkpoint(self, checkpoint: Checkpoint, snapshot: Snapshot) -> None:
        try:
            write_checkpoint(self._settings.folder, checkpoint, snapshot=snapshot)
        finally:
            snapshot.read.set()

    @property
    def _checkpoints_gone(self) -> bool:
        """Whether the run's folder was deleted or moved since the last checkpoint: the journal notices it."""
        return self._journal.rewritten > self._rewritten

    def _checkpoint(self, now: float) -> Checkpoint:
        plain, tensors = self.coordinator.train_state.state()
        settings = self._settings
        about = {
            "signature": self.server.signature,
            "codec": settings.codec,
            "run": settings.identity,
            "recipe": dict(settings.recipe),
            "total": settings.total,
        }
        state = {"trainee": plain, "seconds": now, **about, **self.coordinator.boundary}
        return Checkpoint(
            version=self.coordinator.train_state.version,
            tensors=tensors,
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
            self._failed(reason if self._finished.is_set() else f"{reason}; training goes on")

    def _when_done(
        self, future: Future[Any], then: Callable[[Any], None], otherwise: Callable[[str], None] | None = None
    ) -> None:
        loop = asyncio.get_running_loop()

        def settle() -> None:
            try:
                then(future.result())
            except EvaluateError as error:  # every evaluation would be such a one: nobody should wait for the end
                self._failed(str(error))
                self._wrong_evaluation = error
                self.stop(str(error))
            except Exception as error:  # a full disk, or a user's own way of measuring: training goes on
                (otherwise or self._failed)(str(error) or type(error).__name__)

        future.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(settle))

    def _failed(self, reason: str) -> None:
        log.error("%s", " ".join(reason.split()))
        if len(self._errors) < 100:
            self._errors.append(reason)

    # -- the end -----------------------------------------------------------------------------------------------

    async def _end(self, on_standing: Callable[[RunStatus], None]) -> RunOutcome:
        now = self.server.now()
        finished = self.coordinator.done
        self.coordinator.stop()
        reason = "diverged" if self.coordinator.diverged else "all rounds are done" if finished else str(self._stop)
        self._reason = reason
        log.info("ends after %d rounds: %s", self.rounds_done, reason)
        await self.server.close("over" if finished else "return", reason)
        self.coordinator.flush()
        await self._settled(measured=finished)
        if finished:
            self._evaluate(now)
        self._journal.stay()
        unsaved = self._saved_version != self.coordinator.train_state.version or self._checkpoints_gone
        if unsaved and not self.coordinator.diverged:
            self._save(now)
        await self._settled(measured=finished)
        lost = []
        if self._disk_refuses:
            lost.append(f"the model after step {self.coordinator.train_state.version} is in no checkpoint")
        self._journal.write(
            RunEnded(at_seconds=now, reason=reason, rounds_done=self.rounds_done, diverged=self.coordinator.diverged)
        )
        on_standing(self.status)
        if self._journal.error:
            lost.append(f"{self._journal.lost} records of the trace are lost: {self._journal.error}")
        for reason_lost in lost:
            self._failed(reason_lost)
        return RunOutcome(
            reason=reason,
            finished=finished,
            diverged=self.coordinator.diverged,
            errors=tuple(self._errors),
            lost=tuple(lost),
        )

    async def _settled(self, *, measured: bool) -> None:
        """Wait for the two threads; a run that is stopped does not wait to be measured."""
        under_way = (self._saving, self._measuring if measured else None)
        futures = [asyncio.wrap_future(future) for future in under_way if future is not None]
        await asyncio.gather(*futures, return_exceptions=True)
        await asyncio.sleep(0)  # let what waits for them run

    def _catch_signals(self) -> Callable[[], None]:
        loop = asyncio.get_running_loop()
        caught = []

        def stop(name: str) -> None:
            self._signals += 1
            # A second Ctrl-C means now, whatever is being measured or written. A second SIGTERM does not: schedulers
            # send one with notice and one when the time is up, and kill whoever takes too long by themselves.
            if self._signals > 1 and name == signal.SIGINT.name:
                os._exit(130)
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
