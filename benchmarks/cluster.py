"""Real runs: a server and ten workers on this machine, with injected delays of 0.05 s + Exp(0.02 s).

The default recipe under `full`, `lgc` (late work weighed by its samples, by the share done, and not) and `fastest-k`,
one after the other, as often as `--repeat` says. Seconds are the server's, from the beginning of the first round to the
last step. A strategy's time is the best of its runs, its loss their mean. The same training without a server, by an
all-reduce of gloo in every round (cluster_gloo.py), takes its turn among them: what `full` needs beyond that is the
server's cost.

Of every run:
(a) it is replayed from its trace, and must come out the same to the last bit;
(b) it is simulated with the times that its workers measured, and the simulated time must be that of the run.

What is measured for (b): how long computing took, per worker and batch, and what a message took. A gradient's
`transfer_seconds` are those of the model's way and of its own, so half of their median is the latency of one way; only
gradients count whose worker had been on time in the round before, for the others' model waited for the worker. What is
not measured is what the server does between a gradient and the next model: that is missing from the prediction.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.cluster_gloo import gloo_run
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from paceline.recipes import Recipe
from paceline.runs import simulate
from paceline.runs.replaying import replay
from paceline.runs.training import train
from paceline.traces.history import recorded_delays, write_recorded
from paceline.traces.journal import JournalRecord, StepRecord
from paceline.traces.journal_files import Journal, effective, read_journal

ROUNDS, QUICK_ROUNDS = 300, 12
REPEAT, QUICK_REPEAT = 2, 1
LANES: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lgc, by samples": {"name": "lgc", "scale_partial": "samples"},
    "lgc, unscaled": {"name": "lgc", "scale_partial": False},
    "lgc, scaled": {"name": "lgc", "scale_partial": True},
    "fastest-k": {"name": "fastest-k"},
}
PEER = "gloo"
SERVED = Bar(sign="<=", limit=1.10)
SAVED = Bar(sign=">=", limit=0.28, style=".1%")
LOSS = Bar(sign="<=", limit=1.03, style=".3f")
OFF = Bar(sign="<=", limit=0.10, style=".1%")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One real run, and what replay and simulator say of it."""

    lane: str
    seconds: float
    loss: float | None
    steps: int
    difference: str
    latency_seconds: float
    predicted_seconds: float

    @property
    def ratio(self) -> float:
        """Predicted time against measured time."""
        return self.predicted_seconds / self.seconds


def recipe_of(lane: str, rounds: int) -> Recipe:
    """The default recipe, with its delays made real."""
    return Recipe(rounds=rounds).with_settings(
        target_loss=None,
        strategy={"k": 7, **LANES[lane]},
        delay={"name": "shifted-exponential", "shift_seconds": 0.05, "mean_seconds": 0.02, "inject": True},
        cluster={"late_work": "partial"},
    )


def run(options: Options) -> None:
    """`python -m benchmarks cluster`."""
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    repeat = options.repeat or (QUICK_REPEAT if options.quick else REPEAT)
    lanes = list(LANES)[:2] if options.quick else list(LANES)
    folder = Path(tempfile.mkdtemp(prefix="paceline-cluster-"))
    runs: list[Ran] = []
    peers: list[dict[str, float]] = []
    with progress_bar() as progress:
        bar = progress.add_task("cluster: rounds", total=repeat * len(lanes) * rounds)
        for number in range(repeat):
            progress.update(bar, description=f"cluster: {PEER}")
            seconds, loss = gloo_run(recipe_of("full", rounds))
            peers.append({"seconds": seconds, "loss": loss})
            for lane in lanes:
                before = len(runs) * rounds

                def show(standing: Any, before: int = before) -> None:
                    progress.update(bar, completed=before + standing.round)

                progress.update(bar, description=f"cluster: {lane}")
                runs.append(one_run(lane, recipe_of(lane, rounds), folder / f"{len(runs)}-{number}", show))
    console = tables()
    rows = _rows(runs, peers)
    console.print(_strategies(rows, rounds, repeat, quick=options.quick))
    console.print(_checks(runs))
    save(options, "cluster", {"rows": rows, "peers": peers, "runs": [dataclasses.asdict(each) for each in runs]})
    if any(each.difference for each in runs):
        print(f"the runs are in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)


def one_run(lane: str, recipe: Recipe, folder: Path, show: Any) -> Ran:
    """Train for real, replay, and predict."""
    trained = train(recipe, out=folder, on_standing=show)
    if not trained.outcome.finished:
        raise KeyboardInterrupt
    if trained.outcome.errors:
        raise ValueError(f"{lane}: {trained.outcome.errors[0]}")
    verdict = replay(folder)
    journal = read_journal(folder / "trace.jsonl")
    latency = latency_seconds(journal)
    return Ran(
        lane=lane,
        seconds=trained.result.seconds,
        loss=trained.result.loss,
        steps=verdict.steps,
        difference=verdict.difference or verdict.missing,
        latency_seconds=latency,
        predicted_seconds=predicted_seconds(recipe, journal, latency, folder),
    )


def predicted_seconds(recipe: Recipe, journal: Journal, latency: float, folder: Path) -> float:
    """How long the simulator takes for the run, with the times that were measured in it."""
    file = folder / "delays.csv"
    write_recorded(file, recorded_delays(journal))
    simulated = recipe.with_settings(
        delay={"name": "recorded", "file": str(file), "inject": False}, network={"latency_seconds": latency}
    )
    return simulate(simulated, timing_only=True).seconds


def latency_seconds(journal: Journal) -> float:
    """Half of what model and gradient were on the wire, the median; see above whose."""
    return median(_round_trips(effective(journal.records)) or [0.0]) / 2


def _round_trips(records: Sequence[JournalRecord]) -> list[float]:
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
    return found


# -- tables --------------------------------------------------------------------------------------------------------


def _rows(runs: Sequence[Ran], peers: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    gloo_seconds = min(peer["seconds"] for peer in peers)
    for lane in dict.fromkeys(each.lane for each in runs):
        same = [each for each in runs if each.lane == lane]
        losses = [each.loss for each in same if each.loss is not None]
        seconds = min(each.seconds for each in same)
        loss = sum(losses) / len(losses) if len(losses) == len(same) else None
        full = rows[0] if rows else {"seconds": seconds, "loss": loss}
        rows.append(
            {
                "lane": lane,
                "seconds": seconds,
                "saved": 1 - seconds / full["seconds"],
                "loss": loss,
                "ratio": None if loss is None or full["loss"] is None else loss / full["loss"],
                "times_gloo": seconds / gloo_seconds,
            }
        )
    loss = sum(peer["loss"] for peer in peers) / len(peers)
    ratio = None if rows[0]["loss"] is None else loss / rows[0]["loss"]
    saved = 1 - gloo_seconds / rows[0]["seconds"]
    rows.append(
        {"lane": PEER, "seconds": gloo_seconds, "saved": saved, "loss": loss, "ratio": ratio, "times_gloo": 1.0}
    )
    return rows


def _strategies(rows: Sequence[dict[str, Any]], rounds: int, repeat: int, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("Real runs: 10 workers, K=7, 0.05 s + Exp(0.02 s) injected", quick=quick),
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=f"{rounds} rounds; seconds: best of {repeat}; loss: mean of {repeat}; both against full.\n"
        f"bar of full's time: {SERVED} of gloo's all-reduce, same batches and delays, in the same run.",
    )
    table.add_column("strategy", no_wrap=True)
    for name in ("seconds", "x gloo", "saved", "bar", "loss", "loss / full", "bar"):
        table.add_column(name, justify="right")
    table.add_column("time, loss")
    for row in rows:
        judged = row["lane"].startswith("lgc")
        verdicts = [coloured(SAVED.verdict(row["saved"])), coloured(LOSS.verdict(row["ratio"]))] if judged else []
        if row["lane"] == "full":
            verdicts = [coloured(SERVED.verdict(row["times_gloo"]))]
        table.add_row(
            row["lane"],
            f"{row['seconds']:.2f}",
            SERVED.show(row["times_gloo"]),
            SAVED.show(row["saved"]),
            str(SAVED) if judged else "",
            "-" if row["loss"] is None else f"{row['loss']:.4f}",
            LOSS.show(row["ratio"]),
            str(LOSS) if judged else "",
            ", ".join(verdicts),
        )
    return table


def _checks(runs: Sequence[Ran]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="Every run: replayed from its trace, and simulated with its own times",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="latency: half of the median time of model and gradient on the wire, given to the simulator.\n"
        "What the server does between a gradient and the next model is not measured, and not simulated.",
    )
    table.add_column("strategy", no_wrap=True)
    for name in ("measured s", "latency ms", "simulated s", "sim / meas", f"off, bar {OFF}"):
        table.add_column(name, justify="right")
    for name in ("verdict", "replay"):
        table.add_column(name)
    for each in runs:
        off = abs(each.ratio - 1)
        table.add_row(
            each.lane,
            f"{each.seconds:.2f}",
            f"{each.latency_seconds * 1000:.2f}",
            f"{each.predicted_seconds:.2f}",
            f"{each.ratio:.3f}",
            OFF.show(off),
            coloured(OFF.verdict(off)),
            f"[red]{each.difference}[/]" if each.difference else "identical",
        )
    return table
