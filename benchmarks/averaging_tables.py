"""The tables of the benchmark `averaging`, each with its verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.averaging_plan import BARRIER, PAPER, PERIOD, Plan
from benchmarks.cable import RATE
from benchmarks.output import Bar, coloured, titled

NEAR_THE_LIMIT = Bar(sign=">=", limit=0.95, style=".1%")
FASTER = Bar(sign=">=", limit=2.0)
NO_LATER = Bar(sign="<=", limit=1.0)
WAITING = Bar(sign="<=", limit=0.05, style=".1%")
Row = dict[str, Any]


def speed_table(rows: Sequence[Row], first: Row, plan: Plan, *, quick: bool) -> tuple[Table, str]:
    """Samples per second, and what hpsgd's are beside the limit and beside those who wait."""
    table = _table(
        f"Samples per second, {2 * plan.ranks_per_host} ranks over {RATE}/s, by all-reduce : computation", quick=quick
    )
    table.add_column("lane", no_wrap=True)
    for ratio in plan.ratios:
        table.add_column(f"{ratio:g} : 1", justify="right")
        table.add_column("of psgd", justify="right")
    by_lane = {row["lane"]: {ratio: row[f"{ratio:g}"]["best"] for ratio in plan.ratios} for row in rows}
    for lane, speeds in by_lane.items():
        cells = [(f"{speeds[ratio]:,.0f}", f"{speeds[ratio] / by_lane['psgd'][ratio]:.1%}") for ratio in plan.ratios]
        table.add_row(_name(lane), *(text for cell in cells for text in cell))
    worst = min(plan.ratios, key=lambda ratio: by_lane["hpsgd"][ratio] / by_lane["psgd"][ratio])
    near = by_lane["hpsgd"][worst] / by_lane["psgd"][worst]
    ratio = plan.loss_ratio
    faster, beside = (by_lane["hpsgd"][ratio] / by_lane[lane][ratio] for lane in ("ssgd", "ddp"))
    seconds = median(first["seconds"])
    return table, (
        f"{first['parameters']:,} parameters; one all-reduce takes {1000 * seconds:,.0f} ms, batches of {plan.batch}. "
        "A step's computation is real,\n"
        f"and padded by sleep to {_listed(f'{1000 * seconds / ratio:,.0f}' for ratio in plan.ratios)} ms. "
        f"Best of {plan.rounds} round(s), lanes interleaved.\n"
        f"hpsgd against psgd, where it is least ({worst:g} : 1): {_judged(NEAR_THE_LIMIT, near)}\n"
        f"hpsgd against ssgd at {ratio:g} : 1: {_judged(FASTER, faster, 'times')}; "
        f"against torch's DDP: {FASTER.show(beside)}\n"
    )


def processor_table(rows: Sequence[Row], plan: Plan, *, quick: bool) -> tuple[Table, str]:
    """The processor's time of a step, and what of it an average takes."""
    title = f"The processor's time of a rank, all-reduce : computation = {plan.ratios[0]:g} : 1"
    table = _table(title, quick=quick)
    table.add_column("lane", no_wrap=True)
    for name in ("ms a step", "of psgd", "averages", "ms each"):
        table.add_column(name, justify="right")
    alone = next(row["seconds"] for row in rows if row["lane"] == "psgd")
    for row in rows:
        extra = _ratio(1000 * (row["seconds"] - alone), row["averages"])
        table.add_row(
            _name(row["lane"]),
            f"{1000 * row['seconds']:.1f}",
            f"{row['seconds'] / alone:.2f}",
            f"{row['averages']:.2f}",
            "-" if extra is None else f"{extra:.1f}",
        )
    return table, "Of all threads, gloo's too; psgd does not average. Averages: in a step, and what each takes.\n"


def loss_table(rows: Sequence[Row], plan: Plan, optimiser: Sequence[float], *, quick: bool) -> tuple[Table, str]:
    """Loss by the clock, and the time to ssgd's last."""
    rate, momentum = optimiser
    settings = f"SGD, rate {rate:g}, momentum {momentum:g}"
    title = f"Loss by the clock, {settings}, all-reduce : computation = {plan.loss_ratio:g} : 1"
    table = _table(title, quick=quick)
    table.add_column("lane", no_wrap=True)
    names = [f"at {plan.loss_seconds * part / 3:.3g} s" for part in range(4)]
    for name in ("steps of a rank", *names, "s to target", "of ssgd"):
        table.add_column(name, justify="right")
    to_target = {row["lane"]: row["to_target"] for row in rows}
    for row in rows:
        seconds = row["to_target"]
        table.add_row(
            _name(row["lane"]),
            f"{row['steps']:,.0f}",
            *(f"{loss:.3f}" for loss in row["losses"]),
            "never" if seconds is None else f"{seconds:.2f}",
            NO_LATER.show(_ratio(seconds, to_target["ssgd"])),
        )
    beside, papers = (
        [_ratio(to_target[lane], to_target[other]) for other in ("ssgd", "local-sgd")] for lane in ("hpsgd", PAPER)
    )
    return table, (
        f"Means over {plan.seeds} seed(s). The target is ssgd's loss at its end, {rows[0]['target']:.3f} on average.\n"
        f"All lanes: {settings}, batches of {plan.batch}; nothing is tuned for a lane but ssgd.\n"
        f"hpsgd's time to target against ssgd's: {_judged(NO_LATER, beside[0], 'times')}\n"
        f"hpsgd's time to target against local-sgd's: {_judged(NO_LATER, beside[1], 'times')}\n"
        f"As in the paper, without rebase: {NO_LATER.show(papers[0])} times ssgd's, "
        f"{NO_LATER.show(papers[1])} times local-sgd's\n"
    )


def slow_table(rows: Sequence[Row], plan: Plan, *, quick: bool) -> tuple[Table, str]:
    """Speed and waiting beside a slow rank."""
    table = _table(
        f"One of {2 * plan.ranks_per_host} ranks computes {plan.slow_times} times as long, all-reduce : computation = "
        f"{plan.loss_ratio:g} : 1",
        quick=quick,
    )
    table.add_column("lane", no_wrap=True)
    for name in (
        "samples/s",
        "of a fast rank",
        "of the slow one",
        "fast ones wait",
        "steps a window",
        "of the slow one",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        windows = (row["fast_window"], row["slow_window"])
        table.add_row(
            _name(row["lane"]),
            *(f"{row[name]:,.0f}" for name in ("all", "fast", "slow")),
            f"{row['waiting']:.1%}",
            *("-" if steps is None else f"{steps:.2f}" for steps in windows),
        )
    by_lane = {row["lane"]: row for row in rows}
    ahead = by_lane["hpsgd"]["all"] / by_lane[BARRIER]["all"]
    return table, (
        "Waiting: neither computing nor the optimiser's step. Steps a window: as recorded by the averages.\n"
        f"hpsgd's fast ranks wait: {_judged(WAITING, by_lane['hpsgd']['waiting'])}\n"
        f"hpsgd's samples per second in all, against those with a barrier: {ahead:.2f} times"
    )


def _name(lane: str) -> str:
    if lane == "ddp":
        return "torch: ddp"
    return f"paceline: {lane}({PERIOD})" if lane == "local-sgd" else f"paceline: {lane}"


def _judged(bar: Bar, value: float | None, unit: str = "") -> str:
    return f"{bar.show(value)}{f' {unit}' if unit else ''}, bar {bar}: {coloured(bar.verdict(value))}"


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _listed(texts: Any) -> str:
    return ", ".join(texts)


def _table(title: str, *, quick: bool) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick), padding=(0, 2, 0, 0), pad_edge=False)
