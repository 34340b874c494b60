"""Parts `saving` and `slow-rank` of `lgc-ranks`: recipes trained by real ranks under injected delays.

A rank is a process of this module. It takes the recipe's own batches, block by block, each no sooner than its delay
says (by sleep: four ranks on two cores would else measure the cores), under one synchronizer after the other, and under
torch's DistributedDataParallel with the same batches, delays and optimiser. Seconds are from the first batch to the
moment when the last round's update is there, on rank 0.

saving      4 ranks, K = 3, 2 and auto, delays of 0.2 s + Exp(0.08 s) that last 10 batches. The simulator plays the same
            recipe, late work partial, with a network that costs nothing: what can be saved at all. The bar is the share
            of it that real ranks save.
slow-rank   rank 0 is 5 times slower, and every rank has 3 classes. Reported are the first seeds by which the slow rank
            alone holds two classes or three: each class that no other rank has costs `fastest-k` 10 points. Learning
            rate and rounds were chosen on seeds 100 to 102, in the simulator, for `full`: the same for all lanes.

    python -m experiments.timings.lgc_ranks_training FOLDER RANK PLAN      a rank
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline
from experiments.core.claims import percent
from experiments.core.ranks import Line, free_address, told_by_ranks, write_lines
from experiments.core.recipes import run_recipe
from experiments.core.story import FIRST_SEED, NAN, Job, Numbers, Size, Step, Telling
from experiments.core.turns import bar, verdict
from paceline.optim import make_optimizer
from paceline.quantities import counted
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.reports.table import PlainTable
from paceline.runs.cluster import delay_of
from paceline.training import Batches, Training, measure
from paceline.workers.gradients import Assignment, accumulate

DDP = "torch: ddp"
LEAST_OF_SIMULATED, MOST_BEHIND, LEAST_LOST, MOST_TIME = 0.9, 1.0, 20.0, 0.5
MODULE = "experiments.timings.lgc_ranks_training"

Strategies = dict[str, dict[str, Any]]
Row = dict[str, Any]


# -- what is run -------------------------------------------------------------------------------------------------------


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
    return (yield from told_by_ranks(MODULE, ranks, job, labels))


# -- rows --------------------------------------------------------------------------------------------------------------


def cells(row: Row, **styles: str) -> list[str]:
    """Return figures of a row, each written in its style; one that the row does not have is empty.

    >>> cells({"seconds": 2.0, "saved": 0.25, "of_it": NAN}, seconds=".2f", saved=".1%", of_it=".1%", loss=".3f")
    ['2.00', '25.0 %', 'none', '']
    """
    texts = {name: f"{row[name]:{style}}".replace("%", " %") for name, style in styles.items() if name in row}
    return ["none" if row.get(name) != row.get(name) else texts.get(name, "") for name in styles]


def by_lane(lines: Sequence[Line]) -> dict[str, list[Line]]:
    return {
        lane: [line for line in lines if line["lane"] == lane] for lane in dict.fromkeys(each["lane"] for each in lines)
    }


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


# -- a rank ------------------------------------------------------------------------------------------------------------


class Pace:
    """Blocks of a batch are done no sooner than one by one in so many seconds each, as a recipe's worker does it."""

    def __init__(self, block_seconds: float) -> None:
        self._block_seconds, self._began = block_seconds, time.monotonic()

    def keep(self, done: int) -> None:
        """Sleep until so many blocks may be done."""
        time.sleep(max(0.0, self._began + done * self._block_seconds - time.monotonic()))


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
            pace = Pace(delay_seconds(rank, draw) / assignment.blocks)

            def go_on(done: int, pace: Pace = pace) -> bool:
                pace.keep(done)
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
        pace = Pace(delay_seconds(rank, draw) / blocks)
        optimizer.zero_grad()
        parts = zip(assignment.inputs.chunk(blocks), assignment.targets.chunk(blocks), strict=True)
        for done, (inputs, targets) in enumerate(parts, start=1):
            with ddp.no_sync() if done < blocks else contextlib.nullcontext():
                loss = F.cross_entropy(ddp(inputs), targets) / blocks
                if done == blocks:
                    pace.keep(done)
                loss.backward()  # type: ignore[no-untyped-call]
            pace.keep(done)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return time.perf_counter() - began, {}


def turns_of(job: dict[str, Any]) -> Iterable[Line]:
    return (train(lane, Recipe.from_document(document)) for lane, document in job["turns"])


if __name__ == "__main__":
    job = json.loads(sys.argv[3])
    write_lines(Path(sys.argv[1]), int(sys.argv[2]), job["ranks"], lambda: turns_of(job), address=job["address"])
