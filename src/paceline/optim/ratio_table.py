"""Ratios of weights to gradients as text of at most 80 columns: numbers, and a bar on a logarithmic scale.

  layer              |w|   |grad|    ratio LARS rate  1 to 1000, log scale
> 0.weight          11.3     1.96     5.77   0.00577  ██████▎               the layer that limits the rate
  0.bias               0    0.198        0  as it is  weights are 0
  1.weight            16    0.208     76.9  as it is  ▒▒▒▒▒▒▒▒▒▒▒▒▒▒        bias or scale of a normalisation
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.optim.ratios import LayerRatio

WIDTH = 80
LEAST_NAME, MOST_NAME, NUMBER, RATE = 15, 24, 8, 9
AS_IT_IS = "as it is"  # a rate that LARS does not scale
EIGHTHS = " ▏▎▍▌▋▊▉"
UNKNOWN = "-"
IN_ASCII = str.maketrans({"█": "#", "▒": "=", "▌": "#", "▋": "#", "▊": "#", "▉": "#", "▏": " ", "▎": " ", "▍": " "})


def writable(line: str, encoding: str) -> str:
    """A line of the table for a terminal that may not know blocks.

    >>> writable("> w   6  ██████▋", "utf-8"), writable("> w   6  ██████▋", "ascii")
    ('> w   6  ██████▋', '> w   6  #######')
    """
    try:
        line.encode(encoding)
    except UnicodeEncodeError:
        return line.translate(IN_ASCII)
    return line


def ratio_lines(
    rows: Sequence[LayerRatio], *, limiting: LayerRatio | None, later: Mapping[str, float | None] | None = None,
    later_heading: str = "", rate_heading: str = "LARS rate",
) -> list[str]:  # fmt: skip
    """The table, a heading and a line per row; with `later`, ratios of another moment instead of the rates of LARS.

    The other moment is drawn as a `|` where its bar would end.

    >>> from paceline.optim.ratios import LayerRatio
    >>> row = LayerRatio(name="w", shape=(2, 2), kind="weight", weight_norm=3.0, gradient_norm=0.5, ratio=6.0)
    >>> for line in ratio_lines([row], limiting=row, later={"w": 2.0}, later_heading="step 9"):
    ...     print(line)
      layer                |w|   |grad|    ratio    step 9  1 to 10, log scale
    > w                      3      0.5        6         2  ██████|███████████▋
    """
    drawn = [row.ratio for row in rows if row.counts and row.ratio is not None]
    if later is not None:
        drawn += [ratio for ratio in later.values() if ratio is not None and 0 < ratio < math.inf]
    low, high = decades(drawn)
    name = min(max([LEAST_NAME, *(len(row.name) for row in rows)]), MOST_NAME)
    heading = rate_heading if later is None else later_heading
    width = max(RATE, len(heading))
    bar = WIDTH - 2 - name - 3 * (NUMBER + 1) - (width + 1) - 2
    scale = f"{number(10.0**low)} to {number(10.0**high)}, log scale" if drawn else ""
    if len(scale) > bar:
        scale = scale.removesuffix(" scale")
    lines = [_line(" ", "layer", name, ("|w|", "|grad|", "ratio"), f"{heading:>{width}}", scale[:bar])]
    for row in rows:
        last = row.local_rate if later is None else later.get(row.name)
        if row.counts and row.ratio is not None:
            end = _bar(row.ratio, low, high, bar, soft=row.kind != "weight", later=last if later is not None else None)
        else:
            end = row.remark[:bar]
        mark = ">" if limiting is not None and row.name == limiting.name else " "
        norms = (number(row.weight_norm), number(row.gradient_norm), number(row.ratio))
        told = local_rate(row) if later is None else number(last)
        lines.append(_line(mark, shortened(row.name, name), name, norms, f"{told:>{width}}", end))
    return lines


def local_rate(row: LayerRatio) -> str:
    """The rate or limit of LARS as a cell of a table.

    >>> from paceline.optim.ratios import LayerRatio
    >>> row = LayerRatio(name="b", shape=(2,), kind="bias", weight_norm=3.0, local_rate=1.0, scaled=False)
    >>> local_rate(row)
    'as it is'
    """
    return AS_IT_IS if row.local_rate is not None and not row.scaled else number(row.local_rate)


def decades(ratios: Sequence[float]) -> tuple[int, int]:
    """The powers of ten between which they all lie, the lower one strictly below.

    >>> decades([5.0, 1345.0]), decades([1.0]), decades([])
    ((0, 4), (-1, 0), (0, 1))
    """
    if not ratios:
        return 0, 1
    low, high = math.ceil(math.log10(min(ratios))) - 1, math.ceil(math.log10(max(ratios)))
    return low, max(high, low + 1)


def number(value: float | None) -> str:
    """A number in at most eight characters, with the digits that matter.

    >>> [number(value) for value in (5.7634, 0.000577, 1345.4, 2.5e9, 3e-12, 0.0, math.inf, math.nan, None)]
    ['5.76', '0.000577', '1345', '2.5e+09', '3.0e-12', '0', 'inf', 'nan', '-']
    """
    if value is None:
        return UNKNOWN
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-4 <= abs(value) < 1000:
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{value:.0f}" if 1 <= abs(value) < 1e5 else f"{value:.1e}"


def shortened(name: str, most: int) -> str:
    """A name in at most so many characters: its beginning says where, its end says what.

    >>> shortened("layer4.1.downsample.0.weight", 20)
    'layer4..ple.0.weight'
    """
    if len(name) <= most:
        return name
    end = (2 * (most - 2) + 2) // 3
    return f"{name[: most - 2 - end]}..{name[-end:]}"


def _line(mark: str, name: str, width: int, numbers: Sequence[str], last: str, end: str) -> str:
    cells = "".join(f" {cell:>{NUMBER}}" for cell in numbers)
    return f"{mark} {name:<{width}}{cells} {last}  {end}".rstrip()


def _bar(ratio: float, low: int, high: int, width: int, *, soft: bool, later: float | None) -> str:
    """A bar from 10**low; weights are solid, to an eighth of a character, and all else is grey."""

    def place(value: float) -> float:
        return width * (math.log10(value) - low) / (high - low)

    eighths = max(1, round(8 * place(ratio)))
    full, part = divmod(eighths, 8)
    drawn = "▒" * max(1, round(eighths / 8)) if soft else "█" * full + EIGHTHS[part] * bool(part)
    if later is None or not 0 < later < math.inf:
        return drawn
    at = min(width - 1, max(0, round(place(later)) - 1))
    cells = f"{drawn:<{width}}"
    return f"{cells[:at]}|{cells[at + 1 :]}".rstrip()
