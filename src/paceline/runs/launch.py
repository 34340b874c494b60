"""Ranks that train a recipe: this process is one of them in a launch, or forks all of them here and waits.

in a launch (torchrun)    this process is a rank; rank 0 has the result
else, this process        makes what is trained, so that it refuses before anything is started; forks the ranks

    rank 0 ── where the run stands, the plan of a pipeline, its log, its result or error ──> this process
    rank 1 ── what it logs and prints ──> folder/rank-1.log
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.distributed import RankGoneError
from paceline.drivers.ranks import launch
from paceline.errors import PacelineError, in_a_line, raised_in
from paceline.processes import check_processes
from paceline.quantities import counted
from paceline.recipes.assembly import (
    NOTHING_GIVEN,
    Given,
    going_on,
    load_data,
    make_training,
    refuse_late_blocks,
    resolved,
)
from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import Trained, folder_to_train
from paceline.runs.ranks import RECIPE, by_ranks, read_recipe_of, rounds_to_train, train_rank
from paceline.runs.simulation import Result, give_notices
from paceline.traces.run_folder import check_free
from paceline.traces.run_settings import difference

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from paceline.drivers.ranks.launch import Place
    from paceline.pipeline.plan import Plan
    from paceline.traces.run_status import RunStatus
    from paceline.training import Training

STANDING, PLAN, LOGGED, RESULT, FAILED = "standing", "plan", "logged", "result", "failed"
LOG = logging.getLogger("paceline")
STANDING_SECONDS = 0.1  # the least time between two messages that say where the run stands


class RankError(PacelineError, RuntimeError):
    """An error of a rank that cannot leave its process as it is, in the words of it.

    >>> raise RankError("ZeroDivisionError: division by zero")
    Traceback (most recent call last):
    paceline.runs.launch.RankError: ZeroDivisionError: division by zero
    """


def launched_place(recipe: Recipe) -> Place | None:
    """Return this process's place in a launch, or None; ValueError if the recipe is nothing for ranks."""
    place = launch.place_in(os.environ)
    if place is not None and not by_ranks(recipe):
        raise ValueError(
            f"{recipe.strategy.name} has a server, and starts its workers itself: run it without torchrun, or use "
            "`paceline serve` and `paceline work`; with --on ranks full, fastest-k and lgc run under torchrun, and "
            "hpsgd, its family and pipelines do"
        )
    return place


@dataclass(frozen=True, kw_only=True)
class RanksToTrain:
    """What ranks are asked to do: a recipe, and the run's folder, which is free or is gone on with."""

    recipe: Recipe
    out: str | Path | None
    resume: bool
    extension: Extension | None = None
    given: Given = NOTHING_GIVEN


def train_ranks(
    wanted: RanksToTrain,
    place: Place | None,
    *,
    on_standing: Callable[[RunStatus], None],
    on_plan: Callable[[Plan], None],
) -> Trained:
    """Be a rank, or start the ranks and wait for them."""
    recipe = for_world(wanted.recipe, place)
    refuse_late_blocks(recipe)
    if place is not None and place.rank == 0 and not recipe.pipeline.on and recipe != wanted.recipe:
        LOG.warning(
            "%s were launched, so there are as many workers, not the %d of the recipe",
            counted(place.world, "rank"),
            wanted.recipe.cluster.workers,
        )
    if place is not None and wanted.out is None:
        raise ValueError("under torchrun, give --out (out=): all ranks, and those of a restart, must find one folder")
    rounds, dataset = None, load_data(recipe, wanted.given)
    if not wanted.resume:
        if place is not None and (begun := Path(str(wanted.out)) / RECIPE).is_file():  # this launch, started again
            recipe = going_on(recipe, read_recipe_of(begun.parent))
        recipe = resolved(recipe, dataset)
    else:
        folder = folder_to_train(wanted.out, resume=True)
        stored = read_recipe_of(folder)
        rounds = rounds_to_train(folder, stored, wanted.extension)
        recipe = going_on(recipe, stored)
        # A stored recipe goes on as it is: it was resolved when its run began, or is of an older version.
        recipe = resolved(recipe, dataset) if difference(stored.to_document(), recipe.to_document()) else recipe
    if place is not None:
        folder = Path(str(wanted.out))
        # Whether a folder that holds a run belongs to this launch, started again, is known when its ranks have met.
        if not wanted.resume and not any(folder.glob("rank-*/launch")):
            check_free(folder)
        training = make_training(recipe, dataset, wanted.given)
        if not wanted.resume and place.rank == 0:
            give_notices((wanted.recipe, recipe))
        job = _RankWork(recipe=recipe, folder=folder, resume=wanted.resume, rounds=rounds, training=training)
        return _trained(job.train(place, on_standing=on_standing, on_plan=on_plan), folder)
    world = recipe.pipeline.ranks if recipe.pipeline.on else recipe.cluster.workers
    check_processes(world)
    training = make_training(recipe, dataset, wanted.given)
    if not wanted.resume:
        give_notices((wanted.recipe, recipe))
    folder = folder_to_train(wanted.out, resume=wanted.resume)
    job = _RankWork(recipe=recipe, folder=folder, resume=wanted.resume, rounds=rounds, training=training)
    return _trained(_fork(job, world, on_standing=on_standing, on_plan=on_plan), folder)


def for_world(recipe: Recipe, place: Place | None) -> Recipe:
    """Return the recipe with the launch's number of ranks; without a launch, with its own.

    >>> for_world(Recipe().with_strategy("hpsgd"), launch.Place(rank=0, world=4)).cluster.workers
    4
    """
    if recipe.pipeline.on:
        from paceline.runs.pipelines import for_ranks

        return for_ranks(recipe, None if place is None else place.world)
    if place is None or recipe.cluster.workers == place.world:
        return recipe
    return recipe.with_settings(cluster={"workers": place.world})


def _trained(result: Result | None, folder: Path) -> Trained:
    from paceline.drivers.served.run import RunOutcome

    diverged = result is not None and result.trace.diverged
    reason = "diverged" if diverged else "all rounds are done"
    outcome = RunOutcome(reason=reason, finished=True, diverged=diverged, errors=())
    return Trained(outcome=outcome, result=result, folder=folder)


@dataclass(frozen=True, kw_only=True)
class _RankWork:
    """The work of each rank of a run."""

    recipe: Recipe
    folder: Path
    resume: bool
    rounds: int | None
    training: Training | None = None

    def train(
        self, place: Place, *, on_standing: Callable[[RunStatus], None], on_plan: Callable[[Plan], None]
    ) -> Result | None:
        """Train as a rank; rank 0 returns the result."""
        how: dict[str, Any] = {
            "folder": self.folder,
            "resume": self.resume,
            "rounds": self.rounds,
            "training": self.training,
            "on_standing": on_standing,
        }
        if self.recipe.pipeline.on:
            from paceline.runs.pipelines import train_stage

            return train_stage(self.recipe, place, **how, on_plan=on_plan)
        return train_rank(self.recipe, place, **how)


# -- ranks that are forked here ----------------------------------------------------------------------------------------


def _fork(
    work: _RankWork,
    world: int,
    *,
    on_standing: Callable[[RunStatus], None],
    on_plan: Callable[[Plan], None],
) -> Result:
    """Fork the ranks, call back what rank 0 sends until all have ended, and return the result."""
    _load_driver(work.recipe)
    received: dict[str, Any] = {}
    callbacks: dict[str, Callable[[Any], None]] = {STANDING: on_standing, PLAN: on_plan, LOGGED: LOG.handle}
    receiving, sending = multiprocessing.Pipe(duplex=False)

    def receive(seconds: float) -> bool:
        """Wait for a message for so long, and return whether there was one."""
        try:
            if not receiving.poll(seconds):
                return False
            kind, value = pickle.loads(receiving.recv_bytes())  # noqa: S301 - our own child's, over a pipe
        except (EOFError, OSError):  # rank 0 has ended, perhaps in the middle of a message
            time.sleep(seconds)
            return False
        if kind in callbacks:
            callbacks[kind](value)
        else:
            received[kind] = value
        return True

    with receiving:
        ranks = launch.LocalRanks(lambda place: _run_rank(work, place, sending), world, logs=work.folder)
        sending.close()
        gone = None
        try:
            code = ranks.wait(pause=receive)
        except RankGoneError as error:
            gone = error
        while receive(0.0):
            pass
    failed: Exception | None = received.get(FAILED)
    if gone is not None:
        raise gone if failed is None else RankGoneError(f"{gone} (rank 0: {failed})")
    if failed is not None:
        raise failed
    if code or RESULT not in received:
        raise RankGoneError(f"rank 0 ended with code {code}")
    result: Result = received[RESULT]
    return result


def _load_driver(recipe: Recipe) -> None:
    """Import what the ranks need once, before they fork; torch's first optimiser loads four seconds' worth."""
    import torch

    torch.optim.SGD([torch.zeros(1)])
    if recipe.pipeline.on:
        import paceline.drivers.pipelining.job
        import paceline.drivers.pipelining.planning
    elif recipe.strategy.rounds_on_ranks:
        import paceline.drivers.rounds.job
    else:
        import paceline.drivers.averaging.job  # noqa: F401


def _run_rank(work: _RankWork, place: Place, pipe: Connection) -> int:
    """Train as a rank that was forked, and return the exit code."""
    if place.rank:
        pipe.close()
    last, lock = -STANDING_SECONDS, threading.Lock()

    def send(kind: str, value: object) -> None:
        if not place.rank:
            with lock:  # Not pipe.send: torch would put tensors into shared memory, which ends with this process.
                pipe.send_bytes(pickle.dumps((kind, value)))

    def stands(status: RunStatus) -> None:
        nonlocal last
        if status.round >= status.rounds or time.monotonic() - last >= STANDING_SECONDS:
            last = time.monotonic()
            send(STANDING, status)

    # The handlers are those of who forked: a live view, which two processes cannot draw.
    LOG.handlers, LOG.propagate = [logging.StreamHandler() if place.rank else _Sent(send)], False
    try:
        send(RESULT, work.train(place, on_standing=stands, on_plan=lambda plan: send(PLAN, plan)))
    except Exception as error:
        if place.rank:
            traceback.print_exc()
            print(in_a_line(error), file=sys.stderr)  # the last line is what is told of this rank
        else:
            send(FAILED, _portable(error))
        return 1
    return 0


class _Sent(logging.handlers.QueueHandler):
    """Sends what rank 0 logs to the process that forked it."""

    def __init__(self, send: Callable[[str, object], None]) -> None:
        super().__init__(queue=None)  # type: ignore[arg-type]
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        self._send(LOGGED, record)


def _portable(error: Exception) -> Exception:
    """Return an error that another process can raise, with where it was raised here as a note.

    >>> _portable(ZeroDivisionError("division by zero"))
    ZeroDivisionError('division by zero')
    """
    where = "".join(traceback.format_exception(error))
    found: Exception = RankError(f"{type(error).__name__}: {error}")
    for kind in (ValueError, OSError):
        if isinstance(error, kind):
            found = kind(str(error))
    with contextlib.suppress(Exception):
        copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - it was an object here
        if type(copied) is type(error) and str(copied) == str(error):
            found = copied
    vars(found)["raised_in"] = raised_in(error)
    found.add_note(f"on rank 0:\n{where}")
    return found
