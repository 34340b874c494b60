"""What happened in a run of pipelines, told by rank 0: when each replica began and ended its steps.

    replica 0   |### step 0 ###|### step 1 ###|       a replica is a worker, a step of all replicas is a round
    replica 1   |## step 0 ####|#### step 1 ##|

A step holds the average over the replicas, which all of them wait for; from outside the two cannot be told apart. Times
are a rank's own, on its own clock since all began together; those of each replica's first stage are told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.distributed.collectives import gather_vector
from paceline.distributed.stores import StoreGather
from paceline.drivers.ranks.run import rounds_and_works
from paceline.events import Window
from paceline.traces import Evaluation, Trace


class PipelineStory:
    """The steps and evaluations of a run, through all of its lives.

    >>> story = PipelineStory(stages=2, replicas=1)
    >>> story.began(100.0)
    >>> story.stepped(100.0, 101.5)
    >>> story.seconds(102.0), story.steps
    (2.0, 1)
    """

    def __init__(self, *, stages: int, replicas: int) -> None:
        self._stages, self._replicas = stages, replicas
        self.evaluations: list[Evaluation] = []
        self._zero, self._before_seconds = 0.0, 0.0
        self._earlier = torch.empty((0, 2), dtype=torch.float64)
        self._new: list[tuple[float, float]] = []
        self._every_time = torch.empty((0, replicas, 3), dtype=torch.float64)

    def began(self, now: float) -> None:
        """The clock starts; a run that goes on starts where it had come to."""
        self._zero = now - self._before_seconds

    def seconds(self, now: float) -> float:
        """Seconds of the run."""
        return now - self._zero

    def stepped(self, began: float, ended: float) -> None:
        """A step was taken, between these moments of the clock."""
        self._new.append((self.seconds(began), self.seconds(ended)))

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return len(self._earlier) + len(self._new)

    def _times(self) -> torch.Tensor:
        return torch.cat([self._earlier, torch.tensor(self._new, dtype=torch.float64).reshape(-1, 2)])

    def state_dict(self, now: float) -> dict[str, Any]:
        """All of it, as tensors and plain values."""
        return {
            "times": self._times(),
            "seconds": self.seconds(now),
            "evaluations": [[e.round, e.seconds, e.loss, e.accuracy] for e in self.evaluations],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._earlier, self._new = state["times"], []
        self._before_seconds = float(state["seconds"])
        self.evaluations = [
            Evaluation(round=int(number), seconds=seconds, loss=loss, accuracy=accuracy)
            for number, seconds, loss, accuracy in state["evaluations"]
        ]

    def gather(self, roll: StoreGather) -> None:
        """Bring all ranks' times together; all ranks must come here."""
        ours = self._times()
        steps = dict(enumerate(roll.gather("tell its times", len(ours))))
        if set(steps.values()) != {len(ours)}:
            raise RuntimeError(f"the ranks have taken different numbers of steps: {steps}")
        every = gather_vector(ours.reshape(-1), roll).reshape(-1, len(ours), 2)
        first_stages = every[:: self._stages].transpose(0, 1)  # steps x replicas x (began, ended)
        self._every_time = torch.cat([first_stages, first_stages[:, :, 1:]], dim=2)

    def trace(self, *, about: Mapping[str, Any]) -> Trace:
        """The whole run, once all ranks' times are gathered. `about` is what a Trace says besides."""
        windows = [tuple(Window(steps=1) for _ in range(self._replicas))] * len(self._every_time)
        rounds, works = rounds_and_works(windows, self._every_time)
        return Trace(
            workers=self._replicas,
            clock="real",
            averaged=True,
            used=self.steps * self._replicas,
            rounds=rounds,
            works=works,
            evaluations=tuple(self.evaluations),
            **about,
        )
