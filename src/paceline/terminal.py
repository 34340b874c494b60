"""Text of a fixed width: tables, bars, scatter plots and legends for terminals, logs and pipes.

    text_table   columns of plain text, at most 80 characters wide; one column may shrink
    rich_table   the same for rich, with a title, a caption and styled cells
    bar          ██████▎ to an eighth of a character; `decades` and `log_share` make its scale logarithmic
    scatter      letters on two logarithmic axes
    legend       the marks of a picture, wrapped so that a mark stays with its meaning
    printable    the same text for a terminal that cannot show blocks

Everything returns text or lines of text and never asks whether there is a terminal: widths are parameters, and colours
are added only where the caller asks for them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 80
EIGHTHS = " ▏▎▍▌▋▊▉"
ASCII = str.maketrans(
    {"█": "#", "▓": "#", "▒": "=", "░": "-", "·": ".", **dict.fromkeys("▌▋▊▉", "#"), **dict.fromkeys("▏▎▍", " ")}
)
GLUE = "\N{NO-BREAK SPACE}"

# -- tables ------------------------------------------------------------------------------------------------------------


def text_table(
    rows: Iterable[Sequence[str]],
    *,
    align: str,
    least: Sequence[int] = (),
    gap: int = 2,
    indent: int = 0,
    width: int = WIDTH,
    elastic: int | None = None,
    shortest: int = 12,
    dots: str = "…",
) -> list[str]:
    """Return the lines of a table; a heading is its first row.

    `align` has a `<` or a `>` for each column, and `least` the smallest widths. Where lines would be longer than
    `width`, the cells of the column `elastic` are cut in the middle, but to no less than `shortest` characters.

    >>> for line in text_table([("layer", "ms"), ("encoder.0.weight", "12")], align="<>", width=18, elastic=0):
    ...     print(line)
    layer           ms
    encode….weight  12
    """
    lines = [list(row) for row in rows]
    floors = [*least, *[0] * (len(align) - len(least))]
    widths = [max(floor, *map(len, column)) for floor, column in zip(floors, zip(*lines, strict=True), strict=True)]
    if elastic is not None:
        room = width - indent - gap * (len(align) - 1) - sum(widths) + widths[elastic]
        widths[elastic] = min(widths[elastic], max(room, shortest))
        for line in lines:
            line[elastic] = shortened(line[elastic], widths[elastic], dots=dots)
    columns = [f"{{:{side}{size}}}" for side, size in zip(align, widths, strict=True)]
    pattern = " " * indent + (" " * gap).join(columns)
    return [pattern.format(*line).rstrip() for line in lines]


def rich_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    caption: str | None = None,
    least_name: int | None = None,
    marked: Collection[tuple[int, int]] = (),
    warned: Collection[int] = (),
) -> Table:
    """Return a table for rich: names on the left, figures on the right, no lines but one below the headings.

    `marked` are (row, column) of the cells to stress, `warned` the rows to print in red. Cells are data: rich reads no
    markup in them.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False, title=title, title_justify="left", title_style="bold",
        caption=caption, caption_justify="left",
    )  # fmt: skip
    for index, heading in enumerate(headings):
        if index:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold", min_width=least_name)
    for row, cells in enumerate(rows):
        texts = (Text(cell, style="bold green" if (row, at) in marked else "") for at, cell in enumerate(cells))
        table.add_row(*texts, style="red" if row in warned else "")
    return table


def shortened(text: str, width: int, *, dots: str = "…", cut: Literal["end", "middle", "early"] = "middle") -> str:
    """Return `text` in at most `width` characters, cut at its end, in its middle, or after its first third.

    >>> shortened("encoder.layers.11.mlp.fc", 11), shortened("encoder.layers.11.mlp.fc", 11, dots="..", cut="early")
    ('encod…lp.fc', 'enc..mlp.fc')
    >>> shortened("no sign of life", 10, dots="...", cut="end")
    'no sign...'
    """
    if len(text) <= width:
        return text
    room = width - len(dots)
    front = room // {"end": 1, "middle": 2, "early": 3}[cut]
    return f"{text[:front]}{dots}{text[len(text) - (room - front) :]}"


def paragraphs(parts: Iterable[Sequence[str]]) -> str:
    """Return lines in blocks, with an empty line between two; empty blocks are left out.

    >>> paragraphs([["a table", "of two lines"], [], ["a remark"]])
    'a table\\nof two lines\\n\\na remark'
    """
    return "\n\n".join("\n".join(part) for part in parts if part)


# -- bars and pictures -------------------------------------------------------------------------------------------------


def bar(length: float, *, soft: bool = False) -> str:
    """Return a bar of `length` characters, to an eighth of one; a soft bar is grey and has whole characters.

    >>> bar(6.25), bar(2.6, soft=True), bar(0.0)
    ('██████▎', '▒▒▒', '▏')
    """
    eighths = max(1, round(8 * length))
    if soft:
        return "▒" * max(1, round(eighths / 8))
    full, part = divmod(eighths, 8)
    return "█" * full + EIGHTHS[part] * bool(part)


def decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten between which all values lie, the lower one strictly below.

    >>> decades([5.0, 1345.0]), decades([1.0]), decades([])
    ((0, 4), (-1, 0), (0, 1))
    """
    if not values:
        return 0, 1
    low, high = math.ceil(math.log10(min(values))) - 1, math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def log_share(value: float, low: float, high: float) -> float:
    """Return where `value` lies between 10**low (0.0) and 10**high (1.0) on a logarithmic scale.

    >>> log_share(100.0, 0, 4)
    0.5
    """
    return (math.log10(value) - low) / (high - low or 1.0)


def scatter(
    points: Sequence[tuple[str, float, float]],
    *,
    x_name: str,
    y_name: str,
    zero: str = "0",
    width: int = 66,
    height: int = 9,
) -> list[str]:
    """Return lines with a letter for each (letter, x, y), both axes logarithmic; a y of 0 lies on the bottom line.

    >>> points = [("a", 32, 0.0), ("b", 4, 0.1), ("c", 1, 1.0)]
    >>> print("\\n".join(scatter(points, x_name="bits per element", y_name="error", zero="exact", width=20, height=3)))
      error
          1 |c
            |        b
      exact |                   a
            +--------------------
             1                 32
             bits per element
    """
    margin = 8  # for the numbers of the vertical axis
    heights = [math.log10(y) for _, _, y in points if y > 0] or [0.0]
    has_zero = any(y <= 0 for _, _, y in points)
    floor, top = min(heights) - has_zero, max(heights)  # a 0 has a decade of its own below the others
    columns = [math.log10(x) for _, x, _ in points]
    left, right = min(columns), max(columns)
    rows = [[" "] * width for _ in range(height)]
    for letter, x, y in points:
        row = rows[height - 1 - round((height - 1) * (log_share(y, floor, top) if y > 0 else 0.0))]
        _put(row, round((width - 1) * log_share(x, left, right)), letter)
    names = [f"{10**top:.2g}", *[""] * (height - 2), zero if has_zero else f"{10**floor:.2g}"]
    low, high = f"{10**left:.2g}", f"{10**right:.3g}"
    return [
        f"{y_name:>{margin - 1}}",
        *(f"{name:>{margin - 1}} |{''.join(row)}".rstrip() for name, row in zip(names, rows, strict=True)),
        f"{'':>{margin}}+{'-' * width}",
        f"{'':>{margin}} {low}{high:>{width - len(low)}}",
        f"{'':>{margin}} {x_name}",
    ]


def _put(row: list[str], column: int, letter: str) -> None:
    """Write a letter into its column, or into the nearest that is free."""
    free = [index for index, there in enumerate(row) if there == " "]
    if free:
        row[min(free, key=lambda index: abs(index - column))] = letter


def ruler(cells: int, *, step: int = 10, scale: int = 1) -> str:
    """Return the numbers above a row of cells, one at every `step`; a cell stands for `scale` units.

    >>> ruler(25, scale=2)
    '0         20        40'
    """
    return "".join(f"{cell * scale:<{step}}" for cell in range(0, cells, step)).rstrip()


def legend(parts: Iterable[str], width: int = WIDTH) -> list[str]:
    """Return the lines of a legend; each part, a mark and its meaning, stays on one line.

    >>> legend(["0-9 forward of that micro-batch", "# backward", ". idle"], width=52)
    ['0-9 forward of that micro-batch   # backward', '. idle']
    """
    glued = f"{GLUE * 2} ".join(part.replace(" ", GLUE) for part in parts)
    return [line.replace(GLUE, " ").rstrip() for line in textwrap.wrap(glued, width, break_on_hyphens=False)]


def coloured(cells: Iterable[str], colour: Callable[[str], str]) -> str:
    """Return cells as one text in which runs of cells of one ANSI colour code share its escape sequence.

    >>> coloured("001", lambda cell: "36" if cell == "0" else "32")
    '\\x1b[36m00\\x1b[0m\\x1b[32m1\\x1b[0m'
    """
    return "".join(f"\x1b[{code}m{''.join(run)}\x1b[0m" for code, run in groupby(cells, key=colour))


# -- terminals that cannot show everything -----------------------------------------------------------------------------


def can_print(text: str, encoding: str) -> bool:
    """Tell whether a stream of this encoding can hold `text`.

    >>> can_print("██", "utf-8"), can_print("██", "ascii")
    (True, False)
    """
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str, encoding: str) -> str:
    """Return `text` as a stream of this encoding can hold it: blocks as ASCII, a `?` for what has no other form.

    >>> printable("> w   6  ██████▋", "utf-8"), printable("> w   6  ██████▋", "ascii")
    ('> w   6  ██████▋', '> w   6  #######')
    """
    return text if can_print(text, encoding) else text.translate(ASCII).encode(encoding, "replace").decode(encoding)
