"""Step times of a rank of a recipe: where the rank's time went, in the folder to which it writes its checkpoints.

    |  input  | forward |    backward    | other |  wait   | optimiser |       other        |      rounds: a batch
    |  input  | forward |    backward    |  optimiser .. wait .. merged  |      other        |      averaging: a step
                         an injected delay is in it                       evaluation, checkpoint, what is shown

A step of a rank in rounds is one batch of its own, whatever became of it: the journal's `draw` has the same number.
`version` is that of the model at which it was computed, and `wait` is until the round of that version had closed and
its sum was there. A step of a rank that averages is one step of its optimiser, `version` is the number of the average
in whose window it is (the averages that the rank had begun before it), and `wait` is for averages. For a
checkpoint ranks wait for each other as well, and that is `wait` too: whoever waits tells the clock
(`traces/step_clock.py`). `started_seconds` are on the rank's own clock of the run, which starts when all are ready.

A bucket is one sum: in rounds that of each update applied in the step, ready when this rank entered the sum, which
waits for nobody's computing; in averaging that of an average which was begun and merged in the same step. BucketsMade
has the bytes of the parameters; with a codec fewer are sent, as the trace says.

Ranks on several machines may each have a folder of their own. When a run ends, rank 0 looks which files it does not
have, and gets those from their ranks; after a run that was killed they are where they were written.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from paceline import __version__
from paceline.distributed import RankGoneError, first_line
from paceline.distributed.collectives import PendingCollective
from paceline.distributed.stores import StoreGather
from paceline.errors import PacelineError
from paceline.files import read_plain, write_file
from paceline.processes import seen_from
from paceline.traces.phase_hooks import PhaseHooks
from paceline.traces.step_clock import Phase, StepClock, in_phase, register_clock
from paceline.traces.step_times import (
    FORMAT,
    BucketsMade,
    StepTimes,
    Sync,
    TimesBegan,
    TimesEnded,
    TimesWriter,
    times_path,
)

log = logging.getLogger("paceline.ranks")

MOST_SHARED_BYTES = 32 * 2**20  # of one rank's file


class RankTimes:
    """Measures the steps of one rank and writes them; as a context manager it ends with the run, however that ends.

    Nothing is written before `begin`. A disk that refuses is told in the log once, and training goes on.
    """

    def __init__(self, module: nn.Module, ranks: StoreGather, folder: Path, *, sync: Sync) -> None:
        self._module, self._ranks, self._folder, self._sync = module, ranks, folder, sync
        self._path = times_path(folder, "rank", ranks.rank)
        self._writer: TimesWriter | None = None
        self._clock: StepClock | None = None
        self._hooks = PhaseHooks(None, None)
        self._offset_seconds = 0.0
        self._refused = False

    def __enter__(self) -> RankTimes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close("the run ended" if error is None else f"{kind.__name__ if kind else ''}: {first_line(error)}"[:500])

    def begin(self, *, step: int, seconds: float) -> None:
        """Begin the file, or go on with it, with a step that starts now, `seconds` after the run began."""
        self._writer = TimesWriter(self._path)
        self._writer.write(
            TimesBegan(
                format=FORMAT,
                paceline=__version__,
                noun="rank",
                number=self._ranks.rank,
                workers=self._ranks.world,
                host=platform.node()[:200],
                launch=self._ranks.launch,
                seen_from=seen_from(),
                sync=self._sync,
                device=next((parameter.device.type for parameter in self._module.parameters()), "cpu"),
            )
        )
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        total = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        self._writer.write(BucketsMade(step=step, bytes=(total,)))
        self._offset_seconds = seconds
        self._clock = StepClock(self._write, first_step=step, clock=time.perf_counter)
        self._hooks = PhaseHooks(self._module, self._clock)
        register_clock(self._module, self._clock)

    @contextmanager
    def computing(self, begins: Phase = "input") -> Iterator[None]:
        """Count what happens inside as `begins` until the model's forward pass, then as forward and backward."""
        if self._clock is not None:
            self._clock.enter(begins)
        self._hooks.attach()
        try:
            yield
        finally:
            self._hooks.detach()
            if self._clock is not None:
                self._clock.enter("other")

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Count what happens inside as a phase."""
        return in_phase(self._module, phase)

    def end_step(self, *, version: int | None = None) -> None:
        """End the step, and begin the next."""
        if self._clock is not None:
            self._clock.end_step(version=version)

    def end(self, reason: str) -> None:
        """End the file, and let rank 0 have those that it cannot see. All ranks must come here."""
        self._close(reason)
        try:
            self._share()
        except (
            PacelineError,
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # the run is over: only what tells of it is not whole
            log.warning("rank %d: step times were not brought together: %s", self._ranks.rank, first_line(error))

    def _write(self, times: StepTimes) -> None:
        if self._writer is None:
            return
        self._writer.write(replace(times, started_seconds=times.started_seconds + self._offset_seconds))
        if self._writer.error and not self._refused:
            self._refused = True
            log.error("%s; training goes on, and its step times are not whole", self._writer.error)

    def _close(self, reason: str) -> None:
        if self._writer is None or self._clock is None:
            return
        register_clock(self._module, None)
        self._hooks.detach()
        self._writer.write(TimesEnded(at_seconds=self._clock.now + self._offset_seconds, reason=reason))
        self._writer.close()
        self._writer = self._clock = None

    # -- ranks on several machines -------------------------------------------------------------------------------------

    def _share(self) -> None:
        ranks = self._ranks
        if ranks.world == 1:
            return
        ours = _size(self._path)
        sizes = [int(size) for size in ranks.gather("tell the size of its step times", ours)]
        paths = [times_path(self._folder, "rank", rank) for rank in range(ranks.world)]
        lacking = [
            rank for rank, size in enumerate(sizes) if 0 < size <= MOST_SHARED_BYTES and size != _size(paths[rank])
        ]
        for rank in ranks.gather("tell which step times it lacks", lacking)[0]:
            text = self._broadcast(rank, sizes[rank])
            if ranks.rank == 0:
                paths[rank].parent.mkdir(parents=True, exist_ok=True)
                write_file(paths[rank], text)

    def _broadcast(self, rank: int, size: int) -> bytes:
        vector = torch.zeros(size, dtype=torch.uint8)
        if self._ranks.rank == rank:
            text = read_plain(self._path, most_bytes=MOST_SHARED_BYTES)[:size]
            vector[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        try:
            pending = PendingCollective(dist.broadcast(vector, src=rank, async_op=True), vector.device)
            pending.wait(self._ranks.timeout_seconds)
            if not pending.done():
                raise RankGoneError(f"the step times of rank {rank} have not come in {self._ranks.timeout_seconds:g} s")
            pending.check()
        except RankGoneError:
            raise
        except RuntimeError as error:
            raise RankGoneError(f"the step times of rank {rank} were lost: {first_line(error)}") from error
        return vector.numpy().tobytes()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
