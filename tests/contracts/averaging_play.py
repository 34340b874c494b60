"""Workers with random speeds and plans, and what their courses make of them: no clock, no tensors.

A plan is a list of (steps to take, what to ask for then), and ends with leaving. A history is played by moving one
worker at a time, chosen at random; a worker at a step boundary hears of an average that is done, or not yet.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from paceline.events import Asked, Averaged, Begin, Merge, Release, Standing, Stepped, Wait, Window
from paceline.strategies.averaging import AVERAGING, Averaging, AveragingState, make_averaging
from paceline.strategies.averaging.members import SETTINGS

Plan: TypeAlias = list[tuple[int, Standing]]


def variants() -> dict[str, Averaging]:
    """Every member, with a period short enough for short histories, and with every switch it has."""
    found = {}
    for name in AVERAGING:
        period: dict[str, Any] = {"period": 3} if "period" in SETTINGS[name] else {}
        found[name] = make_averaging(name, **period if name != "hpsgd" else {})
        if "normalize" in SETTINGS[name]:
            found[f"{name} normalize"] = make_averaging(name, **period, normalize=True)
        if "overlap" in SETTINGS[name]:
            found[f"{name} overlap"] = make_averaging(name, **period, overlap=True)
        if "rebase" in SETTINGS[name]:
            overlap = {"overlap": True} if "overlap" in SETTINGS[name] else {}
            found[f"{name} paper"] = make_averaging(name, **period, **overlap, rebase=False)
    return found


VARIANTS = variants()


@dataclass
class Runner:
    """One worker, and the log of what was ordered."""

    course: AveragingState
    plan: Plan
    taken: int = 0
    waits: bool = False
    in_average: int | None = None
    begins: list[Begin] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    releases: list[tuple[Standing, int]] = field(default_factory=list)  # and how many averages it has been in
    waited: int = 0


class Play:
    """All workers of a history."""

    def __init__(self, member: Averaging, plans: list[Plan], *, seed: int, reload: bool = False) -> None:
        self._random = random.Random(seed)
        self._reload = reload
        self.runners = [Runner(AveragingState(member, len(plans)), list(plan)) for plan in plans]
        self.averages: dict[int, dict[int, Window]] = {}

    def run(self) -> Play:
        """Move workers until all have left; fails where nobody can move."""
        while movable := [worker for worker, runner in enumerate(self.runners) if self._movable(runner)]:
            self._move(self._random.choice(movable))
        held_up = [worker for worker, runner in enumerate(self.runners) if not runner.course.finished]
        assert not held_up, f"workers {held_up} wait for ever"
        return self

    def windows(self, number: int) -> tuple[Window, ...]:
        return tuple(self.averages[number][worker] for worker in range(len(self.runners)))

    def _movable(self, runner: Runner) -> bool:
        return not runner.course.finished and (not runner.waits or self._done(runner))

    def _done(self, runner: Runner) -> bool:
        return runner.in_average is not None and len(self.averages[runner.in_average]) == len(self.runners)

    def _move(self, worker: int) -> None:
        runner = self.runners[worker]
        if runner.waits:
            self._averaged(worker)
            return
        steps, standing = runner.plan[0]
        if steps:
            runner.plan[0] = steps - 1, standing
            runner.taken += 1
            self._carry_out(worker, runner.course.handle(Stepped()))
            if not runner.waits and self._done(runner) and self._random.random() < 0.5:
                self._averaged(worker)
        else:
            self._carry_out(worker, runner.course.handle(Asked(standing=standing)))

    def _averaged(self, worker: int) -> None:
        runner = self.runners[worker]
        number, runner.in_average, runner.waits = runner.in_average, None, False
        assert number is not None
        self._carry_out(worker, runner.course.handle(Averaged(number=number, windows=self.windows(number))))

    def _carry_out(self, worker: int, orders: list[Any]) -> None:
        runner = self.runners[worker]
        for order in orders:
            match order:
                case Begin():
                    assert runner.in_average is None, "it is in an average already"
                    runner.in_average = order.number
                    self.averages.setdefault(order.number, {})[worker] = order.window
                    runner.begins.append(order)
                case Wait():
                    assert order.number == runner.in_average
                    runner.waits, runner.waited = True, runner.waited + 1
                case Merge():
                    runner.merges.append(order)
                case Release():
                    runner.releases.append((order.standing, runner.course.averages))
                    runner.plan.pop(0)
                    if self._reload and order.standing is Standing.SETTLING:
                        self._restart(runner)

    def _restart(self, runner: Runner) -> None:
        """The worker goes down and comes up again from what it kept."""
        kept = json.loads(json.dumps(runner.course.state_dict()))
        runner.course = AveragingState(runner.course.member, len(self.runners))
        runner.course.load_state_dict(kept)
