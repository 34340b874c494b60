"""The tables of `large-batch`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rich import box
from rich.table import Table

from benchmarks.large_batch_cases import (
    FINAL,
    LINEAR,
    OPTIMIZERS,
    TUNING,
    TUNING_SEED,
    WITH_LARS,
    WITH_SGD,
    Cell,
    Endings,
    Size,
    Task,
    best_rate,
    cells_of,
)
from benchmarks.output import Bar, coloured, tables, titled
from paceline.reproduce.published import LARS_TABLE_1, LARS_TABLE_3

BEHIND = Bar(sign="<=", limit=1.5, style="+.2f")
AHEAD = Bar(sign=">=", limit=0.0, style="+.2f")

# The paper's tables 1 and 3: (rate, accuracy) of the best rate that it shows, by network and optimiser. 4K, 8K of SGD:
# the best of four; LARS: the one that it gives.
PAPER_BATCHES = (512, 4096, 8192, 16384, 32768)
PAPER_NETWORKS = {"AlexNet": "alexnet", "AlexNet-BN": "alexnet-bn"}


def _best(rows: Sequence[tuple[float, float, float]], batch: int) -> tuple[float, float] | None:
    found = [(rate, accuracy) for own, rate, accuracy in rows if own == batch]
    return max(found, key=lambda each: each[1]) if found else None


PAPER: dict[tuple[str, str], tuple[tuple[float, float] | None, ...]] = {
    (shown, optimizer): tuple(_best(table[name], batch) for batch in PAPER_BATCHES)
    for shown, name in PAPER_NETWORKS.items()
    for optimizer, table in ((WITH_SGD, LARS_TABLE_1), (WITH_LARS, LARS_TABLE_3))
}


def show(size: Size, endings: Endings, *, quick: bool) -> None:
    """All tables; the bars are below the first."""
    console = tables()
    console.print(_results(size, endings, quick=quick))
    console.print(_verdicts(size, endings))
    console.print(_tuning(size, endings))
    for note in tuning_notes(size, endings):
        console.print(note)
    console.print(_paper())


def cell_line(tasks: Sequence[Task], endings: Endings) -> str:
    """One line about a cell whose runs are all there."""
    cell, phase = tasks[0].cell, tasks[0].phase
    found = ", ".join(
        f"{task.rate:g}: {_figure(endings[task].accuracy)}"
        if phase == TUNING
        else f"seed {task.seed}: {_figure(endings[task].accuracy)}"
        for task in tasks
    )
    rate = "" if phase == TUNING else f" at {tasks[0].rate:g}"
    return f"{phase:6}  {cell.optimizer:4} {cell.batch:>5}{rate}   {found}"


# -- figures ---------------------------------------------------------------------------------------------------------


def accuracies(endings: Endings, cell: Cell, phase: str = FINAL) -> list[float] | None:
    """Of a cell's runs, seed by seed; None if one diverged or there are none."""
    found = [ending.accuracy for task, ending in endings.items() if (task.phase, task.cell) == (phase, cell)]
    whole = [each for each in found if each is not None]
    return whole if whole and len(whole) == len(found) else None


def mean_accuracy(endings: Endings, cell: Cell, phase: str = FINAL) -> float | None:
    """Over a cell's seeds; None if one diverged."""
    found = accuracies(endings, cell, phase)
    return fmean(found) if found else None


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(title: str, caption: str = "") -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, caption=caption or None, padding=(0, 2, 0, 0), pad_edge=False)


def _results(size: Size, endings: Endings, *, quick: bool) -> Table:
    seeds = len({task.seed for task in endings if task.phase == FINAL})
    table = _table(
        titled(f"{size.model} on {size.data}, {size.epochs} epoch(s) of {size.images:,} images", quick=quick),
        f"accuracy: on the test images, mean over {seeds} seed(s); spread: highest - lowest.\n"
        f"behind: SGD at {size.batches[0]}. loss: of training, in the last epoch. - diverged.\n"
        f"Rates: the best of {len(size.rates)}, by one run each on {size.held_out:,} held-out images.\n"
        f"by the rule: the rate of batch {size.batches[0]} times k; one seed.",
    )
    for name in ("batch", "steps", "optimiser", "rate", "accuracy", "spread", "behind", "loss"):
        table.add_column(name, justify="left" if name == "optimiser" else "right", no_wrap=True)
    for batch in size.batches:
        for optimizer in OPTIMIZERS:
            for phase in (FINAL, LINEAR):
                row = _row(size, endings, Cell(batch=batch, optimizer=optimizer), phase)
                if row:
                    table.add_row(str(batch), str(size.steps(batch)), *row)
        table.add_section()
    return table


def _row(size: Size, endings: Endings, cell: Cell, phase: str) -> list[str]:
    found = {task: ending for task, ending in endings.items() if (task.phase, task.cell) == (phase, cell)}
    if not found:
        return []
    own, mean = accuracies(endings, cell, phase), mean_accuracy(endings, cell, phase)
    base = mean_accuracy(endings, Cell(batch=size.batches[0], optimizer=WITH_SGD))
    behind = None if mean is None or base is None else base - mean
    losses = [ending.training_loss for ending in found.values() if ending.training_loss is not None]
    return [
        cell.optimizer + (", by the rule" if phase == LINEAR else ""),
        f"{next(iter(found)).rate:g}",
        _figure(mean),
        _figure(max(own) - min(own)) if own and len(own) > 1 else "",
        BEHIND.show(behind),
        f"{fmean(losses):.3f}" if len(losses) == len(found) else "-",
    ]


def verdicts(size: Size, endings: Endings) -> list[tuple[str, Bar, float | None]]:
    """What is measured against the bars; SGD that diverged at the largest batch counts as no per cent there."""
    small, large = size.batches[0], size.batches[-1]
    base = mean_accuracy(endings, Cell(batch=small, optimizer=WITH_SGD))
    sgd, lars = (mean_accuracy(endings, Cell(batch=large, optimizer=optimizer)) for optimizer in OPTIMIZERS)
    behind = None if lars is None or base is None else base - lars
    ahead = None if lars is None else lars - (sgd or 0.0)
    return [
        (f"LARS at {large} behind SGD at {small}, points", BEHIND, behind),
        (f"LARS at {large} ahead of SGD at {large}, points", AHEAD, ahead),
    ]


def _verdicts(size: Size, endings: Endings) -> Table:
    table = _table("")
    for name in ("figure", "measured", "bar", "verdict"):
        table.add_column(name, justify="right" if name in ("measured", "bar") else "left")
    for name, bar, found in verdicts(size, endings):
        table.add_row(name, bar.show(found), str(bar), coloured(bar.verdict(found)))
    return table


def _tuning(size: Size, endings: Endings) -> Table:
    table = _table("Tuning: held-out accuracy, by rate")
    table.add_column("batch", justify="right")
    table.add_column("optimiser")
    for rate in size.rates:
        table.add_column(f"{rate:g} ", justify="right")
    for cell in cells_of(size):
        best = best_rate(size, endings, cell)
        found = []
        for rate in size.rates:
            accuracy = endings[Task(phase=TUNING, cell=cell, rate=rate, seed=TUNING_SEED)].accuracy
            found.append(_figure(accuracy) + ("*" if rate == best else " "))
        table.add_row(str(cell.batch), cell.optimizer, *found)
    return table


def tuning_notes(size: Size, endings: Endings) -> list[str]:
    """How the tuning table is read, and the cells whose best rate is the smallest or the largest of those tried."""
    shares = [1000 * size.trust_coefficient * rate for rate in (size.rates[0], size.rates[-1])]
    notes = [
        f"One run each, seed {TUNING_SEED}. * the best: the final runs take it. - diverged.",
        f"LARS has trust {size.trust_coefficient:g}: its rates are the paper's {shares[0]:g} to {shares[1]:g} with "
        "trust 0.001.",
    ]
    for cell in cells_of(size):
        rate = best_rate(size, endings, cell)
        if rate in (size.rates[0], size.rates[-1]):
            notes.append(
                f"{cell.optimizer}, batch {cell.batch}: best at {rate:g}, an edge of the rates tried "
                "(--rates widens them, for both)."
            )
    return notes


def _paper() -> Table:
    table = _table(
        "The paper's tables 1 and 3: ImageNet, 100 epochs, accuracy (rate)",
        "Figures are the paper's. SGD at 4K, 8K: the best of the rates shown. LARS: trust 0.001.",
    )
    table.add_column("network")
    table.add_column("optimiser")
    for batch in PAPER_BATCHES:
        table.add_column(str(batch) if batch < 1024 else f"{batch // 1024}K", justify="right")
    for (network, optimizer), row in PAPER.items():
        table.add_row(network, optimizer, *("" if each is None else f"{each[1]:.1f} ({each[0]:g})" for each in row))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
