"""A recorded run of workers that averaged among themselves, played again in one process.

What a worker says of itself in an average is all there is to know of its order of completions: how many steps it had
taken, after how many of them it merged the average before, and what it was about. Its course, told the same, must order
the same; then the same steps on the same batches give the same model.

    recorded      average 0: steps 3   average 1: steps 4, merged after 4   average 2: steps 2, merged after 1
    played again  # # # Begin(0)       # # # # Averaged(0) Begin(1)         # Averaged(1) # Begin(2)

What is sent is added up in the order of the workers. Two ranks add up to the same bits in any order; more may differ by
a rounding, except behind a codec, where every rank adds up the decoded payloads in this order too.

Where a worker was asked to settle, flush or leave at the very step boundary at which it merged, with fewer steps open
than a period, the record does not say which came first; here the merge does. It makes a difference of a rounding, and
only for members that overlap and have a period of 2 or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.drivers.replayed.replay import ReplayError
from paceline.events import Asked, Averaged, Begin, Merge, Order, Standing, Stepped, Window
from paceline.strategies.averaging import Averaging, AveragingState
from paceline.training import Training
from paceline.training.team import Team


def replay_averages(
    averages: Sequence[Sequence[Window]],
    training: Training,
    member: Averaging,
    *,
    on_average: Callable[[int, int], None] = lambda done, averages: None,
) -> torch.Tensor:
    """The shared parameters after these averages; `ReplayError` names the average and the worker that do not fit.

    >>> from paceline.recipes import Recipe
    >>> from paceline.recipes.assembly import load_data, make_training
    >>> from paceline.strategies.averaging import make_averaging
    >>> training = make_training(Recipe(), load_data(Recipe()))
    >>> replay_averages([(Window(steps=2), Window(steps=3))], training, make_averaging("local-sgd", period=2))
    Traceback (most recent call last):
    paceline.drivers.replayed.replay.ReplayError: average 0, worker 1: recorded with 3 steps, and by its course ... 2
    """
    return replayed_team(averages, training, member, on_average=on_average).parameters


def replayed_team(
    averages: Sequence[Sequence[Window]],
    training: Training,
    member: Averaging,
    *,
    on_average: Callable[[int, int], None] = lambda done, averages: None,
) -> Team:
    """All workers as they are after these averages.

    `on_average` is told after each how many of how many are done.

    >>> from paceline.recipes import Recipe
    >>> from paceline.recipes.assembly import load_data, make_training
    >>> from paceline.strategies.averaging import make_averaging
    >>> training = make_training(Recipe(), load_data(Recipe()))
    >>> averages = [(Window(steps=2), Window(steps=2))]
    >>> len(replayed_team(averages, training, make_averaging("local-sgd", period=2)).models)
    2
    """
    if not averages:
        raise ReplayError("there is no average to replay")
    everybody = len(averages[0])
    for number, windows in enumerate(averages):
        if len(windows) != everybody:
            raise ReplayError(f"average {number} has {len(windows)} windows, and there are {everybody} workers")
    team = Team(training, member, workers=everybody)
    players = [_Player(team, AveragingState(member, everybody), worker) for worker in range(everybody)]
    for number, windows in enumerate(averages):
        for worker, player in enumerate(players):
            try:
                player.enter(number, windows[worker])
            except ValueError as error:
                raise ReplayError(f"average {number}, worker {worker}: {error}") from error
        team.gathered(number, windows)
        for player in players:
            player.under_way = Averaged(number=number, windows=tuple(windows))
        on_average(number + 1, len(averages))
    for player in players:
        player.merge()
    return team


class _Player:
    """One worker's course, told what the record says."""

    def __init__(self, team: Team, course: AveragingState, worker: int) -> None:
        self._team, self._course, self._worker = team, course, worker
        self._draws = 0
        self._begun: Begin | None = None
        self.under_way: Averaged | None = None

    def enter(self, number: int, window: Window) -> None:
        """Train until average `number` is entered, and see that it is entered as recorded."""
        if self.under_way is not None:
            self._train(window, until=window.merged_after)
            period = self._course.member.period or 0
            if self._course.member.overlap and window.merged_after == window.steps >= period:
                self._ask(window.standing)  # else the merge would have begun the next average as one that trains on
            self.merge()
        if self._begun is None:
            self._train(window, until=window.steps)
        if self._begun is None:
            self._ask(window.standing)
        if self._begun is None:
            raise ValueError(f"recorded with {window.steps} steps, and by its course it takes more before it enters")
        if (self._begun.number, self._begun.window) != (number, window):
            raise ValueError(
                f"recorded as {window}, and by its course it enters average {self._begun.number} as "
                f"{self._begun.window}"
            )
        self._begun = None

    def merge(self) -> None:
        """Take in the average that is under way."""
        if self.under_way is not None:
            done, self.under_way = self.under_way, None
            self._carry_out(self._course.handle(done))
            if self._course.standing is Standing.TRAINING:  # else it waits for the next average, and moves after that
                self._team.settle(self._worker)

    def _train(self, window: Window, *, until: int) -> None:
        while self._course.open_steps < until:
            self._team.compute(self._worker, self._draws)
            self._draws += 1
            self._carry_out(self._course.handle(Stepped()))
            if self._begun is not None:
                break
            self._team.settle(self._worker)
        begun = self._begun
        if begun is not None and begun.window.steps < until:
            raise ValueError(
                f"recorded with {window.steps} steps, and by its course it enters with {begun.window.steps}"
            )

    def _ask(self, standing: Standing) -> None:
        if standing is not Standing.TRAINING and self._course.standing is Standing.TRAINING:
            self._carry_out(self._course.handle(Asked(standing=standing)))

    def _carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case Begin():
                    self._begun = order
                    self._team.enter(self._worker, order)
                case Merge():
                    self._team.merge(self._worker, order)
