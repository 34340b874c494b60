"""How fast the quantising codecs are: against a plain copy of the vector, and against the same in eager torch.

Everything is timed in turns in one process, with the threads torch has, and the best counts. A copy is
`tensor.clone()`. Values are random: what these codecs do does not depend on them.

New memory costs more than the work: the operating system hands it out page by page and fills it with zeros. Whether a
clone gets new memory or what something else has just given back is chance, and would decide the ratio; so large blocks
always are new here, for the clone as for the codecs. The other case, memory that is there already on both sides
(`copy_` against `out=`), is shown beside, and what limits both in the second table.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.codecs_eager import EagerOneBit, EagerQSGD
from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from paceline.codecs import make_codec

NAMES = ("qsgd", "one-bit")
LABELS = {"qsgd": "qsgd, 7 levels", "one-bit": "one-bit"}
COPIES = {"qsgd": Bar(sign="<=", limit=2.5), "one-bit": Bar(sign="<=", limit=2.0)}
FASTER = {"qsgd": Bar(sign=">=", limit=5.0, style=".1f")}
EAGER: dict[str, Any] = {"qsgd": EagerQSGD(), "one-bit": EagerOneBit()}
CLONE, COPY = "copy, new memory (clone)", "copy, warm memory (copy_)"

Works = dict[str, Callable[[], Any]]
Times = dict[str, list[float]]


def run(options: Options) -> None:
    """`python -m benchmarks codecs`."""
    elements, turns = (50_000, 2) if options.quick else (11_000_000, options.repeat or 15)
    _let_memory_be_new()
    vector = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    works, threads = _works(vector), torch.get_num_threads()
    for work in works.values():
        work()  # loads the kernels, and lets the threads start
    with progress_bar() as progress:
        task = progress.add_task("codecs", total=2 * turns)
        best: dict[int, dict[str, float]] = {}
        for count in dict.fromkeys((threads, 1)):
            torch.set_num_threads(count)
            times: Times = {name: [] for name in works}
            for _ in range(turns):
                for name, work in works.items():
                    times[name].append(_seconds(work))
                progress.advance(task, 1 if threads > 1 else 2)
            best[count] = {name: min(seconds) for name, seconds in times.items()}
        torch.set_num_threads(threads)
    rows = [_row(name, best[threads]) for name in NAMES]
    tables().print(_bars_table(rows, elements, threads, best[threads][CLONE], quick=options.quick))
    tables().print(_limits_table(best, elements, quick=options.quick))
    save(options, "codecs", {"elements": elements, "turns": turns, "rows": rows, "best_seconds": best})


def _let_memory_be_new() -> None:
    """Let malloc ask the system for every large block, and give it back at once."""
    threshold, trim = -3, -1
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(threshold, 2**20)
        libc.mallopt(trim, 2**20)


def _works(vector: torch.Tensor) -> Works:
    """What is timed, by name."""
    warm = torch.empty_like(vector)
    works: Works = {CLONE: vector.clone, COPY: lambda: warm.copy_(vector)}
    for name in NAMES:
        works |= _works_of(name, vector, warm)
    return works


def _works_of(name: str, vector: torch.Tensor, warm: torch.Tensor) -> Works:
    codec, eager = make_codec(name), EAGER[name]
    payload, sent = codec.encode(vector), eager.encode(vector)
    return {
        f"{name} encode": lambda: codec.encode(vector),
        f"{name} decode, new memory": lambda: codec.decode(payload),
        f"{name} decode, warm memory (out=)": lambda: codec.decode(payload, out=warm),
        f"{name} encode, eager torch": lambda: eager.encode(vector),
        f"{name} decode, eager torch": lambda: eager.decode(sent),
    }


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _row(name: str, best: dict[str, float]) -> dict[str, Any]:
    encode, decode = best[f"{name} encode"], best[f"{name} decode, new memory"]
    eager = best[f"{name} encode, eager torch"] + best[f"{name} decode, eager torch"]
    copies, faster = (encode + decode) / best[CLONE], eager / (encode + decode)
    warm = (encode + best[f"{name} decode, warm memory (out=)"]) / best[COPY]
    row = {
        "codec": name,
        "warm_copies": warm,
        "encode_seconds": encode,
        "decode_seconds": decode,
        "copies": copies,
        "faster": faster,
    }
    row["copies_verdict"] = COPIES[name].verdict(copies)
    row["faster_verdict"] = FASTER[name].verdict(faster) if name in FASTER else ""
    return row


def _bars_table(rows: list[dict[str, Any]], elements: int, threads: int, clone: float, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled(f"Codecs on {elements:,} float32, {threads} threads", quick=quick),
        caption=f"a copy is tensor.clone(): {1e3 * clone:.1f} ms; eager: the same codec in torch's operations",
    )
    table.add_column("codec", no_wrap=True)
    for heading in (
        "encode ms",
        "decode ms",
        "both in copies",
        "bar",
        "",
        "with warm memory",
        "faster than eager",
        "bar",
        "",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        name = row["codec"]
        table.add_row(
            LABELS[name],
            f"{1e3 * row['encode_seconds']:.1f}",
            f"{1e3 * row['decode_seconds']:.1f}",
            COPIES[name].show(row["copies"]),
            str(COPIES[name]),
            coloured(row["copies_verdict"]),
            f"{row['warm_copies']:.2f}",
            f"{row['faster']:.1f} x",
            str(FASTER.get(name, "")),
            coloured(row["faster_verdict"]) if row["faster_verdict"] else "",
        )
    return table


def _limits_table(best: dict[int, dict[str, float]], elements: int, *, quick: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=titled("What limits them", quick=quick),
        caption="GB/s of the float32 vector. New memory is handed out page by page: where it is most of the time, the "
        "codec is not what is slow, and `out=` helps",
    )
    table.add_column("")
    for count in best:
        threads = f"{count} thread{'s' if count > 1 else ''}"
        table.add_column(f"{threads}\nms", justify="right")
        table.add_column("\nGB/s", justify="right")
    for name in next(iter(best.values())):
        cells = [(f"{1e3 * one[name]:.1f}", f"{4e-9 * elements / one[name]:.1f}") for one in best.values()]
        table.add_row(name, *(text for pair in cells for text in pair))
    return table
