"""What the benchmark `averaging` runs, in order: read by the ranks, who do it, and by the parent, who waits for it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

PERIOD = 8  # of local-sgd
WARM_UP_STEPS = 2
BARRIER = "hpsgd + barrier"
PAPER = "hpsgd, no rebase"
SPEED_LANES = ("ddp", "ssgd", "local-sgd", "hpsgd", PAPER, "psgd")
LOSS_LANES = ("ddp", "ssgd", "local-sgd", "hpsgd", PAPER)
SLOW_LANES = ("ssgd", "local-sgd", BARRIER, "hpsgd")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the ranks do."""

    ranks_per_host: int
    widths: list[int]
    batch: int
    ratios: list[float]  # of an all-reduce's time to a step's computation
    rounds: int  # of every lane, lanes interleaved
    seconds: float  # of one lane in one round, as expected
    loss_ratio: float
    loss_seconds: float
    seeds: int
    optimisers: list[list[float]]  # of SGD: rate and momentum
    slow_times: int  # the last rank's computation, where it is slow
    shard: int  # samples of a rank
    evaluated: int  # samples of the fixed set


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """One lane's turn: `speed` and `slow` rank are timed, `loss` is trained for."""

    part: str
    lane: str
    ratio: float
    turn: int  # the round, or the seed
    rate: float = 0.0  # of what is trained for its loss
    momentum: float = 0.0

    def __str__(self) -> str:
        what = f"momentum {self.momentum:g}" if self.part == "loss" else f"{self.ratio:g} : 1"
        return f"{self.part}, {what}, {self.lane}, {self.turn + 1}"


def stretches(plan: Plan) -> list[Stretch]:
    """All turns; in a round every lane has one, so that what disturbs the machine disturbs all of them."""
    speed = [
        Stretch(part="speed", lane=lane, ratio=ratio, turn=turn)
        for turn in range(plan.rounds)
        for ratio in plan.ratios
        for lane in SPEED_LANES
    ]
    slow = [
        Stretch(part="slow", lane=lane, ratio=plan.loss_ratio, turn=turn)
        for turn in range(plan.rounds)
        for lane in SLOW_LANES
    ]
    loss = [
        Stretch(part="loss", lane=lane, ratio=plan.loss_ratio, turn=seed, rate=rate, momentum=momentum)
        for rate, momentum in plan.optimisers
        for seed in range(plan.seeds)
        for lane in LOSS_LANES
    ]
    return speed + slow + loss


def step_seconds(lane: str, computation: float, reduction: float) -> float:
    """What a step should take; the number of steps is made of it, not the figures.

    >>> step_seconds("ssgd", 1.0, 2.0), step_seconds("local-sgd", 1.0, 2.0), step_seconds("hpsgd", 1.0, 2.0)
    (3.0, 1.25, 1.0)
    """
    waits = {"ddp": 1.0, "ssgd": 1.0, "local-sgd": 1 / PERIOD}
    return computation + waits.get(lane, 0.0) * reduction


def whole_periods(steps: float) -> int:
    """At least so many steps, and as many averages of local-sgd as belong to them.

    >>> whole_periods(0.5), whole_periods(17.0)
    (8, 24)
    """
    return PERIOD * max(1, math.ceil(steps / PERIOD))


def plan_text(plan: Plan) -> str:
    """A plan as the command line takes it."""
    return json.dumps(asdict(plan))
