"""The tables of `averaging-accuracy`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.averaging_accuracy_cases import PARTS, SSGD, Setting, Size
from benchmarks.averaging_accuracy_stability import LENGTHS, MOMENTA, STEEPEST, limits
from benchmarks.output import Bar, coloured, tables, titled

BEHIND = Bar(sign="<=", limit=0.5, style="+.2f")
PAPER = (
    "The paper (figure 4a; 4 workers, plain SGD, rate 0.01): accuracy at epoch 100 is "
    '"generally identical to the SSGD\'s".'
)


def show(rows: Sequence[dict[str, Any]], size: Size, *, quick: bool) -> None:
    """All tables, and what the paper says."""
    console = tables()
    for part in PARTS:
        own = [row for row in rows if row["setting"] == part.setting.name]
        if own:
            console.print(_table(part.setting, own, size, quick=quick))
    console.print(_limits())
    console.print(PAPER)


def _table(setting: Setting, rows: Sequence[dict[str, Any]], size: Size, *, quick: bool) -> Table:
    claimed = "" if setting.claimed else " (the paper does not claim it here)"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled(f"Accuracy on {size.data}, {setting.name}, {setting.workers} workers", quick=quick),
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption=f"{size.rounds} rounds of {setting.workers} batches of {size.batch_size}, from {size.images:,} images; "
        f"mean over {rows[0]['seeds']} seed(s); spread: highest - lowest.\n"
        f"One all-reduce takes {setting.ring_steps:g} steps. window: its steps; time: of a round, in steps.\n"
        f"bar: {BEHIND} points behind ssgd{claimed}.",
    )
    for name in ("optimiser, rate", "member"):
        table.add_column(name, no_wrap=True)
    for name in ("accuracy", "spread", "behind"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for name in ("window", "time"):
        table.add_column(name, justify="right")
    for number, row in enumerate(rows):
        if number and row["local"] != rows[number - 1]["local"]:
            table.add_section()
        table.add_row(row["local"], row["entry"], *_figures(row))
    return table


def _figures(row: dict[str, Any]) -> list[str]:
    accuracy, spread = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("accuracy", "spread"))
    behind = "" if row["entry"] == str(SSGD) else BEHIND.show(row["behind"])
    times = (f"{row[name]:.2f}" for name in ("steps_per_window", "seconds_per_round"))
    return [accuracy, spread, behind, coloured(row["verdict"]) if row["verdict"] else "", *times]


def _limits() -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="How large rate * curvature may be, by the steps of a window: exact, on a quadratic",
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption="together: of the workers' mean; apart: of their differences. The smaller one counts.\n"
        "Members that wait: 2, with momentum 3.8, whatever the window.",
    )
    for name in ("optimiser", "member", ""):
        table.add_column(name)
    for steps in LENGTHS:
        table.add_column(str(steps), justify="right")
    found = limits()
    for momentum in MOMENTA:
        for rebase in (False, True):
            own = [each for each in found if (each["momentum"], each["rebase"]) == (momentum, rebase)]
            names = f"momentum {momentum:g}" if momentum else "plain", "hpsgd" if rebase else "hpsgd, no rebase"
            for mode in ("together", "apart"):
                table.add_row(*names, mode, *(_limit(each[mode]) for each in own))
    return table


def _limit(value: float) -> str:
    return "none" if value >= STEEPEST else f"{value:.2f}"
