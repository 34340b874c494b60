"""What a round of the parameter server costs without computation, beside gloo's all-reduce of the same tensor.

The server sends the model to every worker and gets a gradient from each: 2 N tensors through one process. A ring
all-reduce moves 2 (N - 1) / N tensors per process, and all processes work at once. So on one machine the ratio says how
much of the memory's speed is lost to copies, and not how the two compare between machines.

    copies of a byte, identity, each way:
      server -> worker   frame (1, shared by all workers), gRPC slice (1), kernel (2), Python bytes (1), staging (1),
                         parameters (1)
      worker -> server   frame (1), gRPC slice (1), kernel (2), Python bytes (1), the memory it is summed from (1)
"""

from __future__ import annotations

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from benchmarks.overhead_sides import gloo_all_reduces, server_parts, server_rounds

BARS = {"identity": Bar(sign="<=", limit=3.0), "bfloat16": Bar(sign="<=", limit=1.5)}


def run(options: Options) -> None:
    """Measure both sides in turns, and print the best of each."""
    elements, workers = (40_000, 2) if options.quick else (11_000_000, 4)
    turns, rounds = (1, 4) if options.quick else (3, 15)
    gloo: list[float] = []
    served: dict[str, list[float]] = {codec: [] for codec in BARS}
    with progress_bar() as progress:
        task = progress.add_task("overhead", total=turns * (1 + len(BARS)) + len(BARS))
        for _ in range(turns):
            gloo += gloo_all_reduces(elements, workers, rounds)
            progress.advance(task)
            for codec, times in served.items():
                times += server_rounds(elements, workers, rounds, codec)[1:]  # the first waits for pages and threads
                progress.advance(task)
        parts = {}
        for codec in BARS:
            parts[codec] = server_parts(elements, workers, codec, repeats=turns + 1)
            progress.advance(task)
    what = f"a round without computation, {elements:,} parameters, {workers} workers"
    _tell(what, gloo, served, parts, quick=options.quick)
    save(
        options, "overhead", {"elements": elements, "workers": workers, "gloo": gloo, "served": served, "parts": parts}
    )


def _tell(
    what: str,
    gloo: list[float],
    served: dict[str, list[float]],
    parts: dict[str, dict[str, float]],
    *,
    quick: bool,
) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=titled(what, quick=quick))
    for column in ("", "best ms", "median ms", "x gloo", "bar", ""):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("gloo all-reduce", *_milliseconds(gloo), "1.00", "", "")
    for codec, times in served.items():
        ratio, bar = min(times) / min(gloo), BARS[codec]
        table.add_row(f"server, {codec}", *_milliseconds(times), f"{ratio:.2f}", str(bar), coloured(bar.verdict(ratio)))
    tables().print(table)
    where = Table(box=box.SIMPLE_HEAD, title=titled("where the server's time goes, ms", quick=quick))
    where.add_column("")
    for codec in parts:
        where.add_column(codec, justify="right")
    for name in next(iter(parts.values())):
        where.add_row(name, *(f"{1000 * parts[codec][name]:.1f}" for codec in parts))
    rest = [min(served[codec]) - sum(parts[codec].values()) for codec in parts]
    where.add_row("the rest: gRPC, both ways, and workers", *(f"{1000 * seconds:.1f}" for seconds in rest))
    tables().print(where)


def _milliseconds(times: list[float]) -> tuple[str, str]:
    return f"{1000 * min(times):.0f}", f"{1000 * sorted(times)[len(times) // 2]:.0f}"
