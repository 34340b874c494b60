"""Parts `saving` and `slow-rank` of the benchmark `lgc-ranks`: recipes trained by real ranks under injected delays.

A rank is a process of this module. It takes the recipe's own batches, block by block, each no sooner than its delay
says (by sleep: four ranks on two cores would else measure the cores), under one synchronizer after the other, and under
torch's DistributedDataParallel with the same batches, delays and optimiser. Seconds are from the first batch to the
moment when the last round's update is there, on rank 0.

saving      4 ranks, K = 3, 2 and auto, delays of 0.2 s + Exp(0.08 s) that last 10 batches. The simulator plays the same
            recipe, late work partial, with a network that costs nothing: what can be saved at all. The bar is the share
            of it that real ranks save.
slow-rank   rank 0 is 5 times slower, and every rank has 3 classes. Reported are the first seeds by which the slow rank
            alone holds two classes or three: each class that nobody else has costs `fastest-k` 10 points. Learning rate
            and rounds were chosen on seeds 100 to 102, in the simulator, for `full`: the same for all lanes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.table import Table
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paceline
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, titled
from benchmarks.ranks import free_address, measured
from paceline.optim import make_optimizer
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.runs import simulate
from paceline.runs.cluster import delay_of
from paceline.training import Batches, Training, measure
from paceline.workers.gradients import Assignment, accumulate

DDP = "torch: ddp"
RANKS, QUICK_RANKS = 4, 2
SAVING_ROUNDS, SLOW_ROUNDS, QUICK_ROUNDS = 180, 150, 2
SEEDS = 3
SLOW_SEEDS = (0, 2, 3, 4, 5, 6)  # of 1 the slow rank alone holds one class only
OF_SIMULATED = Bar(sign=">=", limit=0.9, style=".1%")
POINTS_BEHIND = Bar(sign="<=", limit=1.0, style=".1f")
POINTS_LOST = Bar(sign=">=", limit=20.0, style=".1f")
OF_TIME = Bar(sign="<=", limit=0.5)
Row = dict[str, Any]


# -- what is run -------------------------------------------------------------------------------------------------------


def saving_recipe(seed: int, rounds: int, ranks: int, strategy: dict[str, Any]) -> Recipe:
    """Return the recipe of part `saving`, with its delays made real."""
    return Recipe(seed=seed, rounds=rounds).with_settings(
        target_loss=None,
        data={"classes_per_worker": max(3, math.ceil(10 / ranks))},
        cluster={"workers": ranks, "late_work": "partial"},
        delay={
            "name": "shifted-exponential",
            "shift_seconds": 0.2,
            "mean_seconds": 0.08,
            "persistence": 10,
            "inject": True,
        },
        strategy={"k": 1, "on": "ranks", **strategy},
    )


def slow_recipe(seed: int, rounds: int, ranks: int, strategy: dict[str, Any]) -> Recipe:
    """Return the recipe of part `slow-rank`."""
    return saving_recipe(seed, rounds, ranks, strategy).with_settings(
        worker={"blocks": 8},
        optimizer={"lr": 0.05},
        delay={"name": "slow-worker", "shift_seconds": 0.04, "mean_seconds": 0.01, "slow_factor": 5.0, "inject": True},
    )


def saving_lanes(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the strategy of each lane of part `saving`."""
    fixed = {f"lgc, K={k}": {"name": "lgc", "k": k} for k in (ranks - 1, ranks - 2) if k >= 1}
    return {DDP: {"name": "full"}, "full": {"name": "full"}, **fixed, "lgc, K=auto": {"name": "lgc", "k": "auto"}}


def slow_lanes(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the strategy of each lane of part `slow-rank`."""
    k = ranks - 1
    return {
        DDP: {"name": "full"},
        f"lgc, K={k}": {"name": "lgc", "k": k},
        f"fastest-k, K={k}": {"name": "fastest-k", "k": k},
    }


def saving(options: Options, folder: Path) -> tuple[list[Table | str], dict[str, Any]]:
    """Train all lanes for all seeds, and simulate them."""
    rounds = QUICK_ROUNDS if options.quick else options.rounds or SAVING_ROUNDS
    seeds = range(1 if options.quick else options.seeds or SEEDS)
    ranks = QUICK_RANKS if options.quick else RANKS
    turns = [
        (lane, saving_recipe(seed, rounds, ranks, strategy))
        for seed in seeds
        for lane, strategy in saving_lanes(ranks).items()
    ]
    lines = _trained("saving", turns, folder)
    for line, (lane, recipe) in zip(lines, turns, strict=True):
        if lane != DDP:
            simulated = simulate(recipe.with_settings(delay={"inject": False}))
            line["simulated_seconds"], line["simulated_loss"] = simulated.seconds, simulated.loss
    rows = saving_rows(lines)
    return [_saving_table(rows, ranks, rounds, len(seeds), quick=options.quick)], {"rows": rows, "runs": lines}


def slow_rank(options: Options, folder: Path) -> tuple[list[Table | str], dict[str, Any]]:
    """Train all lanes for all seeds."""
    rounds = QUICK_ROUNDS if options.quick else options.rounds or SLOW_ROUNDS
    seeds = SLOW_SEEDS[: 1 if options.quick else options.seeds or SEEDS]
    ranks = QUICK_RANKS if options.quick else RANKS
    turns = [
        (lane, slow_recipe(seed, rounds, ranks, strategy))
        for seed in seeds
        for lane, strategy in slow_lanes(ranks).items()
    ]
    lines = _trained("slow-rank", turns, folder)
    rows = slow_rows(lines)
    return [_slow_table(rows, ranks, rounds, seeds, quick=options.quick)], {"rows": rows, "runs": lines}


def _trained(part: str, turns: Sequence[tuple[str, Recipe]], folder: Path) -> list[Row]:
    ranks = turns[0][1].cluster.workers
    plan = {
        "address": free_address(),
        "ranks": ranks,
        "turns": [[lane, recipe.to_document()] for lane, recipe in turns],
    }
    labels = [f"{lane}, seed {recipe.seed}" for lane, recipe in turns]
    name, module = f"lgc-ranks, {part}", "benchmarks.lgc_ranks_training"
    return measured(name, module, json.dumps(plan), labels, None, folder, ranks_per_host=ranks)


# -- a rank ------------------------------------------------------------------------------------------------------------


class Pace:
    """Blocks of a batch are done no sooner than one by one in so many seconds each, as a recipe's worker does it."""

    def __init__(self, block_seconds: float) -> None:
        self._block_seconds, self._began = block_seconds, time.monotonic()

    def keep(self, done: int) -> None:
        """Sleep until so many blocks may be done."""
        time.sleep(max(0.0, self._began + done * self._block_seconds - time.monotonic()))


class Draws:
    """One rank's batches without end, as a loader."""

    def __init__(self, training: Training, rank: int) -> None:
        self._batches, self._blocks, self._rank, self._draw = Batches(training), training.blocks, rank, 0

    def __iter__(self) -> Iterator[tuple[int, Assignment]]:
        while True:
            draw, self._draw = self._draw, self._draw + 1
            yield draw, self._batches.assignment(worker=self._rank, draw=draw, blocks_done=self._blocks)


def train(lane: str, recipe: Recipe) -> Row:
    """Train a recipe as one of its ranks."""
    training = make_training(recipe, load_data(recipe))
    seconds, outcomes = (_train_by_ddp if lane == DDP else _train_in_rounds)(recipe, training)
    training.module.eval()
    with torch.no_grad():
        measured = measure(training.module, training)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, outcomes)
    return {
        "lane": lane,
        "seed": recipe.seed,
        "seconds": seconds,
        "loss": measured.loss,
        "accuracy": measured.accuracy,
        "outcomes": gathered,
    }


def _train_in_rounds(recipe: Recipe, training: Training) -> tuple[float, dict[str, Any]]:
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
        for draw, assignment in sync.epoch(Draws(training, rank), rounds=recipe.rounds):
            pace = Pace(delay_seconds(rank, draw) / assignment.blocks)

            def go_on(done: int, pace: Pace = pace) -> bool:
                pace.keep(done)
                return bool(sync.block_done())

            sync.begin_batch(assignment.blocks)
            losses, _ = accumulate(module, assignment, training.loss, parts=assignment.blocks, go_on=go_on)
            sync.step(losses)
    return sync.history[-1].done - began, sync.outcomes.state_dict()


def _train_by_ddp(recipe: Recipe, training: Training) -> tuple[float, dict[str, Any]]:
    """Train under torch's own; a batch's delay is over before its last backward pass, in which DDP adds up."""
    rank, blocks, delay_seconds = dist.get_rank(), training.blocks, delay_of(recipe)
    optimizer, schedule = make_optimizer(
        training.optimizer, training.module.parameters(), total_steps=training.total_steps
    )
    ddp = DistributedDataParallel(training.module)
    training.module.train()
    dist.barrier()
    began = time.perf_counter()
    for draw, assignment in itertools.islice(Draws(training, rank), recipe.rounds):
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


def main(folder: Path, rank: int, plan: dict[str, Any]) -> None:
    """Train all turns as one rank."""
    torch.set_num_threads(1)
    timeout, address = timedelta(seconds=120), f"tcp://{plan['address']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=plan["ranks"], timeout=timeout)
    with (folder / f"lanes-{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as lines:
        for lane, document in plan["turns"]:
            lines.write(json.dumps(train(lane, Recipe.from_document(document))) + "\n")
    dist.barrier()
    dist.destroy_process_group()


# -- rows and tables ---------------------------------------------------------------------------------------------------


def saving_rows(lines: Sequence[Row]) -> list[Row]:
    """Return a row for each lane, over all seeds: seconds are sums, losses means."""
    rows: list[Row] = []
    for lane in dict.fromkeys(line["lane"] for line in lines):
        runs = [line for line in lines if line["lane"] == lane]
        row: Row = {
            "lane": lane,
            "seconds": sum(run["seconds"] for run in runs),
            "loss": fmean(run["loss"] for run in runs),
        }
        if "simulated_seconds" in runs[0]:
            row["simulated_seconds"] = sum(run["simulated_seconds"] for run in runs)
            row["simulated_loss"] = fmean(run["simulated_loss"] for run in runs)
        rows.append(row)
    full = next(row for row in rows if row["lane"] == "full")
    for row in rows:
        row["saved"] = 1 - row["seconds"] / full["seconds"]
        row["loss_ratio"] = row["loss"] / full["loss"]
        if row["lane"].startswith("lgc"):
            row["simulated_saved"] = 1 - row["simulated_seconds"] / full["simulated_seconds"]
            row["simulated_loss_ratio"] = row["simulated_loss"] / full["simulated_loss"]
            row["of_simulated"] = row["saved"] / row["simulated_saved"] if row["simulated_saved"] > 0 else None
    return rows


def slow_rows(lines: Sequence[Row]) -> list[Row]:
    """Return a row for each lane: means over the seeds; points are those that DDP has more."""
    rows: list[Row] = []
    for lane in dict.fromkeys(line["lane"] for line in lines):
        runs = [line for line in lines if line["lane"] == lane]
        accuracies = [100 * run["accuracy"] for run in runs]
        row: Row = {
            "lane": lane,
            "seconds": fmean(run["seconds"] for run in runs),
            "loss": fmean(run["loss"] for run in runs),
            "accuracy": fmean(accuracies),
            "accuracies": accuracies,
        }
        slow = [run["outcomes"][0] for run in runs if run["outcomes"][0]]
        if slow:
            row["slow_rank"] = [
                sum(each["used"] for each in slow),
                sum(each["late"] for each in slow),
                sum(sum(each["dropped"].values()) for each in slow),
            ]
        rows.append(row)
    for row in rows:
        row["of_time"], row["points"] = row["seconds"] / rows[0]["seconds"], rows[0]["accuracy"] - row["accuracy"]
    return rows


def _table(title: str, caption: str, columns: Sequence[str], *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title=titled(title, quick=quick), caption=caption, padding=(0, 1, 0, 0), pad_edge=False
    )
    table.add_column("lane", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("verdict")
    return table


def _saving_table(rows: Sequence[Row], ranks: int, rounds: int, seeds: int, *, quick: bool) -> Table:
    caption = (
        f"digits, 4 blocks, {rounds} rounds, {seeds} seed(s): seconds are sums, losses means.\n"
        "Simulated: the same delays, and a network that costs nothing.\n"
        f"Bar of the saving, against the simulator's: {OF_SIMULATED}"
    )
    columns = ("seconds", "saved", "simulated", "of it", "loss / full", "simulated")
    table = _table(f"{ranks} ranks, delays of 0.2 s + Exp(0.08 s) injected", caption, columns, quick=quick)
    for row in rows:
        share, judged = row.get("of_simulated"), "simulated_saved" in row
        table.add_row(
            row["lane"],
            f"{row['seconds']:.2f}",
            f"{row['saved']:.1%}",
            f"{row['simulated_saved']:.1%}" if judged else "",
            OF_SIMULATED.show(share) if judged else "",
            f"{row['loss_ratio']:.3f}",
            f"{row['simulated_loss_ratio']:.3f}" if judged else "",
            coloured(OF_SIMULATED.verdict(share)) if judged else "",
        )
    return table


def _slow_table(rows: Sequence[Row], ranks: int, rounds: int, seeds: Sequence[int], *, quick: bool) -> Table:
    caption = (
        f"digits, 8 blocks, {rounds} rounds, seeds {', '.join(map(str, seeds))}: means.\n"
        f"Points: behind ddp's accuracy; bar of lgc: {POINTS_BEHIND}, of fastest-k: {POINTS_LOST}.\n"
        f"Bar of lgc's time: {OF_TIME} of ddp's. Slow rank: its gradients fresh, late, dropped."
    )
    columns = ("seconds", "of ddp's", "accuracy", "points", "loss", "slow rank")
    table = _table(f"One of {ranks} ranks 5 x slower, 3 classes each", caption, columns, quick=quick)
    for row in rows:
        verdicts: list[str] = []
        if row["lane"].startswith("lgc"):
            verdicts = [POINTS_BEHIND.verdict(row["points"]), OF_TIME.verdict(row["of_time"])]
        elif row["lane"].startswith("fastest"):
            verdicts = [POINTS_LOST.verdict(row["points"])]
        table.add_row(
            row["lane"],
            f"{row['seconds']:.2f}",
            OF_TIME.show(row["of_time"]),
            f"{row['accuracy']:.1f}",
            POINTS_BEHIND.show(row["points"]),
            f"{row['loss']:.4f}",
            ", ".join(map(str, row.get("slow_rank", []))),
            ", ".join(map(coloured, verdicts)),
        )
    return table


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
