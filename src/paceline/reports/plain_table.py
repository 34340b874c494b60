"""A table of text that the terminal and the page show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from paceline.terminal import rich_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class PlainTable:
    """Headings (a newline breaks them in the terminal), rows of cells, a caption. `marked` are (row, column) to stress.

    >>> plain = PlainTable(title="Sizes", headings=("codec", "bits per\\nelement"), rows=[("<half>", "16")], caption="")
    >>> "<th scope=\\"row\\">&lt;half&gt;</th><td>16</td>" in plain.html()
    True
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    marked: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    def rich(self) -> Table:
        return rich_table(self.headings, self.rows, title=self.title, caption=self.caption, marked=self.marked)

    def html(self) -> str:
        """For a page: in a box that scrolls by itself on a narrow screen."""
        head = "".join(f'<th scope="col">{escape(" ".join(heading.split()))}</th>' for heading in self.headings)
        body = "\n".join(self._html_row(row, cells) for row, cells in enumerate(self.rows))
        return (
            f'<div class="scroller" tabindex="0" role="region" aria-label="{escape(self.title)}"><table>'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
            f'<p class="note">{escape(self.caption)}</p>'
        )

    def _html_row(self, row: int, cells: Sequence[str]) -> str:
        def inner(column: int, cell: str) -> str:
            return f"<b>{escape(cell)}</b>" if (row, column) in self.marked else escape(cell)

        first, rest = cells[0], list(enumerate(cells))[1:]
        tds = "".join(f"<td>{inner(column, cell)}</td>" for column, cell in rest)
        return f'<tr><th scope="row">{inner(0, first)}</th>{tds}</tr>'
