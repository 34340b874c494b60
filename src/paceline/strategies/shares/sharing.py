"""When new shares pay: settings, the decision, and what a run in rounds keeps of its workers.

    times of every rank ──> Speed each ──> divide: the best shares ──> do they pay? ──> the same answer on all ranks

Shares change only where the slowest rank would be quicker by more than PAYS of its time, and by more than PAYS_AT
standard errors of what is known of it. So a rank that is always slower is relieved as soon as it was seen a few times,
and one that jitters is left alone: however often one looks, noise alone hardly ever gets as far.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.decoding import Count, WorkerNumber, decode
from paceline.events import GradientArrived
from paceline.strategies.shares.allocation import Cost, divide
from paceline.strategies.shares.speed import FEWEST, Speed, SpeedEstimate

PAYS = 0.04  # of the slowest rank's time
PAYS_AT = 5.0  # standard errors
PERIOD = 5  # steps between two looks


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDecision:
    """The best shares by what is known: the slowest rank's seconds with them, with the present ones, with equal ones.

    `pays` says whether they are worth a change.

    >>> slow = Speed(samples=10, seconds=3.0)
    >>> decide([Speed(samples=10, seconds=1.0), slow], [10, 10])
    ShareDecision(shares=(15, 5), seconds=1.5, present_seconds=3.0, equal_seconds=3.0, pays=True)
    """

    shares: tuple[int, ...]
    seconds: float
    present_seconds: float
    equal_seconds: float
    pays: bool


def decide(
    speeds: Sequence[Speed],
    shares: Sequence[int],
    *,
    samples: int | None = None,
    least: int = 1,
    most: Sequence[int | None] | int | None = None,
    multiple: int = 1,
) -> ShareDecision | None:
    """Return the best shares of a batch of `samples` (as many as now), and whether they pay; None: not enough is known.

    >>> decide([Speed(samples=10, seconds=1.0), Speed(samples=10, seconds=1.0, known=1)], [10, 10]) is None
    True
    """
    if any(speed.known < FEWEST for speed in speeds):
        return None
    total, ranks = sum(shares) if samples is None else samples, len(speeds)
    costs = [Cost(sample_seconds=speed.sample_seconds, fixed_seconds=speed.fixed_seconds) for speed in speeds]
    best = divide(total, costs, least=least, most=most, multiple=multiple)
    present = [speed.predict(share) for speed, share in zip(speeds, shares, strict=True)]
    seconds = max(speed.predict(share) for speed, share in zip(speeds, best, strict=True))
    slowest = max(range(ranks), key=lambda rank: present[rank])
    error = speeds[slowest].error_seconds * present[slowest] / speeds[slowest].seconds
    gained = present[slowest] - seconds
    return ShareDecision(
        shares=tuple(best),
        seconds=seconds,
        present_seconds=present[slowest],
        equal_seconds=max(speed.predict(-(-total // ranks)) for speed in speeds),
        pays=gained > max(PAYS * present[slowest], PAYS_AT * error),
    )


# -- in rounds, where one strategy hears of all workers ----------------------------------------------------------------


class EqualShares:
    """Every worker computes a batch of the same size: nothing is learned, and nothing assigned.

    >>> EqualShares().closed(version=3, members={0, 1}) is None
    True
    """

    def arrived(self, event: GradientArrived) -> None:
        """Hear of a gradient."""

    def forget(self, worker: int) -> None:
        """Hear that a worker is gone."""

    def closed(self, *, version: int, members: Collection[int]) -> Mapping[int, int] | None:
        """Hear that a round closed; return the samples of each member's next batch if they are others than before."""
        return None

    @property
    def form(self) -> Any:
        """The type of a `state_dict` that was kept as JSON."""
        return dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""


ShareState = EqualShares  # what a strategy asks of its shares


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesBySpeed:
    """Workers get batches by their speed, `batch_size` samples on average; looked at every `period` rounds.

    A batch has at least `least` samples and at most `most`, and is a multiple of `multiple`, so that it can be cut into
    as many equal blocks.

    >>> SharesBySpeed(batch_size=32, multiple=4).start()
    SpeedShares(32)
    """

    batch_size: int
    least: int = 1
    most: int | None = None
    multiple: int = 1
    period: int = PERIOD

    def __post_init__(self) -> None:
        for name in ("batch_size", "least", "multiple", "period"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more ({name}={getattr(self, name)})")
        if self.batch_size % self.multiple:
            raise ValueError(
                f"batch_size must be a multiple of {self.multiple} (batch_size={self.batch_size}): blocks are equal"
            )
        if self.least > self.batch_size or (self.most is not None and self.most < self.batch_size):
            raise ValueError(
                f"batch_size must be between least and most (least={self.least}, batch_size={self.batch_size}, "
                f"most={self.most})"
            )

    def in_blocks(self, blocks: int) -> SharesBySpeed:
        """Return the same with batches that can be cut into so many equal blocks.

        >>> SharesBySpeed(batch_size=12, multiple=2).in_blocks(4).multiple
        4
        """
        multiple = math.lcm(self.multiple, blocks)
        return replace(self, multiple=multiple, least=max(self.least, multiple))

    def start(self) -> SpeedShares:
        """Return the state of a run that begins now."""
        return SpeedShares(self)


class SpeedShares(EqualShares):
    """The speeds and the present shares of the workers of a run in rounds.

    A worker that joins has `batch_size` samples until the next round closes. From then on it counts as quick as the
    median of the others, until its own times are known. When somebody has joined or left, shares are dealt anew at
    once, since a batch of all workers has `batch_size` samples for each.

    >>> shares = SharesBySpeed(batch_size=12, period=3).start()
    >>> for version in range(3):
    ...     for worker, seconds in enumerate((1.0, 3.0)):
    ...         shares.arrived(GradientArrived(worker=worker, version=version, samples=12, work_seconds=seconds))
    ...     assigned = shares.closed(version=version, members={0, 1})
    >>> assigned
    {0: 18, 1: 6}
    """

    def __init__(self, settings: SharesBySpeed) -> None:
        self._settings = settings
        self._speeds: dict[int, SpeedEstimate] = {}
        self.assigned: dict[int, int] = {}  # empty: everybody has `batch_size`
        self.decision: ShareDecision | None = None  # the last one
        self._looked = -1  # the version of the last look

    def __repr__(self) -> str:
        return f"SpeedShares({self.assigned or self._settings.batch_size})"

    def arrived(self, event: GradientArrived) -> None:
        # The rest of an epoch is smaller, and what a loader had fetched is of an earlier share: both say little.
        expected = self.assigned.get(event.worker, self._settings.batch_size)
        if event.work_seconds is not None and event.samples == expected:
            seconds = event.work_seconds * event.blocks / event.blocks_done + event.transfer_seconds
            self._speeds.setdefault(event.worker, SpeedEstimate()).observe(event.samples, seconds)

    def forget(self, worker: int) -> None:
        self._speeds.pop(worker, None)

    def closed(self, *, version: int, members: Collection[int]) -> Mapping[int, int] | None:
        settings, workers = self._settings, sorted(members)
        present = [self.assigned.get(worker, settings.batch_size) for worker in workers]
        changed = bool(self.assigned) and set(self.assigned) != set(workers)
        if version - self._looked < settings.period and not changed:
            return None
        speeds = self._known_speeds(workers)
        if speeds is None:
            return None
        decision = decide(
            speeds,
            present,
            samples=settings.batch_size * len(workers),
            least=settings.least,
            most=settings.most,
            multiple=settings.multiple,
        )
        if decision is None:
            return None
        self._looked, self.decision = version, decision
        if not (decision.pays or changed) or list(decision.shares) == present:
            return None
        self.assigned = dict(zip(workers, decision.shares, strict=True))
        return dict(self.assigned)

    def _known_speeds(self, workers: Sequence[int]) -> list[Speed] | None:
        """Return the speed of each worker; one of which nothing is known is as quick as the median of the others."""
        found = {worker: self._speeds[worker].speed for worker in workers if worker in self._speeds}
        if self.assigned:  # one that came later is known when it was seen a few times
            found = {
                worker: speed for worker, speed in found.items() if speed.known >= FEWEST or worker in self.assigned
            }
        newcomers = {worker for worker in workers if worker not in found and worker not in self.assigned}
        if not found or (newcomers and not self.assigned):
            return None  # at the beginning everybody is waited for
        usual = statistics.median(speed.sample_seconds for speed in found.values())
        size = self._settings.batch_size
        unknown = Speed(samples=size, seconds=usual * size)
        return [found.get(worker, unknown) for worker in workers]

    @property
    def form(self) -> Any:
        return {
            "speeds": tuple[tuple[WorkerNumber, dict[str, Any]], ...],
            "assigned": tuple[tuple[WorkerNumber, Count], ...],
            "looked": Count | None,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "speeds": [(worker, speed.state_dict()) for worker, speed in sorted(self._speeds.items())],
            "assigned": sorted(self.assigned.items()),
            "looked": self._looked if self._looked >= 0 else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:  # of a run that had none
            return
        held = decode(self.form, state, "shares")
        self._speeds = {}
        for worker, speed in held["speeds"]:
            self._speeds[worker] = SpeedEstimate()
            self._speeds[worker].load_state_dict(speed)
        self.assigned = dict(held["assigned"])
        self._looked = -1 if held["looked"] is None else held["looked"]
