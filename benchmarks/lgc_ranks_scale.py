"""Parts `scale` and `one-class` of the benchmark `lgc-ranks`: ranks on the virtual clock, at the measured costs.

A ring's cost is made of two figures, which parts `round` (this machine) and `link` (the cable) measure with an
all-reduce of a small vector and one of the model's, among n ranks:

    latency = small / (2 (n - 1))        bandwidth = 2 (n - 1) / n * bits / (large - small)

Where a part has not been measured into the same folder, what the documentation's run measured is taken.

scale       10 to 1,024 ranks, delays of 0.2 s + Exp(0.08 s) that last 10 batches, K at 70 %: the time of `full` that
            `lgc` saves, both on ranks. `ssgd`, the averaging family's own way to wait for everybody, must take `full`'s
            time: it has the same ring. With many ranks the hops of the ring take longer than the slowest rank.
one-class   10 ranks, one class each, one rank 5 times slower, 8 blocks, K = 9: only the slow rank has its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, titled
from benchmarks.pool import run_all
from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.cluster import Setup
from paceline.drivers.simulated.delays import ShiftedExponential
from paceline.drivers.simulated.network import Network, ring_seconds
from paceline.drivers.simulated.timing import RoundTimes
from paceline.recipes import Recipe
from paceline.runs import simulate
from paceline.strategies import LGC, Full
from paceline.strategies.averaging import AVERAGING
from paceline.traffic import all_reduce_traffic

RANKS, QUICK_RANKS = (10, 32, 100, 320, 1024), (10, 32)
ROUNDS, QUICK_ROUNDS = 200, 10
SAME = Bar(sign="<=", limit=0.01, style=".1%")
POINTS_BEHIND = Bar(sign="<=", limit=1.0, style=".1f")
OF_TIME = Bar(sign="<=", limit=0.5)
ONE_CLASS_LANES: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lgc, K=9": {"name": "lgc", "k": 9},
    "fastest-k, K=9": {"name": "fastest-k", "k": 9},
}
DOCUMENTED: dict[str, dict[str, float]] = {
    "round": {"ranks": 4, "bytes": 44_000_000, "small_seconds": 0.00170, "large_seconds": 0.0627},
    "link": {"ranks": 4, "bytes": 4_000_000, "small_seconds": 0.00392, "large_seconds": 0.2018},
}
PLACES = {"round": "this machine", "link": "200 Mbit/s"}
Row = dict[str, Any]


def measured_network(costs: Mapping[str, float]) -> Network:
    """Return the network that gives a ring the measured times.

    >>> found = measured_network({"ranks": 4, "bytes": 1000, "small_seconds": 0.6, "large_seconds": 12.6})
    >>> found.latency_seconds, found.worker_bits_per_second
    (0.1, 1000.0)
    """
    ranks, small = costs["ranks"], costs["small_seconds"]
    sent_bits = 2 * (ranks - 1) / ranks * 8 * costs["bytes"]
    return Network(
        latency_seconds=round(small / (2 * (ranks - 1)), 9),
        worker_bits_per_second=round(sent_bits / max(1e-9, costs["large_seconds"] - small), 3),
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run: where, how many ranks, what."""

    place: str
    network: Network
    message_bytes: int
    ranks: int
    strategy: str
    rounds: int


def seconds_of(task: Task) -> float:
    """Return the seconds of a run."""
    common: dict[str, Any] = {
        "workers": task.ranks,
        "rounds": task.rounds,
        "delays": ShiftedExponential(shift_seconds=0.2, mean_seconds=0.08, persistence=10),
        "network": task.network,
    }
    if task.strategy == "ssgd":
        averaged = AveragedSimulation(
            AveragingSetup(member=AVERAGING["ssgd"], **common), message_bytes=task.message_bytes
        )
        for _ in averaged:
            pass
        return averaged.trace.seconds
    strategy = Full() if task.strategy == "full" else LGC(k=round(0.7 * task.ranks))
    setup = Setup(name=task.strategy, strategy=strategy, blocks=4, on="ranks", **common)
    times = RoundTimes(setup, round_traffic=all_reduce_traffic(task.message_bytes, task.ranks))
    for _ in times:
        pass
    return times.trace.seconds


def scale(options: Options, known: Mapping[str, Any]) -> tuple[list[Table | str], dict[str, Any]]:
    """Simulate all sizes at the costs of each place; `known` are the figures of the other parts."""
    sizes, rounds = (QUICK_RANKS, QUICK_ROUNDS) if options.quick else (RANKS, ROUNDS)
    costs = {part: known.get(part, {}).get("costs", DOCUMENTED[part]) for part in PLACES}
    tasks = [
        Task(
            place=place,
            network=measured_network(costs[part]),
            message_bytes=int(costs[part]["bytes"]),
            ranks=ranks,
            strategy=strategy,
            rounds=rounds,
        )
        for part, place in PLACES.items()
        for ranks in sizes
        for strategy in ("full", "lgc", "ssgd")
    ]
    if options.quick:
        seconds = [seconds_of(task) for task in tasks]  # loading torch once more would take longer
    else:
        seconds = run_all(seconds_of, tasks, label="lgc-ranks, scale: runs")
    found = {(task.place, task.ranks, task.strategy): each / rounds for task, each in zip(tasks, seconds, strict=True)}
    rows: list[Row] = []
    for task in tasks:
        if task.strategy == "full":
            full, lgc, ssgd = (found[task.place, task.ranks, each] for each in ("full", "lgc", "ssgd"))
            rows.append(
                {
                    "place": task.place,
                    "ranks": task.ranks,
                    "ring": ring_seconds(task.network, workers=task.ranks, message_bytes=task.message_bytes),
                    "full": full,
                    "lgc": lgc,
                    "ssgd": ssgd,
                    "saved": 1 - lgc / full,
                    "ssgd_off": abs(ssgd / full - 1),
                }
            )
    return [_scale_table(rows, tasks, quick=options.quick)], {"rows": rows, "costs": costs}


def one_class_recipe(seed: int, rounds: int, strategy: dict[str, Any], network: Network) -> Recipe:
    """Return the recipe of part `one-class`."""
    return Recipe(seed=seed, rounds=rounds).with_settings(
        target_loss=None,
        data={"classes_per_worker": 1},
        worker={"blocks": 8},
        cluster={"workers": 10, "late_work": "partial"},
        delay={"name": "slow-worker", "shift_seconds": 0.2, "mean_seconds": 0.05, "slow_factor": 5.0},
        network={"latency_seconds": network.latency_seconds, "worker_bits_per_second": network.worker_bits_per_second},
        strategy={"k": 9, "on": "ranks", **strategy},
    )


def one_class(options: Options, known: Mapping[str, Any]) -> tuple[list[Table | str], dict[str, Any]]:
    """Simulate all lanes for all seeds."""
    rounds, seeds = (10, 1) if options.quick else (options.rounds or 300, options.seeds or 3)
    network = measured_network(known.get("link", {}).get("costs", DOCUMENTED["link"]))
    rows: list[Row] = []
    for lane, strategy in ONE_CLASS_LANES.items():
        runs = [simulate(one_class_recipe(seed, rounds, strategy, network)) for seed in range(seeds)]
        rows.append(
            {
                "lane": lane,
                "seconds": fmean(run.seconds for run in runs),
                "accuracy": fmean(100 * (run.accuracy or 0.0) for run in runs),
            }
        )
    for row in rows:
        row["of_time"], row["points"] = row["seconds"] / rows[0]["seconds"], rows[0]["accuracy"] - row["accuracy"]
    return [_one_class_table(rows, rounds, seeds, quick=options.quick)], {"rows": rows}


# -- tables ------------------------------------------------------------------------------------------------------------


def _scale_table(rows: Sequence[Row], tasks: Sequence[Task], *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("Seconds of a round on the virtual clock, at measured costs", quick=quick),
        caption="\n".join(
            f"{place}: {task.network.latency_seconds * 1000:.2f} ms a hop, "
            f"{task.network.worker_bits_per_second / 1e9:.2f} Gbit/s, {task.message_bytes / 1e6:.0f} MB a message"
            for place, task in {task.place: task for task in tasks}.items()
        )
        + f"\nbar of ssgd's time, off full's by: {SAME}",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("network", no_wrap=True)
    for name in ("ranks", "ring", "full@ranks", "ssgd", "lgc@ranks", "saved"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            row["place"],
            f"{row['ranks']:,}",
            *(f"{row[name]:.3f}" for name in ("ring", "full", "ssgd", "lgc")),
            f"{row['saved']:.1%}",
            coloured(SAME.verdict(row["ssgd_off"])),
        )
    return table


def _one_class_table(rows: Sequence[Row], rounds: int, seeds: int, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("10 ranks on the virtual clock, one class each, one rank 5 x slower", quick=quick),
        caption=f"digits, 8 blocks, {rounds} rounds, mean of {seeds} seed(s); bars of lgc: points {POINTS_BEHIND}, "
        f"time {OF_TIME} of full's",
        padding=(0, 2, 0, 0),
        pad_edge=False,
    )
    table.add_column("lane", no_wrap=True)
    for name in ("seconds", "of full's", "accuracy", "points behind"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        verdicts = [POINTS_BEHIND.verdict(row["points"]), OF_TIME.verdict(row["of_time"])]
        table.add_row(
            row["lane"],
            f"{row['seconds']:.1f}",
            OF_TIME.show(row["of_time"]),
            f"{row['accuracy']:.1f}",
            POINTS_BEHIND.show(row["points"]),
            ", ".join(map(coloured, verdicts)) if row["lane"].startswith("lgc") else "",
        )
    return table
