"""One run on a cluster of Ray's, as its caller sees it: the server is an actor, the workers are tasks.

    caller                          a node                        any node
    RunAuthority ── keys ─────────> ServerActor <── TLS ───────── work(...)     one task for each worker
    FolderCopy  <── files ──────────┘  ^                            ^
    loop: poll ─────────────────────────┘                            │
          a task that ended while the run goes on is submitted again ┘

    what is lost                what happens
    a worker, its node          the run goes on without it; its task is submitted again, and waits for a node with room
    the server, its node        a new actor, anywhere, goes on from the newest checkpoint that was copied here, with new
                                workers
    the caller                  Ray ends actor and tasks; the copy here can be resumed
    room for any worker         said after a while; after `resources_seconds` the run ends, with a checkpoint

The caller retries and not Ray (`max_retries`, `max_restarts` are 0): Ray would retry a worker that fails at its first
line for ever, and would start a server again with arguments of before, at an address that nobody has been told.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from paceline import __version__
from paceline.drivers.served.keys import RunAuthority
from paceline.drivers.served.run import RunOutcome
from paceline.quantities import counted
from paceline.ray.connection import (
    RayResourcesError,
    RayTrainingError,
    cluster_text,
    demand_text,
    living_nodes,
    require_ray,
)
from paceline.ray.mirror import FolderCopy
from paceline.recipes.assembly import Given
from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import OnStanding, Trained, WorkerOptions
from paceline.user_code import UserCodeError, is_code

log = logging.getLogger("paceline.served")

POLL_SECONDS = 0.2
COPY_SECONDS = 2.0
SILENT_SECONDS = 60.0  # that the server's actor may leave a poll unanswered
END_SECONDS = 15.0  # for workers that were told that the run is over
RESULT_SECONDS = 600.0
START_SECONDS = 120.0  # for a process on a node that has room, and for torch in it
WAITING_SECONDS = 20.0  # for a node with room, before it is told
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
FAILURES_EACH = 3  # of every worker, without a round in between, end the run
SERVER_DEATHS = 3  # without a new checkpoint in between, end the run


@dataclass(frozen=True, kw_only=True)
class Demands:
    """What server and workers demand of a node, and how long a run waits for a node that has it.

    >>> Demands(cpus_per_worker=2.0, resources_per_worker={"fast_disk": 1.0}).of_worker
    {'CPU': 2.0, 'fast_disk': 1.0}
    >>> Demands(cpus_per_worker=-1.0)
    Traceback (most recent call last):
    ValueError: cpus_per_worker must be a number of at least 0 (cpus_per_worker=-1.0)
    """

    cpus_per_worker: float = 1.0
    resources_per_worker: Mapping[str, float] = field(default_factory=dict)
    server_cpus: float = 1.0
    resources_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("cpus_per_worker", "server_cpus", "resources_seconds"):
            number = getattr(self, name)
            if not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
                raise ValueError(f"{name} must be a number of at least 0 ({name}={number!r})")
        for name, number in self.resources_per_worker.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                other = "cpus_per_worker is for it" if name == "CPU" else "recipes run on the CPU"
                raise ValueError(f"resources_per_worker is for custom resources, and {name} is none: {other}")
            if not number > 0:
                raise ValueError(f"resources_per_worker[{name!r}] must be above 0 (it is {number!r})")

    @property
    def of_worker(self) -> dict[str, float]:
        """What a worker demands, by Ray's names."""
        return {"CPU": self.cpus_per_worker, **self.resources_per_worker}

    @property
    def worker_threads(self) -> int:
        """The threads of a worker's torch: its share of a CPU may be less than one."""
        return max(1, int(self.cpus_per_worker))


def delay_file(recipe: Recipe) -> str:
    return recipe.delay.file if recipe.delay.name == "recorded" and recipe.delay.inject else ""


@dataclass(kw_only=True)
class _Attempt:
    """One task of a worker; `reference` is None until it is due."""

    worker: int
    number: int
    due: float
    pause: float
    reference: Any = None
    started: bool = False


class _ServerLostError(Exception):
    """The server's actor is dead, or does not answer."""


class RayRun:
    """One run, as its caller sees it."""

    def __init__(
        self,
        recipe: Recipe,
        given: Given,
        copy: FolderCopy,
        authority: RunAuthority,
        *,
        resume: bool,
        extension: Extension | None,
        demands: Demands,
        loopback: bool,
        on_open: Callable[[str], None],
        on_standing: OnStanding,
    ) -> None:
        self._ray = require_ray()
        self._recipe, self._given, self._copy, self._authority = recipe, given, copy, authority
        self._resume, self._extension, self._demands, self._loopback = resume, extension, demands, loopback
        self._on_open, self._on_standing = on_open, on_standing
        self._stop: str | None = None
        self._failure: RayTrainingError | None = None  # why the run is stopped by us
        self._server: Any = None
        self._polling: tuple[Any, float] | None = None
        self._address: str | None = None
        self._attempts: list[_Attempt] = []
        self._numbers = 0
        self._round, self._failures, self._last_failure = -1, 0, ""
        self._idle_since = time.monotonic()
        self._warned_of_room = False
        self._deaths, self._checkpoint_before = 0, ""
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="paceline-copier")
        self._copying: Future[None] | None = None
        self._copied_at = 0.0
        self._copy_error = ""

    def stop(self, reason: str) -> None:
        """Ask the run to end with a checkpoint."""
        self._stop = self._stop or reason

    def carry_out(self) -> Trained:
        """Start the server, and workers once it listens; return when the run is over."""
        try:
            given = self._put_given()
            while True:
                try:
                    self._start_server(given)
                    self._follow(given)
                    return self._end()
                except _ServerLostError as lost:
                    self._note_lost_server(lost)
        finally:
            self._end_workers(by_themselves=False)
            if self._server is not None:
                self._ray.kill(self._server)
            self._copier.shutdown(wait=True)
            self._copy.close()

    def _put_given(self) -> Any:
        try:
            return self._ray.put(self._given.objects())
        except TypeError as error:
            raise RayTrainingError(
                f"data, model or loss cannot be sent to Ray's nodes: give a function that makes it there ({error})"
            ) from error

    # -- the server ------------------------------------------------------------------------------------------------

    def _start_server(self, given: Any) -> None:
        from paceline.ray.server import ServerActor, ServerJob

        ray, node = self._ray, self._ray.get_runtime_context().get_node_id()
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=True)
        actor = ray.remote(num_cpus=self._demands.server_cpus, max_restarts=0, scheduling_strategy=near)(ServerActor)
        self._server, self._address, self._polling = actor.remote(), None, None
        place = self._placed(self._server.place.remote())
        if place.paceline != __version__:
            raise RayTrainingError(
                f"the node {place.address} has paceline {place.paceline}, and here is {__version__}: install the same"
            )
        goes_on = self._copy.resumable
        if self._resume and not goes_on:
            raise ValueError(f"{self._copy.folder} has no whole checkpoint to resume from")
        if not goes_on:
            self._copy.empty()
        files: dict[str, list[Any]] = {}
        for name, piece in self._copy.pieces() if goes_on else ():
            files.setdefault(name, []).append(ray.put(piece))
        host = "127.0.0.1" if self._loopback else place.address
        job = ServerJob(
            recipe=self._recipe,
            host=host,
            threads=max(1, int(self._demands.server_cpus)),
            resume=goes_on,
            extension=self._extension,
            files=files,
        )
        self._answer(self._server.serve.remote(job, self._authority.server_keys(host), given))

    def _placed(self, reference: Any) -> Any:
        """Wait until the server's actor is on a node."""
        demand, began, warned = {"CPU": self._demands.server_cpus}, time.monotonic(), False
        while True:
            ready, _ = self._ray.wait([reference], timeout=POLL_SECONDS)
            if ready:
                return self._answer(reference)
            waited = time.monotonic() - began
            if self._stop is not None:
                raise KeyboardInterrupt(self._stop)
            if waited > self._limit(demand):
                raise RayResourcesError(
                    f"no node has started the server for {waited:.0f} s: it demands {demand_text(demand)}, and "
                    f"{cluster_text(demand)}"
                )
            if waited > WAITING_SECONDS and not warned:
                warned = True
                log.warning("the server waits for a node: it demands %s; %s", demand_text(demand), cluster_text(demand))

    def _answer(self, reference: Any, seconds: float = SILENT_SECONDS) -> Any:
        """Return an actor's answer; _ServerLostError if it is dead or silent, and what it raised as it was raised."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=seconds)
        except errors.RayTaskError as error:
            raise getattr(error, "cause", None) or error from None
        except errors.GetTimeoutError:
            raise _ServerLostError(f"its actor has not answered for {seconds:g} s") from None
        except errors.RayActorError as error:
            raise _ServerLostError(_first_line(error)) from error

    def _note_lost_server(self, lost: _ServerLostError) -> None:
        """Make ready for another server; RayTrainingError if the last ones got nowhere."""
        self._settle_copy()
        self._end_workers(by_themselves=False)
        with suppress(Exception):
            self._ray.kill(self._server)
        newest = self._copy.checkpoints[-1] if self._copy.checkpoints else ""
        self._deaths = 1 if newest != self._checkpoint_before else self._deaths + 1
        self._checkpoint_before = newest
        if self._deaths >= SERVER_DEATHS:
            raise RayTrainingError(
                f"the server was lost {self._deaths} times without a new checkpoint in between: {lost}"
            ) from lost
        if self._stop is not None:
            raise RayTrainingError(f"the server was lost while the run was being stopped: {lost}") from lost
        where = f"goes on from {newest}" if self._copy.resumable else "begins again"
        log.warning("the server is lost (%s): another one %s", lost, where)

    # -- the run ---------------------------------------------------------------------------------------------------

    def _follow(self, given: Any) -> None:
        """Look after the run until the server says that it is over."""
        self._idle_since = now = time.monotonic()
        self._attempts = [self._attempt(number, now) for number in range(self._recipe.cluster.workers)]
        while True:
            report = self._poll()
            for level, line in report.lines:
                log.log(level, "%s", line)
            if report.status is not None:
                self._on_standing(report.status)
                if report.status.round > self._round:
                    self._round, self._failures = report.status.round, 0
            if report.ended:
                return
            if report.address is not None and self._address is None:
                self._address = report.address
                self._on_open(report.address)
            self._look_after_workers(report.started, given)
            self._copy_when_due()
            time.sleep(POLL_SECONDS)

    def _poll(self) -> Any:
        if self._polling is None:
            self._polling = self._server.poll.remote(self._stop), time.monotonic()
        reference, since = self._polling
        try:
            found = self._answer(reference, max(1.0, SILENT_SECONDS - (time.monotonic() - since)))
        finally:
            self._polling = None
        return found

    # -- workers ---------------------------------------------------------------------------------------------------

    def _attempt(self, worker: int, due: float, pause: float = FIRST_PAUSE_SECONDS) -> _Attempt:
        self._numbers += 1
        return _Attempt(worker=worker, number=self._numbers, due=due, pause=pause)

    def _submit(self, attempt: _Attempt, given: Any) -> None:
        from paceline.ray.worker import work

        recipe, objects = self._recipe, self._given.objects()
        names = {"model": recipe.model.name, "data": recipe.data.name, "loss": recipe.model.loss}
        own = {key: name for key, name in names.items() if is_code(name) and getattr(objects, key) is None}
        options = WorkerOptions(
            model=own.get("model", ""),
            data=own.get("data", ""),
            loss=own.get("loss", ""),
            data_directory=recipe.data.directory,
            delay_file=delay_file(recipe),
            wish=attempt.worker,
            threads=self._demands.worker_threads,
        )
        task = self._ray.remote(
            num_cpus=self._demands.cpus_per_worker,
            resources=dict(self._demands.resources_per_worker) or None,
            max_retries=0,
            max_calls=1,
            scheduling_strategy="SPREAD",
        )(work)
        attempt.reference = task.options(name=f"paceline worker {attempt.worker}").remote(
            attempt.number, self._authority.worker_keys(), options, given, self._server
        )

    def _look_after_workers(self, started: Mapping[int, str], given: Any) -> None:
        """Submit what is due, and again what has ended while the run goes on."""
        if not self._attempts or self._stop is not None:
            return
        now = time.monotonic()
        for attempt in self._attempts:
            if attempt.reference is None and attempt.due <= now:
                self._submit(attempt, given)
            if attempt.number in started and not attempt.started:
                attempt.started = True
                log.info("worker %d runs on %s", attempt.worker, started[attempt.number])
        pending = {attempt.reference: attempt for attempt in self._attempts if attempt.reference is not None}
        if pending:
            ready, _ = self._ray.wait(list(pending), num_returns=len(pending), timeout=0, fetch_local=False)
            for reference in ready:
                self._replace(pending[reference], now)
        self._check_room(now)

    def _replace(self, attempt: _Attempt, now: float) -> None:
        """Note why a worker's task has ended, and let another take its place after a while."""
        errors = self._ray.exceptions
        try:
            self._ray.get(attempt.reference, timeout=SILENT_SECONDS)
            # It was told that the run is over, which the next poll says as well, unless the server is lost just now.
            self._attempts[self._attempts.index(attempt)] = self._attempt(attempt.worker, now + END_SECONDS)
            return
        except errors.NodeDiedError:
            reason, counts = "its node is gone", False
        except errors.RayTaskError as error:
            cause = getattr(error, "cause", None) or error
            reason, counts = f"{type(cause).__name__}: {_first_line(cause)}", True
        except errors.WorkerCrashedError:
            reason, counts = "its process died", True
        except errors.RayError as error:
            reason, counts = _first_line(error), True
        log.warning("worker %d has ended (%s): it is started again", attempt.worker, reason)
        self._failures += counts
        pause = min(2 * attempt.pause, LONGEST_PAUSE_SECONDS) if counts else FIRST_PAUSE_SECONDS
        self._attempts[self._attempts.index(attempt)] = self._attempt(attempt.worker, now + attempt.pause, pause)
        if counts:
            self._last_failure = reason
        if self._failures >= FAILURES_EACH * self._recipe.cluster.workers:
            text = f"workers failed {self._failures} times without a round in between, the last one with {reason}"
            self._give_up(RayTrainingError(text))

    def _check_room(self, now: float) -> None:
        """Say that workers wait for a node, and end the run if not a single one has run for too long."""
        waiting = [attempt for attempt in self._attempts if attempt.reference is not None and not attempt.started]
        if any(attempt.started for attempt in self._attempts) or not waiting:
            self._idle_since = now
        demand = self._demands.of_worker
        if waiting and not self._warned_of_room and now - waiting[0].due > WAITING_SECONDS:
            self._warned_of_room = True
            ever = "" if any(node.holds(demand) for node in living_nodes()) else ", and no node could ever hold one"
            log.warning(
                "%s of %d wait for a node with room: each demands %s%s; %s; a node that joins is given work",
                counted(len(waiting), "worker"),
                len(self._attempts),
                demand_text(demand),
                ever,
                cluster_text(demand),
            )
        elif not waiting:
            self._warned_of_room = False
        if (idle := now - self._idle_since) > self._demands.resources_seconds and idle > self._limit(demand):
            self._give_up(
                RayResourcesError(
                    f"no node has had room for a single worker for {idle:.0f} s: each demands {demand_text(demand)}, "
                    f"and {cluster_text(demand)}; free resources, add nodes, or let a worker demand less "
                    "(cpus_per_worker)"
                )
            )

    def _limit(self, demand: Mapping[str, float]) -> float:
        """Return how long to wait for a process: a node that could hold it may be starting it, which is no want."""
        starting = any(node.holds(demand) for node in living_nodes())
        return self._demands.resources_seconds + (START_SECONDS if starting else 0.0)

    def _give_up(self, error: RayTrainingError) -> None:
        self._failure = self._failure or error
        self.stop(str(error))

    def _end_workers(self, *, by_themselves: bool) -> None:
        """End the workers' tasks: they sign off by themselves, are asked to, or are ended."""
        left = [attempt.reference for attempt in self._attempts if attempt.reference is not None]
        self._attempts = []
        for force in (None, False, True):
            if not left:
                return
            if force is not None:
                for reference in left:
                    with suppress(Exception):  # it has ended meanwhile
                        self._ray.cancel(reference, force=force)
            elif not by_themselves:
                continue
            seconds = END_SECONDS if force is None else END_SECONDS / 3
            _, left = self._ray.wait(left, num_returns=len(left), timeout=seconds, fetch_local=False)

    # -- the folder ------------------------------------------------------------------------------------------------

    def _copy_when_due(self) -> None:
        now = time.monotonic()
        if self._copying is not None and self._copying.done():
            self._settle_copy()
        if self._copying is None and now - self._copied_at >= COPY_SECONDS:
            self._copied_at = now
            self._copying = self._copier.submit(self._follow_folder, self._server)

    def _follow_folder(self, server: Any) -> None:
        self._copy.follow(
            lambda: self._answer(server.listing.remote()),
            lambda name, start, length: self._answer(server.read.remote(name, start, length)),
        )

    def _settle_copy(self) -> None:
        """Wait for the copying that is under way; what a disk does not take is told once."""
        if self._copying is None:
            return
        copying, self._copying = self._copying, None
        try:
            copying.result(RESULT_SECONDS)
            self._copy_error = ""
        except _ServerLostError:
            pass  # the next poll sees it as well
        except (OSError, TimeoutError) as error:
            if not self._copy_error:
                log.error("cannot copy the run to %s: %s; training goes on", self._copy.folder, _first_line(error))
            self._copy_error = _first_line(error)

    def _end(self) -> Trained:
        """Copy what is left, and return what the run came to, or raise what it ended with."""
        self._settle_copy()
        lost: tuple[str, ...] = ()
        try:
            self._follow_folder(self._server)
        except OSError as error:
            lost = (f"the run is not whole in {self._copy.folder}: {_first_line(error)}",)
        try:
            trained: Trained = self._answer(self._server.result.remote(), RESULT_SECONDS)
        except UserCodeError as error:
            if "was not found" not in str(error):
                raise
            sent = (
                "on the nodes of a cluster it is found where Ray sends it: --ray-working-dir . (in Python: runtime_env)"
            )
            raise UserCodeError(f"{error}; {sent}") from None
        self._end_workers(by_themselves=trained.outcome.finished)
        if not lost:
            with suppress(_ServerLostError):
                self._answer(self._server.discard.remote())
        if self._failure is not None and not trained.outcome.finished:
            text = f"{self._failure}; the run in {self._copy.folder} can be gone on with (resume)"
            raise type(self._failure)(text)
        return replace(trained, outcome=_with_lost(trained.outcome, lost), folder=self._copy.folder)


def _with_lost(outcome: RunOutcome, lost: tuple[str, ...]) -> RunOutcome:
    for each in lost:
        log.error("%s", each)
    return replace(outcome, errors=(*outcome.errors, *lost), lost=(*outcome.lost, *lost))


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's text: Ray's have pages.

    >>> _first_line(ValueError("no such data\\nTraceback ..."))
    'no such data'
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
