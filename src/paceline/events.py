"""What can happen, and what can be asked: the vocabulary of the core.

A driver (the simulator, the parameter server) tells a strategy what happened; the strategy answers with
what is to be done. Nothing here or in a strategy reads a clock, opens a socket, draws a random number or
touches a tensor: a gradient is known by who computed it and at which version of the model.

    driver  -- Joined, Left, GradientArrived, LossSeen -->  strategy
    driver  <-- Step, Send, Drop -------------------------  strategy

A *version* counts the steps the model has taken. For synchronous strategies it is the round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A worker is there, with nothing to do yet.

    >>> Joined(worker=3)
    Joined(worker=3, at_seconds=0.0)
    """

    worker: int
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A worker is gone, politely or not. What it had delivered stays valid.

    >>> Left(worker=3, at_seconds=1.5)
    Left(worker=3, at_seconds=1.5)
    """

    worker: int
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientArrived:
    """A worker's gradient for one version is in: the sum over the blocks it did, divided by `blocks`.

    `work_seconds` is how long the worker computed on the blocks it did, `transfer_seconds` how long the model and the
    gradient were on the wire; `None` where nobody measured it.

    >>> GradientArrived(worker=0, version=4, blocks_done=3, blocks=4).whole
    False
    """

    worker: int
    version: int
    blocks_done: int = 1
    blocks: int = 1
    at_seconds: float = 0.0
    work_seconds: float | None = None
    transfer_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.blocks_done <= self.blocks:
            raise ValueError(
                f"blocks_done must be between 1 and blocks (blocks_done={self.blocks_done}, blocks={self.blocks})"
            )

    @property
    def whole(self) -> bool:
        """Whether every block was done."""
        return self.blocks_done == self.blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSeen:
    """What a worker's gradient was the gradient of: the mean and the variance of its samples' losses.

    Comes with the gradient or after it, or not at all. It closes no round; strategies may learn from it.

    >>> LossSeen(worker=0, version=4, mean=0.7, variance=0.2, samples=32).samples
    32
    """

    worker: int
    version: int
    mean: float
    variance: float
    samples: int


Event: TypeAlias = Joined | Left | GradientArrived | LossSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One gradient's weight in an update.

    >>> Share(worker=2, version=7, weight=0.25)
    Share(worker=2, version=7, weight=0.25)
    """

    worker: int
    version: int
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Give the optimiser one update; the model moves from `version` to `version + 1`.

        update =   sum of weight * gradient over `fresh`
                 + sum of weight * gradient over `late`
                 - previous_mean_weight * (the fresh sum of the step before)

    Shares are ordered by worker, so the sum does not depend on the order of arrival.

    >>> Step(version=0, fresh=(Share(worker=0, version=0, weight=1.0),)).late
    ()
    """

    version: int
    fresh: tuple[Share, ...]
    late: tuple[Share, ...] = ()
    previous_mean_weight: float = 0.0
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Give these workers the current model; each then begins on its next batch.

    >>> Send(workers=(0, 1))
    Send(workers=(0, 1))
    """

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A gradient that is in no update, and why: nothing is lost in silence.

    >>> Drop(worker=1, version=3, reason="its round had closed").reason
    'its round had closed'
    """

    worker: int
    version: int
    reason: str


Action: TypeAlias = Step | Send | Drop
