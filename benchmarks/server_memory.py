"""The parameter server's memory in multiples of its model, for models of three sizes and up to 32 workers.

A server process of its own for every row: the peak of what it holds (the kernel's high-water mark, memory files counted
once) less what it held before the model was made. One process stands in for all workers and is not measured. Every run
has four rounds, with checkpoints and evaluations as a user would have them. Gradients come over TCP, or in memory that
the server shares with workers on its machine.

    bar  =  4 models                         parameters, update, what is being sent, a copy that is saved or measured
            + the optimiser's state          1 for momentum
            + 1 where something is remembered: compensation (lgc), a codec that sends changes (qsgd)
            + 1.25 for each gradient that was held at once

`held` counts the gradients that the server had memory for at once, from the first byte that comes until the step: under
lgc a worker's late gradient waits while its next one arrives.
"""

from __future__ import annotations

import multiprocessing
import queue
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options, chosen
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from benchmarks.server_memory_sides import Case, SharedMemory, server_side, stand_ins

SIZES = {"1M": 1_000_000, "10M": 10_000_000, "50M": 50_000_000}
WORKERS = ("2", "8", "32")
STRATEGIES = ("full", "lgc")
CODECS = "bfloat16", "qsgd levels=7"  # at 10 M parameters and 8 workers
QUICK = [Case(parameters=40_000, workers=3, strategy="lgc", local=True)]
LOOK_SECONDS = 0.01
GIVE_UP_SECONDS = 600.0
SPARE_BYTES = 1_500_000_000  # what the rest of the machine keeps, whatever a server takes


def run(options: Options) -> None:
    """`python -m benchmarks server-memory`."""
    cases = QUICK if options.quick else cases_of(options)
    rows: list[dict[str, Any]] = []
    with progress_bar() as progress:
        bar = progress.add_task("server-memory", total=len(cases))
        for case in cases:
            what = f"server-memory: {case.parameters:,} parameters, {case.workers} workers, {case.strategy}"
            progress.update(bar, description=what)
            rows.append(row_of(case, measured(case)))
            progress.advance(bar)
    tables().print(_table(rows, quick=options.quick))
    save(options, "server-memory", {"rows": rows})


def cases_of(options: Options) -> list[Case]:
    """The rows that the options leave."""
    strategies = chosen(options.strategies, STRATEGIES, "strategy")
    workers = chosen(options.workers, WORKERS, "number of workers")
    sizes = {size: SIZES[size] for size in chosen(options.only, tuple(SIZES), "size")}
    cases = [
        Case(parameters=parameters, workers=int(count), strategy=strategy, local=local)
        for parameters in sizes.values()
        for count in workers
        for strategy in strategies
        for local in ((False, True) if strategy == "full" else (False,))
    ]
    if "10M" in sizes and "8" in workers and "full" in strategies:
        cases += [Case(parameters=SIZES["10M"], workers=8, codec=codec) for codec in CODECS]
    return cases


def bar_of(case: Case, held: int) -> Bar:
    """The most that a server may hold, in models.

    >>> str(bar_of(Case(parameters=1, workers=8, strategy="lgc"), held=8))
    '<= 16.00'
    """
    remembered = case.strategy == "lgc" or case.codec.startswith("qsgd")
    return Bar(sign="<=", limit=4 + 1 + remembered + 1.25 * held)


# -- measuring -----------------------------------------------------------------------------------------------------


def measured(case: Case) -> dict[str, Any]:
    """Run a case in two processes; its figures in bytes. A server that would take all memory is ended."""
    context = multiprocessing.get_context("forkserver")  # torch is loaded once for all processes, and none has threads
    context.set_forkserver_preload(["benchmarks.server_memory_sides", "paceline.drivers.served.run"])
    told, ports = context.Queue(), context.Queue()
    server = context.Process(target=server_side, args=(case, told), daemon=True)
    workers = context.Process(target=stand_ins, args=(case, ports), daemon=True)
    server.start()
    workers.start()
    shared, most_bytes, figures = SharedMemory(), _available_bytes() - SPARE_BYTES, dict[str, Any]()
    deadline, most_held = time.monotonic() + GIVE_UP_SECONDS, 0
    try:
        while "held" not in figures:
            alive = server.is_alive()
            holds = shared.look(server.pid)
            most_held = max(most_held, holds if "base" in figures else 0)
            if "base" in figures and holds > most_bytes:
                return figures | {"peak": holds, "held": case.workers, "ended": True}
            try:
                name, value = told.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if not alive or time.monotonic() > deadline:
                    raise ValueError(f"server-memory: the server of {case} told no figures") from None
                continue
            if name == "port":
                ports.put(value)
            else:
                figures[name] = value
        figures["peak"] = max(figures["peak"], most_held)  # the kernel's mark leaves out what no mapping has touched
        server.join(30)
        return figures | {"shared": shared.most_bytes, "ended": False}
    finally:
        for process in (server, workers):
            process.kill()
            process.join(30)


def _available_bytes() -> int:
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found[1]) if found else 2**62


# -- the table -----------------------------------------------------------------------------------------------------


def row_of(case: Case, figures: dict[str, Any]) -> dict[str, Any]:
    """A row of the table: what was measured, in models."""
    models = (figures["peak"] - figures["base"]) / case.model_bytes
    bar = bar_of(case, figures["held"])
    return {
        "parameters": case.parameters,
        "workers": case.workers,
        "strategy": case.strategy,
        "codec": case.codec,
        "local": case.local,
        "held": figures["held"],
        "models": models,
        "bar": bar.limit,
        "verdict": "MISS" if figures["ended"] else bar.verdict(models),
        **figures,
    }


def _table(rows: Sequence[dict[str, Any]], *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("The server's memory above its start, in models", quick=quick),
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption="held: gradients at once. bar: 4 + 1 (momentum) + 1 (lgc, qsgd) + 1.25 for each held.\n"
        ">: ended there, before it took all memory.",
    )
    for name in ("parameters", "workers"):
        table.add_column(name, justify="right")
    for name in ("strategy", "codec", "by"):
        table.add_column(name)
    for name in ("held", "MB", "models", "bar"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        more = "> " if row["ended"] else ""
        table.add_row(
            f"{row['parameters']:,}",
            str(row["workers"]),
            row["strategy"],
            row["codec"],
            "memory" if row["local"] else "TCP",
            str(row["held"]),
            f"{more}{(row['peak'] - row['base']) / 1e6:,.0f}",
            f"{more}{row['models']:.1f}",
            f"<= {row['bar']:.2f}",
            coloured(row["verdict"]),
        )
    return table
