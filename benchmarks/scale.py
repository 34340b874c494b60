"""How averaging scales without a server: scale efficiency of the whole family, at 4 to 1,024 simulated workers.

    scale efficiency = samples per second of N workers / (N * samples per second of one worker alone)

Only times are simulated; nothing is trained. The figures to compare with are those of the HPSGD paper's figure 5a.
The settings, and what the paper's numbers imply, are those of `paceline.reproduce.hpsgd.scaling`.
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
from paceline.reproduce.hpsgd.scaling import HARDWARE, SharedHardware, batches_per_second, implied_by
from paceline.reproduce.published import HPSGD_FIGURE_5A
from paceline.strategies.averaging import AVERAGING

WORKERS = (4, 8, 16, 64, 1024)
ROUNDS = 200
QUICK_WORKERS, QUICK_ROUNDS = (4, 16), 10
TABLE_WIDTH = 80
SAME = 0.10  # two efficiencies are the same if they differ by no more than this share


SETTINGS = tuple(HARDWARE.values())


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run."""

    setting: SharedHardware
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


CLAIMS = tuple(Claim(workers=workers, over=over, ratio=1 + gain) for workers, over, gain in HPSGD_FIGURE_5A)


def samples_per_second(task: Task) -> float:
    """In batches: what a whole run came to, its start and its end included."""
    return batches_per_second(task.setting.name, task.member, task.workers, task.rounds)


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


def _claim_row(setting: SharedHardware, claim: Claim, found: dict[tuple[str, str, int], float]) -> dict[str, Any]:
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


# -- tables -----------------------------------------------------------------------------------------------------------


def _efficiencies(
    setting: SharedHardware, sizes: Sequence[int], found: dict[tuple[str, str, int], float], rounds: int, *, quick: bool
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
    table.add_row("ring / mean step", *(f"{setting.ring_in_steps(workers):.2f}" for workers in sizes))
    return table


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
