"""A run as a picture: a row for every window, a cell for every epoch (the paper's figure 3, in plain text).

    epochs  start  0         10
      1-11      6   ░░░░░··██··              ░ whole, before the starting point of its window
     12-23      3  ░░░·██··██··              · whole, after it        █ pruned

Rows too long for a line go on in the next ones. Windows of more than four lines are scaled to one: a cell is then
several epochs, and is drawn as pruned if one of them is. Of many windows the first ones and the last are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BEFORE, WHOLE, PRUNED = "-", ".", "#"  # as they are drawn where there is only ASCII
IN_BLOCKS = str.maketrans({BEFORE: "░", WHOLE: "·", PRUNED: "█"})
MOST_WRAPPED = 4
MOST_LINES = 24
LEAST_WIDTH = 40
TICK = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A window: a mark for every epoch from `first` on. `skipped` is where in the window the first of them is.

    >>> row = Row(first=1, cells="----##", start=5, skipped=1)
    >>> row.last, row.epochs
    (6, '1-6')
    """

    first: int
    cells: str
    start: int | None = None
    skipped: int = 0

    @property
    def last(self) -> int:
        """The last epoch of the row.

        >>> Row(first=12, cells="--#").last
        14
        """
        return self.first + len(self.cells) - 1

    @property
    def epochs(self) -> str:
        """From which epoch to which.

        >>> Row(first=3, cells=".").epochs
        '3'
        """
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def length(self) -> int:
        """How many cells it is long, with those skipped.

        >>> Row(first=1, cells="--#", skipped=1).length
        4
        """
        return self.skipped + len(self.cells)


def draw(rows: Sequence[Row], *, width: int = 80, ascii_only: bool = False, before: str = "") -> list[str]:
    """The lines of the picture: a ruler, the rows and what the marks mean; `before` says what comes before pruning.

    >>> rows = [Row(first=1, cells="-----..##..", start=6, skipped=1), Row(first=12, cells="---.##..##..", start=3)]
    >>> print("\\n".join(draw(rows, ascii_only=True)))
      epochs  start  0         10
        1-11      6   -----..##..
       12-23      3  ---.##..##..
    <BLANKLINE>
      # pruned   . whole   - whole, before the starting point of its window
    """
    if width < LEAST_WIDTH:
        raise ValueError(f"width must be at least {LEAST_WIDTH} columns (width={width})")
    label = max(len("epochs"), *(len(row.epochs) for row in rows))
    starts = any(row.start is not None for row in rows)
    prefix = 2 + label + (7 if starts else 0) + 2
    longest, room = max(row.length for row in rows), width - prefix
    per_line = longest if longest <= room else room // TICK * TICK
    lines_of_a_row = math.ceil(longest / per_line)
    scale = 1 if lines_of_a_row <= MOST_WRAPPED else math.ceil(longest / per_line)
    lines = [f"  {'epochs':>{label}}{'  start' if starts else ''}  {_ruler(min(longest, per_line), scale)}".rstrip()]
    shown = _shown(rows, 1 if scale > 1 else lines_of_a_row)
    for row in shown:
        lines += _lines(row, label, starts=starts, per_line=per_line, scale=scale)
    if len(shown) < len(rows):
        lines.insert(-1, f"  {'...':>{label}}".ljust(prefix) + f"{len(rows) - len(shown):,} more windows")
    if not ascii_only:
        lines = [line[:prefix] + line[prefix:].translate(IN_BLOCKS) for line in lines]  # not the - of "12-23"
    return [*lines, "", *_legend(scale, before, ascii_only=ascii_only)]


def _ruler(cells: int, scale: int) -> str:
    return "".join(f"{cell * scale:<{TICK}}" for cell in range(0, cells, TICK)).rstrip()


def _shown(rows: Sequence[Row], lines_of_a_row: int) -> Sequence[Row]:
    """All rows, or the first ones and the last."""
    most = max(3, MOST_LINES // lines_of_a_row)
    return rows if len(rows) <= most else [*rows[: most - 1], rows[-1]]


def _lines(row: Row, label: int, *, starts: bool, per_line: int, scale: int) -> list[str]:
    cells = " " * row.skipped + row.cells
    if scale > 1:
        cells = "".join(_one_of(cells[place : place + scale]) for place in range(0, len(cells), scale))
    lines = []
    for place in range(0, len(cells), per_line):
        name = f"+{place}" if place else row.epochs
        start = f"  {'' if place or row.start is None else row.start:>5}" if starts else ""
        lines.append(f"  {name:>{label}}{start}  {cells[place : place + per_line]}")
    return lines


def _one_of(cells: str) -> str:
    """The mark for several epochs.

    >>> _one_of(" -.."), _one_of("-.#.")
    ('.', '#')
    """
    return next(mark for mark in (PRUNED, WHOLE, BEFORE, " ") if mark in cells)


def _legend(scale: int, before: str, *, ascii_only: bool) -> list[str]:
    pruned, whole, early = (mark if ascii_only else mark.translate(IN_BLOCKS) for mark in (PRUNED, WHOLE, BEFORE))
    before = before or "before the starting point of its window"
    if scale == 1:
        return [f"  {pruned} pruned   {whole} whole   {early} whole, {before}"]
    cell = f"  A cell is {scale:,} epochs: "
    return [f"{cell}{pruned} some pruned   {whole} whole   {early} whole,", f"{'':{len(cell)}}{before}"]
