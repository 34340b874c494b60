"""What every benchmark says and keeps: bars and verdicts, the table's console, the progress bar, the raw numbers."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.options import Options

TABLE_COLUMNS = 100


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What a figure must come to.

    >>> bar = Bar(sign="<=", limit=1.05)
    >>> str(bar), bar.verdict(1.02), bar.verdict(1.06), bar.verdict(None)
    ('<= 1.05', 'PASS', 'MISS', 'MISS')
    >>> str(Bar(sign=">=", limit=0.3, style=".0%"))
    '>= 30%'
    """

    sign: Literal["<=", ">="]
    limit: float
    style: str = ".2f"

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:{self.style}}"

    def show(self, value: float | None) -> str:
        """A figure written as the bar is."""
        return "-" if value is None else f"{value:{self.style}}"

    def verdict(self, value: float | None) -> str:
        """PASS or MISS; a figure that there is not is a MISS."""
        if value is None:
            return "MISS"
        return "PASS" if (value <= self.limit if self.sign == "<=" else value >= self.limit) else "MISS"


def coloured(verdict: str) -> str:
    """A verdict in rich's markup.

    >>> coloured("PASS")
    '[green]PASS[/]'
    """
    colour = {"PASS": "green", "MISS": "red"}.get(verdict, "dim")
    return f"[{colour}]{verdict}[/]"


def tables() -> Console:
    """Where tables go: stdout, at most 100 columns wide, and 100 where nobody says how wide it is."""
    console = Console(highlight=False)
    console.width = min(TABLE_COLUMNS, console.width) if console.is_terminal else TABLE_COLUMNS
    return console


def titled(title: str, *, quick: bool) -> str:
    """A table's title, with a warning where the figures mean nothing.

    >>> titled("Times", quick=True)
    'Times (quick: figures mean nothing)'
    """
    return f"{title} (quick: figures mean nothing)" if quick else title


def progress_bar() -> Progress:
    """A bar on stderr with what is done, what it took and what it will take."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


def save(options: Options, name: str, numbers: Mapping[str, Any]) -> None:
    """Write the raw numbers and what they were measured on to <out>/<name>.json."""
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "paceline": version("paceline"),
    }
    file = Path(options.out, f"{name}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": name, "quick": options.quick, "machine": machine, **numbers}
    file.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
