"""How the engines' speeds and differences are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from benchmarks.output import Bar, coloured, titled

if TYPE_CHECKING:
    from benchmarks.gradients import Row

AGREEMENT = Bar(sign="<=", limit=1e-6, style=".0e")


def speed_table(rows: Sequence[Row], *, quick: bool) -> Table:
    """A row per network and number of threads."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("Gradients of 10 workers, batch 32: how many times as fast as the loop", quick=quick),
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="one pass: GroupedGradients; vmap: torch.func.vmap(grad), - where it does not work or was left out; "
        "used: make_engine's choice, which is judged; PASS~: below the bar by less than the noise, 0.03",
    )
    table.add_column("network")
    table.add_column("input")
    for name in ("parameters", "threads", "loop ms", "one pass", "vmap"):
        table.add_column(name, justify="right")
    table.add_column("used")
    for name in ("used", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        bar = Bar(sign=">=", limit=row.case.at_least)
        table.add_row(
            row.case.name,
            "x".join(map(str, row.case.input_shape)),
            f"{row.parameters:,}",
            str(row.threads),
            f"{1e3 * row.seconds['loop']:.1f}",
            bar.show(row.ratio("grouped")),
            bar.show(row.ratio("vmap")),
            "one pass" if row.choice == "grouped" else "loop",
            bar.show(row.ratio(row.choice)),
            str(bar),
            coloured(row.verdict).replace("[dim]", "[yellow]"),
        )
    return table


def differences_table(rows: Sequence[Row]) -> Table:
    """How far the one pass is from the loop; the bar is on the largest difference against the largest gradient."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title="One pass against the loop: differences of gradients",
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption="the same sums in another order; from float64: norm of the first worker's error / norm of its gradient",
    )
    table.add_column("\nnetwork")
    table.add_column("\ninput")
    for name in ("\nthreads", "\nlargest", "/ largest\ngradient", "norm /\nnorm"):
        table.add_column(name, justify="right")
    table.add_column(f"bar\n{AGREEMENT}")
    for name in ("loop from\nfloat64", "one pass\nfrom float64"):
        table.add_column(name, justify="right")
    for row in rows:
        apart = {name: f"{value:.1e}" for name, value in row.differences.items()}
        table.add_row(
            row.case.name,
            "x".join(map(str, row.case.input_shape)),
            str(row.threads),
            *(apart.get(name, "-") for name in ("most", "most_over_largest", "norm_over_norm")),
            coloured(AGREEMENT.verdict(row.differences["most_over_largest"])) if apart else "-",
            *(apart.get(name, "-") for name in ("loop_from_exact", "grouped_from_exact")),
        )
    return table
