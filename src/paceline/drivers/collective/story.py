"""What happened in a run of ranks, told by rank 0: every rank's windows, and when it began and ended them.

Windows are in every average's own words, so each rank knows all of them. Times are a rank's own, on its own clock since
the roll call at the start; they are gathered once, at the end. All ranks have been in the same averages, so what each
gathers has the same size. The roll is called first, for a collective that waits does not say for whom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.distributed.collectives import gather_vector
from paceline.distributed.stores import StoreGather
from paceline.drivers.collective.history import Average
from paceline.events import Standing, Window
from paceline.traces import Evaluation, Round, Trace, Work

STARTED, BEGUN, DONE = range(3)


class Story:
    """The windows, times and evaluations of a run, through all of its lives.

    >>> story = Story(workers=2)
    >>> story.began(100.0)
    >>> story.seconds(101.5)
    1.5
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.evaluations: list[Evaluation] = []
        self._zero = 0.0
        self._before_seconds = 0.0
        self._windows = torch.empty((0, workers, 3), dtype=torch.int64)
        self._times = torch.empty((0, 3), dtype=torch.float64)
        self._every_time = torch.empty((0, workers, 3), dtype=torch.float64)
        self._sent_bytes = 0

    def began(self, now: float) -> None:
        """The clock starts; a run that goes on starts where it had come to."""
        self._zero = now - self._before_seconds

    def seconds(self, now: float) -> float:
        """Seconds of the run."""
        return now - self._zero

    def windows(self, history: Sequence[Average]) -> torch.Tensor:
        """All windows: averages x workers x (steps, merged_after, standing)."""
        rows = [[[w.steps, w.merged_after, int(w.standing)] for w in average.windows] for average in history]
        new = torch.tensor(rows, dtype=torch.int64).reshape(-1, self._workers, 3)
        return torch.cat([self._windows, new])

    def _own_times(self, history: Sequence[Average]) -> torch.Tensor:
        rows = [[self.seconds(moment) for moment in (a.started, a.begun, a.done)] for a in history]
        return torch.cat([self._times, torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)])

    def state_dict(self, history: Sequence[Average], now: float) -> dict[str, Any]:
        """All of it, as tensors and plain values."""
        return {
            "windows": self.windows(history),
            "times": self._own_times(history),
            "seconds": self.seconds(now),
            "evaluations": [[e.round, e.seconds, e.loss, e.accuracy] for e in self.evaluations],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._windows, self._times = state["windows"], state["times"]
        self._before_seconds = float(state["seconds"])
        self.evaluations = [
            Evaluation(round=int(number), seconds=seconds, loss=loss, accuracy=accuracy)
            for number, seconds, loss, accuracy in state["evaluations"]
        ]

    def gather(self, history: Sequence[Average], roll: StoreGather, *, sent_bytes: int) -> None:
        """Bring all ranks' times and bytes together; all ranks must come here."""
        ours = self._own_times(history)
        said = roll.gather("tell its times", {"averages": len(ours), "sent_bytes": sent_bytes})
        averages = {rank: each["averages"] for rank, each in enumerate(said)}
        if set(averages.values()) != {len(ours)}:
            raise RuntimeError(f"the ranks have been in different numbers of averages: {averages}")
        every = gather_vector(ours.reshape(-1), roll).reshape(self._workers, -1, 3)
        self._every_time, self._sent_bytes = every.transpose(0, 1), sum(each["sent_bytes"] for each in said)

    def trace(self, history: Sequence[Average], *, about: Mapping[str, Any]) -> Trace:
        """The whole run, once all ranks' times are gathered. `about` is what a Trace says besides."""
        windows = windows_from(self.windows(history))
        rounds, works = rounds_and_works(windows, self._every_time)
        return Trace(
            workers=self._workers,
            clock="real",
            averaged=True,
            sent_bytes=self._sent_bytes,
            rounds=rounds,
            works=works,
            evaluations=tuple(self.evaluations),
            **about,
        )


def windows_from(rows: torch.Tensor) -> list[tuple[Window, ...]]:
    """The windows of every average, from averages x workers x (steps, merged_after, standing).

    >>> windows_from(torch.tensor([[[3, 1, 0], [2, 0, 2]]]))[0][1].standing.name
    'FLUSHING'
    """
    return [
        tuple(Window(steps=steps, merged_after=after, standing=Standing(at)) for steps, after, at in average)
        for average in rows.tolist()
    ]


def rounds_and_works(
    windows: Sequence[Sequence[Window]], times: torch.Tensor
) -> tuple[tuple[Round, ...], tuple[Work, ...]]:
    """A round for each average, a work for each window that brought something; times are averages x workers x 3.

    >>> times = torch.tensor([[[0.0, 1.0, 2.5], [0.0, 2.0, 2.4]]])
    >>> rounds, works = rounds_and_works([(Window(steps=1), Window(steps=2))], times)
    >>> [round(work.sent_seconds - work.finished_seconds, 3) for work in works]
    [1.0, 0.0]
    """
    rounds, works, opened = [], [], 0.0
    for number, (average, moments) in enumerate(zip(windows, times.tolist(), strict=True)):
        sent = max(moment[BEGUN] for moment in moments)  # it cannot travel before the last is there
        done = max(sent, min(moment[DONE] for moment in moments))
        brought = [worker for worker, window in enumerate(average) if window.brought]
        rounds.append(
            Round(
                version=number,
                opened_seconds=opened,
                closed_seconds=max(done, opened),
                k=len(average),
                used=len(brought),
                late=0,
            )
        )
        opened = rounds[-1].closed_seconds
        works += [
            Work(
                worker=worker,
                version=number,
                started_seconds=moments[worker][STARTED],
                finished_seconds=moments[worker][BEGUN],
                arrived_seconds=done,
                sent_seconds=sent,
            )
            for worker in brought
        ]
    return tuple(rounds), tuple(works)
