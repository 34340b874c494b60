"""Text of a fixed width: it keeps within its width, and reads the same on terminals that know only ASCII."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paceline.terminal import bar, can_print, decades, legend, log_share, printable, rich_table, shortened, text_table

ROWS = [("layer", "forward", "memory"), ("encoder.layers.11.self_attention.projection", "12.3 ms", "2.5 MB")]


@pytest.mark.parametrize("width", [30, 40, 58, 80])
def test_a_table_keeps_within_its_width(width: int) -> None:
    lines = text_table(ROWS, align="<>>", width=width, elastic=0, shortest=8)
    assert max(map(len, lines)) <= width
    assert len({len(line) for line in lines}) == 1


def test_a_table_is_not_narrower_than_its_shortest_name() -> None:
    lines = text_table(ROWS, align="<>>", width=10, elastic=0, shortest=8)
    assert lines[1].split("  ")[0] == shortened(ROWS[1][0], 8)


def test_columns_have_at_least_their_widths_and_lines_no_spaces_at_the_end() -> None:
    assert text_table([("a", "b", "")], align="<><", least=(3, 4, 5), gap=1, indent=2) == ["  a      b"]


@pytest.mark.parametrize("cut", ["end", "middle", "early"])
def test_a_shortened_text_has_just_its_width(cut: str) -> None:
    for width in range(4, 20):
        assert len(shortened("a.long.name.of.a.layer", width, dots="..", cut=cut)) == width


def test_a_longer_bar_is_never_shorter() -> None:
    bars = [bar(eighths / 8) for eighths in range(1, 80)]
    assert len(set(bars)) == len(bars)
    assert [len(one) for one in bars] == sorted(len(one) for one in bars)


def test_values_lie_between_their_decades() -> None:
    for values in ([1.0], [5.0, 1345.0], [0.001, 1e6], [10.0, 100.0]):
        low, high = decades(values)
        assert all(0 < log_share(value, low, high) <= 1 for value in values)


def test_marks_stay_with_their_meanings() -> None:
    parts = ["0-9 forward of that micro-batch", "# backward", "- of weights", ". idle"]
    lines = legend(parts, width=40)
    assert all(len(line) <= 40 for line in lines)
    assert all(any(part in line for line in lines) for part in parts)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_what_is_printable_can_be_printed(encoding: str) -> None:
    drawn = "▓▓░░·█▒▎ naïve … 层"
    assert can_print(printable(drawn, encoding), encoding)
    assert len(printable(drawn, encoding)) == len(drawn)


def test_cells_are_data_and_not_markup() -> None:
    stream = io.StringIO()
    table = rich_table(["name", "figure"], [["[red]x[/red]", "1"]], title="T", marked={(0, 1)}, warned={0})
    Console(file=stream, width=40).print(table)
    assert "[red]x[/red]" in stream.getvalue()
