"""A table of text that the terminal and the page show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from rich import box
from rich.table import Table
from rich.text import Text


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
        """For the terminal."""
        table = Table(
            box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False, title=self.title, title_justify="left",
            title_style="bold", caption=self.caption, caption_justify="left",
        )  # fmt: skip
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
        for row, cells in enumerate(self.rows):
            table.add_row(*(Text(cell, style=self._style(row, column)) for column, cell in enumerate(cells)))
        return table

    def _style(self, row: int, column: int) -> str:
        return "bold green" if (row, column) in self.marked else ""

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
