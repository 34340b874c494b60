"""What pruning costs beside training: an epoch's bookkeeping, its memory, and a `DataLoader`'s epoch.

Bookkeeping: batches of 128 are handed out, their losses (CPU tensors that are there already, with a graph to go back
through) are observed, and who sits the next epoch out is decided. Every epoch but the first is pruned.

    iter, first batch        |  batch, observe, batch, observe, ...  last observe (which judges)
    decides and shuffles     |  a pruned epoch hands out fewer: this part is scaled up to all samples
    a                        |  b                                            a + b * samples / handed out

`losses.mean()`, which a loop without pruning has too, is measured alone and taken off; both are shown. One thread does
it all and waits for nothing, so its CPU time is its time on a machine with nothing else to do. Memory is the peak
of the resident set of a fresh process above what it was when the losses were there and the sampler was not.

A loader's epoch: a `TensorDataset` of small vectors, as it is and with a collate function that takes a millisecond a
batch, in this process and with two workers, under our sampler and under torch's `BatchSampler(RandomSampler)` that
hands out as many samples. The two take turns; the best epoch of each counts: CPU time again where there are no workers,
else wall time.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from benchmarks.pool import one_thread
from benchmarks.pruning_overhead_sides import (
    COLLATE_MS,
    POLICIES,
    Bookkeeping,
    Case,
    LoaderEpochs,
    bookkeeping,
    loader_epochs,
)

NAME = "pruning-overhead"
FEW = Case(samples=50_000, epochs=20)
MANY = Case(samples=10_000_000, epochs=4)
QUICK_CASES = (Case(samples=2_000, epochs=3), Case(samples=4_000, epochs=3))
MILLISECONDS = {FEW: Bar(sign="<=", limit=15.0, style=".1f"), MANY: Bar(sign="<=", limit=2000.0, style=".0f")}
MEGABYTES = Bar(sign="<=", limit=200.0, style=".0f")
RATIO = Bar(sign="<=", limit=1.02, style=".3f")
TURNS = 8


def run(options: Options) -> None:
    """`python -m benchmarks pruning-overhead`."""
    few, many = QUICK_CASES if options.quick else (FEW, MANY)
    turns = 1 if options.quick else options.repeat or TURNS
    workers = (0,) if options.quick else (0, 2)
    books: list[Bookkeeping] = []
    loaders: list[LoaderEpochs] = []
    kinds = [(worker, collate) for worker in workers for collate in (False, True)]
    with progress_bar() as progress:
        bar = progress.add_task("pruning: overhead", total=len(POLICIES) * (2 + len(kinds)))
        for case in (few, many):
            for policy in POLICIES:
                books.append(_measured(policy, case, fresh=not options.quick))
                progress.advance(bar)
        for worker, collate in kinds:
            for policy in POLICIES:
                loaders.append(
                    loader_epochs(policy, samples=few.samples, workers=worker, slow_collate=collate, turns=turns)
                )
                progress.advance(bar)
    for case, limit in zip((few, many), MILLISECONDS.values(), strict=True):
        _tell_books([book for book in books if book.case == case], limit, memory=case is many, quick=options.quick)
    tables().print(_loader_table(loaders, samples=few.samples, quick=options.quick))
    save(options, NAME, numbers(books, loaders))


def _measured(policy: str, case: Case, *, fresh: bool) -> Bookkeeping:
    if not fresh:
        return bookkeeping(policy, case)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=one_thread) as pool:
        return pool.submit(bookkeeping, policy, case).result()


def numbers(books: list[Bookkeeping], loaders: list[LoaderEpochs]) -> dict[str, Any]:
    """The raw numbers."""
    return {"bookkeeping": [book.document() for book in books], "loaders": [each.document() for each in loaders]}


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(title: str, caption: str, columns: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption or None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def _tell_books(books: list[Bookkeeping], limit: Bar, *, memory: bool, quick: bool) -> None:
    samples = books[0].case.samples
    table = _table(
        titled(f"Bookkeeping of an epoch of {samples:,} samples, ms", quick=quick),
        f"CPU time, best of {books[0].case.epochs} pruned epochs. decide: before the first batch.\n"
        "all: scaled to all samples. own: all - mean(), which a loop without pruning has too.",
        ("policy", "handed out", "decide", "rest", "all", "mean()", "own", "bar", "verdict"),
    )
    for book in books:
        best = book.best
        parts = (best.decide_seconds, best.rest_seconds, book.all_seconds, book.mean_seconds)
        own = 1000 * book.own_seconds
        table.add_row(
            book.policy,
            f"{best.handed_out:,}",
            *(f"{1000 * each:.1f}" for each in parts),
            limit.show(own),
            str(limit),
            coloured(limit.verdict(own)),
        )
    tables().print(table)
    if memory:
        tables().print(_memory_table(books, quick=quick))


def _memory_table(books: list[Bookkeeping], *, quick: bool) -> Table:
    table = _table(
        titled(f"Memory for {books[0].case.samples:,} samples, MB", quick=quick),
        f"Resident set of a fresh process ({books[0].peak_by}); before: torch and the losses are there.",
        ("policy", "before", "peak", "own", "bar", "verdict"),
    )
    for book in books:
        before, peak = book.bytes_before / 1e6, book.bytes_peak / 1e6
        own = peak - before
        table.add_row(
            book.policy,
            f"{before:.0f}",
            f"{peak:.0f}",
            MEGABYTES.show(own),
            str(MEGABYTES),
            coloured(MEGABYTES.verdict(own)),
        )
    return table


def _loader_table(loaders: list[LoaderEpochs], *, samples: int, quick: bool) -> Table:
    turns = len(loaders[0].ours)
    table = _table(
        titled(f"A DataLoader's epoch over {samples:,} vectors, ms a batch", quick=quick),
        f"Best of {turns} epoch(s) each, taken in turns, with as many samples. ratio: ours / torch's.\n"
        "Without workers CPU time, with workers wall time.",
        ("policy", "workers", "collate", "batches", "torch's", "ours", "ratio", "bar", "verdict"),
    )
    for each in loaders:
        table.add_row(
            each.policy,
            str(each.workers),
            f"{COLLATE_MS:g} ms" if each.slow_collate else "torch's",
            str(each.batches),
            f"{1000 * min(each.theirs):.3f}",
            f"{1000 * min(each.ours):.3f}",
            RATIO.show(each.ratio),
            str(RATIO),
            coloured(RATIO.verdict(each.ratio)),
        )
    return table
