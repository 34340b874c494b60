"""Scale efficiency of averaging, by simulated times alone: the settings and the arithmetic of HPSGD's figure 5a.

    scale efficiency = samples per second of N workers / (N * samples per second of one worker alone)

The paper's figures (ResNet-101 on CIFAR-10, batches of 128, local-sgd every 8 steps) come from 4 to 16 processes on one
DGX Station with 4 GPUs. It tells neither the seconds of a step nor the link, so the settings here are ours, chosen
before the figures were seen and not changed after:

    a step      0.20 s + Exp(0.02 s): about what a V100 needs for such a batch, with a little noise in every step
    a message   170 MB: 42.5 million parameters of 4 bytes
    station     one link of 80 Gbit/s that all share: each of N workers has 1/N of it, and the ring's time grows with N
    4 GPUs      as station, and more than 4 workers share 4 GPUs: a step takes N/4 times as long
    cluster     a link of 10 Gbit/s for every worker, 50 microseconds a hop: the ring's time hardly grows

What the paper's numbers imply is computed too. With c = a mean step, R = one ring and s = the slowest worker's step,
where hpsgd hides all of R, and local-sgd's period is p:

    hpsgd / ssgd = (s + R) / c        hpsgd / local-sgd = (s + R/p) / c

If all are equally fast (s = c) each number gives a ratio R/c of its own; both together give R and s.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.delays import ShiftedExponential
from paceline.drivers.simulated.network import Network, ring_seconds
from paceline.reproduce.published import HPSGD_FIGURE_5A
from paceline.strategies.averaging import AVERAGING

STEP_SECONDS, NOISE_SECONDS = 0.20, 0.02
MESSAGE_BYTES = 170_000_000


@dataclass(frozen=True, kw_only=True)
class SharedHardware:
    """What workers share.

    >>> SharedHardware(name="4 GPUs", processors=4).slowdown(16)
    4.0
    """

    name: str
    shared_bits_per_second: float | None = None  # one link for all; else everybody has one
    own_bits_per_second: float = 10e9
    latency_seconds: float = 0.0
    processors: int | None = None  # that all share; else everybody has one
    most_workers: int = 1024  # more on so few would tell nothing

    def network(self, workers: int) -> Network:
        """Return the network as one of so many workers sees it."""
        own = self.own_bits_per_second if self.shared_bits_per_second is None else self.shared_bits_per_second / workers
        return Network(latency_seconds=self.latency_seconds, worker_bits_per_second=own)

    def slowdown(self, workers: int) -> float:
        """Return how many times as long a step takes where so many workers share the processors."""
        return 1.0 if self.processors is None else max(1.0, workers / self.processors)

    def ring_in_steps(self, workers: int) -> float:
        """Return how long an average of all workers takes, in mean steps."""
        step = (STEP_SECONDS + NOISE_SECONDS) * self.slowdown(workers)
        return ring_seconds(self.network(workers), workers=workers, message_bytes=MESSAGE_BYTES) / step


HARDWARE = {
    each.name: each
    for each in (
        SharedHardware(name="station", shared_bits_per_second=80e9),
        SharedHardware(name="4 GPUs", shared_bits_per_second=80e9, processors=4, most_workers=16),
        SharedHardware(name="cluster", latency_seconds=50e-6),
    )
}
"""The settings by name."""


def batches_per_second(hardware: str, member: str, workers: int, rounds: int) -> float:
    """Return the batches of all workers in a second, a whole run's start and end included.

    >>> alone = batches_per_second("cluster", "psgd", 1, 50)
    >>> 0.9 < batches_per_second("cluster", "psgd", 4, 50) / 4 / alone < 1.0
    True
    """
    found = HARDWARE[hardware]
    slowdown = found.slowdown(workers)
    setup = AveragingSetup(
        member=AVERAGING[member],
        workers=workers,
        rounds=rounds,
        delays=ShiftedExponential(shift_seconds=STEP_SECONDS * slowdown, mean_seconds=NOISE_SECONDS * slowdown),
        network=found.network(workers),
    )
    run = AveragedSimulation(setup, message_bytes=MESSAGE_BYTES)
    for _ in run:
        pass
    trace = run.trace
    return trace.used / trace.seconds


def implied_by(workers: int) -> dict[str, float]:
    """Return what the paper's numbers for so many workers say of the ring and the slowest worker, in mean steps.

    >>> {name: round(value, 2) for name, value in implied_by(16).items()}
    {'workers': 16, 'ring_by_ssgd': 2.5, 'ring_by_local_sgd': 6.0, 'ring': 2.0, 'slowest': 1.5}
    """
    period = AVERAGING["local-sgd"].period or 1
    ratio = {over: 1 + gain for count, over, gain in HPSGD_FIGURE_5A if count == workers}
    ring = (ratio["ssgd"] - ratio["local-sgd"]) / (1 - 1 / period)
    return {
        "workers": workers,
        "ring_by_ssgd": ratio["ssgd"] - 1,
        "ring_by_local_sgd": period * (ratio["local-sgd"] - 1),
        "ring": ring,
        "slowest": ratio["ssgd"] - ring,
    }
