"""How the choice of K is shown: a table per strategy and delay, and what the noise makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from benchmarks.choice_of_k_figures import Figures
from benchmarks.output import Bar, coloured

BAR = Bar(sign="<=", limit=1.05)


def settings_table(rows: Mapping[tuple[int, int], Figures], *, title: str, judged: bool) -> Table:
    """A row per (persistence, classes per worker); the best fixed K is bold."""
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        padding=0,
        caption="p: batches a delay lasts; c: classes per worker (10: dealt alike); saved: against all workers",
    )
    ks = list(next(iter(rows.values())).means)
    table.add_column("\n p  c", no_wrap=True)
    for name in (*(f"\nK={k}" for k in ks), "\nauto", "auto /\nbest K", "held\nout", "saved\nbest", "saved\nK=7"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"bar\n{BAR}" if judged else "\nno bar", no_wrap=True)
    for (persistence, classes), found in rows.items():
        table.add_row(f"{persistence:>2} {classes:>2}", *_cells(found, ks, judged=judged))
    return table


def _cells(found: Figures, ks: Sequence[int], *, judged: bool) -> list[str]:
    times = [_bold(_seconds(found.means[k]), when=k == found.best_k) for k in ks]
    error = "" if found.standard_error is None else f"±{found.standard_error:.2f}"
    verdict = "-" if found.best_k is None else BAR.verdict(found.ratio)
    return [
        *times,
        _seconds(found.auto),
        BAR.show(found.ratio) + error,
        BAR.show(found.held_out),
        _share(found.saved(found.best_k)),
        _share(found.saved(7)),
        coloured(verdict) if judged else "",
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _bold(text: str, *, when: bool) -> str:
    return f"[bold]{text}[/]" if when else text


def noise_note(strategy: str, found: Sequence[Figures]) -> str:
    """What can be said over all settings of a strategy, and what cannot."""
    judged = [each for each in found if each.best_k is not None]
    passed = sum(BAR.verdict(each.ratio) == "PASS" for each in judged)
    errors = [each.standard_error for each in judged if each.standard_error is not None]
    error = f"±{sum(errors) / len(errors):.3f}" if errors else "unknown (one seed)"
    return (
        f"[bold]{strategy}[/]: auto / best K {BAR} in {passed} of {len(judged)} settings "
        f"({len(found) - len(judged)} where no K reached the target); "
        f"geometric mean {_geometric_mean([each.ratio for each in judged])}, "
        f"held out {_geometric_mean([each.held_out for each in judged])}.\n"
        f"Noise: the standard error of a row's ratio is {error} on average. The best fixed K is the minimum of "
        f"{len(judged[0].means) if judged else 'all'} noisy means, picked after the fact, so its time is too low "
        "and the ratio too high; 'held out' picks it by the other seeds.\n"
    )


def _geometric_mean(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{math.exp(sum(map(math.log, known)) / len(known)):.3f}" if known else "-"
