"""async: every gradient is a step, whenever it comes.

    update = gradient                       or, with staleness scaling,
    update = gradient / (1 + staleness)     staleness: steps the model took since the gradient's version

Nobody waits, but a gradient is on average N - 1 steps old. With the scaling, N gradients weigh about as much as one
mean of N, so a learning rate that fits `full` fits here too. One *round*, for budgets and comparisons, is N gradients,
so that curves compare like with like; the model takes N steps in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.decoding import Count
from paceline.events import Action, Drop, Event, GradientArrived, Joined, Left, LossSeen, Send, Share, Step
from paceline.strategies.forms import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Async:
    """Asynchronous SGD, with gradients scaled down by their staleness unless told otherwise.

    >>> Async(staleness_scaling=False)
    Async(staleness_scaling=False)
    """

    staleness_scaling: bool = True

    def start(self) -> AsyncSteps:
        """Return the state of a run that begins now."""
        return AsyncSteps(staleness_scaling=self.staleness_scaling)

    def updates_per_round(self, workers: int) -> int:
        """Return the steps of the model in one round: as many as there are workers."""
        return workers


class AsyncSteps:
    """The state of an asynchronous run.

    >>> steps = Async().start()
    >>> _ = steps.handle(Joined(worker=0))
    >>> steps.handle(GradientArrived(worker=0, version=0))[0].fresh[0].weight
    1.0
    """

    def __init__(self, *, staleness_scaling: bool) -> None:
        self.version = 0
        self._staleness_scaling = staleness_scaling
        self._alive: set[int] = set()

    @property
    def k(self) -> int:
        """How many gradients make a step."""
        return 1

    def handle(self, event: Event) -> list[Action]:
        """Take in what happened; return what is to be done."""
        match event:
            case Joined():
                self._alive.add(event.worker)
                return [Send(workers=(event.worker,))]
            case Left():
                self._alive.discard(event.worker)
                return []
            case LossSeen():
                return []
            case GradientArrived():
                return self._arrived(event)

    def _arrived(self, event: GradientArrived) -> list[Action]:
        staleness = self.version - event.version
        if staleness < 0:
            raise ValueError(
                f"worker {event.worker} sent a gradient of version {event.version}, "
                f"but the model is at version {self.version}"
            )
        if event.worker not in self._alive:
            return [Drop(worker=event.worker, version=event.version, reason="its worker is not a member")]
        weight = 1.0 / (1 + staleness) if self._staleness_scaling else 1.0
        share = Share(worker=event.worker, version=event.version, weight=weight)
        step = Step(version=self.version, fresh=(share,), at_seconds=event.at_seconds)
        self.version += 1
        return [step, Send(workers=(event.worker,))]

    @property
    def form(self) -> dict[str, Any]:
        """The types of a `state_dict` that was kept as JSON."""
        return {"version": Count, "alive": Workers}

    @property
    def added(self) -> dict[str, Any]:
        """What a `state_dict` of an earlier release lacks: nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""
        return {"version": self.version, "alive": sorted(self._alive)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.version = state["version"]
        self._alive = set(state["alive"])
