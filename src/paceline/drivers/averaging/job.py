"""What a rank of a recipe does that averages: its own batches and optimiser, averages with the others.

    step ── averaging (hooked into the optimiser's step) ──> merged: all ranks read the same counts in the same average
                                                               ├─ evaluation: rank 0 measures the shared model
                                                               ├─ checkpoint: all settle, each keeps its own state
                                                               └─ the end:    all leave

Flush, checkpoint and end are not decided by one rank: a rank says in its next average what it is about, and all read
the same words in the same average. So there is no barrier, each rank takes any number of steps, and nobody is alone in
a collective.

What is due follows from the steps that all workers have brought to the averages, so all ranks come to it after the same
average, whatever their speed. `rounds` x ranks local steps are a run. Where training waits for averages every rank
takes `rounds` of them; where it does not, fast ranks take more than slow ones, and the run is over after the average
that takes the merged steps to the sum.
"""

from __future__ import annotations

import copy
import math
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.decoding import Count, decode
from paceline.distributed.collectives import gather_vector
from paceline.distributed.stores import StoreGather
from paceline.drivers.averaging.averager import Averager
from paceline.drivers.averaging.loop import MergedAverage
from paceline.drivers.ranks.run import OnStanding, RankJob, RankRun, RunRecorder
from paceline.drivers.ranks.times import RankTimes
from paceline.events import Standing, Window
from paceline.optim import make_optimizer
from paceline.strategies.averaging import Averaging
from paceline.traces import Trace
from paceline.traces.worker_counts import WorkerCounts
from paceline.training import Measurement, measure
from paceline.training.replica import local_gradient
from paceline.training.saved_state import check_model, check_tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AveragingJob(RankJob):
    """The settings of a run of ranks that average: those of a RankJob, and the averaging strategy (`member`)."""

    member: Averaging
    silence_seconds: float = 15.0


class AveragingRecorder(RunRecorder):
    """The windows and times of an averaging run.

    Windows are in every average's headers, so each rank knows all of them; times are gathered at the end. All ranks
    have been in the same averages, so what each gathers has the same size. Words are gathered through the store first,
    for a collective that waits does not say for whom. `brought` counts the steps of each worker in all averages.

    >>> recorder = AveragingRecorder(2)
    >>> recorder.start_clock(100.0)
    >>> recorder.seconds(101.5)
    1.5
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._windows, self._moments = array("q"), array("d")  # moments of time.perf_counter() in this process
        self._earlier_times = torch.empty((0, 3), dtype=torch.float64)
        self.brought = [0] * workers
        self.sent_bytes = 0

    def add(self, average: MergedAverage) -> None:
        """Record an average that was merged."""
        self.brought = [before + window.brought for before, window in zip(self.brought, average.windows, strict=True)]
        if self.has_room:
            for window in average.windows:
                self._windows.extend((window.steps, window.merged_after, int(window.standing)))
            self._moments.extend((average.started, average.begun, average.done))
        self.recorded += 1

    def window_rows(self) -> torch.Tensor:
        """Return the windows: averages x workers x (steps, merged_after, standing)."""
        return _tensor_of(self._windows, torch.int64).reshape(-1, self.workers, 3)

    def windows(self) -> list[tuple[Window, ...]]:
        return windows_from(self.window_rows())

    def times(self) -> torch.Tensor:
        moments = _tensor_of(self._moments, torch.float64).reshape(-1, 3)
        return torch.cat([self._earlier_times, moments - self._zero])

    def state_dict(self, now: float) -> dict[str, Any]:
        return super().state_dict(now) | {"windows": self.window_rows(), "brought": list(self.brought)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        windows, times = state["windows"], state["times"]
        averages = len(times) if isinstance(times, torch.Tensor) and times.ndim else 0
        check_tensor("times", times, self._earlier_times.new_empty((averages, 3)))
        check_tensor("windows", windows, torch.empty((averages, self.workers, 3), dtype=torch.int64))
        found = windows_from(windows)  # raises for one that cannot be
        sums = [sum(average[worker].brought for average in found) for worker in range(self.workers)]
        self.brought = list(decode(tuple[Count, ...], state.get("brought", sums), "brought"))
        if len(self.brought) != self.workers:
            raise ValueError(f"brought must have {self.workers} numbers, not {len(self.brought)}")
        self._windows = array("q", windows.reshape(-1).tolist())
        self._earlier_times, self._moments = times, array("d")

    def gather(self, ranks: StoreGather, *, sent_bytes: int) -> None:
        """Bring all ranks' times and bytes together. All ranks must come here."""
        ours = self.times()
        words = ranks.gather("tell its times", {"averages": len(ours), "sent_bytes": sent_bytes})
        averages = {rank: each["averages"] for rank, each in enumerate(words)}
        if set(averages.values()) != {len(ours)}:
            raise RuntimeError(f"the ranks have been in different numbers of averages: {averages}")
        self.every_time = gather_vector(ours.reshape(-1), ranks).reshape(self.workers, -1, 3).transpose(0, 1)
        self.sent_bytes = sum(each["sent_bytes"] for each in words)


def _tensor_of(numbers: array[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(numbers, dtype=dtype).clone() if numbers else torch.empty(0, dtype=dtype)


def windows_from(rows: torch.Tensor) -> list[tuple[Window, ...]]:
    """Return the windows of every average, from averages x workers x (steps, merged_after, standing).

    >>> windows_from(torch.tensor([[[3, 1, 0], [2, 0, 2]]]))[0][1].standing.name
    'FLUSHING'
    """
    return [
        tuple(Window(steps=steps, merged_after=after, standing=Standing(at)) for steps, after, at in average)
        for average in rows.tolist()
    ]


def worker_counts(steps: Sequence[int], times: torch.Tensor, batch_samples: int) -> tuple[WorkerCounts, ...]:
    """Return how many steps of each worker are in averages, and how long it waited for the others to enter them.

    `steps` are those of each worker; `times` are averages x workers x (started its steps, entered the average, average
    done). A worker that trains on begins its next steps before the others are there, and waits for nobody.

    >>> times = torch.tensor([[[0.0, 1.0, 2.5], [0.0, 2.0, 2.5]], [[2.5, 3.0, 4.0], [2.5, 3.5, 4.0]]])
    >>> [counts.waited_seconds for counts in worker_counts([2, 2], times, 32)]
    [1.5, 0.0]
    """
    if not len(times):
        return ()
    entered = times[:, :, 1]
    last = entered.max(dim=1, keepdim=True).values.expand_as(entered)
    nexts = torch.cat([times[1:, :, 0], torch.full_like(times[:1, :, 0], math.inf)])
    waited = (torch.minimum(last, nexts) - entered).clamp(min=0).sum(dim=0).tolist()
    return tuple(
        WorkerCounts(worker=worker, used=used, samples_used=used * batch_samples, waited_seconds=waited[worker])
        for worker, used in enumerate(steps)
    )


class AveragingRun(RankRun):
    """One rank's side of an averaging run; needs an initialised process group."""

    job: AveragingJob
    recorder: AveragingRecorder
    times: RankTimes

    def __init__(
        self, job: AveragingJob, ranks: StoreGather, *, on_standing: OnStanding = lambda standing: None
    ) -> None:
        super().__init__(job, ranks, on_standing=on_standing)
        self._module, self._draws, self._sent_bytes = job.training.module, 0, 0
        self._window = 0  # the number of the average to which the last step is brought
        self.optimizer, self.schedule = make_optimizer(
            job.training.optimizer, self._module.parameters(), total_steps=job.rounds
        )
        self._sync = Averager(
            self._module,
            self.optimizer,
            job.member,
            codec=job.training.codec,
            plan=job.training.plan,
            seed=job.training.seed,
            silence_seconds=job.silence_seconds,
            timeout_seconds=job.timeout_seconds,
            on_average=self._record,
        )
        self.recorder = AveragingRecorder(ranks.world)
        self._is_over = False
        self.times = RankTimes(self._module, ranks, job.folder, sync="averaging")

    def _record(self, average: MergedAverage) -> None:
        if not self._is_over:
            self.recorder.add(average)

    def connected(self) -> Averager:
        return self._sync

    @property
    def rounds_done(self) -> int:
        world = self.ranks.world
        return self._draws if self.job.member.alone(world) else self._sync.merged_steps // world

    @property
    def over(self) -> bool:
        own_steps = self.job.member.counts_own_steps(self.ranks.world)
        return (self._draws if own_steps else self.rounds_done) >= self.job.rounds

    def begin_together(self) -> None:
        # A flush would do, but a run that goes on may have open windows, and a flush closes them.
        self._sync.gather_numbers([self.rounds_done])

    def step(self) -> None:
        began, rank = time.perf_counter(), self.ranks.rank
        with self.times.computing():
            local_gradient(self._module, self.batches, worker=rank, draw=self._draws)
            self.wait_for_delay(began, rank, self._draws)
        self._draws += 1
        self._window = self._sync.averages_begun  # a step is in the window that is open when the step is taken
        with self.times.phase("optimiser"):
            self.optimizer.step()

    def end(self, *, was_over: bool) -> None:
        sent_bytes = self._sync.sent_bytes
        self._is_over = was_over  # what the ranks send each other only to end again is no part of the run
        self._sync.close()
        self._sent_bytes = sent_bytes if was_over else self._sync.sent_bytes

    def measure_model(self) -> Measurement | None:
        if self.ranks.rank != 0:
            return None
        training, module = self.job.training, copy.deepcopy(self._module)
        if self.job.member.period is not None:
            module.load_state_dict(self._sync.shared, strict=False)
        return measure(module, training)

    def state(self) -> dict[str, Any]:
        sync = self._sync.state_dict()  # before the model's: all ranks come to the same average here
        return {
            "model": dict(self._module.state_dict()),
            "sync": sync,
            "draws": self._draws,
            "pruning": self.batches.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        check_model("model", state["model"], self._module.state_dict())
        self._module.load_state_dict(state["model"])
        self._sync.load_state_dict(state["sync"])
        self._draws = decode(Count, state["draws"], "draws")
        self.batches.load_state_dict(state.get("pruning", {}))  # older runs kept none

    @property
    def steps_taken(self) -> int:
        return self._draws

    @property
    def step_version(self) -> int | None:
        return self._window

    def figures(self) -> dict[str, float]:
        return {"ranks": self.ranks.world} | self._sync.figures()

    def gather_times(self) -> None:
        self.recorder.gather(self.ranks, sent_bytes=self._sent_bytes)

    def trace(self, **about: Any) -> Trace | None:
        if self.ranks.rank != 0:
            return None
        used = self._draws if self.ranks.world == 1 else self._sync.merged_steps
        recorder = self.recorder
        return recorder.trace(
            strategy=self.job.member.name,
            used=used,
            sent_bytes=recorder.sent_bytes,
            by_worker=worker_counts(recorder.brought, recorder.every_time, self.job.training.batch_size),
            **about,
        )

    @property
    def module(self) -> torch.nn.Module:
        """This rank's model."""
        return self._module

    @property
    def parameters(self) -> torch.Tensor:
        """This rank's parameters in one vector; after the end, those of all ranks."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self._module.parameters()])
