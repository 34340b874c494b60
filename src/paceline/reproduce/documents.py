"""Findings for people and for programs: lines of the terminal, a page, results.json; many of them as one page."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.quantities import counted
from paceline.reports.chart import Chart, palette
from paceline.reports.page import page_html
from paceline.reproduce.experiment import Experiment, ExperimentPlan, Findings

TEMPLATE = "reproduction.html"
INTRODUCTION = (
    "`paceline reproduce all` wrote this page: ours beside theirs, for each claim whether it came out, and what is\n"
    "not as in the source. "
)
TOY = "A toy size: its figures mean nothing."


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """An experiment that was run: its plan, what it came to, and what is to be said of its data.

    >>> Reproduction.__dataclass_fields__["data_remarks"].default
    ()
    """

    experiment: Experiment
    plan: ExperimentPlan
    findings: Findings
    data_remarks: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The claims that hold, in a sentence."""
        judged = [claim for claim in self.findings.claims if claim.judged]
        missed = len(self.findings.missed)
        if not judged:
            return "Nothing is claimed that could be judged."
        held = f"{len(judged) - missed} of {counted(len(judged), 'claim')} came out"
        return f"{held}." if not missed else f"{held}; {missed} did not."

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is not as in the source."""
        return (*((TOY,) if self.plan.toy else ()), *self.data_remarks, *self.findings.remarks)

    @property
    def conditions(self) -> tuple[str, ...]:
        """The setting in a few phrases."""
        seeds = self.plan.seeds
        shown = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
        return (self.experiment.source, f"{self.plan.size} size", shown)


def claim_lines(reproduction: Reproduction) -> list[str]:
    """Return a line for each claim, and the verdict."""
    return [*(claim.line for claim in reproduction.findings.claims), reproduction.verdict]


def document(reproduction: Reproduction) -> dict[str, Any]:
    """Return what was found as plain values, for results.json."""
    experiment, findings = reproduction.experiment, reproduction.findings
    return {
        "experiment": experiment.name,
        "source": experiment.source,
        "question": experiment.question,
        "size": reproduction.plan.size,
        "seeds": list(reproduction.plan.seeds),
        "claims": [dataclasses.asdict(claim) for claim in findings.claims],
        "missed": len(findings.missed),
        "tables": [
            {
                "title": table.title,
                "headings": list(table.headings),
                "rows": [list(row) for row in table.rows],
                "caption": table.caption,
            }
            for table in findings.tables
        ],
        "remarks": list(reproduction.remarks),
        "numbers": json.loads(json.dumps(findings.numbers)),
    }


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """Return documents as a page of Markdown, in their order: a table of verdicts, then each experiment.

    >>> claim = {"kind": "winner", "text": "lgc first", "holds": False, "because": "41 and 47 %", "judged": True}
    >>> found = {"experiment": "lgc-3", "source": "LGC, figure 3", "question": "who wins", "size": "laboratory",
    ...          "seeds": [200], "claims": [claim], "missed": 1, "tables": [], "remarks": ["LeNet."], "numbers": {}}
    >>> print(markdown([found]))
    # The papers, reproduced
    <BLANKLINE>
    `paceline reproduce all` wrote this page: ours beside theirs, for each claim whether it came out, and what is
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
    - **MISS**: lgc first (same winner: 41 and 47 %)
    <BLANKLINE>
    LeNet.
    <BLANKLINE>
    """
    claims = [claim for each in found for claim in each["claims"] if claim["judged"]]
    came_out = f"{sum(claim['holds'] for claim in claims)} of {counted(len(claims), 'claim')} came out."
    lines = ["# The papers, reproduced", "", INTRODUCTION + came_out, ""]
    lines += ["| experiment | source | claims that came out | missed |", "|---|---|---|---|"]
    for each in found:
        judged = [claim for claim in each["claims"] if claim["judged"]]
        missed = "; ".join(_cell(claim["text"]) for claim in judged if not claim["holds"])
        name, held = each["experiment"], sum(claim["holds"] for claim in judged)
        lines.append(f"| [{name}](#{name}) | {_cell(each['source'])} | {held} of {len(judged)} | {missed or '-'} |")
    lines.append("")
    for each in found:
        lines += _markdown_section(each)
    return "\n".join(lines)


def _markdown_section(found: Mapping[str, Any]) -> list[str]:
    seeds = found["seeds"]
    shown = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"
    setting = f"{found['source']}: {found['question']}. {found['size'].capitalize()} size, {shown}."
    lines = [f"## {found['experiment']}", "", setting, ""]
    for table in found["tables"]:
        headings = [" ".join(heading.split()) for heading in table["headings"]]
        lines += [f"**{table['title']}**", "", f"| {' | '.join(map(_cell, headings))} |", "|---" * len(headings) + "|"]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in table["rows"]]
        lines += ["", *([table["caption"], ""] if table.get("caption") else [])]
    for claim in found["claims"]:
        word = "reported" if not claim["judged"] else "yes" if claim["holds"] else "**MISS**"
        lines.append(f"- {word}: {claim['text']} (same {claim['kind']}: {claim['because']})")
    for remark in found["remarks"]:
        lines += ["", remark]
    return [*lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def page(reproductions: Sequence[Reproduction]) -> str:
    """Return one experiment, or all of them, as a page."""
    only = reproductions[0] if len(reproductions) == 1 else None
    charts: list[Chart] = []
    parts = []
    series = list(dict.fromkeys(name for each in reproductions for name in each.findings.series))
    for each in reproductions:
        drawn = tuple(_recoloured(chart, each, series, alone=only is not None) for chart in each.findings.charts)
        charts += drawn
        parts.append(
            {
                "name": each.experiment.name,
                "question": each.experiment.question,
                "source": each.experiment.source,
                "verdict": each.verdict,
                "charts": drawn,
                "tables": each.findings.tables,
                "claims": each.findings.claims,
                "remarks": each.remarks,
            }
        )
    missed = sum(len(each.findings.missed) for each in reproductions)
    judged = sum(claim.judged for each in reproductions for claim in each.findings.claims)
    every = f"{judged - missed} of {counted(judged, 'claim')} came out"
    return page_html(
        TEMPLATE,
        title=f"paceline reproduce {only.experiment.name if only else 'all'}",
        headline=f"{only.experiment.name}: {only.experiment.question}" if only else f"Five sources: {every}",
        conditions=only.conditions if only else (counted(len(parts), "experiment"),),
        sentences=[only.verdict] if only else [],
        figures=charts,
        colours=palette(series),
        experiments=parts,
    )


def _recoloured(chart: Chart, reproduction: Reproduction, series: Sequence[str], *, alone: bool) -> Chart:
    """Return a chart whose series have the page's colours, and whose name is the page's only one."""
    own = reproduction.findings.series
    places = {f"s{index}": f"s{series.index(name)}" for index, name in enumerate(own)}
    name = chart.name if alone else f"{reproduction.experiment.name}-{chart.name}"
    if all(old == new for old, new in places.items()):
        return dataclasses.replace(chart, name=name)
    return dataclasses.replace(
        chart,
        name=name,
        data=_with_tokens(chart.data, places),
        layout=_with_tokens(chart.layout, places),
        keys=tuple(dataclasses.replace(key, series=places.get(key.series, key.series)) for key in chart.keys),
    )


def _with_tokens(value: Any, places: dict[str, str]) -> Any:
    """Return plain values with other tokens of series: `s0`, or `s0/0.3`."""
    if isinstance(value, dict):
        return {key: _with_tokens(held, places) for key, held in value.items()}
    if isinstance(value, list):
        return [_with_tokens(held, places) for held in value]
    if isinstance(value, str):
        token, slash, rest = value.partition("/")
        return f"{places[token]}{slash}{rest}" if token in places else value
    return value
