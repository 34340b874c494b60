"""The events that happen in a run, and the actions that answer them: the vocabulary of the core.

A driver (the simulator, the parameter server) reports an event to a strategy; the strategy returns the actions that
follow. Nothing here or in a strategy reads a clock, opens a socket, draws a random number or touches a tensor: a
gradient is known by who computed it and at which version of the model.

    driver  -- Joined, Left, GradientArrived, LossSeen -->  strategy
    driver  <-- Step, Assign, Send, Drop -----------------  strategy

A *version* of the model is the number of steps it has taken. In a synchronous strategy every round is one step, so the
version is also the number of the round.

A `Step` is data: its shares (worker, version, weight), and the weight of the fresh mean before. The updates of all
strategies, compensation included, are such linear combinations, so a driver needs one way to carry them out.

Where workers average among themselves (Local SGD, HPSGD) there is no server, and every worker has an averaging state
of its own. Its events are a `Happening`, its actions an `Order`:

    driver  -- Stepped, Averaged, Asked -------->  averaging state of one worker
    driver  <-- Begin, Wait, Merge, Release -----  averaging state of one worker

A *window* is the local steps that a worker takes between two averages that it enters; its *change* is what they did to
the parameters. An *average* is one collective that adds up the changes of all workers. To *merge* it is to apply that
sum to the *shared model*, which each worker keeps a copy of. An averaging state touches no tensor either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A worker has joined, with nothing to do yet.

    >>> Joined(worker=3)
    Joined(worker=3, at_seconds=0.0)
    """

    worker: int
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A worker is gone, in good order or not. The gradients that it delivered stay valid.

    >>> Left(worker=3, at_seconds=1.5)
    Left(worker=3, at_seconds=1.5)
    """

    worker: int
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientArrived:
    """A worker's gradient at one version has arrived: the sum of the mean gradients of its blocks, divided by `blocks`.

    A batch is cut into equal blocks. A worker whose round has closed stops after the block that it is in, and sends the
    sum over the `blocks_done` so far.

    `work_seconds` is how long the worker computed on the blocks it did, `transfer_seconds` how long the model and the
    gradient were on the wire; `None` where nobody measured it.

    `samples` is the size of the whole batch: gradients are weighed by it. 0 is not said, and counts as much as the
    others do.

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
    samples: int = 0

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
    """The losses behind a worker's gradient: the mean and the variance over its samples.

    The event comes with the gradient or after it, or not at all. It closes no round; strategies may learn from it.

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
    """The driver is to give the optimiser one update; the model moves from `version` to `version + 1`.

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
class Assign:
    """From now on the next batch that a worker begins has so many samples, given as (worker, samples).

    A worker that none was ever assigned has the size that its driver began with.

    >>> dict(Assign(samples=((0, 48), (1, 16))).samples)[1]
    16
    """

    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """The driver is to send these workers the current model; each then begins on its next batch.

    >>> Send(workers=(0, 1))
    Send(workers=(0, 1))
    """

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A gradient is in no update, for a reason: nothing is lost in silence.

    >>> Drop(worker=1, version=3, reason="its round had closed").reason
    'its round had closed'
    """

    worker: int
    version: int
    reason: str


Action: TypeAlias = Step | Assign | Send | Drop


# -- without a server: workers that average among themselves ---------------------------------------------------------


class Standing(IntEnum):
    """What a worker needs from the averages before it trains on: nothing, or that all workers come to one point.

    Workers say it in their `Window`; whoever asked is released by the first average in which all ask for at least that.
    A higher standing includes what the lower ones ask for.

    >>> Standing.LEAVING > Standing.FLUSHING
    True
    """

    TRAINING = 0
    SETTLING = 1  # for a checkpoint: all workers have merged the same average, and open windows stay open
    FLUSHING = 2  # for an evaluation: all steps of all workers are merged; then the worker trains on
    LEAVING = 3  # as FLUSHING, and the worker enters no average after the one in which all are leaving


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One worker's window, as all workers read it in an average: its number of local steps, and the worker's standing.

    `steps` counts the local steps since the worker entered the average before. `merged_after` is how many of them it
    had taken when it merged that average. A replay of the run needs no more than these two numbers.

    >>> Window(steps=3).brought, Window(steps=3, standing=Standing.SETTLING).brought
    (3, 0)
    """

    steps: int = 0
    merged_after: int = 0
    standing: Standing = Standing.TRAINING

    def __post_init__(self) -> None:
        if not 0 <= self.merged_after <= self.steps:
            raise ValueError(
                f"merged_after must be between 0 and steps (merged_after={self.merged_after}, steps={self.steps})"
            )

    @property
    def brought(self) -> int:
        """The steps whose change is in the average."""
        return 0 if self.standing is Standing.SETTLING else self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """The worker has taken a local step. (Where gradients are averaged: it has a gradient, and is about to step.)

    >>> Stepped()
    Stepped()
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaged:
    """The average that this worker has entered is done; `windows` has one window for each worker, by worker number.

    >>> Averaged(number=0, windows=(Window(steps=1), Window(steps=2))).number
    0
    """

    number: int
    windows: tuple[Window, ...]


def is_merged(windows: Sequence[Window]) -> bool:
    """Return whether an average of these windows is merged: a worker brings a change, or every worker flushes.

    >>> is_merged([Window(), Window(standing=Standing.FLUSHING)]), is_merged([Window(steps=1), Window()])
    (False, True)
    """
    return any(window.brought for window in windows) or all(w.standing >= Standing.FLUSHING for w in windows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The program that this worker belongs to asks that all workers come to the same point.

    >>> Asked(standing=Standing.FLUSHING).standing.name
    'FLUSHING'
    """

    standing: Standing


Happening: TypeAlias = Stepped | Averaged | Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The worker is to enter average `number`: close its window, send the change times `scale`, begin the next.

    A worker that brings no change sends zeros; if it is settling its window stays open.

    >>> Begin(number=0, window=Window(steps=2)).scale
    1.0
    """

    number: int
    window: Window
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The worker is not to train on before average `number` is done.

    >>> Wait(number=3)
    Wait(number=3)
    """

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """The worker is to merge average `number`: `weight` times the sum of what all workers sent is the mean change.

    The outer step (`Outer`) turns the mean change into the move of the shared model; a plain one moves it by just that.
    Where gradients are averaged it is the mean gradient, and the optimiser takes the step.

    A weight of 0 means that no worker brought a change and all flush: buffers are made equal, and no parameter moves.

    >>> Merge(number=0, weight=0.5, open_steps=0).open_steps
    0
    """

    number: int
    weight: float
    open_steps: int  # that this worker has taken in its open window


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What the last `Asked` asked for is done: all workers are at the same point, and this one may go on.

    >>> Release(standing=Standing.SETTLING).standing.value
    1
    """

    standing: Standing


Order: TypeAlias = Begin | Wait | Merge | Release
