"""LGC on torch.distributed, without a server: beside DDP, a plain all-reduce loop, the server, and the simulator.

    saving       real ranks under injected delays: what lgc saves of full's time, against what the simulator says it can
    round        a round without delays against the same loop with a plain all-reduce; where the difference goes
    python-lock  a round while one rank is busy in Python
    link         rounds a second over 200 Mbit/s against the server; needs root
    slow-rank    one of four ranks 5 times slower, three classes each: accuracy and time against DDP and fastest-k
    scale        10 to 1,024 ranks on the virtual clock, at the costs that `round` and `link` measured
    one-class    10 ranks on the virtual clock, one class each

Two cores bear about four ranks; hence four real ones, and more only on the virtual clock. Recipes' seeds count from 0,
which is that of the first seed in the list's default.

The last two parts are here. A ring's cost is made of two figures, which `round` (this machine) and `link` (the cable)
measure with an all-reduce of a small vector and one of the model's, among n ranks:

    latency = small / (2 (n - 1))        bandwidth = 2 (n - 1) / n * bits / (large - small)

Where a part is not measured in the same run, what the documentation's run measured is taken.

scale       delays of 0.2 s + Exp(0.08 s) that last 10 batches, K at 70 %: the time of `full` that `lgc` saves, both on
            ranks. `ssgd`, the averaging family's own way to wait for all, must take `full`'s time: it has the same
            ring. With many ranks the hops of the ring take longer than the slowest rank.
one-class   one rank is 5 times slower, 8 blocks, K = 9: only the slow rank has its class.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import product
from typing import Any

from experiments.core.claims import percent
from experiments.core.story import Job, Numbers, Size, Telling, experiment
from experiments.core.turns import bar, verdict
from experiments.papers.lgc.setting import chosen
from experiments.timings.lgc_ranks_round import Costs, link, python_lock, round_cost
from experiments.timings.lgc_ranks_training import Strategies, cells, saving, simulated_job, slow_rank
from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.cluster import Setup
from paceline.drivers.simulated.delays import ShiftedExponential
from paceline.drivers.simulated.network import Network, ring_seconds
from paceline.drivers.simulated.timing import RoundTimes
from paceline.quantities import counted
from paceline.recipes import Recipe
from paceline.reports.table import PlainTable
from paceline.strategies import LGC, Full
from paceline.strategies.averaging import AVERAGING
from paceline.traffic import all_reduce_traffic

PARTS = ("saving", "round", "python-lock", "link", "slow-rank", "scale", "one-class")
MOST_OFF, MOST_BEHIND, MOST_TIME = 0.01, 1.0, 0.5
DOCUMENTED: dict[str, Costs] = {
    "round": {"ranks": 4, "bytes": 44_000_000, "small_seconds": 0.00170, "large_seconds": 0.0627},
    "link": {"ranks": 4, "bytes": 4_000_000, "small_seconds": 0.00392, "large_seconds": 0.2018},
}
PLACES = {"round": "this machine", "link": "200 Mbit/s"}


@experiment(
    "lgc-ranks",
    question="lgc without a server: against DDP, a plain all-reduce loop, the server, the simulator",
    minutes=25,
    seeds=3,
)
def lgc_ranks(size: Size, *, parts: tuple[str, ...] = PARTS, rounds: int = 0, repeat: int = 0) -> Telling:
    """Tell these parts; `rounds` are those of runs that train, `repeat` the turns; 0 is what each part has."""
    costs: dict[str, Costs] = {}
    tellings: dict[str, Generator[Any, Any, Costs | None]] = {
        "saving": saving(size, rounds),
        "round": round_cost(size, repeat),
        "python-lock": python_lock(size, repeat),
        "link": link(size, repeat),
        "slow-rank": slow_rank(size, rounds),
        "scale": scale(size, costs),
        "one-class": one_class(size, rounds, costs),
    }
    for part in chosen("part of lgc-ranks", parts, PARTS):
        found = yield from tellings[part]
        if found is not None:
            costs[part] = found


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


def scale(size: Size, measured: Mapping[str, Costs]) -> Telling:
    """Tell part `scale`: all sizes at the costs of each place."""
    numbers, rounds = size.pick((10, 32), (10, 32, 100, 320, 1024)), size.pick(10, 200)
    costs = {place: measured.get(part, DOCUMENTED[part]) for part, place in PLACES.items()}
    networks = {place: measured_network(each) for place, each in costs.items()}
    sizes = list(product(PLACES.values(), numbers))
    runs = yield {
        (place, ranks, strategy): Job(
            seconds_of_rounds,
            {"costs": costs[place], "ranks": ranks, "strategy": strategy, "rounds": rounds},
            0.01 * ranks,
        )
        for (place, ranks), strategy in product(sizes, ("full", "lgc", "ssgd"))
    }
    seconds, rows = runs.mean("seconds"), list[dict[str, Any]]()
    for place, ranks in sizes:
        full, lgc, ssgd = (seconds[place, ranks, strategy] / rounds for strategy in ("full", "lgc", "ssgd"))
        ring = ring_seconds(networks[place], workers=ranks, message_bytes=int(costs[place]["bytes"]))
        rows.append(
            {"place": place, "ranks": ranks, "ring": ring, "full": full, "lgc": lgc, "ssgd": ssgd,
             "saved": 1 - lgc / full, "ssgd_off": abs(ssgd / full - 1)}
        )  # fmt: skip
    claims = [
        bar(f"scale, {row['place']}, {row['ranks']:,} ranks: ssgd's time off full's", row["ssgd_off"], most=MOST_OFF,
            write=percent)
        for row in rows
    ]  # fmt: skip
    yield PlainTable(
        title="Seconds of a round on the virtual clock",
        headings=("network", "ranks", "ring", "full", "ssgd", "lgc", "saved", ""),
        rows=[
            (row["place"], f"{row['ranks']:,}", *cells(row, ring=".3f", full=".3f", ssgd=".3f", lgc=".3f", saved=".1%"),
             verdict(claim))
            for row, claim in zip(rows, claims, strict=True)
        ],
        caption="\n".join(
            f"{place}: {1000 * network.latency_seconds:.2f} ms a hop, "
            f"{(network.worker_bits_per_second or 0.0) / 1e9:.2f} Gbit/s, {costs[place]['bytes'] / 1e6:.0f} MB a "
            f"message{'' if part in measured else ', as documented'}"
            for (part, place), network in zip(PLACES.items(), networks.values(), strict=True)
        ),
    )  # fmt: skip
    yield from claims
    yield Numbers({"scale": {"rows": rows, "costs": costs}})


def seconds_of_rounds(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of so many rounds of a strategy on ranks that are joined at such costs."""
    costs, ranks, strategy = settings["costs"], settings["ranks"], settings["strategy"]
    message_bytes = int(costs["bytes"])
    common: dict[str, Any] = {
        "workers": ranks,
        "rounds": settings["rounds"],
        "delays": ShiftedExponential(shift_seconds=0.2, mean_seconds=0.08, persistence=10),
        "network": measured_network(costs),
    }
    run: AveragedSimulation | RoundTimes
    if strategy == "ssgd":
        run = AveragedSimulation(AveragingSetup(member=AVERAGING["ssgd"], **common), message_bytes=message_bytes)
    else:
        own = Full() if strategy == "full" else LGC(k=round(0.7 * ranks))
        setup = Setup(name=strategy, strategy=own, blocks=4, on="ranks", **common)
        run = RoundTimes(setup, round_traffic=all_reduce_traffic(message_bytes, ranks))
    for _ in run:
        pass
    return {"seconds": run.trace.seconds}


def one_class(size: Size, rounds: int, measured: Mapping[str, Costs]) -> Telling:
    """Tell part `one-class`."""
    rounds = size.pick(10, rounds or 300)
    network = measured_network(measured.get("link", DOCUMENTED["link"]))
    lgc, fastest = "lgc, K=9", "fastest-k, K=9"
    lanes: Strategies = {"full": {"name": "full"}, lgc: {"name": "lgc", "k": 9}, fastest: {"name": "fastest-k", "k": 9}}

    runs = yield {
        ("one class", lane): simulated_job(one_class_recipe(rounds, strategy, network), size.pick(0.2, 4.0))
        for lane, strategy in lanes.items()
    }
    rows = {
        lane: {"seconds": runs.mean("seconds")[key], "accuracy": 100 * runs.mean("accuracy", lost=lambda _: 0.0)[key]}
        for key in runs for lane in key[1:]
    }  # fmt: skip
    for row in rows.values():
        row["of_time"] = row["seconds"] / rows["full"]["seconds"]
        row["points"] = rows["full"]["accuracy"] - row["accuracy"]
    claims = [
        bar(f"one-class, {lgc}: points behind full", rows[lgc]["points"], most=MOST_BEHIND),
        bar(f"one-class, {lgc}: time of full's", rows[lgc]["of_time"], most=MOST_TIME),
    ]
    yield PlainTable(
        title="10 ranks on the virtual clock, one class each, one rank 5 times slower",
        headings=("lane", "seconds", "of full's", "accuracy", "points behind", ""),
        rows=[
            (lane, *cells(row, seconds=".1f", of_time=".2f", accuracy=".1f", points=".1f"),
             ", ".join(map(verdict, claims)) if lane == lgc else "")
            for lane, row in rows.items()
        ],
        caption=f"digits, 8 blocks, {rounds} rounds, mean of {counted(len(size.seeds), 'seed')}.",
    )  # fmt: skip
    yield from claims
    yield Numbers({"one-class": {"rows": rows}})


def one_class_recipe(rounds: int, strategy: dict[str, Any], network: Network) -> Recipe:
    """Return the recipe of part `one-class`."""
    return Recipe(rounds=rounds).with_settings(
        target_loss=None,
        data={"classes_per_worker": 1},
        worker={"blocks": 8},
        cluster={"workers": 10, "late_work": "partial"},
        delay={"name": "slow-worker", "shift_seconds": 0.2, "mean_seconds": 0.05, "slow_factor": 5.0},
        network={"latency_seconds": network.latency_seconds, "worker_bits_per_second": network.worker_bits_per_second},
        strategy={"k": 9, "on": "ranks", **strategy},
    )
