"""A recorded run of workers that averaged among themselves, computed again in one process.

The window that a worker brings to an average is all there is to know of its order of completions: how many steps it had
taken, after how many of them it merged the average before, and whether it trained on. An `AveragingState` that gets the
same events must give the same orders; then the same steps on the same batches give the same model.

    recorded      average 0: steps 3   average 1: steps 4, merged after 4   average 2: steps 2, merged after 1
    replayed      # # # Begin(0)       # # # # Averaged(0) Begin(1)         # Averaged(1) # Begin(2)

Two ranks add up to the same bits in any order. More may differ by a rounding where a ring adds up what travels (plan
all-reduce); where payloads are decoded first (gather, two-step) every rank adds up in the order of the ranks, and so it
is here, with all that owners of shards hold back.

Where a worker was asked to settle, flush or leave at the very step boundary at which it merged, with fewer steps open
than a period, the record does not say which came first; here the merge does. It makes a difference of a rounding, and
only for members that overlap and have a period of 2 or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.drivers.replayed.served_run import ReplayError
from paceline.events import Asked, Averaged, Begin, Merge, Order, Standing, Stepped, Window
from paceline.strategies.averaging import Averaging, AveragingState
from paceline.training import Training
from paceline.training.averaging_workers import AveragingWorkers


def replay_averages(
    averages: Sequence[Sequence[Window]],
    training: Training,
    member: Averaging,
    *,
    on_average: Callable[[int, int], None] = lambda done, averages: None,
) -> AveragingWorkers:
    """Compute recorded averages again, and return all workers as they are after them.

    `on_average` is called after each with how many are done, and with the number of all. ReplayError names the average
    and the worker that do not fit.

    >>> replay_averages([(Window(), Window()), (Window(),)], training=None, member=None)
    Traceback (most recent call last):
    paceline.drivers.replayed.served_run.ReplayError: average 1 has 1 windows, and there are 2 workers
    """
    if not averages:
        raise ReplayError("there is no average to replay")
    everybody = len(averages[0])
    for number, windows in enumerate(averages):
        if len(windows) != everybody:
            raise ReplayError(f"average {number} has {len(windows)} windows, and there are {everybody} workers")
    workers = AveragingWorkers(training, member, workers=everybody)
    replayed = [_ReplayedWorker(workers, AveragingState(member, everybody), worker) for worker in range(everybody)]
    for number, windows in enumerate(averages):
        for worker, each in enumerate(replayed):
            try:
                each.enter(number, windows[worker])
            except ValueError as error:
                raise ReplayError(f"average {number}, worker {worker}: {error}") from error
        workers.add_up(number, windows)
        for each in replayed:
            each.under_way = Averaged(number=number, windows=tuple(windows))
        on_average(number + 1, len(averages))
    for each in replayed:
        each.merge()
    return workers


class _ReplayedWorker:
    """One worker: an averaging state that gets the events of the record."""

    def __init__(self, workers: AveragingWorkers, state: AveragingState, worker: int) -> None:
        self._workers, self._state, self._worker = workers, state, worker
        self._draws = 0
        self._begun: Begin | None = None
        self.under_way: Averaged | None = None

    def enter(self, number: int, window: Window) -> None:
        """Train until average `number` is entered, and see that it is entered as recorded."""
        if self.under_way is not None:
            self._train(window, until=window.merged_after)
            period = self._state.member.period or 0
            if self._state.member.overlap and window.merged_after == window.steps >= period:
                self._ask(window.standing)  # else the merge would have begun the next average as one that trains on
            self.merge()
            self._state.finished = False  # all had left, and the run was extended: it went on from its last checkpoint
        if self._begun is None:
            self._train(window, until=window.steps)
        if self._begun is None:
            self._ask(window.standing)
        if self._begun is None:
            raise ValueError(f"recorded with {window.steps} steps, and by its state it takes more before it enters")
        if (self._begun.number, self._begun.window) != (number, window):
            raise ValueError(
                f"recorded as {window}, and by its state it enters average {self._begun.number} as {self._begun.window}"
            )
        self._begun = None

    def merge(self) -> None:
        """Take in the average that is under way."""
        if self.under_way is not None:
            done, self.under_way = self.under_way, None
            self._carry_out(self._state.handle(done))
            if self._state.standing is Standing.TRAINING:  # else it waits for the next average, and moves after that
                self._workers.settle(self._worker)

    def _train(self, window: Window, *, until: int) -> None:
        while self._state.open_steps < until:
            self._workers.compute(self._worker, self._draws)
            self._draws += 1
            self._carry_out(self._state.handle(Stepped()))
            if self._begun is not None:
                break
            self._workers.settle(self._worker)
        begun = self._begun
        if begun is not None and begun.window.steps < until:
            raise ValueError(
                f"recorded with {window.steps} steps, and by its state it enters with {begun.window.steps}"
            )

    def _ask(self, standing: Standing) -> None:
        if standing is not Standing.TRAINING and self._state.standing is Standing.TRAINING:
            self._carry_out(self._state.handle(Asked(standing=standing)))

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Begin():
                    self._begun = order
                    self._workers.enter(self._worker, order)
                case Merge():
                    self._workers.merge(self._worker, order)
