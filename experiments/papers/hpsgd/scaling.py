"""hpsgd-5a, the paper's figure 5a: the scale efficiency, here by simulated times alone.

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

The question `scale` has the same settings with the whole family of averaging, at up to 1,024 workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.core.claims import ahead, percent, within
from experiments.core.story import NAN, Job, Numbers, Runs, Size, Telling, experiment
from experiments.papers.published import HPSGD_FIGURE_5A
from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.delays import ShiftedExponential
from paceline.drivers.simulated.network import Network, ring_seconds
from paceline.quantities import percent_text
from paceline.reports.figures import Series, line_chart
from paceline.reports.table import PlainTable
from paceline.strategies.averaging import AVERAGING

STEP_SECONDS, NOISE_SECONDS = 0.20, 0.02
MESSAGE_BYTES = 170_000_000
SAME = 0.10  # two efficiencies are the same if they differ by no more than this share
MEMBERS = ("ssgd", "local-sgd", "hpsgd", "psgd")
ALONE = ("station", "psgd", 1)

Cell = tuple[str, str, int]  # hardware, member, workers


@dataclass(frozen=True, kw_only=True)
class SharedHardware:
    """Workers share this hardware: a link, processors, or nothing.

    >>> SharedHardware(processors=4).slowdown(16)
    4.0
    """

    shared_bits_per_second: float | None = None  # one link for all; else each worker has one
    own_bits_per_second: float = 10e9
    latency_seconds: float = 0.0
    processors: int | None = None  # that all share; else each worker has one
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
    "station": SharedHardware(shared_bits_per_second=80e9),
    "4 GPUs": SharedHardware(shared_bits_per_second=80e9, processors=4, most_workers=16),
    "cluster": SharedHardware(latency_seconds=50e-6),
}


def run_scale(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batches of all workers in a second, a whole run's start and end included.

    >>> alone, four = (
    ...     run_scale({"hardware": "cluster", "member": "psgd", "workers": workers, "rounds": 50})["batches_per_second"]
    ...     for workers in (1, 4)
    ... )
    >>> 0.9 < four / 4 / alone < 1.0
    True
    """
    hardware, workers = HARDWARE[settings["hardware"]], settings["workers"]
    slowdown = hardware.slowdown(workers)
    setup = AveragingSetup(
        member=AVERAGING[settings["member"]],
        workers=workers,
        rounds=settings["rounds"],
        delays=ShiftedExponential(shift_seconds=STEP_SECONDS * slowdown, mean_seconds=NOISE_SECONDS * slowdown),
        network=hardware.network(workers),
    )
    run = AveragedSimulation(setup, message_bytes=MESSAGE_BYTES)
    for _ in run:
        pass
    trace = run.trace
    return {"batches_per_second": trace.used / trace.seconds}


def scale_job(cell: Cell, rounds: int, seconds: float) -> Job:
    """Return the job of one cell.

    >>> scale_job(ALONE, 200, 0.5).of(0)
    {'hardware': 'station', 'member': 'psgd', 'workers': 1, 'rounds': 200}
    """
    hardware, member, workers = cell
    return Job(run_scale, {"hardware": hardware, "member": member, "workers": workers, "rounds": rounds}, seconds)


def cells_of(members: Iterable[str], sizes: Sequence[int]) -> list[Cell]:
    """Return all cells, of each hardware those with as many workers as it has room for."""
    members = tuple(members)
    return [
        (hardware, member, workers)
        for hardware, found in HARDWARE.items()
        for member in members
        for workers in sizes
        if workers <= found.most_workers
    ]


def efficiencies(runs: Runs) -> dict[Cell, float]:
    """Return the scale efficiency of each cell.

    >>> speeds = {ALONE: 5.0, ("station", "hpsgd", 4): 18.0}
    >>> efficiencies(Runs({cell: [{"batches_per_second": speed}] for cell, speed in speeds.items()}))
    {('station', 'hpsgd', 4): 0.9}
    """
    speeds: dict[Cell, float] = runs.mean("batches_per_second")
    alone = speeds.pop(ALONE)
    return {cell: speed / cell[2] / alone for cell, speed in speeds.items()}


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


def implied_told() -> Telling:
    """Tell what the paper's numbers imply: a table, and the numbers."""
    implied = [implied_by(workers) for workers in sorted({workers for workers, _, _ in HPSGD_FIGURE_5A})]
    columns = ("ring_by_ssgd", "ring_by_local_sgd", "ring", "slowest")
    yield PlainTable(
        title="What the paper's gains imply, in mean steps",
        headings=("workers", "ring,\nby ssgd", "ring, by\nlocal-sgd", "ring,\nby both", "slowest step,\nby both"),
        rows=[(f"{row['workers']:.0f}", *(f"{row[name]:.2f}" for name in columns)) for row in implied],
        caption="If all workers were equally fast, the first two would be the same; a slowest step below 1\n"
        "cannot be. So the four gains do not go together.",
    )
    yield Numbers({"implied": implied})


# -- the figure --------------------------------------------------------------------------------------------------------


@experiment(
    "hpsgd-5a",
    source="HPSGD, figure 5a",
    question="scale efficiency with 4 to 16 workers",
    minutes=0.5,
    full_hours=0.1,
)
def figure_5a(size: Size) -> Telling:
    sizes = size.pick((4, 16), (4, 8, 12, 16))
    rounds, seconds = size.pick((10, 0.1), (400, 0.5), (9766, 10.0))
    runs = yield {cell: scale_job(cell, rounds, seconds) for cell in (ALONE, *cells_of(MEMBERS, sizes))}
    found, gains = efficiencies(runs), []
    for hardware in HARDWARE:
        for first, second, text, limit in (
            ("hpsgd", "local-sgd", "HPSGD / Local SGD", 0.99),
            ("local-sgd", "ssgd", "Local SGD / SSGD", 1.05),
        ):
            ratios = [found[hardware, first, workers] / found[hardware, second, workers] for workers in sizes]
            least = NAN if any(map(math.isnan, ratios)) else min(ratios)
            yield within(f"{text}, the least of all N, {hardware}", least, least=limit, kind="winner")
        yield ahead(
            f"share of its efficiency that is kept from {sizes[0]} to {sizes[-1]} workers, {hardware}",
            {
                lane: found[hardware, lane, sizes[-1]] / found[hardware, lane, sizes[0]]
                for lane in ("hpsgd", "local-sgd")
            },
            best="high",
            write=percent,
        )
        for workers, over, gain in HPSGD_FIGURE_5A:
            ours = found[hardware, "hpsgd", workers] / found[hardware, over, workers] - 1
            gains.append((f"over {over}, {workers} workers, {hardware}", percent_text(gain), percent_text(ours)))
            yield within(
                f"HPSGD's gain over {over} is {percent_text(gain)} to a tenth, {workers} workers, {hardware}",
                ours,
                least=(1 - SAME) * (1 + gain) - 1,
                most=(1 + SAME) * (1 + gain) - 1,
                write=percent,
            )
    yield PlainTable(
        title="Scale efficiency",
        headings=("hardware", "member", *(f"ours:\n{workers}" for workers in sizes)),
        rows=[
            (hardware, member, *(percent(found[hardware, member, workers]) for workers in sizes))
            for hardware in HARDWARE
            for member in MEMBERS
        ],
        caption="100 %: N workers are N times as fast as one alone.",
    )
    yield PlainTable(title="HPSGD's gain in scale efficiency", headings=("gain", "paper", "ours"), rows=gains)
    for number, hardware in enumerate(HARDWARE):
        yield line_chart(
            f"efficiency-{number}",
            f"Scale efficiency, {hardware}",
            "Times are simulated, nothing is trained.",
            [
                Series(name=member, points=[(workers, found[hardware, member, workers]) for workers in sizes])
                for member in MEMBERS
            ],
            x="workers",
            y="scale efficiency",
            percent=True,
            wide=False,
        )
    yield (
        "The paper tells neither the seconds of a step nor the link. Here a step takes 0.20 s plus an exponential "
        "of mean 0.02 s, and messages have 170 MB. On the station all share 80 Gbit/s; on the 4 GPUs N workers "
        "share 4 processors as well; on the cluster each has 10 Gbit/s."
    )
    yield Numbers({"efficiency": {f"{h}, {m}, {n}": value for (h, m, n), value in found.items()}})
    yield from implied_told()
