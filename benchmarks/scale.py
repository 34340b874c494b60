"""How averaging scales without a server: scale efficiency of the whole family, at 4 to 1,024 simulated workers.

    scale efficiency = samples per second of N workers / (N * samples per second of one worker alone)

Only times are simulated; nothing is trained. The figures to compare with are those of the HPSGD paper's figure 5a
(ResNet-101 on CIFAR-10, batches of 128, local-sgd every 8 steps), which come from 4 to 16 processes on one DGX Station
with 4 GPUs. The paper tells neither the seconds of a step nor the link, so the settings here are ours, chosen before
the figures were seen and not changed after:

    a step      0.20 s + Exp(0.02 s): about what a V100 needs for such a batch, with a little noise in every step
    a message   170 MB: 42.5 million parameters of 4 bytes
    station     one link of 80 Gbit/s that all share: each of N workers has 1/N of it, and the ring's time grows with N
    4 GPUs      as station, and more than 4 workers share 4 GPUs: a step takes N/4 times as long
    cluster     a link of 10 Gbit/s for every worker, 50 microseconds a hop: the ring's time hardly grows

What the claims imply is computed too. With c = a mean step, R = one ring and s = the slowest worker's step, where
hpsgd hides all of R, and local-sgd's period is p:

    hpsgd / ssgd = (s + R) / c        hpsgd / local-sgd = (s + R/p) / c

If all are equally fast (s = c) each claim gives a ratio R/c of its own; both together give R and s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.pool import run_all
from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.delays import ShiftedExponential
from paceline.drivers.simulated.network import Network, ring_seconds
from paceline.strategies.averaging import AVERAGING

WORKERS = (4, 8, 16, 64, 1024)
ROUNDS = 200
QUICK_WORKERS, QUICK_ROUNDS = (4, 16), 10
STEP_SECONDS, NOISE_SECONDS = 0.20, 0.02
MESSAGE_BYTES = 170_000_000
TABLE_WIDTH = 80
SAME = 0.10  # two efficiencies are the same if they differ by no more than this share


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What workers share."""

    name: str
    shared_bits_per_second: float | None = None  # one link for all; else everybody has one
    own_bits_per_second: float = 10e9
    latency_seconds: float = 0.0
    processors: int | None = None  # that all share; else everybody has one
    most_workers: int = max(WORKERS)  # more on so few would tell nothing

    def network(self, workers: int) -> Network:
        """The network as one of so many workers sees it."""
        own = self.own_bits_per_second if self.shared_bits_per_second is None else self.shared_bits_per_second / workers
        return Network(latency_seconds=self.latency_seconds, worker_bits_per_second=own)

    def slowdown(self, workers: int) -> float:
        """How many times as long a step takes where so many workers share the processors."""
        return 1.0 if self.processors is None else max(1.0, workers / self.processors)


SETTINGS = (
    Setting(name="station", shared_bits_per_second=80e9),
    Setting(name="4 GPUs", shared_bits_per_second=80e9, processors=4, most_workers=16),
    Setting(name="cluster", latency_seconds=50e-6),
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run."""

    setting: Setting
    member: str
    workers: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The paper's words on figure 5a: so much more than another, at so many workers."""

    workers: int
    over: str
    ratio: float

    @property
    def bar(self) -> Bar:
        """A gain is to be reached; what is the same may differ by a little."""
        return Bar(sign="<=", limit=SAME, style=".0%") if self.ratio == 1.0 else Bar(sign=">=", limit=self.ratio)

    def figure(self, ratio: float) -> float:
        """The figure for the bar."""
        return abs(ratio - 1.0) if self.ratio == 1.0 else ratio

    def __str__(self) -> str:
        return f"hpsgd / {self.over}, {self.workers} workers" + (", off 1 by" if self.ratio == 1.0 else "")


CLAIMS = (
    Claim(workers=4, over="local-sgd", ratio=1.0),
    Claim(workers=4, over="ssgd", ratio=2.33),
    Claim(workers=16, over="local-sgd", ratio=1.75),
    Claim(workers=16, over="ssgd", ratio=3.5),
)


def samples_per_second(task: Task) -> float:
    """In batches: what a whole run came to, its start and its end included."""
    slowdown = task.setting.slowdown(task.workers)
    setup = AveragingSetup(
        member=AVERAGING[task.member],
        workers=task.workers,
        rounds=task.rounds,
        delays=ShiftedExponential(shift_seconds=STEP_SECONDS * slowdown, mean_seconds=NOISE_SECONDS * slowdown),
        network=task.setting.network(task.workers),
    )
    run_ = AveragedSimulation(setup, message_bytes=MESSAGE_BYTES)
    for _ in run_:
        pass
    trace = run_.trace
    return trace.used / trace.seconds


def run(options: Options) -> None:
    """`python -m benchmarks scale`."""
    sizes, rounds = (QUICK_WORKERS, QUICK_ROUNDS) if options.quick else (WORKERS, ROUNDS)
    tasks = [
        Task(setting=setting, member=member, workers=workers, rounds=rounds)
        for setting in SETTINGS
        for workers in sorted(sizes, reverse=True)  # the long ones first
        if workers <= setting.most_workers
        for member in AVERAGING
    ]
    speeds = run_all(samples_per_second, tasks, label="scale: runs")
    alone = samples_per_second(Task(setting=SETTINGS[0], member="psgd", workers=1, rounds=max(rounds, ROUNDS)))
    found = {
        (task.setting.name, task.member, task.workers): speed / task.workers / alone
        for task, speed in zip(tasks, speeds, strict=True)
    }
    claims = [_claim_row(setting, claim, found) for setting in SETTINGS for claim in CLAIMS]
    implied = [implied_by(workers) for workers in sorted({claim.workers for claim in CLAIMS})]
    console = tables()
    for setting in SETTINGS:
        console.print(_efficiencies(setting, sizes, found, rounds, quick=options.quick))
    console.print(_claims(claims, quick=options.quick))
    console.print(_implied(implied))
    runs = [
        dataclasses.asdict(task) | {"efficiency": found[task.setting.name, task.member, task.workers]} for task in tasks
    ]
    save(options, "scale", {"alone_batches_per_second": alone, "runs": runs, "claims": claims, "implied": implied})


def _claim_row(setting: Setting, claim: Claim, found: dict[tuple[str, str, int], float]) -> dict[str, Any]:
    ratio = found[setting.name, "hpsgd", claim.workers] / found[setting.name, claim.over, claim.workers]
    figure = claim.figure(ratio)
    return {
        "setting": setting.name,
        "claim": str(claim),
        "ratio": ratio,
        "shown": claim.bar.show(figure),
        "bar": str(claim.bar),
        "verdict": claim.bar.verdict(figure),
    }


def implied_by(workers: int) -> dict[str, float]:
    """What the claims for so many workers say of the ring and the slowest worker, in mean steps.

    >>> {name: round(value, 2) for name, value in implied_by(16).items()}
    {'workers': 16, 'ring_by_ssgd': 2.5, 'ring_by_local_sgd': 6.0, 'ring': 2.0, 'slowest': 1.5}
    """
    period = AVERAGING["local-sgd"].period or 1
    ratio = {claim.over: claim.ratio for claim in CLAIMS if claim.workers == workers}
    ring = (ratio["ssgd"] - ratio["local-sgd"]) / (1 - 1 / period)
    return {
        "workers": workers,
        "ring_by_ssgd": ratio["ssgd"] - 1,
        "ring_by_local_sgd": period * (ratio["local-sgd"] - 1),
        "ring": ring,
        "slowest": ratio["ssgd"] - ring,
    }


# -- tables -----------------------------------------------------------------------------------------------------------


def _efficiencies(
    setting: Setting, sizes: Sequence[int], found: dict[tuple[str, str, int], float], rounds: int, *, quick: bool
) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled(f"Scale efficiency, {setting.name}", quick=quick),
        min_width=TABLE_WIDTH,
        caption=f"{rounds} rounds; local-sgd and bmuf average every {AVERAGING['local-sgd'].period} steps, "
        f"diloco every {AVERAGING['diloco'].period}.\n100%: N times as fast as one worker alone.",
    )
    table.add_column("member")
    for workers in sizes:
        table.add_column(f"{workers:,}", justify="right")
    for member in AVERAGING:
        figures = [found.get((setting.name, member, workers)) for workers in sizes]
        table.add_row(member, *("-" if figure is None else f"{figure:.1%}" for figure in figures))
    table.add_section()
    table.add_row("ring / mean step", *(f"{_ring_in_steps(setting, workers):.2f}" for workers in sizes))
    return table


def _ring_in_steps(setting: Setting, workers: int) -> float:
    step = (STEP_SECONDS + NOISE_SECONDS) * setting.slowdown(workers)
    return ring_seconds(setting.network(workers), workers=workers, message_bytes=MESSAGE_BYTES) / step


def _claims(rows: Sequence[dict[str, Any]], *, quick: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=titled("The paper's figure 5a", quick=quick), min_width=TABLE_WIDTH)
    for name in ("setting", "claim"):
        table.add_column(name)
    for name in ("simulated", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(*(row[name] for name in ("setting", "claim", "shown", "bar")), coloured(row["verdict"]))
    return table


def _implied(rows: Sequence[dict[str, float]]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="What the paper's claims imply, in mean steps",
        caption="If all workers were equally fast, the first two rings of a line would be the same.\n"
        "A slowest step below 1 cannot be: then hpsgd itself was held up, or 'the same' was not quite.",
    )
    table.add_column("workers")
    for name in ("ring, by ssgd", "ring, by local-sgd", "ring, by both", "slowest step, by both"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row[name] for name in ("ring_by_ssgd", "ring_by_local_sgd", "ring", "slowest"))
        table.add_row(f"{row['workers']:.0f}", *(f"{figure:.2f}" for figure in figures))
    return table
