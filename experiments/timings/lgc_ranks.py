"""LGC on torch.distributed, without a server: beside DDP, a plain all-reduce loop, the server, and the simulator.

saving       4 real ranks, K = 3, 2 and auto, delays of 0.2 s + Exp(0.08 s) that last 10 batches. The simulator plays
             the same recipe, late work partial, with a network that costs nothing: what can be saved of full's time at
             all. The bar is the share of it that real ranks save.
round        a round without delays against the same loop with a plain all-reduce; where the difference goes
python-lock  a round while one rank is busy in Python
link         rounds a second over 200 Mbit/s against the server; needs root (these three: `lgc_ranks_round`)
slow-rank    rank 0 of 4 is 5 times slower, and every rank has 3 classes: accuracy and time against DDP and fastest-k.
             Reported are the first seeds by which the slow rank alone holds two classes or three: each class that no
             other rank has costs `fastest-k` 10 points. Learning rate and rounds were chosen on seeds 100 to 102, in
             the simulator, for `full`: the same for all lanes.
scale        10 to 1,024 ranks on the virtual clock, delays as those of `saving`, K at 70 %: the time of `full` that
             `lgc` saves, both on ranks. `ssgd`, the averaging family's own way to wait for all, must take `full`'s
             time: it has the same ring. With many ranks the hops of the ring take longer than the slowest rank.
one-class    10 ranks on the virtual clock, one class each, one 5 times slower, 8 blocks, K = 9: only the slow rank has
             its class

Two cores bear about four ranks; hence four real ones, and more only on the virtual clock. A real rank takes its
recipe's own batches, block by block, each no sooner than its delay says (by sleep: four ranks on two cores would else
measure the cores), under one synchronizer after the other, and under DDP with the same batches, delays and optimiser.
Seconds are from the first batch to the moment when the last round's update is there, on rank 0. Seeds of recipes count
from 0, which stands for the first of the seeds that are the default.

On the virtual clock a ring's cost is made of two figures, which `round` (this machine) and `link` (the cable) measure
with an all-reduce of a small vector and one of the model's, among n ranks:

    latency = small / (2 (n - 1))        bandwidth = 2 (n - 1) / n * bits / (large - small)

Where a part is not measured in the same run, what the documentation's run measured is taken.

    python -m experiments.timings.lgc_ranks FOLDER RANK JOB      a rank of `saving` or `slow-rank`
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline
from experiments.core.claims import percent
from experiments.core.ranks import Line, by_lane, free_address, told_by_ranks, write_lines
from experiments.core.recipes import run_recipe
from experiments.core.story import FIRST_SEED, NAN, Job, Numbers, Size, Step, Telling, chosen, experiment
from experiments.core.turns import bar, cells, verdict
from experiments.timings.lgc_ranks_round import Costs, link, python_lock, round_cost
from paceline.drivers.simulated.averaging_cluster import AveragingSetup
from paceline.drivers.simulated.averaging_simulation import AveragedSimulation
from paceline.drivers.simulated.cluster import Setup
from paceline.drivers.simulated.delays import ShiftedExponential
from paceline.drivers.simulated.network import Network, ring_seconds
from paceline.drivers.simulated.timing import RoundTimes
from paceline.optim import make_optimizer
from paceline.quantities import counted
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.reports.table import PlainTable
from paceline.runs.cluster import delay_of
from paceline.strategies import LGC, Full
from paceline.strategies.averaging import AVERAGING
from paceline.traffic import all_reduce_traffic
from paceline.training import Batches, Training, measure
from paceline.workers.gradients import Assignment, accumulate

PARTS = ("saving", "round", "python-lock", "link", "slow-rank", "scale", "one-class")
DDP = "torch: ddp"
LEAST_OF_SIMULATED, LEAST_LOST = 0.9, 20.0
MOST_BEHIND, MOST_TIME, MOST_OFF = 1.0, 0.5, 0.01
DOCUMENTED: dict[str, Costs] = {
    "round": {"ranks": 4, "bytes": 44_000_000, "small_seconds": 0.00170, "large_seconds": 0.0627},
    "link": {"ranks": 4, "bytes": 4_000_000, "small_seconds": 0.00392, "large_seconds": 0.2018},
}
PLACES = {"round": "this machine", "link": "200 Mbit/s"}

Strategies = dict[str, dict[str, Any]]
Row = dict[str, Any]


@experiment(
    "lgc-ranks",
    question="lgc without a server: against DDP, a plain loop, the server and the simulator",
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


# -- parts `saving` and `slow-rank`: real ranks ------------------------------------------------------------------------


def saving_recipe(rounds: int, ranks: int, strategy: dict[str, Any]) -> Recipe:
    """Return the recipe of part `saving`, with its delays made real."""
    delay = {"name": "shifted-exponential", "shift_seconds": 0.2, "mean_seconds": 0.08, "persistence": 10}
    return Recipe(rounds=rounds).with_settings(
        target_loss=None,
        data={"classes_per_worker": max(3, math.ceil(10 / ranks))},
        cluster={"workers": ranks, "late_work": "partial"},
        delay={**delay, "inject": True},
        strategy={"k": 1, "on": "ranks", **strategy},
    )


def slow_recipe(rounds: int, ranks: int, strategy: dict[str, Any]) -> Recipe:
    """Return the recipe of part `slow-rank`."""
    return saving_recipe(rounds, ranks, strategy).with_settings(
        worker={"blocks": 8},
        optimizer={"lr": 0.05},
        delay={"name": "slow-worker", "shift_seconds": 0.04, "mean_seconds": 0.01, "slow_factor": 5.0, "inject": True},
    )


def simulated_job(recipe: Recipe, seconds: float) -> Job:
    """Return the job that simulates a recipe with each seed; recipes' seeds count from 0."""
    return Job(run_recipe, lambda seed: {"recipe": recipe.with_seed(seed - FIRST_SEED).to_document()}, seconds)


def saving(size: Size, rounds: int) -> Telling:
    """Tell part `saving`: train all lanes for all seeds, and simulate them."""
    rounds, ranks = size.pick(2, rounds or 180), size.pick(2, 4)
    fixed: Strategies = {f"lgc, K={k}": {"name": "lgc", "k": k} for k in (ranks - 1, ranks - 2) if k >= 1}
    lanes = {DDP: {"name": "full"}, "full": {"name": "full"}, **fixed, "lgc, K=auto": {"name": "lgc", "k": "auto"}}
    recipes = {lane: saving_recipe(rounds, ranks, strategy) for lane, strategy in lanes.items()}
    lines = yield from trained("saving", recipes, [seed - FIRST_SEED for seed in size.seeds])
    runs = yield {
        ("simulated", lane): simulated_job(recipe.with_settings(delay={"inject": False}), size.pick(0.2, 2.0))
        for lane, recipe in recipes.items() if lane != DDP
    }  # fmt: skip
    seconds, losses = ({lane: values for (_, lane), values in runs.each(name).items()} for name in ("seconds", "loss"))
    rows = saving_rows(lines, seconds, losses)
    claims = {
        lane: bar(f"saving, {lane}: of what is saved in the simulator", row["of_simulated"], least=LEAST_OF_SIMULATED,
                  write=percent)
        for lane, row in rows.items() if "of_simulated" in row
    }  # fmt: skip
    yield PlainTable(
        title=f"{ranks} ranks, delays of 0.2 s + Exp(0.08 s) injected",
        headings=("\nlane", "\nseconds", "\nsaved", "\nsimulated", "\nof it", "loss /\nfull's", "\nsimulated", ""),
        rows=[
            (lane, *cells(row, seconds=".2f", saved=".1%", simulated_saved=".1%", of_simulated=".1%", loss_ratio=".3f",
                          simulated_loss_ratio=".3f"), verdict(claims[lane]) if lane in claims else "")
            for lane, row in rows.items()
        ],
        caption=f"digits, 4 blocks, {rounds} rounds, {counted(len(size.seeds), 'seed')}: seconds are sums, losses "
        "means. Simulated: the same delays, and a network that costs nothing.",
    )  # fmt: skip
    yield from claims.values()
    yield Numbers({"saving": {"rows": rows, "runs": lines, "simulated_seconds": seconds, "simulated_loss": losses}})


def slow_rank(size: Size, rounds: int) -> Telling:
    """Tell part `slow-rank`: train all lanes for all seeds."""
    rounds, ranks = size.pick(2, rounds or 150), size.pick(2, 4)
    k = ranks - 1
    lgc, fastest = f"lgc, K={k}", f"fastest-k, K={k}"
    lanes = {DDP: {"name": "full"}, lgc: {"name": "lgc", "k": k}, fastest: {"name": "fastest-k", "k": k}}
    seeds = list(itertools.islice(slow_seeds(size.seeds[0] - FIRST_SEED), len(size.seeds)))
    recipes = {lane: slow_recipe(rounds, ranks, strategy) for lane, strategy in lanes.items()}
    lines = yield from trained("slow-rank", recipes, seeds)
    rows = slow_rows(lines)
    behind, text = {lane: row["points"] for lane, row in rows.items()}, "points behind ddp"
    claims = {
        lgc: [
            bar(f"slow-rank, {lgc}: {text}", behind[lgc], most=MOST_BEHIND),
            bar(f"slow-rank, {lgc}: time of ddp's", rows[lgc]["of_time"], most=MOST_TIME),
        ],
        fastest: [bar(f"slow-rank, {fastest}: {text}", behind[fastest], least=LEAST_LOST)],
    }
    yield PlainTable(
        title=f"One of {ranks} ranks 5 times slower, 3 classes each",
        headings=("\nlane", "\nseconds", "of\nddp's", "\naccuracy", "points\nbehind", "\nloss", "the slow\nrank's", ""),
        rows=[
            (lane, *cells(row, seconds=".2f", of_time=".2f", accuracy=".1f", points=".1f", loss=".4f"),
             ", ".join(map(str, row.get("slow_rank", []))), ", ".join(map(verdict, claims.get(lane, []))))
            for lane, row in rows.items()
        ],
        caption=f"digits, 8 blocks, {rounds} rounds, seeds {', '.join(map(str, seeds))}: means. The slow rank's: its "
        "gradients fresh, late, dropped. Verdicts: accuracy, time.",
    )  # fmt: skip
    for several in claims.values():
        yield from several
    yield Numbers({"slow-rank": {"rows": rows, "runs": lines}})


def slow_seeds(first: int) -> Iterator[int]:
    """Yield the seeds from this one on by which the slow one of four ranks alone holds two classes or three.

    >>> list(itertools.islice(slow_seeds(0), 6))
    [0, 2, 3, 4, 5, 6]
    """
    for seed in itertools.count(first):
        recipe = slow_recipe(1, 4, {"name": "full"}).with_seed(seed)
        training = make_training(recipe, load_data(recipe))
        own, *others = (set(training.dataset.train.take(shard)[1].tolist()) for shard in training.shards)
        if len(own.difference(*others)) >= 2:
            yield seed


def trained(part: str, recipes: dict[str, Recipe], seeds: Sequence[int]) -> Generator[Step, None, list[Line]]:
    """Let ranks train all lanes, seed by seed, and return what rank 0 wrote of each run."""
    turns = [(lane, recipe.with_seed(seed)) for seed in seeds for lane, recipe in recipes.items()]
    ranks, documents = turns[0][1].cluster.workers, [(lane, recipe.to_document()) for lane, recipe in turns]
    labels = [f"{part}, {lane}, seed {recipe.seed}" for lane, recipe in turns]
    job = {"address": free_address(), "ranks": ranks, "turns": documents}
    return (yield from told_by_ranks("experiments.timings.lgc_ranks", ranks, job, labels))


def saving_rows(
    lines: Sequence[Line], seconds: dict[str, list[float]], losses: dict[str, list[float]]
) -> dict[str, Row]:
    """Return a row for each lane, over all seeds: seconds are sums, losses means.

    `seconds` and `losses` are those of the simulated runs, seed by seed.
    """
    rows: dict[str, Row] = {
        lane: {"seconds": sum(run["seconds"] for run in runs), "loss": fmean(run["loss"] for run in runs)}
        for lane, runs in by_lane(lines).items()
    }
    for lane, row in rows.items():
        row["saved"] = 1 - row["seconds"] / rows["full"]["seconds"]
        row["loss_ratio"] = row["loss"] / rows["full"]["loss"]
        if lane.startswith("lgc"):
            row["simulated_saved"] = 1 - sum(seconds[lane]) / sum(seconds["full"])
            row["simulated_loss_ratio"] = fmean(losses[lane]) / fmean(losses["full"])
            row["of_simulated"] = row["saved"] / row["simulated_saved"] if row["simulated_saved"] > 0 else NAN
    return rows


def slow_rows(lines: Sequence[Line]) -> dict[str, Row]:
    """Return a row for each lane: means over the seeds; points are those that DDP has more."""
    rows: dict[str, Row] = {}
    for lane, runs in by_lane(lines).items():
        accuracies = [100 * run["accuracy"] for run in runs]
        rows[lane] = row = {
            "seconds": fmean(run["seconds"] for run in runs),
            "loss": fmean(run["loss"] for run in runs),
            "accuracy": fmean(accuracies),
            "accuracies": accuracies,
        }
        row["of_time"] = row["seconds"] / rows[DDP]["seconds"]
        row["points"] = rows[DDP]["accuracy"] - row["accuracy"]
        slow = [run["outcomes"][0] for run in runs if run["outcomes"][0]]
        if slow:
            dropped = sum(sum(each["dropped"].values()) for each in slow)
            row["slow_rank"] = [sum(each["used"] for each in slow), sum(each["late"] for each in slow), dropped]
    return rows


# -- parts `scale` and `one-class`: the virtual clock ------------------------------------------------------------------


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
    sizes = list(itertools.product(PLACES.values(), numbers))
    runs = yield {
        (place, ranks, strategy): Job(
            seconds_of_rounds,
            {"costs": costs[place], "ranks": ranks, "strategy": strategy, "rounds": rounds},
            0.01 * ranks,
        )
        for (place, ranks), strategy in itertools.product(sizes, ("full", "lgc", "ssgd"))
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


# -- a rank ------------------------------------------------------------------------------------------------------------


def pace(block_seconds: float) -> Callable[[int], None]:
    """Return what sleeps until so many blocks of a batch may be done: one by one in so many seconds each."""
    began = time.monotonic()
    return lambda done: time.sleep(max(0.0, began + done * block_seconds - time.monotonic()))


def draws(training: Training, rank: int) -> Iterator[tuple[int, Assignment]]:
    """Yield one rank's batches without end."""
    batches = Batches(training)
    for draw in itertools.count():
        yield draw, batches.assignment(worker=rank, draw=draw, blocks_done=training.blocks)


def train(lane: str, recipe: Recipe) -> Line:
    """Train a recipe as one of its ranks."""
    training = make_training(recipe, load_data(recipe))
    seconds, outcomes = (train_by_ddp if lane == DDP else train_in_rounds)(recipe, training)
    training.module.eval()
    with torch.no_grad():
        measured = measure(training.module, training)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, outcomes)
    figures = {"seconds": seconds, "loss": measured.loss, "accuracy": measured.accuracy}
    return {"lane": lane, "seed": recipe.seed, **figures, "outcomes": gathered}


def train_in_rounds(recipe: Recipe, training: Training) -> tuple[float, dict[str, Any]]:
    """Train under a synchronizer; return the seconds, and what became of this rank's gradients."""
    rank, module, strategy, delay_seconds = dist.get_rank(), training.module, recipe.strategy, delay_of(recipe)
    optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
    common: dict[str, Any] = {"scheduler": schedule, "blocks": training.blocks, "record": True}
    if strategy.name == "full":
        sync: Any = paceline.FullSync(module, optimizer, **common)
    else:
        kind = paceline.LGCSync if strategy.name == "lgc" else paceline.FastestKSync
        sync = kind(module, optimizer, k=recipe.k, **common)
    module.train()
    with sync:
        dist.barrier()
        began = time.perf_counter()
        for draw, assignment in sync.epoch(draws(training, rank), rounds=recipe.rounds):
            keep_pace = pace(delay_seconds(rank, draw) / assignment.blocks)

            def go_on(done: int, keep_pace: Callable[[int], None] = keep_pace) -> bool:
                keep_pace(done)
                return bool(sync.block_done())

            sync.begin_batch(assignment.blocks)
            losses, _ = accumulate(module, assignment, training.loss, parts=assignment.blocks, go_on=go_on)
            sync.step(losses)
    return sync.history[-1].done - began, sync.outcomes.state_dict()


def train_by_ddp(recipe: Recipe, training: Training) -> tuple[float, dict[str, Any]]:
    """Train under torch's own; a batch's delay is over before its last backward pass, in which DDP adds up."""
    rank, blocks, delay_seconds, module = dist.get_rank(), training.blocks, delay_of(recipe), training.module
    optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
    ddp = DistributedDataParallel(module)
    module.train()
    dist.barrier()
    began = time.perf_counter()
    for draw, assignment in itertools.islice(draws(training, rank), recipe.rounds):
        keep_pace = pace(delay_seconds(rank, draw) / blocks)
        optimizer.zero_grad()
        parts = zip(assignment.inputs.chunk(blocks), assignment.targets.chunk(blocks), strict=True)
        for done, (inputs, targets) in enumerate(parts, start=1):
            with ddp.no_sync() if done < blocks else contextlib.nullcontext():
                loss = F.cross_entropy(ddp(inputs), targets) / blocks
                if done == blocks:
                    keep_pace(done)
                loss.backward()  # type: ignore[no-untyped-call]
            keep_pace(done)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return time.perf_counter() - began, {}


def turns_of(job: dict[str, Any]) -> Iterable[Line]:
    return (train(lane, Recipe.from_document(document)) for lane, document in job["turns"])


if __name__ == "__main__":
    job = json.loads(sys.argv[3])
    write_lines(Path(sys.argv[1]), int(sys.argv[2]), job["ranks"], lambda: turns_of(job), address=job["address"])
