"""k="auto": the K that should reach a given loss soonest, from what was seen so far.

    seconds to target  ~  T(K) / progress(K) * (1 + noise(K))          the smallest wins

T(K)         the K-th smallest of the workers' times for a whole batch, averaged over the rounds seen
progress(K)  what a round is worth against a full one. A worker gets w of its batch done before the round closes.
             Scaled late work adds w: where all hold alike data the round is worth the mean of w; where each holds
             its own kind, the kind that is done least is learned last, and it is the harmonic mean. `skew` says how
             much of each: (1 - skew) * mean + skew * harmonic mean. Work that is weighed by its samples makes steps
             as long as those of a full round, so that is divided by the mean of w. Unscaled work is worth 1.
noise(K)     grows like 1/K - 1/N, and more with skew: few workers speak for few kinds of data; and more where the
             workers of a round are again those of the round before

`skew` says how differently the workers' data is dealt, and is measured by their losses:

    skew = variance between workers / (variance between workers + variance between the samples of a worker)

This is the intraclass correlation of a one-way analysis of variance. What the workers' means would differ by anyway,
as means of so many samples, is taken off the variance between them. Equally dealt data gives about 0, one class per
worker about 0.7 on digits at the start of training. As training goes on all losses become alike though the data does
not, so the highest skew seen is remembered, and fades slowly.

What is learned from are numbers and no tensors: arrival times, and the mean and variance of each worker's losses. So
the strategy stays free of torch.

The paper leaves the choice of K open. The constants were fitted to times to target on digits, K = 1..10: those of work
weighed by its samples on seeds 100 to 102, the others, with which runs of 0.2.0 are played again, on seeds 0 to 2.
`experiments/questions/choice_of_k.py` measures the choice against every fixed K on seeds from 200 on.

The same events give the same K wherever processors round powers alike; where they do not, the costs of two K would have
to agree in 15 digits for another to be chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from paceline.decoding import MOST_FLOAT, Between, Blocks, Count, Fraction, WorkerNumber
from paceline.events import GradientArrived, LossSeen
from paceline.strategies.choose_k import Chooser, FixedK
from paceline.strategies.forms import Seconds, Workers

RECENT = 0.2  # weight of the newest in a running mean
MOST_CANDIDATES = 32
SKEW_FADES = 0.998


@dataclass(frozen=True, kw_only=True)
class LateWorkUse:
    """What becomes of late work, as far as the choice of K goes, and how a run begins.

    While nothing is known K is so many tenths of the workers. Before any losses were compared the skew is taken to be
    `unseen_skew`. The first losses are compared as soon as the next round has some, or when late ones are in as well.

    >>> SCALED.noise(skew=0.0), SCALED.noise(skew=1.0)
    (0.1, 3.1)
    """

    unfinished: Literal["shrinks the step", "weighs less", "counts as whole", "is dropped"]
    noise_always: float
    noise_with_skew: float
    persistence_power: float
    begins_with_tenths: int = 5
    unseen_skew: float = 0.3
    compares_at_once: bool = False

    def noise(self, skew: float) -> float:
        """Return the factor of 1/K - 1/N."""
        return self.noise_always + self.noise_with_skew * skew**2


SCALED = LateWorkUse(unfinished="shrinks the step", noise_always=0.1, noise_with_skew=3.0, persistence_power=0.2)
BY_SAMPLES = LateWorkUse(
    unfinished="weighs less",
    noise_always=0.1,
    noise_with_skew=2.0,
    persistence_power=0.35,
    begins_with_tenths=7,
    unseen_skew=0.5,
    compares_at_once=True,
)
UNSCALED = LateWorkUse(unfinished="counts as whole", noise_always=0.1, noise_with_skew=3.0, persistence_power=0.2)
DISCARDED = LateWorkUse(unfinished="is dropped", noise_always=1.6, noise_with_skew=13.0, persistence_power=0.5)


def make_chooser(k: int | Literal["auto"], use: LateWorkUse) -> Chooser:
    """Return the chooser that a setting of k asks for.

    >>> make_chooser(4, SCALED).k(members=10)
    4
    """
    return AutoK(use) if k == "auto" else FixedK(k)


class Skew:
    """How much of the variance of losses lies between workers: the highest share seen, fading.

    >>> skew = Skew(unseen=0.3)
    >>> for version in (0, 1, 2):
    ...     for worker, loss in enumerate((1.0, 5.0, 9.0)):
    ...         skew.note(LossSeen(worker=worker, version=version, mean=loss, variance=1.0, samples=32))
    >>> round(skew.value, 2)
    0.94
    """

    def __init__(self, *, unseen: float, at_once: bool = False) -> None:
        self.value, self._at_once = unseen, at_once
        self._recent: float | None = None
        self._seen: defaultdict[int, dict[int, tuple[float, float, int]]] = defaultdict(dict)

    def note(self, event: LossSeen) -> None:
        """Take in a worker's losses. A version is judged once two newer ones came: then its late gradients are in.

        `at_once`, the first version is also judged by what is there when the next one begins, so that something is
        known of the skew one round sooner.
        """
        if self._at_once and self._recent is None and self._seen and event.version > min(self._seen):
            self._judge(list(self._seen[min(self._seen)].values()))
        self._seen[event.version][event.worker] = event.mean, event.variance, event.samples
        for version in [version for version in self._seen if version <= event.version - 2]:
            self._judge(list(self._seen.pop(version).values()))

    def _judge(self, losses: list[tuple[float, float, int]]) -> None:
        if len(losses) < 3:
            return
        means, variances, samples = (np.array(column, dtype=np.float64) for column in zip(*losses, strict=True))
        within = float(variances.mean())
        between = max(0.0, float(means.var(ddof=1)) - float((variances / samples).mean()))
        if not within + between > 0:
            return
        share = between / (within + between)
        first = self._recent is None
        self._recent = share if self._recent is None else self._recent + RECENT * (share - self._recent)
        self.value = self._recent if first else max(self._recent, SKEW_FADES * self.value)

    @property
    def form(self) -> dict[str, Any]:
        """The types of a `state_dict` that was kept as JSON."""
        loss = tuple[float, Annotated[float, Between(0, MOST_FLOAT)], Count]  # mean, variance, samples
        by_worker = tuple[tuple[WorkerNumber, loss], ...]
        return {"value": Fraction, "recent": Fraction | None, "seen": tuple[tuple[Count, by_worker], ...]}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""
        seen = [(version, sorted(by.items())) for version, by in sorted(self._seen.items())]
        return {"value": self.value, "recent": self._recent, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._recent = state["value"], state["recent"]
        self._seen = defaultdict(dict)
        for version, entries in state["seen"]:
            self._seen[int(version)] = {int(worker): tuple(entry) for worker, entry in entries}


class AutoK(Chooser):
    """Chooses K anew for every round from arrival times and losses.

    >>> chooser = AutoK(SCALED)
    >>> chooser.k(members=10)  # nothing seen yet
    5
    """

    def __init__(self, use: LateWorkUse) -> None:
        self._use = use
        self._batch_seconds: dict[int, float] = {}
        self.blocks = 1
        self._order_seconds: NDArray[np.float64] = np.zeros(0)
        self._skew = Skew(unseen=use.unseen_skew, at_once=use.compares_at_once)
        self._last_fresh: frozenset[int] = frozenset()
        self._same_again = 0.0
        self._chosen: tuple[int, int] | None = None

    def k(self, members: int) -> int:
        """Return the K with the smallest expected time to target; some tenths of the workers while nothing is known."""
        if len(self._order_seconds) == 0:
            return max(1, -(-self._use.begins_with_tenths * members // 10))
        if self._chosen is None or self._chosen[0] != members:
            self._chosen = members, self._choose(members)
        return self._chosen[1]

    def arrived(self, event: GradientArrived, *, round_seconds: float) -> None:
        """Note how long a whole batch takes this worker."""
        self.blocks = event.blocks
        if event.work_seconds is None:
            seconds = max(round_seconds, 0.0) * event.blocks / event.blocks_done
        else:
            seconds = event.work_seconds * event.blocks / event.blocks_done + event.transfer_seconds
        self._batch_seconds[event.worker] = seconds

    def loss_seen(self, event: LossSeen) -> None:
        """Note how much the workers' losses differ."""
        self._skew.note(event)

    def closed(self, fresh: Set[int]) -> None:
        """Take the round's times into the averages; the next K is chosen anew."""
        now, before = frozenset(fresh), self._last_fresh
        members = max(len(self._batch_seconds), len(now))
        self.learn(
            np.fromiter(self._batch_seconds.values(), dtype=np.float64),
            again=len(now & before) / len(now) if before else None,
            by_chance=len(now) / members,
        )
        self._last_fresh = now

    def learn(self, batch_seconds: NDArray[np.float64], *, again: float | None, by_chance: float) -> None:
        """Take in a round that closed: the times last known of all workers, and who was in the round before too.

        `again` is the share of the round's workers that were also in the one before, `by_chance` the expected share.
        """
        times = np.sort(batch_seconds)
        if len(times) == len(self._order_seconds):
            times = (1 - RECENT) * self._order_seconds + RECENT * times
        self._order_seconds = times
        if again is not None and by_chance < 1:
            excess = max((again - by_chance) / (1 - by_chance), 0.0)
            self._same_again += RECENT * (excess - self._same_again)
        self._chosen = None

    def forget(self, worker: int) -> None:
        """Leave out the times of a worker that is gone."""
        self._batch_seconds.pop(worker, None)
        self._chosen = None

    def _choose(self, members: int) -> int:
        # Who was never heard of is not waited for: nobody knows how long that would take.
        most = min(members, len(self._order_seconds))
        candidates = np.unique(np.linspace(1, most, min(most, MOST_CANDIDATES)).round().astype(int))
        costs = [self._cost(int(k), members) for k in candidates]
        return int(candidates[int(np.argmin(costs))])

    def _cost(self, k: int, members: int) -> float:
        seconds = float(self._order_seconds[k - 1])
        persistence = (1.0 - min(self._same_again, 0.99)) ** -self._use.persistence_power
        noise = self._use.noise(self._skew.value) * float(persistence) * (1.0 / k - 1.0 / members)
        return seconds / self._progress(seconds) * (1.0 + noise)

    def _progress(self, seconds: float) -> float:
        if self._use.unfinished in ("counts as whole", "is dropped"):
            return 1.0
        share = seconds / np.maximum(self._order_seconds, 1e-12)
        done = np.where(share * self.blocks >= 1, np.ceil(share * self.blocks - 1e-9) / self.blocks, share)
        done = np.clip(done, 1e-6, 1.0)
        skew, mean = self._skew.value, float(done.mean())
        progress = (1 - skew) * mean + skew / float(np.mean(1 / done))
        return progress if self._use.unfinished == "shrinks the step" else progress / mean

    @property
    def form(self) -> dict[str, Any]:
        """The types of a `state_dict` that was kept as JSON."""
        return {
            "batch_seconds": tuple[tuple[WorkerNumber, Seconds], ...],
            "blocks": Blocks,
            "order_seconds": tuple[Seconds, ...],
            "skew": self._skew.form,
            "last_fresh": Workers,
            "same_again": Fraction,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch_seconds": sorted(self._batch_seconds.items()),
            "blocks": self.blocks,
            "order_seconds": self._order_seconds.tolist(),
            "skew": self._skew.state_dict(),
            "last_fresh": sorted(self._last_fresh),
            "same_again": self._same_again,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._batch_seconds = {int(worker): float(seconds) for worker, seconds in state["batch_seconds"]}
        self.blocks = state["blocks"]
        self._order_seconds = np.array(state["order_seconds"], dtype=np.float64)
        self._skew.load_state_dict(state["skew"])
        self._last_fresh = frozenset(state["last_fresh"])
        self._same_again = state["same_again"]
        self._chosen = None
