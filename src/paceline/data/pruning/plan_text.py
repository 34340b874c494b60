"""A plan in words: what is pruned, the picture, and the exact figures beside those of the paper's formulas."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.data.pruning.formulas import SECONDS, Times
from paceline.data.pruning.picture import draw

if TYPE_CHECKING:
    from paceline.data.pruning.plan import Plan

NOBODY_SEEN = "before any loss is known"
DAY, HOUR, MINUTE = 86_400, 3_600, 60
MANY = 10**12


def describe(plan: Plan, *, width: int = 80, ascii_only: bool = False) -> str:
    """The whole text; lines are no longer than `width`, but for the table, which needs up to 72 columns."""
    before = NOBODY_SEEN if plan.rows[0].start is None else ""  # without starting points, only the first epoch is
    parts = [
        _wrapped(_headline(plan), width),
        draw(plan.rows, width=width, ascii_only=ascii_only, before=before),
        _wrapped(_epochs(plan), width),
        _table(plan),
        [line for remark in plan.remarks for line in _wrapped(remark, width)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _headline(plan: Plan) -> str:
    pruned = len(plan.pruned_epochs)
    which = f"{pruned:,} of {plan.epochs:,} epochs"
    if pruned and pruned == plan.pruned_epochs[-1] - plan.pruned_epochs[0] + 1:
        which += f" ({plan.pruned_epochs[0]:,} to {plan.pruned_epochs[-1]:,})"
    most = "" if plan.exact else "on average at most "
    saved = f"{most}{plan.share_saved:.1%} of the samples are saved" if pruned else "nothing is saved"
    return f"{plan.policy} prunes {which}: {saved}."


def _epochs(plan: Plan) -> str:
    samples, batches = plan.whole
    said = f"A whole epoch has {samples:,} samples in {batches:,} {'batch' if batches == 1 else 'batches'}"
    if not plan.pruned_epochs:
        return f"{said}."
    fewer, in_batches = plan.pruned
    if plan.exact:
        return f"{said}, a pruned one {fewer:,} in {in_batches:,}."
    return (
        f"{said}, a pruned one on average at least {fewer:,} in {in_batches:,}. How many it really has depends on the "
        "losses: the fewer of them are below their mean, the more."
    )


def _table(plan: Plan) -> list[str]:
    """The figures, with the paper's symbols; those of the formulas in a second column, where there are any."""
    columns = [plan.times] if plan.paper is None else [plan.times, plan.paper]
    heads = ["exact" if plan.exact else "at best", "formulas"][: len(columns)]
    rows = [
        (name, symbol if plan.paper else "", [told(times) for times in columns]) for name, symbol, told in _rows(plan)
    ]
    wide = max(12, *(len(value) for _, _, values in rows for value in values))
    lines = [f"  {'':<34}" + "".join(f"  {head:>{wide}}" for head in heads)]
    for name, symbol, values in rows:
        lines.append(f"  {name:<23}  {symbol:<9}" + "".join(f"  {value:>{wide}}" for value in values))
    return lines


def _rows(plan: Plan) -> list[tuple[str, str, Callable[[Times], str]]]:
    """What a row is called, the paper's symbol, and how its figure is told."""
    total, of_an_epoch = plan.epochs * plan.whole[0], plan.whole[0] - plan.pruned[0]
    unit, time = ("time", _seconds) if plan.times.unit == SECONDS else ("batches", _count)
    return [
        ("pruned epochs", "n_prune", lambda times: _count(times.n_prune)),
        ("samples in all", "", lambda times: _count(total - times.n_prune * of_an_epoch)),
        ("  share saved", "", lambda times: f"{times.n_prune * of_an_epoch / total:.2%}"),
        ("batches per epoch", "b_prune", lambda times: f"{times.b_prune:,.1f}"),
        (f"{unit} without pruning", "t_regular", lambda times: time(times.t_regular)),
        (f"{unit} with pruning", "t_prune", lambda times: time(times.t_prune)),
        (f"{unit} saved", "t_save", lambda times: time(times.t_save)),
        ("  share saved", "", lambda times: f"{times.t_save / times.t_regular:.2%}"),
    ]


def _count(number: float) -> str:
    """A number of things; one of more than twelve digits is rounded, to fit its column.

    >>> _count(8_935_000), _count(2_000_000_000_000_000)
    ('8,935,000', '2.000e+15')
    """
    return f"{number:,.0f}" if abs(number) < MANY else f"{number:.3e}"


def _seconds(number: float) -> str:
    """A time as people say it.

    >>> _seconds(59.5), _seconds(3700), _seconds(200_000), _seconds(-3)
    ('59.50 s', '1 h 01 min', '2 d 07 h', '-3.00 s')
    """
    sign, rest = ("-" if number < 0 else ""), abs(number)
    if rest < MINUTE:
        return f"{sign}{rest:.2f} s"
    if rest < HOUR:
        return f"{sign}{rest // MINUTE:.0f} min {rest % MINUTE:02.0f} s"
    if rest < DAY:
        return f"{sign}{rest // HOUR:.0f} h {rest % HOUR // MINUTE:02.0f} min"
    return f"{sign}{rest // DAY:,.0f} d {rest % DAY // HOUR:02.0f} h"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width)
