"""The trace of a run, and its summary. All times are seconds since the run began, on the cluster's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from paceline.decoding import Count
from paceline.traces.worker_counts import WorkerCounts

Outcome: TypeAlias = Literal["used", "late", "dropped"]
KEPT_WORKS = 100_000  # that a trace holds in full; later ones are only counted
NOT_YET = "it had not joined yet"  # why a worker that came after the first round was away before


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One worker's work on one version of the model, and what came of it.

       started       finished   arrived
          |#############|~~~~~~~~~~|          # computing   ~ on the wire

    `used` is in an update in time, `late` is in one as compensation, `dropped` is in none (`reason` says why).
    `arrived_seconds` is None for work that never reached the server. In an average of all workers a message travels
    from when the last of them is there: `sent_seconds`; None: from when it was finished.

    >>> Work(worker=0, version=0, started_seconds=0.0, finished_seconds=1.2, arrived_seconds=1.2).compute_seconds
    1.2
    """

    worker: int
    version: int
    started_seconds: float
    finished_seconds: float
    arrived_seconds: float | None
    blocks_done: int = 1
    blocks: int = 1
    outcome: Outcome = "used"
    reason: str = ""
    sent_seconds: float | None = None

    @property
    def compute_seconds(self) -> float:
        """How long the worker computed."""
        return self.finished_seconds - self.started_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One step of the model: when its round opened and closed, and how many gradients it took.

    >>> Round(version=0, opened_seconds=0.0, closed_seconds=2.0, k=3, used=3, late=0).seconds
    2.0
    """

    version: int
    opened_seconds: float
    closed_seconds: float
    k: int
    used: int
    late: int

    @property
    def seconds(self) -> float:
        """How long the round was open."""
        return self.closed_seconds - self.opened_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The model measured after some rounds: mean loss on the training data, accuracy and mean loss on the test data.

    The accuracy is None where nothing is guessed: targets are numbers, or the loss is of a kind of its own. The test
    loss is None where nobody measured it, as in the files of older runs.

    >>> Evaluation(round=10, seconds=1.5, loss=0.7, accuracy=0.9).loss
    0.7
    """

    round: Count
    seconds: float
    loss: float
    accuracy: float | None
    test_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A worker of a real run was not there, and why; `to_seconds` is None where it was still away at the end.

    >>> Absence(worker=2, from_seconds=9.5, to_seconds=None, reason="its connection was lost").worker
    2
    """

    worker: int
    from_seconds: float
    to_seconds: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """How many samples sat out of whole passes over the shards, which share that is of all that these passes would have
    met, and how many such passes each worker made.

    >>> Pruned(sat_out=14, share_pruned=0.14, passes=(5, 5)).share_pruned
    0.14
    """

    sat_out: int
    share_pruned: float
    passes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """The samples of a worker's batches, as its speed allows, and the seconds of such a batch.

    `predicted_seconds` are by its batches of the size before; `seconds` are the median of those that it has had since;
    `equal_seconds` are what a batch of the mean size would take it.

    >>> WorkerShare(worker=1, samples=14, predicted_seconds=1.3, seconds=1.31, equal_seconds=3.0).samples
    14
    """

    worker: int
    samples: int
    predicted_seconds: float
    seconds: float
    equal_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSummary:
    """The shares by speed that a run came to, and how long its rounds take with them.

    They hold since round `since`, after so many `changes`, and the mean of the rounds since then is `round_seconds`.
    `predicted_seconds` is what was predicted of a round, by the median batch of each worker; `equal_seconds` is how
    long the same rounds would have been open with equal shares. A time is None where no round is there to tell it by.

    >>> share = WorkerShare(worker=0, samples=8, predicted_seconds=1.0, seconds=1.0, equal_seconds=1.0)
    >>> ShareSummary(workers=(share,), changes=0, since=0).batch
    8
    """

    workers: tuple[WorkerShare, ...]
    changes: int
    since: int
    predicted_seconds: float | None = None
    round_seconds: float | None = None
    equal_seconds: float | None = None

    @property
    def batch(self) -> int:
        """The samples of a batch of all workers together."""
        return sum(share.samples for share in self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole run. `works` may be cut to the first rounds on large clusters; the counts never are.

    An `averaged` run has no server: a round is an average of all workers, a work is a window of local steps.
    `absences` says when workers of a real run were away. `ended` is why the server of a real run ended it, in its own
    words; it is empty where the server was killed. `pruned` is None where nothing was, or nobody knows: the server of a
    real run is not told whom its workers leave out. `by_worker` are the counts of a real run's workers. `shares` is
    None where all workers have batches of the same size. `missing` says what of the run is not in here, in sentences
    without a full stop.

    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=0, seconds=0.0)
    >>> trace.clock, trace.late_work
    ('virtual', 'partial')
    """

    strategy: str
    seed: int
    workers: int
    recipe: Mapping[str, Any]
    rounds_done: int
    seconds: float
    clock: Literal["virtual", "real"] = "virtual"
    averaged: bool = False
    late_work: Literal["partial", "complete"] = "partial"
    diverged: bool = False
    used: int = 0
    late: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    rounds: tuple[Round, ...] = ()
    works: tuple[Work, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    absences: tuple[Absence, ...] = ()
    ended: str = ""
    pruned: Pruned | None = None
    by_worker: tuple[WorkerCounts, ...] = ()
    shares: ShareSummary | None = None
    missing: tuple[str, ...] = ()

    @property
    def rounds_asked(self) -> int | None:
        """How many rounds the recipe asks for, if it says so.

        >>> Trace(strategy="full", seed=0, workers=2, recipe={"rounds": 9}, rounds_done=4, seconds=1.0).rounds_asked
        9
        """
        asked = self.recipe.get("rounds")
        return asked if isinstance(asked, int) and not isinstance(asked, bool) else None

    @property
    def stopped(self) -> bool:
        """Whether the run was stopped or killed before all of its rounds were done; one that diverged was not.

        >>> Trace(strategy="full", seed=0, workers=2, recipe={"rounds": 9}, rounds_done=4, seconds=1.0).stopped
        True
        """
        return not self.diverged and self.rounds_asked is not None and self.rounds_done < self.rounds_asked


def works_left_out(works: int, most: int = KEPT_WORKS) -> tuple[str, ...]:
    """Return a sentence where a trace of so many works holds no more of them; nothing where it holds them all.

    >>> works_left_out(100_000)
    ('of the works of single workers the first 100,000 are kept, and later ones are only counted',)
    """
    words = f"of the works of single workers the first {most:,} are kept, and later ones are only counted"
    return () if works < most else (words,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of a run in one line.

    `loss`, `accuracy` and `test_loss` are None where nothing was trained, or training diverged. `seconds_to_target` is
    when the training loss reached the recipe's target, `seconds_to_accuracy` when the test accuracy reached its own.

    >>> Summary(strategy="full", seed=0, rounds=1, seconds=2.0, loss=None, accuracy=None,
    ...         seconds_to_target=None, used=3, late=0, dropped=0).seconds
    2.0
    """

    strategy: str
    seed: int
    rounds: int
    seconds: float
    loss: float | None
    accuracy: float | None
    seconds_to_target: float | None
    used: int
    late: int
    dropped: int
    test_loss: float | None = None
    seconds_to_accuracy: float | None = None


def shares_of(recipe: Mapping[str, Any]) -> str:
    """Return how a recipe's workers share a batch; one of before there were such shares says nothing, and is equal.

    >>> shares_of({"worker": {"shares": "speed"}}), shares_of({})
    ('speed', 'equal')
    """
    worker = recipe.get("worker")
    return str(worker.get("shares", "equal")) if isinstance(worker, Mapping) else "equal"


def labelled_with_shares(strategy: str, recipe: Mapping[str, Any]) -> str:
    """Return a strategy's name as tables have it: with the shares of its recipe, before the place.

    >>> labelled_with_shares("lgc@ranks", {"worker": {"shares": "speed"}}), labelled_with_shares("lgc", {})
    ('lgc+speed@ranks', 'lgc')
    """
    shares = shares_of(recipe)
    if shares == "equal" or "+" in strategy:
        return strategy
    name, at, place = strategy.partition("@")
    return f"{name}+{shares}{at}{place}"


def summarise(trace: Trace) -> Summary:
    """Return the summary of a trace.

    >>> summarise(Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0)).rounds
    5
    """
    last = trace.evaluations[-1] if trace.evaluations and not trace.diverged else None
    return Summary(
        strategy=trace.strategy,
        seed=trace.seed,
        rounds=trace.rounds_done,
        seconds=trace.seconds,
        loss=last.loss if last else None,
        accuracy=last.accuracy if last else None,
        seconds_to_target=seconds_to_target(trace),
        used=trace.used,
        late=trace.late,
        dropped=sum(trace.dropped.values()),
        test_loss=last.test_loss if last else None,
        seconds_to_accuracy=seconds_to_accuracy(trace),
    )


def seconds_to_target(trace: Trace) -> float | None:
    """When the training loss first reached the recipe's target, between evaluations on a straight line.

    >>> seconds_to_target(Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0))
    """
    target: float | None = trace.recipe.get("target_loss")
    return None if target is None else _first_at_most(target, [(each.seconds, each.loss) for each in trace.evaluations])


def seconds_to_accuracy(trace: Trace, target: float | None = None) -> float | None:
    """When the test accuracy first reached a target, between evaluations on a straight line; by default the recipe's.

    >>> points = [Evaluation(round=n, seconds=n, loss=1.0, accuracy=n / 4) for n in range(5)]
    >>> seconds_to_accuracy(Trace(strategy="full", seed=0, workers=2, recipe={"target_accuracy": 0.625}, rounds_done=5,
    ...                           seconds=5.0, evaluations=tuple(points)))
    2.5
    """
    target = trace.recipe.get("target_accuracy") if target is None else target
    if target is None:
        return None
    # An accuracy rises to its target as its negative falls; evaluations without one say nothing.
    points = [(each.seconds, -each.accuracy) for each in trace.evaluations if each.accuracy is not None]
    return _first_at_most(-target, points)


def _first_at_most(target: float, points: Sequence[tuple[float, float]]) -> float | None:
    """Return when the values of points (seconds, value) first came down to a target; None: they did not."""
    before: tuple[float, float] | None = None
    for seconds, value in points:
        if value <= target:
            if before is None:
                return seconds
            share = (before[1] - target) / (before[1] - value)
            return before[0] + share * (seconds - before[0])
        before = seconds, value
    return None
