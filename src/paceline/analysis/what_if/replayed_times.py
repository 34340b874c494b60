"""A measured run played by the simulator: as it was, or with a remedy."""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import median

from paceline.analysis.what_if.measured_run import MeasuredRun, WhatIfError
from paceline.drivers.simulated.averaging_cluster import AveragingCluster, AveragingSetup, NoReplicas, SimulatedAverage
from paceline.drivers.simulated.cluster import Cluster, MeasuredCosts, NoTraining, Setup
from paceline.drivers.simulated.delays import Sequences
from paceline.drivers.simulated.network import Network
from paceline.traffic import Traffic

MOST_ERROR = 0.10
MOST_GRADIENTS = 5_000_000


@dataclass(frozen=True, kw_only=True)
class Played:
    """The times of a run that was played: in all, of each round, and which share of its draws nobody had measured."""

    seconds: float
    round_seconds: tuple[float, ...]
    unseen_share: float


@dataclass(frozen=True, kw_only=True)
class ReplayDifference:
    """How far a run that was played again is from its record: in all, and the median of its rounds' differences.

    >>> ReplayDifference(total=-0.02, median_round=0.03).refused
    False
    """

    total: float
    median_round: float

    @property
    def refused(self) -> bool:
        """Whether nothing should be predicted from it."""
        return not abs(self.total) <= MOST_ERROR


def play(run: MeasuredRun) -> Played:
    """Play a run; without a change, as it was recorded."""
    if run.workers * max(run.rounds, run.steps // max(1, run.workers)) > MOST_GRADIENTS:
        raise WhatIfError(f"workers x rounds must be at most {MOST_GRADIENTS:,} ({run.workers} x {run.rounds:,})")
    played = _play_averages(run) if run.member is not None else _play_rounds(run)
    floor = _processor_floor(run)
    if played.seconds < floor:  # the cores of one machine have no more to give
        factor = floor / played.seconds
        return Played(
            seconds=floor,
            round_seconds=tuple(factor * each for each in played.round_seconds),
            unseen_share=played.unseen_share,
        )
    return played


def played_error(run: MeasuredRun, played: Played) -> ReplayDifference:
    """Compare a run that was played again with its record."""
    pairs = list(zip(run.round_seconds, played.round_seconds, strict=False))
    off = [abs(simulated - recorded) / recorded for recorded, simulated in pairs if recorded > 0]
    total = played.seconds / run.seconds - 1 if run.seconds > 0 else float("inf")
    return ReplayDifference(total=total, median_round=median(off) if off else 0.0)


def _play_rounds(run: MeasuredRun) -> Played:
    strategy = run.strategy
    if strategy is None:
        raise WhatIfError(f"{run.label} has no rounds")
    setup = Setup(
        name=run.label,
        strategy=strategy,
        workers=run.workers,
        rounds=run.rounds,
        delays=Sequences(columns=tuple(tuple(draw.seconds for draw in column) for column in run.draws)),
        late_work=run.late_work,
        blocks=run.blocks,
        on=run.on,
        costs=MeasuredCosts(
            server_seconds=run.server_seconds,
            worker_seconds=Sequences(
                columns=tuple(tuple(draw.beside_seconds for draw in column) for column in run.draws)
            ),
            links=run.links if run.on == "server" else (),
        ),
    )
    cluster = Cluster(setup, trainer=NoTraining(up=run.up_bytes, down=run.down_bytes))
    closes = [taken.step.at_seconds for taken in cluster.run(run.steps)]
    return Played(
        seconds=closes[-1],
        round_seconds=tuple(later - earlier for earlier, later in zip([0.0, *closes], closes, strict=False)),
        unseen_share=_unseen(run, cluster.draws),
    )


def _play_averages(run: MeasuredRun) -> Played:
    member = run.member
    if member is None:
        raise WhatIfError(f"{run.label} does not average")
    wire = median(run.server_seconds) if run.server_seconds else 0.0
    setup = AveragingSetup(
        member=member,
        workers=run.workers,
        rounds=run.rounds,
        delays=Sequences(
            columns=tuple(tuple(draw.seconds + draw.beside_seconds for draw in column) for column in run.draws)
        ),
        network=Network(latency_seconds=wire),
    )
    cluster = AveragingCluster(setup, trainer=NoReplicas(traffic=Traffic(hops=1)))
    ends = [each.ended_seconds for each in cluster.run() if isinstance(each, SimulatedAverage) and each.steps]
    taken = cluster.steps_taken // run.workers
    return Played(
        seconds=ends[-1] if ends else cluster.now_seconds,
        round_seconds=tuple(later - earlier for earlier, later in zip([0.0, *ends], ends, strict=False)),
        unseen_share=_unseen(run, (taken,) * run.workers),
    )


def _unseen(run: MeasuredRun, drawn: tuple[int, ...]) -> float:
    """Return the share of the draws that were guessed, or seen once and used again."""
    unseen = sum(
        sum(draw.mark == "guessed" for draw in column[:count]) + max(0, count - len(column))
        for column, count in zip(run.draws, drawn, strict=True)
    )
    return unseen / max(1, sum(drawn))


def _processor_floor(run: MeasuredRun) -> float:
    """Return the least time that the cores of this machine need for all that the workers compute, if all were here."""
    return run.rounds * run.workers * (run.processor_seconds or 0.0) / (os.cpu_count() or 1) if run.was_here else 0.0
