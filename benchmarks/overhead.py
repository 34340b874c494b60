"""What a round of the parameter server costs without computation, beside gloo with the same tensor.

The server sends the model to every worker and gets a gradient from each: 2 N tensors through one process. A ring
all-reduce moves 2 (N - 1) / N tensors per process, and all processes work at once. So on one machine the ratio says how
much of the memory's speed is lost to copies, and not how the two compare between machines. The lane "gloo, as a server"
moves the server's tensors with gloo's send and recv, and nothing else: no membership, no trace, no checks.

All lanes take turns in one run, and the best round of each counts.

The second question is whether the server's event loop, which must answer everybody, is kept from it by a codec that
takes long: the longest time in a round in which nothing else had its turn.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from benchmarks.overhead_sides import (
    gloo_all_reduces,
    gloo_server_rounds,
    local_is_known,
    loop_gaps,
    server_parts,
    server_rounds,
)

GLOO, GLOO_SERVER = "gloo all-reduce", "gloo, as a server"
BARS = {
    "server, same machine, identity": Bar(sign="<=", limit=1.3),
    "server, TCP, identity": Bar(sign="<=", limit=3.0),
    "server, TCP, bfloat16": Bar(sign="<=", limit=2.0),
}
PARTS = "identity", "bfloat16"
GAPS = {
    "identity": None,
    "qsgd levels=7": None,
    "qsgd levels=7 lossless=entropy": Bar(sign="<=", limit=50.0, style=".0f"),
}


def lanes_of(elements: int, workers: int, rounds: int) -> dict[str, Callable[[], list[float]]]:
    """What takes turns: each gives the seconds of its rounds, the first left out, which waits for pages and threads."""

    def served(codec: str, *, local: bool = False) -> list[float]:
        return server_rounds(elements, workers, rounds, codec, local=local)[1:]

    lanes: dict[str, Callable[[], list[float]]] = {
        GLOO: lambda: gloo_all_reduces(elements, workers, rounds)[1:],
        GLOO_SERVER: lambda: gloo_server_rounds(elements, workers, rounds)[1:],
        "server, same machine, identity": lambda: served("identity", local=True),
        "server, TCP, identity": lambda: served("identity"),
        "server, TCP, bfloat16": lambda: served("bfloat16"),
    }
    if not local_is_known():
        del lanes["server, same machine, identity"]
    return lanes


def run(options: Options) -> None:
    """`python -m benchmarks overhead`."""
    elements, workers = (40_000, 2) if options.quick else (11_000_000, 4)
    turns, rounds = (1, 4) if options.quick else (4, 12)
    lanes = lanes_of(elements, workers, rounds)
    coded, gap_codecs = (40_000, list(GAPS)[-1:]) if options.quick else (5_000_000, list(GAPS))
    times: dict[str, list[float]] = {name: [] for name in lanes}
    with progress_bar() as progress:
        task = progress.add_task("overhead", total=turns * len(lanes) + len(PARTS) + len(gap_codecs))
        for _ in range(turns):
            for name, lane in lanes.items():
                progress.update(task, description=f"overhead: {name}")
                times[name] += lane()
                progress.advance(task)
        parts, gaps = {}, {}
        for codec in PARTS:
            parts[codec] = server_parts(elements, workers, codec, repeats=turns + 1)
            progress.advance(task)
        for codec in gap_codecs:
            progress.update(task, description=f"overhead: event loop, {codec}")
            gaps[codec] = loop_gaps(coded, 2, 4 if options.quick else 8, codec)
            progress.advance(task)
    console = tables()
    what = f"a round without computation, {elements:,} parameters, {workers} workers"
    console.print(_rounds(what, times, quick=options.quick))
    console.print(_parts(parts, times, quick=options.quick))
    console.print(_gaps(coded, gaps, quick=options.quick))
    save(
        options,
        "overhead",
        {"elements": elements, "workers": workers, "times": times, "parts": parts, "gaps": gaps},
    )


def _rounds(what: str, times: dict[str, list[float]], *, quick: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=titled(what, quick=quick))
    for column in ("", "best ms", "median ms", "x gloo", "bar", ""):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in times.items():
        ratio, bar = min(seconds) / min(times[GLOO]), BARS.get(name)
        judged = (str(bar), coloured(bar.verdict(ratio))) if bar is not None else ("", "")
        best, usual = f"{1000 * min(seconds):.0f}", f"{1000 * median(seconds):.0f}"
        table.add_row(name, best, usual, f"{ratio:.2f}", *judged)
    return table


def _parts(parts: dict[str, dict[str, float]], times: dict[str, list[float]], *, quick: bool) -> Table:
    where = Table(box=box.SIMPLE_HEAD, title=titled("where the server's time goes over TCP, ms", quick=quick))
    where.add_column("")
    for codec in parts:
        where.add_column(codec, justify="right")
    for name in next(iter(parts.values())):
        where.add_row(name, *(f"{1000 * parts[codec][name]:.1f}" for codec in parts))
    rest = [min(times[f"server, TCP, {codec}"]) - sum(parts[codec].values()) for codec in parts]
    where.add_row("the rest: network, both ways, and workers", *(f"{1000 * seconds:.1f}" for seconds in rest))
    return where


def _gaps(elements: int, gaps: dict[str, Any], *, quick: bool) -> Table:
    title = f"longest time in a round that the event loop is kept, {elements:,} parameters, 2 workers"
    table = Table(box=box.SIMPLE_HEAD, title=titled(title, quick=quick))
    for column in ("codec", "median ms", "most ms", "bar", ""):
        table.add_column(column, justify="left" if column in ("codec", "") else "right")
    for codec, found in gaps.items():
        usual, bar = 1000 * median(found), GAPS[codec]
        judged = (str(bar), coloured(bar.verdict(usual))) if bar is not None else ("", "")
        table.add_row(codec, f"{usual:.0f}", f"{1000 * max(found):.0f}", *judged)
    return table
