"""One line in a training script, and every rank writes down where its time goes.

    model = DistributedDataParallel(network)
    watch = paceline.watch(model)               # on every rank
    for inputs, targets in loader: ...          # the loop stays as it is

Each rank has a clock and a file of step times (`traces/step_times.py`); rank 0's folder is a run that
`paceline diagnose` reads. Whatever goes wrong with the measuring, training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import platform
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.distributed import RankGoneError, check_limits, first_line
from paceline.distributed.agreement import current_group
from paceline.distributed.collectives import PendingCollective
from paceline.distributed.groups import never_destroy
from paceline.distributed.stores import StoreGather, meet_ranks, private_store
from paceline.drivers.watching.buckets import BucketTimer, count_buffers_as_wait, time_buckets
from paceline.drivers.watching.folder import Gather, WatchedFolder, WatchError, agree_on_folder
from paceline.drivers.watching.lines import DelayedLines
from paceline.drivers.watching.links import LinkProbe, is_probed
from paceline.drivers.watching.phases import StepPhases
from paceline.drivers.watching.relay import LineReceiver, LineSender
from paceline.loggers import GuardedLog, Log
from paceline.traces.run_folder import check_asked
from paceline.traces.step_clock import PHASES, MeasuredStep, StepClock, clock_of, register_clock
from paceline.traces.step_times import (
    FORMAT,
    LinkTimed,
    Sync,
    TimesBegan,
    TimesEnded,
    TimesWriter,
    times_path,
)

log = logging.getLogger("paceline.watch")

SILENT_SECONDS = 10.0  # of waiting for other ranks, after which that is said
TIMEOUT_SECONDS = 300.0  # in which all ranks must have called watch()
FIRST_PROBE_SECONDS, LATER_PROBE_SECONDS = 30.0, 10.0  # of one message
UNSEEN = (
    "forward and backward passes are not seen, and are in no phase: the script does not call model(x), but a method or "
    "a part of the model"
)
LAST_BUCKETS_SECONDS = 0.5  # for the backend's thread to say that the last step's buckets are done


def watch(
    model: torch.nn.Module,
    *,
    out: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    buckets: bool = True,
    probe_links: bool = True,
    log: Log | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Watch:
    """Write down where the time of every training step goes; call it once, on every rank.

    `model` is what the script calls: a DistributedDataParallel or FSDP model, or any module, also without
    torch.distributed. `out` is the folder of the run, which must be new; without it rank 0 takes the next free
    `runs/watch`. Each rank's times go to `out/times/rank-N.jsonl`. `process_group` are the ranks, unless the model has
    a group or all ranks are meant. Steps end with `optimizer.step()`: of the first optimiser that holds parameters of
    the model and takes a step, or of `optimizer`. With `buckets` the buckets of DDP are timed one by one, in the first
    50 steps and then in every tenth; without, only the wait for all of them is. With `probe_links` the links between
    neighbouring ranks are timed, at once and, under DDP, after 10 steps, 100, 1,000, and every 5,000. `log` is called
    with `figures()` after each step (paceline.loggers). A rank that does not call watch() within `timeout_seconds` is
    named in an error on the others, and so is one that calls it with other options.

    It costs some 0.1 ms of processor time in a step, with `buckets` some 0.3 ms and one more pass over the gradients;
    `make bench ARGS="watch"` measures both.

    >>> import tempfile
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(model, out=tempfile.mkdtemp()) as watching:
    ...     for _ in range(3):
    ...         model(torch.ones(2, 4)).sum().backward()
    ...         optimizer.step()
    >>> watching.steps
    3
    """
    if not isinstance(model, torch.nn.Module):
        raise WatchError(f"watch takes a torch.nn.Module (this is a {type(model).__name__})")
    check_limits(timeout_seconds=timeout_seconds)
    check_asked(out)
    if clock_of(model) is not None:
        raise WatchError("this model is watched already; close() the first watch, or watch another model")
    return Watch(model, out, process_group, optimizer, buckets, probe_links, log, timeout_seconds)


class Watch:
    """What `watch` returns. `folder` is where this rank writes; `close` it, or leave that to the end of the script."""

    def __init__(
        self,
        model: torch.nn.Module,
        out: str | os.PathLike[str] | None,
        process_group: dist.ProcessGroup | None,
        optimizer: torch.optim.Optimizer | None,
        buckets: bool,
        probe_links: bool,
        log: Log | None,
        timeout_seconds: float,
    ) -> None:
        _end_all_left()
        self._log, self._pid, self._closed, self._warned = GuardedLog(log), os.getpid(), False, False
        parallel = _parallel_model(model)
        # The group of an FSDP model may be the one of its shards alone.
        own = parallel.process_group if isinstance(parallel, DistributedDataParallel) else None
        group = current_group(process_group or own)
        _check_initialised(group)
        self._ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        self.rank = self._ranks.index(dist.get_rank()) if group is not None else 0
        key = ""
        with _telling_of_a_wait(self.rank, len(self._ranks)):
            if group is not None and len(self._ranks) > 1:
                key = _store_key(group, self._ranks, _device_of(model), timeout_seconds)
            self._place = agree_on_folder(
                out,
                self.rank,
                _gather(self._ranks, self.rank, key, timeout_seconds),
                options={"probe_links": bool(probe_links), "buckets": bool(buckets)},
                gloo=dist.is_available() and dist.is_gloo_available(),
            )
        self.folder: Path = self._place.folder
        self._totals = dict.fromkeys(("seconds", *(f"{phase}_seconds" for phase in PHASES)), 0.0)
        self.steps = 0
        self._relay = _make_relay(self._place, self.rank, key)
        copy = self._relay.send if isinstance(self._relay, LineSender) else None
        self._writer = TimesWriter(times_path(self.folder, "rank", self.rank), copy=copy)
        self._lines = DelayedLines(self._writer, self._warn)
        self._clock = StepClock(
            self._lines.keep, keep=self._keep, first_step=self._place.first_step, on_sync=self._set_sync
        )
        self._began = TimesBegan(
            format=FORMAT,
            paceline=paceline.__version__,
            noun="rank",
            number=self.rank,
            workers=len(self._ranks),
            host=platform.node(),
            launch=self._place.launch,
            sync=_sync_of(parallel),
            device=_device_of(model).type,
        )
        self._lines.keep(self._began)
        self._lines.flush()  # also if the next lines hang
        self._buckets: BucketTimer | None = None
        notes = []
        if isinstance(parallel, DistributedDataParallel) and not buckets:
            notes.append("no times of buckets: watch() was called with buckets=False")
        elif isinstance(parallel, DistributedDataParallel):
            self._buckets = time_buckets(parallel, self._clock, self._lines.keep)
            if self._buckets is None:
                notes.append("no times of buckets: the model had a communication hook before watch() was called")
        self._end_of_buffers = count_buffers_as_wait(parallel, self._clock)
        if self._began.device != "cpu":
            notes.append(f"host times only: what the {self._began.device} computes later is in the phase that waits")
        self._in_step = isinstance(parallel, DistributedDataParallel)
        self._probe: LinkProbe | None = None
        self._probe_due = False
        if probe_links and len(self._ranks) > 1:
            notes += self._begin_probing(timeout_seconds)
        self._tell(notes)
        models = [model, *([] if parallel is model else [parallel]), *_inner_modules(parallel)]
        for each in models:
            register_clock(each, self._clock)
        self._parallel, self._models = weakref.ref(parallel), [weakref.ref(each) for each in models]
        self._phases = StepPhases(
            model,
            self._clock,
            self._end_step,
            optimizer=optimizer,
            syncs=self._is_synced,
            before_first=self._probe_if_due,
            on_unseen=self._note_unseen,
        )
        _OPEN.add(self)
        self._model_gone = weakref.finalize(model, self._lines.end_with, self._close_without_model)
        self._model_gone.atexit = False
        atexit.register(self._close_at_exit)
        self._clock.skip()

    def __repr__(self) -> str:
        return f"Watch({str(self.folder)!r}, {self.steps:,} steps)"

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close("closed" if kind is None else f"ended by {kind.__name__}")

    @property
    def notes(self) -> tuple[str, ...]:
        """What cannot be seen here, and why, in sentences."""
        return self._began.notes

    def figures(self) -> dict[str, float]:
        """Return what is worth logging by now, of this rank: the steps, and the mean seconds of a step and its phases.

        `lost_lines` are those that a full disk did not take.
        """
        self._lines.flush()
        return self._figures()

    def _figures(self) -> dict[str, float]:
        steps = max(1, self.steps)
        means = {name: seconds / steps for name, seconds in self._totals.items()}
        return {"steps": self.steps, **means, "lost_lines": self._writer.lost}

    def close(self) -> None:
        """Watch no more, and end the file; training goes on as ever. Once more does no harm."""
        self._close("closed")

    # -- one step --------------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        self._clock.end_step()
        done = self._clock.step - self._place.first_step
        if self._log:
            self._log(self._figures(), done)  # lines are written by their own thread
        if self._in_step and is_probed(done):
            self._probe_due = True

    def _keep(self, step: MeasuredStep) -> None:
        self.steps += 1
        self._totals["seconds"] += step.ended - step.started
        for phase in PHASES:
            self._totals[f"{phase}_seconds"] += step.seconds[phase]
        self._lines.keep(step)

    def _warn(self) -> None:
        if self._writer.error and not self._warned:
            self._warned = True
            log.warning("step times are lost, and training goes on: %s", self._writer.error)

    def _note_unseen(self) -> None:
        self._begin_again(notes=(*self._began.notes, UNSEEN))
        log.warning("rank %d: %s", self.rank, UNSEEN)

    def _set_sync(self, sync: Sync) -> None:
        """Note how gradients come together, as a part of the library says it."""
        if sync != self._began.sync:
            self._begin_again(sync=sync)

    def _begin_again(self, **changes: Any) -> None:
        values = {name: getattr(self._began, name) for name in TimesBegan.__dataclass_fields__}
        self._began = TimesBegan(**values | changes)
        self._lines.keep(self._began)

    def _tell(self, notes: list[str]) -> None:
        if notes:
            self._begin_again(notes=tuple(notes))
        if self.rank == 0:
            ranks = "1 rank" if len(self._ranks) == 1 else f"{len(self._ranks)} ranks"
            print("; ".join([f"paceline watches {ranks}: {_shown(self.folder)}", *notes]), file=sys.stderr, flush=True)

    def _is_synced(self) -> bool:
        return bool(getattr(self._parallel(), "require_backward_grad_sync", True))

    # -- links -----------------------------------------------------------------------------------------------------

    def _begin_probing(self, timeout_seconds: float) -> list[str]:
        """Time links for the first time; return what is to be said of it."""
        if self._place.restarted:  # the store holds the addresses of dead processes, and gloo would connect to them
            return ["links are not timed: the launch was restarted"]
        if not self._place.gloo:
            return ["links are not timed: torch was built without gloo on some rank"]
        try:
            self._probe = LinkProbe(self._ranks, group_timeout_seconds=timeout_seconds)
        except RuntimeError as error:
            return [f"links are not timed: {first_line(error)}"]
        failure = self._probe_now(FIRST_PROBE_SECONDS)
        return [failure] if failure else []

    def _probe_if_due(self) -> None:
        """Time links again before the next step's forward pass: there all ranks come, and no optimiser is at work."""
        if not self._probe_due:
            return
        self._probe_due = False
        if self._probe is not None and not _in_join(self._parallel()):
            with self._clock.left_out():
                self._probe_now(LATER_PROBE_SECONDS)

    def _probe_now(self, timeout_seconds: float) -> str:
        """Time links; return why not, if that fails: then it is the last time."""
        if self._probe is None:
            return ""
        links: list[LinkTimed] = self._probe.measure(self._clock.now, timeout_seconds)
        for link in links:
            self._lines.keep(link)
        failure = self._probe.failure
        if failure:
            log.warning("rank %d: %s", self.rank, failure)
            self._end_probing()
        return failure

    def _end_probing(self) -> None:
        if self._probe is not None:
            probe, self._probe = self._probe, None
            probe.close()

    # -- the end ---------------------------------------------------------------------------------------------------

    def _close_at_exit(self) -> None:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        self._close("the script ended" if error is None else f"ended by {type(error).__name__}")

    def _close_without_model(self) -> None:
        """End the file, on the thread that writes lines; the group of the probe is ended by the script's thread."""
        _LEFT.append(self)
        self._end_file("the model was deleted")

    def _close(self, reason: str) -> None:
        if self._pid != os.getpid():
            return
        self._lines.join()  # where the model was deleted, that thread is ending the file
        self._end_file(reason)
        self._end_probing()
        atexit.unregister(self._close_at_exit)

    def _end_file(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        _OPEN.discard(self)
        self._let_go()
        self._clock.flush(within_seconds=LAST_BUCKETS_SECONDS)
        self._lines.keep(TimesEnded(at_seconds=self._clock.now, reason=reason))
        self._lines.close()
        if self._relay is not None:
            self._relay.close()

    def _let_go(self) -> None:
        """Take all hooks off the model."""
        self._model_gone.detach()
        self._phases.close()
        if self._buckets is not None:
            self._buckets.end()
        self._end_of_buffers()
        for reference in self._models:
            if (model := reference()) is not None:
                register_clock(model, None)

    def _forget_in_child(self) -> None:
        """Do nothing any more, in a forked child: the file is the parent's."""
        self._closed = True
        self._lines.forget()
        self._let_go()


_OPEN: weakref.WeakSet[Watch] = weakref.WeakSet()
# Of models that were deleted: a group that ends on a daemon thread aborts the process while the interpreter ends.
_LEFT: list[Watch] = []


def _end_all_left() -> None:
    """End the process groups of models that were deleted, on the script's thread."""
    while _LEFT:
        _LEFT.pop().close()


def _check_initialised(group: dist.ProcessGroup | None) -> None:
    """Refuse a launch of several ranks in which each would watch itself alone."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if group is None and launched != "1":
        raise WatchError(
            f"this launch has {launched} ranks (WORLD_SIZE), and torch.distributed is not initialised: call "
            "init_process_group() before watch()"
        )


@contextlib.contextmanager
def _telling_of_a_wait(rank: int, ranks: int) -> Iterator[None]:
    """Say so, after some seconds, where the other ranks do not come."""
    words = "rank %d waits in watch() for the other %d: every rank of the launch must call it"
    timer = threading.Timer(SILENT_SECONDS, log.warning, (words, rank, ranks - 1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _forget_all_in_child() -> None:
    for each in list(_OPEN):
        each._forget_in_child()
    _OPEN.clear()
    for watching in _LEFT:
        never_destroy(watching)  # its group waits for threads that the child does not have
    _LEFT.clear()


os.register_at_fork(after_in_child=_forget_all_in_child)


def _shown(folder: Path) -> Path:
    """Return a folder as a person would write it: relative to where the script runs, if it is in there."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _parallel_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that torch.compile has wrapped, or the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, torch.nn.Module) else model


def _inner_modules(parallel: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the user's module inside a parallel model: parts of the library are given one or the other."""
    inner = getattr(parallel, "module", None)
    is_wrapper = isinstance(parallel, (DistributedDataParallel, *_sharded_types()))
    return [inner] if is_wrapper and isinstance(inner, torch.nn.Module) else []


def _sharded_types() -> tuple[type, ...]:
    """Return the classes of FSDP's models; none if nobody has loaded it, for it takes long to load."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    found = (getattr(loaded, name, None) for name in ("FullyShardedDataParallel", "FSDPModule"))
    return tuple(each for each in found if each is not None)


def _sync_of(parallel: torch.nn.Module) -> Sync:
    if isinstance(parallel, DistributedDataParallel):
        return "ddp"
    return "fsdp" if isinstance(parallel, _sharded_types()) else "none"


def _device_of(model: torch.nn.Module) -> torch.device:
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def _in_join(parallel: torch.nn.Module | None) -> bool:
    """Whether ranks may be out of data, and so out of step."""
    return bool(getattr(getattr(parallel, "_join_config", None), "enable", False))


def _store_key(group: dist.ProcessGroup, ranks: list[int], device: torch.device, timeout_seconds: float) -> str:
    """Meet the other ranks, and return a name for the keys of one watch in the store, drawn by the first rank.

    It does not come through the store, which may still hold what ranks wrote there before a launch was restarted.
    """
    meet_ranks(ranks, "call watch()", purpose="watch", timeout_seconds=timeout_seconds)
    ours = torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).to(device)
    work = dist.broadcast(ours, src=ranks[0], group=group, async_op=True)
    pending = PendingCollective(work, ours.device)
    pending.wait(timeout_seconds)
    if not pending.done():
        raise RankGoneError(f"rank {dist.get_rank()} waited {timeout_seconds:g} s for rank {ranks[0]} to call watch()")
    pending.check()
    return f"watch/{bytes(ours.tolist()).hex()}"


def _gather(ranks: Sequence[int], rank: int, key: str, timeout_seconds: float) -> Gather:
    if len(ranks) == 1:
        return lambda doing, words: [words]
    gather = StoreGather(private_store(key), rank, len(ranks), timeout_seconds=timeout_seconds, ranks=ranks)
    return lambda doing, words: gather.gather(f"{doing} in watch()", words)


def _make_relay(place: WatchedFolder, rank: int, key: str) -> LineSender | LineReceiver | None:
    """Make the thread that sends lines to rank 0, or that takes them there; None where all see one folder."""
    if not place.remote or (rank != 0 and rank not in place.remote):
        return None
    try:
        store = private_store(f"{key}/lines", own_connection=True)
    except (RuntimeError, AttributeError) as error:
        log.warning("the times of ranks that do not see %s stay there: %s", place.shared, first_line(error))
        return None
    return LineReceiver(store, place.remote, place.shared) if rank == 0 else LineSender(store, rank)
