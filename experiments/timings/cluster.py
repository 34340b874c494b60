"""Real runs: a server and ten workers on this machine, with injected delays of 0.05 s + Exp(0.02 s).

The default recipe under `full`, `lgc` (late work weighed by its samples, by the share done, and not) and `fastest-k`,
in turns. Seconds are the server's, from the beginning of the first round to the last step. A strategy's time is the
best of its runs, its loss their mean. The same training without a server takes its turn among them: ten processes with
the batches, delays and optimiser of `full`'s workers, and an all-reduce of gloo in every round. What `full` needs
beyond that is the server's cost.

Of every run:
(a) it is replayed from its trace, and must come out the same to the last bit;
(b) it is simulated with the times that its workers measured, and the simulated time must be that of the run.

What is measured for (b): how long computing took, per worker and batch, and what a message took. A gradient's
`transfer_seconds` are those of the model's way and of its own, so half of their median is the latency of one way; only
gradients count whose worker had been on time in the round before, for the others' model waited for the worker. What is
not measured is what the server does between a gradient and the next model: that is missing from the prediction.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from experiments.core.claims import percent, ratio_text
from experiments.core.ranks import Line, told_by_ranks, write_lines
from experiments.core.story import NAN, Claim, Numbers, Size, Step, Telling, experiment
from experiments.core.turns import bar, verdict
from paceline.optim import make_optimizer
from paceline.processes import Processes
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_training
from paceline.reports.table import PlainTable
from paceline.runs import simulate
from paceline.runs.cluster import delay_of
from paceline.runs.replaying import replay
from paceline.runs.training import train
from paceline.traces.history import recorded_delays, write_recorded
from paceline.traces.journal import JournalRecord, StepRecord
from paceline.traces.journal_files import effective, read_journal
from paceline.training import Batches, measure
from paceline.workers.flat import FlatModel
from paceline.workers.gradients import accumulate

LANES: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lgc, by samples": {"name": "lgc", "scale_partial": "samples"},
    "lgc, unscaled": {"name": "lgc", "scale_partial": False},
    "lgc, scaled": {"name": "lgc", "scale_partial": True},
    "fastest-k": {"name": "fastest-k"},
}
PEER = "gloo"
ROUNDS_A_LINE = 100  # of gloo's ranks: so that they are not taken for dead
MOST_OF_GLOO, LEAST_SAVED, MOST_LOSS, MOST_OFF = 1.10, 0.28, 1.03, 0.10


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One real run, and what replay and simulator say of it."""

    lane: str
    seconds: float
    loss: float
    steps: int = 0
    difference: str = ""
    latency_seconds: float = NAN
    predicted_seconds: float = NAN


@experiment("cluster", question="real runs of lgc against full and gloo, replayed and simulated", minutes=11)
def cluster(size: Size, *, rounds: int = 300, repeat: int = 2) -> Telling:
    rounds, repeat = size.pick((12, 1), (rounds, repeat))
    lanes = size.pick(list(LANES)[:2], list(LANES))
    total = repeat * (len(lanes) + lines_for(rounds))
    folder, runs, peers = Path(tempfile.mkdtemp(prefix="paceline-cluster-")), list[Ran](), list[Ran]()
    try:
        for turn in range(repeat):
            peers.append((yield from gloo_run(recipe_of("full", rounds), total)))
            for number, lane in enumerate(lanes):
                yield Step(lane, total)
                runs.append(one_run(lane, recipe_of(lane, rounds), folder / f"{turn}-{number}"))
    finally:
        if not any(run.difference for run in runs):
            shutil.rmtree(folder)
    yield from tell_strategies(runs, peers, f"{rounds} rounds; seconds: best of {repeat}; loss: mean of {repeat}")
    yield from tell_checks(runs)
    if any(run.difference for run in runs):
        yield f"The runs are in {folder}."


def recipe_of(lane: str, rounds: int) -> Recipe:
    """Return the default recipe, with its delays made real."""
    return Recipe(rounds=rounds).with_settings(
        target_loss=None,
        strategy={"k": 7, **LANES[lane]},
        delay={"name": "shifted-exponential", "shift_seconds": 0.05, "mean_seconds": 0.02, "inject": True},
        cluster={"late_work": "partial"},
    )


def one_run(lane: str, recipe: Recipe, folder: Path) -> Ran:
    """Train for real, replay, and simulate with the times that were measured."""
    trained = train(recipe, out=folder)
    result = trained.result
    if result is None or not trained.outcome.finished:
        raise KeyboardInterrupt
    if trained.outcome.errors:
        raise ValueError(f"{lane}: {trained.outcome.errors[0]}")
    replayed = replay(folder)
    journal, delays = read_journal(folder / "trace.jsonl"), folder / "delays.csv"
    latency = latency_seconds(effective(journal.records))
    write_recorded(delays, recorded_delays(journal))
    simulated = recipe.with_settings(
        delay={"name": "recorded", "file": str(delays), "inject": False}, network={"latency_seconds": latency}
    )
    return Ran(
        lane=lane,
        seconds=result.seconds,
        loss=NAN if result.loss is None else result.loss,
        steps=replayed.steps,
        difference=replayed.difference or replayed.missing,
        latency_seconds=latency,
        predicted_seconds=simulate(simulated, timing_only=True).seconds,
    )


def latency_seconds(records: Sequence[JournalRecord]) -> float:
    """Return half of what model and gradient were on the wire, the median; see above whose."""
    found: list[float] = []
    on_time: set[tuple[int, int]] = set()
    for record in records:
        if isinstance(record, StepRecord):
            fresh = set(record.fresh)
            found += [
                arrival.transfer_seconds
                for arrival in record.arrivals
                if (arrival.worker, arrival.version) in fresh and (arrival.worker, arrival.version - 1) in on_time
            ]
            on_time = fresh
    return median(found or [0.0]) / 2


# -- what is told ------------------------------------------------------------------------------------------------------


def tell_strategies(runs: Sequence[Ran], peers: Sequence[Ran], how_often: str) -> Telling:
    """Yield the table of the strategies and gloo, and what is asked of their times and losses."""
    lanes = by_lane([*runs, *peers])
    best = {lane: min(run.seconds for run in of_lane) for lane, of_lane in lanes.items()}
    loss = {lane: fmean(run.loss for run in of_lane) for lane, of_lane in lanes.items()}
    rows, shown = [], []
    for lane, seconds in best.items():
        saved, ratio, times_gloo = 1 - seconds / best["full"], loss[lane] / loss["full"], seconds / best[PEER]
        claims: list[Claim] = []
        if lane == "full":
            claims = [bar("full: seconds over those of gloo's all-reduce", times_gloo, most=MOST_OF_GLOO)]
        elif lane.startswith("lgc"):
            claims = [
                bar(f"{lane}: time saved against full", saved, least=LEAST_SAVED, write=percent),
                bar(f"{lane}: loss over full's", ratio, most=MOST_LOSS, write=ratio_text),
            ]
        yield from claims
        figures = (f"{seconds:.2f}", f"{times_gloo:.2f}", percent(saved), f"{loss[lane]:.4f}", ratio_text(ratio))
        shown.append((lane, *figures, ", ".join(map(verdict, claims))))
        rows.append({"lane": lane, "seconds": seconds, "saved": saved, "loss": loss[lane], "ratio": ratio,
                     "times_gloo": times_gloo})  # fmt: skip
    yield PlainTable(
        title="Real runs: 10 workers, K = 7, 0.05 s + Exp(0.02 s) injected",
        headings=("strategy", "seconds", "x gloo", "saved", "loss", "loss / full", "time, loss"),
        rows=shown,
        caption=f"{how_often}. Saved and loss / full are against full. full's bar is {MOST_OF_GLOO:.2f} times gloo's "
        "all-reduce on the same batches and delays, in the same run.",
    )
    yield Numbers({"rows": rows, "runs": [asdict(run) for run in runs], "peers": [asdict(peer) for peer in peers]})


def tell_checks(runs: Sequence[Ran]) -> Telling:
    """Yield what replay and simulator say of every run."""
    shown = []
    for lane, of_lane in by_lane(runs).items():
        for turn, run in enumerate(of_lane, start=1):
            ratio, name = run.predicted_seconds / run.seconds, f"{lane}, run {turn}"
            near = bar(f"{name}: how far the simulated time is off", abs(ratio - 1), most=MOST_OFF, write=percent)
            same = run.difference or "identical"
            yield near
            yield Claim(kind="bar", text=f"{name}: replayed from its trace", holds=not run.difference, because=same)
            shown.append(
                (lane, f"{run.seconds:.2f}", f"{1e3 * run.latency_seconds:.2f}", f"{run.predicted_seconds:.2f}",
                 f"{ratio:.3f}", percent(abs(ratio - 1)), verdict(near), "differs" if run.difference else same)
            )  # fmt: skip
    yield PlainTable(
        title="Every run: replayed from its trace, and simulated with its own times",
        headings=("strategy", "measured\ns", "latency\nms", "simulated\ns", "sim /\nmeas", "\noff", "", "\nreplay"),
        rows=shown,
        caption="Latency: half of the median time of model and gradient on the wire, given to the simulator. What the "
        "server does between a gradient and the next model is not measured, and not simulated.",
    )


def by_lane(runs: Sequence[Ran]) -> dict[str, list[Ran]]:
    return {lane: [run for run in runs if run.lane == lane] for lane in dict.fromkeys(run.lane for run in runs)}


# -- the same training without a server --------------------------------------------------------------------------------


def gloo_run(recipe: Recipe, total: int) -> Generator[Step, None, Ran]:
    """Train with all-reduces; the seconds are those from the first batch to the last step."""
    labels = [PEER] * lines_for(recipe.rounds)
    *_, last = yield from told_by_ranks(__name__, 1, recipe.to_document(), labels, total=total)
    return Ran(lane=PEER, **last)


def lines_for(rounds: int) -> int:
    return (rounds - 1) // ROUNDS_A_LINE + 1


def main(folder: Path, recipe: Recipe) -> int:
    """Fork the ranks, which end with this process: torch is loaded once for all."""
    processes, ranks = Processes(), recipe.cluster.workers

    def work(rank: int) -> int:
        write_lines(folder, rank, ranks, partial(all_reduces, rank, recipe))
        return 0

    for rank in range(ranks):
        processes.fork(partial(work, rank))
    return int(any(processes.wait(until_failure=True)))


def all_reduces(rank: int, recipe: Recipe) -> Iterator[Line]:
    """Train as one of the ranks; the last line has the seconds and the loss."""
    training, delay_seconds = make_training(recipe, load_data(recipe)), delay_of(recipe)
    module = training.module
    optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
    model, batches = FlatModel(module), Batches(training)
    batches.joined(rank, draw=0)
    module.train()
    dist.barrier()
    began = time.perf_counter()
    for draw in range(recipe.rounds):
        if draw and draw % ROUNDS_A_LINE == 0:
            yield {}
        assignment = batches.assignment(worker=rank, shard=rank, draw=draw, blocks_done=training.blocks)
        no_sooner = time.perf_counter() + delay_seconds(rank, draw)
        model.gradient.zero_()
        accumulate(module, assignment, training.loss, parts=training.blocks)
        time.sleep(max(0.0, no_sooner - time.perf_counter()))
        dist.all_reduce(model.gradient)
        model.gradient.div_(recipe.cluster.workers)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    seconds = time.perf_counter() - began
    dist.barrier()
    if rank == 0:
        module.eval()
        with torch.no_grad():
            yield {"seconds": seconds, "loss": measure(module, training).loss}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Recipe.from_document(json.loads(sys.argv[3]))))
