"""Findings for people and for programs: lines of the terminal, a page, results.json; many of them as one page."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.core.story import Claim, Experiment, Findings, Size, plain
from paceline.quantities import counted
from paceline.reports.chart import Chart, palette
from paceline.reports.page import page_html

TEMPLATE = "experiment.html"
INTRODUCTION = (
    '`make reproduce ARGS="all"` wrote this page: ours beside theirs, for each claim whether it came out, and what is\n'
    "not as in the source. "
)
TOY = "A toy size: its figures mean nothing."


@dataclass(frozen=True, kw_only=True)
class Told:
    """An experiment that was run: at which size, what it came to, and what is to be said of its data.

    >>> Told.__dataclass_fields__["data_remarks"].default
    ()
    """

    experiment: Experiment
    size: Size
    findings: Findings
    data_remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The claims that hold, in a sentence."""
        judged = [claim for claim in self.findings.claims if claim.judged]
        missed = len(self.findings.missed)
        if self.findings.skipped:
            return f"Skipped, and nothing was judged: {self.findings.skipped}."
        if not judged:
            return "Nothing is claimed that could be judged."
        held = f"{len(judged) - missed} of {counted(len(judged), 'claim')} came out"
        return f"{held}." if not missed else f"{held}; {missed} did not."

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is not as in the source."""
        return (*((TOY,) if self.size.toy else ()), *self.data_remarks, *self.findings.remarks)

    @property
    def lines(self) -> list[str]:
        """A line for each claim, and the verdict."""
        return [*(claim.line for claim in self.findings.claims), self.verdict]

    @property
    def document(self) -> dict[str, Any]:
        """What was found as plain values, for results.json."""
        found = {
            "experiment": self.experiment.name,
            "source": self.experiment.source,
            "question": self.experiment.question,
            "size": self.size.name,
            "seeds": self.size.seeds,
            "claims": [{**dataclasses.asdict(claim), "about": claim.about} for claim in self.findings.claims],
            "missed": len(self.findings.missed),
            "skipped": self.findings.skipped,
            "machine": machine(),
            "tables": [
                {"title": table.title, "headings": table.headings, "rows": table.rows, "caption": table.caption}
                for table in self.findings.tables
            ],
            "remarks": self.remarks,
            "numbers": self.findings.numbers,
        }
        document: dict[str, Any] = plain(found)
        return document


def machine() -> dict[str, Any]:
    """Return what an experiment was run on."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "paceline": version("paceline"),
    }


def seeds_text(seeds: Sequence[int]) -> str:
    """Write seeds.

    >>> seeds_text([200]), seeds_text([200, 201, 202])
    ('seed 200', 'seeds 200 to 202')
    """
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


# -- Markdown ----------------------------------------------------------------------------------------------------------


def markdown(documents: Sequence[Mapping[str, Any]], *, title: str = "The papers, reproduced") -> str:
    """Return documents as a page of Markdown, in their order: a table of verdicts, then each experiment.

    >>> claim = {"about": "same winner", "text": "lgc first", "holds": False, "because": "41, 47 %", "judged": True}
    >>> found = {"experiment": "lgc-3", "source": "LGC, figure 3", "question": "who wins", "size": "laboratory",
    ...          "seeds": [200], "claims": [claim], "missed": 1, "tables": [], "remarks": ["LeNet."], "numbers": {}}
    >>> print(markdown([found]))
    # The papers, reproduced
    <BLANKLINE>
    `make reproduce ARGS="all"` wrote this page: ours beside theirs, for each claim whether it came out, and what is
    not as in the source. 0 of 1 claim came out.
    <BLANKLINE>
    | experiment | source | claims that came out | missed |
    |---|---|---|---|
    | [lgc-3](#lgc-3) | LGC, figure 3 | 0 of 1 | lgc first |
    <BLANKLINE>
    ## lgc-3
    <BLANKLINE>
    LGC, figure 3: who wins. Laboratory size, seed 200.
    <BLANKLINE>
    - **MISS**: lgc first (same winner: 41, 47 %)
    <BLANKLINE>
    LeNet.
    <BLANKLINE>
    """
    claims = [claim for each in documents for claim in each["claims"] if claim["judged"]]
    came_out = f"{sum(claim['holds'] for claim in claims)} of {counted(len(claims), 'claim')} came out."
    lines = [f"# {title}", "", INTRODUCTION + came_out, ""]
    lines += ["| experiment | source | claims that came out | missed |", "|---|---|---|---|"]
    for each in documents:
        judged = [claim for claim in each["claims"] if claim["judged"]]
        missed = "; ".join(_cell(claim["text"]) for claim in judged if not claim["holds"])
        name, held = each["experiment"], sum(claim["holds"] for claim in judged)
        lines.append(f"| [{name}](#{name}) | {_cell(each['source'])} | {held} of {len(judged)} | {missed or '-'} |")
    lines.append("")
    for each in documents:
        lines += _markdown_section(each)
    return "\n".join(lines)


def _markdown_section(found: Mapping[str, Any]) -> list[str]:
    setting = f"{found['source']}: {found['question']}" if found["source"] else found["question"]
    size = f"{found['size'].capitalize()} size, {seeds_text(found['seeds'])}."
    lines = [f"## {found['experiment']}", "", f"{setting}. {size}", ""]
    for table in found["tables"]:
        headings = [" ".join(heading.split()) for heading in table["headings"]]
        lines += [f"**{table['title']}**", "", f"| {' | '.join(map(_cell, headings))} |", "|---" * len(headings) + "|"]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in table["rows"]]
        lines += ["", *([table["caption"], ""] if table.get("caption") else [])]
    for claim in found["claims"]:
        word = "reported" if not claim["judged"] else "yes" if claim["holds"] else "**MISS**"
        lines.append(f"- {word}: {claim['text']} ({claim['about']}: {claim['because']})")
    for remark in found["remarks"]:
        lines += ["", remark]
    return [*lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# -- the page ----------------------------------------------------------------------------------------------------------


def page(told: Sequence[Told]) -> str:
    """Return one experiment, or all of them, as a page."""
    only = told[0] if len(told) == 1 else None
    series = list(dict.fromkeys(name for each in told for chart in each.findings.charts for name in series_of(chart)))
    charts: list[Chart] = []
    parts = []
    for each in told:
        prefix = "" if only is not None else f"{each.experiment.name}-"
        drawn = tuple(_recoloured(chart, f"{prefix}{chart.name}", series) for chart in each.findings.charts)
        charts += drawn
        parts.append(
            {
                "name": each.experiment.name,
                "question": each.experiment.question,
                "source": each.experiment.source,
                "verdict": each.verdict,
                "charts": drawn,
                "tables": each.findings.tables,
                "claims": [(_mark(claim), claim) for claim in each.findings.claims],
                "remarks": each.remarks,
            }
        )
    claims = [claim for each in told for claim in each.findings.claims if claim.judged]
    every = f"{sum(claim.holds for claim in claims)} of {counted(len(claims), 'claim')} came out"
    return page_html(
        TEMPLATE,
        folder=Path(__file__).parent,
        title=f"paceline, {only.experiment.name if only else 'all experiments'}",
        headline=f"{only.experiment.name}: {only.experiment.question}" if only else f"Five sources: {every}",
        conditions=_conditions(only) if only else (counted(len(parts), "experiment"),),
        sentences=[only.verdict] if only else [],
        figures=charts,
        colours=palette(series),
        experiments=parts,
    )


def _conditions(told: Told) -> list[str]:
    found = (told.experiment.source, f"{told.size.name} size", seeds_text(told.size.seeds))
    return [each for each in found if each]


def _mark(claim: Claim) -> tuple[str, str]:
    """Return a claim's class in the page's style sheet, and its word."""
    return ("open", "-") if not claim.judged else ("yes", "yes") if claim.holds else ("no", "MISS")


def series_of(chart: Chart) -> dict[str, str]:
    """Return the names of a chart's series, each with its token.

    >>> from paceline.reports.figures import bar_chart
    >>> series_of(bar_chart("acc", "Accuracy", "", ["c = 1"], {"lgc": [0.4], "full": [0.5]}, y="accuracy"))
    {'lgc': 's0', 'full': 's1'}
    """
    return {key.text: key.series for key in chart.keys if key.series}


def _recoloured(chart: Chart, name: str, series: Sequence[str]) -> Chart:
    """Return a chart whose series have the page's colours, and whose name is the page's only one."""
    places = {token: f"s{series.index(text)}" for text, token in series_of(chart).items()}
    return dataclasses.replace(
        chart,
        name=name,
        data=_with_tokens(chart.data, places),
        layout=_with_tokens(chart.layout, places),
        keys=tuple(dataclasses.replace(key, series=places.get(key.series, key.series)) for key in chart.keys),
    )


def _with_tokens(value: Any, places: Mapping[str, str]) -> Any:
    """Return plain values with other tokens of series: `s0`, or `s0/0.3`."""
    if isinstance(value, dict):
        return {key: _with_tokens(held, places) for key, held in value.items()}
    if isinstance(value, list):
        return [_with_tokens(held, places) for held in value]
    if isinstance(value, str):
        token, slash, rest = value.partition("/")
        return f"{places[token]}{slash}{rest}" if token in places else value
    return value
