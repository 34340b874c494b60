"""Batches by speed under DDP: how near `paceline.Balance` comes to what all machines could do together.

Four real ranks on this machine, gloo over the loopback, whose computation is padded by sleep (`shares_rank`). Each lane
is a launch of its own, lanes take turns, and of each the quickest turn counts: whatever else the machine does only adds
to it.

    torch: ddp    equal batches: every step waits for the slowest
    balance       the same script with paceline.Balance
    ideal         the sum of all speeds, computed from the pads: no time for DDP, the optimiser, or whole samples

pace       samples a second after the first 20 steps, as a share of the ideal, and in times DDP's. Where speeds change
           in the run, the steps in which they have changed and shares have not are among them.
simulated  with `pace`: the same clusters as recipes, `full` on ranks with equal shares and by speed, a network that
           costs nothing. How long a step takes on the virtual clock, beside the real one.
jitter     ranks that are equal but for noise of 20 %, drawn anew in every batch: shares should stay as they are.
overhead   ranks that are equal. Balance against DDP, whose difference is smaller than what two turns differ by; and the
           time inside Balance's own code, every way into it wrapped, less what the wrappers take around nothing. By the
           clock it contains the waits for other ranks where they tell each other their times.
accuracy   digits, a network with BatchNorm, one rank three times slower: the same epochs with equal batches and with
           shares. `equal shares kept` has the same batches as `balance`, so it differs by what BatchNorm makes of parts
           of other sizes, and by rounding.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options, chosen
from benchmarks.output import Bar, coloured, save, tables, titled
from benchmarks.ranks import ended_by_signals, measured
from benchmarks.shares_rank import BALANCE, DDP, KEPT, Job, Noise
from paceline.recipes import Recipe
from paceline.runs import simulate

NOISES: tuple[Noise, ...] = ("uniform", "gaussian")
PARTS = ("pace", "jitter", "overhead", "accuracy")
FIRST_SEED = 200  # periods and limits of paceline.strategies.shares were chosen on others, 100 and above
SEEDS, ACCURACY_SEEDS = 5, 3
STEPS, WARM_STEPS = 50, 20
OF_IDEAL = Bar(sign=">=", limit=0.93, style=".1%")
OF_DDP = Bar(sign=">=", limit=2.3)
CHANGES = Bar(sign="<=", limit=0, style=".0f")
OVERHEAD = Bar(sign="<=", limit=0.005, style=".2%")
POINTS = Bar(sign="<=", limit=1.0, style=".2f")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Ranks of some speeds, and what is judged."""

    name: str
    job: Job
    turns: int = 2
    ddp_steps: int | None = 12  # DDP does not change: fewer steps say as much
    of_ideal: Bar | None = None
    of_ddp: Bar | None = None

    def lane(self, lane: str, seed: int) -> Job:
        """Return the job of a lane."""
        job = replace(self.job, lanes=(lane,), seeds=(seed,))
        return job if lane == BALANCE or self.ddp_steps is None else replace(job, steps=self.ddp_steps, warm_steps=2)


ONE_SLOW = Job(slower=(1, 1, 1, 3), equal_seconds=0.25, steps=STEPS, warm_steps=WARM_STEPS)
SCENARIOS = (
    Scenario(name="one 3 times slower", job=ONE_SLOW, of_ideal=OF_IDEAL, of_ddp=OF_DDP),
    Scenario(name="two 2 times slower", job=replace(ONE_SLOW, slower=(1, 1, 2, 2)), of_ideal=OF_IDEAL),
    Scenario(
        name="one 3 times slower, fixed part",
        job=replace(ONE_SLOW, equal_seconds=0.2, fixed_seconds=0.05),
        turns=1,
    ),
    Scenario(
        name="one slow from 1/2 to 3/4",
        job=replace(ONE_SLOW, slow_from=0.5, slow_to=0.75, steps=80),
        turns=1,
        ddp_steps=None,
    ),
)
EQUAL = Scenario(name="all equal", job=replace(ONE_SLOW, slower=(1, 1, 1, 1), steps=60), ddp_steps=None)


def run(options: Options) -> None:
    """`python -m benchmarks shares`."""
    parts, console, rows = chosen(options.only, PARTS, "part"), tables(), dict[str, Any]()
    first = options.first_seed or FIRST_SEED
    if "pace" in parts:
        scenarios = [_shorter(each) for each in SCENARIOS[:1]] if options.quick else SCENARIOS
        rows["pace"] = [_pace(each, first, options.repeat) for each in scenarios]
        console.print(_pace_table(rows["pace"], quick=options.quick))
        console.print(_simulated_table(rows["pace"], quick=options.quick))
    if "jitter" in parts:
        rows["jitter"] = [
            _jitter(kind, first, options) for kind in ("uniform", "gaussian")[: 1 if options.quick else 2]
        ]
        console.print(_jitter_table(rows["jitter"], quick=options.quick))
    if "overhead" in parts:
        rows["overhead"] = _overhead(_shorter(EQUAL) if options.quick else EQUAL, first, options.repeat)
        console.print(_overhead_lines(rows["overhead"]))
    if "accuracy" in parts:
        rows["accuracy"] = _accuracy(first, options)
        console.print(_accuracy_table(rows["accuracy"], quick=options.quick))
    save(options, "shares", {"first_seed": first, **rows})


def _shorter(scenario: Scenario) -> Scenario:
    job = replace(scenario.job, slower=scenario.job.slower[-2:], equal_seconds=0.02, steps=16, warm_steps=8)
    return replace(scenario, job=job, turns=0, ddp_steps=None)


def _launched(name: str, job: Job) -> list[Row]:
    """Start the ranks of a job; return a line for each of its seeds."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-shares-"))
    try:
        with ended_by_signals():
            labels = [f"{lane}, seed {seed}" for lane in job.lanes for seed in job.seeds]
            plan = json.dumps(asdict(job))
            return measured(name, "benchmarks.shares_rank", plan, labels, None, folder, ranks_per_host=job.ranks)
    finally:
        shutil.rmtree(folder)


def _turns(scenario: Scenario, seed: int, repeat: int | None) -> dict[str, list[Row]]:
    """Return the turns of DDP and Balance, which alternate; 0 turns are one launch of both."""
    found: dict[str, list[Row]] = {DDP: [], BALANCE: []}
    name, turns = f"shares, {scenario.name}", scenario.turns if repeat is None else repeat
    for job in [scenario.lane(lane, seed) for lane in found] * turns or [replace(scenario.job, lanes=tuple(found))]:
        for line in _launched(name, job):
            found[line["lane"]].append(line)
    return found


# -- how quick ---------------------------------------------------------------------------------------------------------


def _pace(scenario: Scenario, seed: int, repeat: int | None) -> Row:
    turns, job = _turns(scenario, seed, repeat), scenario.job
    found = pace_of(turns[DDP], turns[BALANCE], job.batch_size)
    simulated = {lane: simulated_step(scenario.lane(lane, seed)) for lane in turns}
    limits = (("of_ideal", scenario.of_ideal), ("of_ddp", scenario.of_ddp))
    bars = {name: bar for name, bar in limits if bar is not None}
    return {
        "scenario": scenario.name,
        **found,
        "bars": {name: str(bar) for name, bar in bars.items()},
        "verdicts": {name: bar.verdict(found[name]) for name, bar in bars.items()},
        "simulated_step_seconds": simulated,
        "turns": turns,
    }


def simulated_step(job: Job) -> float:
    """Return the seconds of a step after those that do not count, on the simulator's clock.

    >>> round(simulated_step(Job(lanes=(DDP,), slower=(1, 3), equal_seconds=0.1, steps=4, warm_steps=1)), 3)
    0.3
    """
    with tempfile.TemporaryDirectory(prefix="paceline-shares-") as folder:
        whole = (
            [job.fixed_seconds + job.equal_seconds * each for each in job.slower_at(step)] for step in range(job.steps)
        )
        lines = [",".join(f"{seconds:.6f}" for seconds in batch) for batch in whole]
        table = Path(folder, "delays.csv")
        table.write_text("\n".join(lines) + "\n", encoding="utf-8")
        recipe = Recipe(seed=job.seeds[0], rounds=job.steps, evaluate_every=job.steps).with_settings(
            data={"split": "iid"},
            worker={"shares": "equal" if job.lanes == (DDP,) else "speed", "batch_size": job.share, "blocks": 1},
            cluster={"workers": job.ranks},
            strategy={"name": "full", "on": "ranks"},
            delay={"name": "recorded", "file": str(table), "fixed_seconds": job.fixed_seconds},
        )
        rounds = simulate(recipe).trace.rounds[job.warm_steps :]
    return (rounds[-1].closed_seconds - rounds[0].opened_seconds) / len(rounds)


def _simulated_table(rows: Sequence[Row], *, quick: bool) -> Table:
    title = titled("A step after the first ones: real, and simulated", quick=quick)
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("ranks")
    table.add_column("lane")
    for name in ("real", "simulated", "off"):
        table.add_column(name, justify="right")
    for row in rows:
        for lane, turns in row["turns"].items():
            real = min(turn["seconds"] / turn["steps"] for turn in turns)
            simulated = row["simulated_step_seconds"][lane]
            figures = f"{1e3 * real:.0f} ms", f"{1e3 * simulated:.0f} ms", f"{simulated / real - 1:+.1%}"
            table.add_row(row["scenario"], lane, *figures)
    return table


def pace_of(ddp: Sequence[Row], balance: Sequence[Row], batch_size: int) -> Row:
    """Return the paces of the quickest turns, of the ideal, and when shares changed.

    >>> turn = {"steps": 10, "seconds": 6.0, "ideal_seconds": 2.0, "changed_at": [], "shares": [8, 8]}
    >>> found = pace_of([turn], [turn | {"seconds": 2.5, "changed_at": [6]}], batch_size=16)
    >>> found["of_ideal"], found["of_ddp"], found["samples_per_second"]
    (0.8, 2.4, 64.0)
    """
    slow, quick = (min(turns, key=lambda turn: turn["seconds"] / turn["steps"]) for turns in (ddp, balance))
    steps_per_second = [turn["steps"] / turn["seconds"] for turn in (slow, quick)]
    return {
        "ideal_samples_per_second": batch_size * quick["steps"] / quick["ideal_seconds"],
        "ddp_samples_per_second": batch_size * steps_per_second[0],
        "samples_per_second": batch_size * steps_per_second[1],
        "of_ideal": quick["ideal_seconds"] / quick["seconds"],
        "of_ddp": steps_per_second[1] / steps_per_second[0],
        "changed_at": quick["changed_at"],
        "shares": quick["shares"],
    }


def _pace_table(rows: Sequence[Row], *, quick: bool) -> Table:
    title = titled("Samples a second after the first steps: real ranks, padded by sleep", quick=quick)
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("ranks")
    for name in ("ideal", "ddp", "balance", "of the ideal", "times ddp", "changed after steps"):
        table.add_column(name, justify="right")
    for row in rows:
        paces = (row[f"{name}samples_per_second"] for name in ("ideal_", "ddp_", ""))
        table.add_row(
            row["scenario"],
            *(f"{pace:,.0f}" for pace in paces),
            _judged(row, "of_ideal", OF_IDEAL),
            _judged(row, "of_ddp", OF_DDP),
            ", ".join(map(str, row["changed_at"])) or "never",
        )
    table.caption = f"bars: {OF_IDEAL} of the ideal (the first two), {OF_DDP} times ddp (the first)"
    return table


def _judged(row: Row, name: str, bar: Bar) -> str:
    verdict = row["verdicts"].get(name)
    return bar.show(row[name]) + (f" {coloured(verdict)}" if verdict else "")


# -- what must not happen ----------------------------------------------------------------------------------------------


def _jitter(kind: Noise, first: int, options: Options) -> Row:
    seeds = tuple(range(first, first + (options.seeds or (1 if options.quick else SEEDS))))
    job = replace(EQUAL.job, jitter=kind, equal_seconds=0.1, seeds=seeds)
    if options.quick:
        job = replace(_shorter(EQUAL).job, jitter=kind, seeds=seeds)
    lines = _launched(f"shares, {kind} jitter", job)
    changes = sum(len(line["changed_at"]) for line in lines)
    looks = job.steps * len(lines)
    return {"jitter": kind, "changes": changes, "steps": looks, "verdict": CHANGES.verdict(changes), "lines": lines}


def _jitter_table(rows: Sequence[Row], *, quick: bool) -> Table:
    title = titled("Equal ranks with 20 % of noise in every batch", quick=quick)
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 2, 0, 0), pad_edge=False)
    for name, side in (
        ("noise", "left"),
        ("seeds", "right"),
        ("steps", "right"),
        ("changes", "right"),
        ("bar", "right"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    table.add_column("verdict")
    for row in rows:
        counts = (len(row["lines"]), row["steps"], row["changes"])
        table.add_row(row["jitter"], *map(str, counts), str(CHANGES), coloured(row["verdict"]))
    return table


def _overhead(scenario: Scenario, seed: int, repeat: int | None) -> Row:
    turns = _turns(scenario, seed, repeat)
    ddp = [turn["seconds"] / turn["steps"] for turn in turns[DDP]]
    own = [turn["seconds"] / turn["steps"] for turn in turns[BALANCE]]
    best = min(turns[BALANCE], key=lambda turn: turn["inside_seconds"])
    return {
        "step_seconds": min(ddp),
        "against_ddp": min(own) / min(ddp) - 1,
        "turns_apart": (max(ddp) - min(ddp)) / min(ddp),
        "inside_seconds": best["inside_seconds"] - best["wrapping_seconds"],
        "inside_processor_seconds": best["inside_processor_seconds"],
        "changes": sum(len(turn["changed_at"]) for turn in turns[BALANCE]),
        "turns": turns,
    }


def _overhead_lines(found: Row) -> str:
    step = found["step_seconds"]
    inside, processor = found["inside_seconds"] / step, found["inside_processor_seconds"] / step
    against = found["against_ddp"]
    return (
        f"Overhead where all ranks are equal, in a step of {1e3 * step:.0f} ms; bar {OVERHEAD}\n"
        f"  inside Balance, on the rank that is longest in it: {1e6 * found['inside_seconds']:.0f} us by the clock, "
        f"{OVERHEAD.show(inside)}: {coloured(OVERHEAD.verdict(inside))}\n"
        f"  of that the processor: {1e6 * found['inside_processor_seconds']:.0f} us, {OVERHEAD.show(processor)}\n"
        f"  a step of balance against ddp, quickest turns: {against:+.2%}: {coloured(OVERHEAD.verdict(against))} "
        f"(turns of ddp are {found['turns_apart']:.2%} apart); shares changed {found['changes']} times\n"
    )


# -- how well it learns ------------------------------------------------------------------------------------------------


def _accuracy(first: int, options: Options) -> list[Row]:
    seeds = tuple(range(first, first + (options.seeds or (1 if options.quick else ACCURACY_SEEDS))))
    lanes, slower = (DDP, KEPT, BALANCE), (1.0, 3.0) if options.quick else ONE_SLOW.slower
    job = Job(
        lanes=lanes,
        slower=slower,
        equal_seconds=0.008,
        share=128 // len(slower),
        epochs=2 if options.quick else 12,
        seeds=seeds,
    )
    rows = []
    found = _launched("shares, accuracy", job)
    for lane in lanes:
        lines = [line for line in found if line["lane"] == lane]
        accuracies = [line["accuracy"] for line in lines]
        rows.append(
            {
                "lane": lane,
                "accuracy": fmean(accuracies),
                "deviation": stdev(accuracies) if len(accuracies) > 1 else None,
                "loss": fmean(line["loss"] for line in lines),
                "lines": lines,
            }
        )
    return rows


def points_apart(rows: Sequence[Row]) -> float:
    """Return how many points of accuracy the lane with shares is away from that of DDP.

    >>> points_apart([{"accuracy": 0.97}, {"accuracy": 0.5}, {"accuracy": 0.965}])
    0.5
    """
    return round(100 * abs(float(rows[-1]["accuracy"]) - float(rows[0]["accuracy"])), 6)


def _accuracy_table(rows: Sequence[Row], *, quick: bool) -> Table:
    title = titled("Digits, one rank 3 times slower: the same epochs", quick=quick)
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("lane")
    for name in ("test accuracy", "seeds differ by", "test loss", "shares at the end"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["lane"],
            f"{row['accuracy']:.2%}",
            "-" if row["deviation"] is None else f"{100 * row['deviation']:.2f} points",
            f"{row['loss']:.4f}",
            " ".join(map(str, row["lines"][-1]["shares"])),
        )
    apart = points_apart(rows)
    table.caption = (
        f"balance against ddp: {POINTS.show(apart)} points apart (bar {POINTS}): {coloured(POINTS.verdict(apart))}; "
        "seeds differ by: standard deviation"
    )
    return table
