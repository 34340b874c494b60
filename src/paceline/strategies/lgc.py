"""lgc: take the first K gradients, and make up for the others one round late.

    update_t = mean of the K fresh gradients of round t  +  e_{t-1}

    e_{t-1}  = (1/N) * sum of the M late gradients of round t-1
               - (M/N) * mean of the K fresh gradients of round t-1

e_{t-1} is the compensation for round t-1, which had N members: K of them fresh, M late. Live gradient compensation,
J. Xu. If all N - K others deliver a whole late gradient, the fresh mean of a round plus its e is the mean of all N
gradients. So the updates add up to what `full` makes of the same gradients, at the pace of the K-th worker.

As a `Step`: each fresh gradient has the weight 1/K, each late one 1/N, and `previous_mean_weight` is M/N. N is
everybody who was in round t-1. The driver keeps the gradients; here they are known by worker and version alone.

Batches of b_i samples weigh by their samples. With B = sum of b_i over everybody who was in round t-1,

    e_{t-1}  = sum over late i of (b_i / B) * g_i  -  (sum over late i of b_i / B) * fresh mean of t-1

which is the above where all b_i are equal, and sums up to the mean over all samples in the same way. Of a member that
has not delivered, b_i is that of its last batch.

A late worker stops at the next block boundary. With m_i the mean over the r_i of s blocks that it did, `scale_partial`
says what it counts in e, and how much of the fresh mean is taken back for it:

    True        (b_i / B) * (r_i / s) * m_i   and   b_i / B    the paper's linear scaling: less is put in than is taken
                                                               back, so steps are a little shorter than those of `full`
    False       (b_i / B) * m_i               and   b_i / B    unscaled: a few samples speak for a whole batch
    "samples"   (d_i / D) * m_i               and   d_i / D    d_i = b_i * r_i / s are the samples done, and D is B with
                                                               the d_i of the late in place of their b_i

With "auto", a run that begins weighs by "samples" (experiments/questions/late_weights.py measures all three), and one
that goes on weighs as it began.

By "samples", the fresh mean plus e is the mean over all samples that were computed, whoever computed them, as it is
where shares are by speed. A member that has not delivered stands in D with its whole batch: the fresh mean speaks for
it, as it does in B. With whole late work, r_i = s, the three are equal.

A worker sends g_i = (r_i / s) * m_i, the sum over its blocks divided by all s. So in a `Step` the late shares have the
weights b_i / B, (s / r_i) * b_i / B and b_i / D.

Where we differ from the paper: the server never waits for late gradients. M is the number of late gradients of round
t-1 that have arrived when round t closes; the paper takes all N - K. One that arrives after that is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

from paceline.events import Action, Drop, GradientArrived, Share, Step
from paceline.strategies.auto_k import BY_SAMPLES, SCALED, UNSCALED, LateWorkUse, make_chooser
from paceline.strategies.choose_k import Chooser, check_k
from paceline.strategies.forms import Nothing, Workers
from paceline.strategies.rounds import Rounds, RoundStrategy, Sizes, comparable
from paceline.strategies.shares import SharesBySpeed

ScalePartial: TypeAlias = bool | Literal["samples", "auto"]
StrategyT = TypeVar("StrategyT")
SAMPLES: Literal["samples"] = "samples"
AUTO: Literal["auto"] = "auto"
Weighing: TypeAlias = bool | Literal["samples"]
USES: dict[Weighing, LateWorkUse] = {True: SCALED, False: UNSCALED, SAMPLES: BY_SAMPLES}  # how K is chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class LGC(RoundStrategy):
    """The fastest K of N workers, with the late work of the others added one round later.

    `k` is how many gradients close a round; with "auto" it is learned (auto_k.py). The first `warmup_rounds` run as
    `full`. `scale_partial` says what a late gradient of r out of s blocks counts: as much as its samples are of all
    samples that were computed ("samples"), r/s of a whole one (True, the paper), or as a whole one (False). With "auto"
    that is by samples; a run that began otherwise goes on as it began. With `shares` workers get batches by their
    speed; without, all of them have the same.

    >>> LGC(k=7, warmup_rounds=10)
    LGC(k=7, warmup_rounds=10, scale_partial='auto')
    """

    k: int | Literal["auto"]
    warmup_rounds: int = 0
    scale_partial: ScalePartial = AUTO
    shares: SharesBySpeed | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_k(self.k, self.warmup_rounds)
        if not isinstance(self.scale_partial, bool) and self.scale_partial not in (SAMPLES, AUTO):
            raise ValueError(
                f"scale_partial must be true, false, {SAMPLES!r} or {AUTO!r} (scale_partial={self.scale_partial!r:.40})"
            )

    @property
    def weighing(self) -> Weighing:
        """How a run that begins now weighs partial work.

        >>> LGC(k=7).weighing, LGC(k=7, scale_partial=True).weighing
        ('samples', True)
        """
        return SAMPLES if self.scale_partial == AUTO else self.scale_partial

    def begun(self, weighing: Weighing) -> LGC:
        """Return the strategy as a run has it that began with this weighing, where it is left open here.

        >>> LGC(k=7).begun(True), LGC(k=7, scale_partial=False).begun(True)
        (LGC(k=7, warmup_rounds=0, scale_partial=True), LGC(k=7, warmup_rounds=0, scale_partial=False))
        """
        return replace(self, scale_partial=weighing) if self.scale_partial == AUTO else self

    def start(self) -> CompensatedRounds:
        """Return the state of a run that begins now."""
        return CompensatedRounds(
            chooser=make_chooser(self.k, USES[self.weighing]),
            warmup_rounds=self.warmup_rounds,
            weighing=self.weighing,
            shares=self.shares,
        )


def settled(strategy: StrategyT, began: Weighing | None = None) -> StrategyT:
    """Return a strategy with the weighing of a run that `began` with it, or begins now, where it is left open.

    >>> settled(LGC(k=7)).scale_partial, settled(LGC(k=7), True).scale_partial
    ('samples', True)
    """
    if not isinstance(strategy, LGC):
        return strategy
    return cast("StrategyT", strategy.begun(strategy.weighing if began is None else began))


def weighing_in(text: str) -> Weighing | None:
    """Return the weighing of a strategy that was kept as text.

    >>> weighing_in("LGC(k=2, warmup_rounds=0, scale_partial=True)"), weighing_in("Full()")
    (True, None)
    """
    found = re.search(r"\bscale_partial=(True|False|'samples')", text)
    if found is None:
        return None
    return SAMPLES if found[1] == repr(SAMPLES) else found[1] == "True"


class CompensatedRounds(Rounds):
    """Rounds that keep late gradients for the next update.

    >>> state = LGC(k=1).start()
    >>> state.version
    0
    """

    def __init__(
        self, *, chooser: Chooser, warmup_rounds: int, weighing: Weighing, shares: SharesBySpeed | None = None
    ) -> None:
        super().__init__(chooser=chooser, warmup_rounds=warmup_rounds, shares=shares)
        self._weighing = weighing
        self._late_scales: dict[int, float] = {}  # late gradients that have arrived, by worker: s/r; if scaled, 1
        self._previous_fresh: set[int] = set()
        self._previous_members: dict[int, int] = {}  # and the samples of their batches in that round

    def _late_arrived(self, event: GradientArrived) -> list[Action]:
        if event.worker in self._late_scales or event.worker in self._previous_fresh:
            return [Drop(worker=event.worker, version=event.version, reason="it came twice")]
        if event.worker not in self._previous_members:
            return [Drop(worker=event.worker, version=event.version, reason="its worker was not in that round")]
        if event.samples:
            self._previous_members[event.worker] = event.samples
        self._late_scales[event.worker] = 1.0 if self._weighing is True else event.blocks / event.blocks_done
        return []

    def _step(self, at_seconds: float) -> Step:
        sizes = comparable(self._previous_members)
        by_samples, counted = self._weighing == SAMPLES, sizes
        if by_samples:
            counted = {worker: size / self._late_scales.get(worker, 1.0) for worker, size in sizes.items()}
        total, late = sum(counted.values()), sum(counted[worker] for worker in self._late_scales)
        weights = {
            worker: (1.0 if by_samples else scale) / (total / sizes[worker])
            for worker, scale in sorted(self._late_scales.items())
        }
        return Step(
            version=self.version,
            fresh=self._fresh_shares(),
            late=tuple(
                Share(worker=worker, version=self.version - 1, weight=weight) for worker, weight in weights.items()
            ),
            previous_mean_weight=late / total if late else 0.0,
            at_seconds=at_seconds,
        )

    def _round_closed(self) -> None:
        self._late_scales = {}
        self._previous_fresh = set(self._fresh)
        self._previous_members = {
            worker: self._fresh.get(worker) or self._sizes.get(worker, 0) for worker in self._alive | self._fresh.keys()
        }

    @property
    def form(self) -> dict[str, Any]:
        """The types of a `state_dict` that was kept as JSON."""
        return super().form | {
            "late_scales": Nothing,
            "previous_fresh": Workers,
            "previous_members": Workers,
            "previous_sizes": Sizes,
        }

    @property
    def added(self) -> dict[str, Any]:
        return super().added | {"previous_sizes": []}

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on later, as plain values."""
        return super().state_dict() | {
            "late_scales": sorted(self._late_scales.items()),
            "previous_fresh": sorted(self._previous_fresh),
            "previous_members": sorted(self._previous_members),
            "previous_sizes": sorted((worker, size) for worker, size in self._previous_members.items() if size),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        state = self.added | state
        super().load_state_dict(state)
        self._late_scales = {int(worker): float(scale) for worker, scale in state["late_scales"]}
        self._previous_fresh = set(state["previous_fresh"])
        sizes = {int(worker): int(size) for worker, size in state["previous_sizes"]}
        self._previous_members = {worker: sizes.get(worker, 0) for worker in state["previous_members"]}
