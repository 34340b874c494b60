"""What two runs prune in common, in words, tables and on a page: `paceline inspect pruning RUN RUN2`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.quantities import number_text, percent_text
from paceline.reports.chart import palette
from paceline.reports.figures import bar_chart
from paceline.reports.page import page_html
from paceline.reports.table import PlainTable
from paceline.traces.pruning_overlap import PruningOverlap, overlap_of_records
from paceline.traces.pruning_record import PruningRecord

TEMPLATE = "overlap.html"
MOST_CLASSES, MOST_SHARED = 100, 100


class OverlapFacts:
    """Two records, and what their runs pruned in common.

    >>> from paceline.traces.pruning_record import empty_record
    >>> OverlapFacts(empty_record(), empty_record(), ("a", "b")).headline
    'Nothing was pruned in a'
    """

    def __init__(self, first: PruningRecord, second: PruningRecord, names: tuple[str, str]) -> None:
        self.records, self.names = (first, second), names
        self.overlap: PruningOverlap = overlap_of_records(first, second)

    @property
    def headline(self) -> str:
        """The overlap in one line."""
        for name, size in zip(self.names, self.overlap.sizes, strict=True):
            if not size:
                return f"Nothing was pruned in {name}"
        found = self.overlap
        return (
            f"The most pruned tenths overlap by {percent_text(found.jaccard, 1)}, by chance it would be "
            f"{percent_text(found.chance, 1)}"
        )

    @property
    def sentences(self) -> list[str]:
        """What was compared."""
        found = self.overlap
        return [
            f"Of {found.samples:,} samples {found.sizes[0]:,} are the most pruned of {self.names[0]}, "
            f"{found.sizes[1]:,} those of {self.names[1]}; {_count(found.shared)} are both, and "
            f"{_count(found.chance_shared)} would be if each run had drawn its own at random."
        ]

    @property
    def conditions(self) -> list[str]:
        """By what each run pruned."""
        return [
            f"{name}: {record.policy}, {record.epochs:,} epochs, {record.prunings:,} prunings"
            for name, record in zip(self.names, self.records, strict=True)
        ]

    @property
    def shared_samples(self) -> list[int]:
        """The numbers of those that both prune most, the most pruned first."""
        shared = self.overlap.surely_shared()
        times = sum(record.times_pruned[shared].astype(np.int64) for record in self.records)
        return [int(number) for number in shared[np.argsort(-np.asarray(times), kind="stable")]]

    def class_rows(self) -> list[tuple[str, int, float, float, float]]:
        """Return of each class its samples, and how many of them each run, and both, prune most."""
        first, second = self.overlap.memberships
        rows = []
        for number, name in enumerate(self.records[0].classes):
            held = self.records[0].label == number
            if held.any():
                both = float(first[held] @ second[held])
                rows.append((name, int(held.sum()), float(first[held].sum()), float(second[held].sum()), both))
        return sorted(rows, key=lambda row: -row[4])

    def document(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        found = self.overlap
        return {
            "runs": list(self.names),
            "samples": found.samples,
            "share": found.share,
            "most_pruned": list(found.sizes),
            "shared": found.shared,
            "shared_by_chance": found.chance_shared,
            "overlap": found.jaccard,
            "overlap_by_chance": found.chance,
            "shared_samples": self.shared_samples,
            "classes": [
                {"name": name, "samples": samples, "most_pruned": [first, second], "shared": both}
                for name, samples, first, second, both in self.class_rows()
            ],
        }


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else number_text(value)


def overlap_table(facts: OverlapFacts) -> PlainTable:
    """Return the overlap beside that of chance."""
    found = facts.overlap
    return PlainTable(
        title="The most pruned tenths of both runs",
        headings=("", "these runs", "by chance"),
        rows=[
            ("in both", _count(found.shared), _count(found.chance_shared)),
            (
                "in one or both",
                _count(sum(found.sizes) - found.shared),
                _count(sum(found.sizes) - found.chance_shared),
            ),
            ("overlap", f"{found.jaccard:.3f}", f"{found.chance:.3f}"),
        ],
        caption="Overlap: in both, of those in one or both. 0: nobody in common; 1: the same samples.",
    )


def class_table(facts: OverlapFacts, *, most: int = MOST_CLASSES) -> PlainTable:
    """Return whom both prune most, class by class."""
    rows = facts.class_rows()
    cut = f" The {most} of {len(rows):,} classes with the most in both." if len(rows) > most else ""
    return PlainTable(
        title="Class by class",
        headings=("class", "samples", "most pruned\nin the first", "in the\nsecond", "in both"),
        rows=[
            (name, f"{samples:,}", _count(first), _count(second), _count(both))
            for name, samples, first, second, both in rows[:most]
        ],
        caption=f"First: {facts.names[0]}. Second: {facts.names[1]}.{cut}",
    )


def shared_table(facts: OverlapFacts, *, most: int = MOST_SHARED) -> PlainTable:
    """Return the samples that both prune most: number, label, and how often each left them out."""
    first, second = facts.records
    shown = facts.shared_samples
    cut = f" The first {most} of {len(shown):,}." if len(shown) > most else ""
    return PlainTable(
        title="Samples that both prune most",
        headings=("sample", "label", "times pruned\nin the first", "in the\nsecond"),
        rows=[
            (f"#{number}", first.classes[first.label[number]], str(first.times_pruned[number]),
             str(second.times_pruned[number]))
            for number in shown[:most]
        ],
        caption=f"Without those that are equal to others at the limit of a tenth.{cut}",
    )  # fmt: skip


def overlap_page(facts: OverlapFacts, *, title: str) -> str:
    """Return the page.

    >>> from paceline.traces.pruning_record import empty_record
    >>> "Nothing was pruned" in overlap_page(OverlapFacts(empty_record(), empty_record(), ("a", "b")), title="a, b")
    True
    """
    found, rows = facts.overlap, facts.class_rows()[:MOST_CLASSES]
    names: Sequence[str] = ("these runs", "by chance")
    charts = [
        bar_chart(
            "overlap",
            "Overlap of the most pruned tenths",
            "In both, of those in one or both.",
            ["overlap"],
            {names[0]: [found.jaccard], names[1]: [found.chance]},
            y="overlap",
            percent=True,
            wide=False,
        ),
        bar_chart(
            "classes",
            "In both tenths, by class",
            "By chance: if each run had drawn as many of the class at random.",
            [row[0] for row in rows],
            {names[0]: [row[4] for row in rows], names[1]: [row[2] * row[3] / row[1] for row in rows]},
            y="samples",
            wide=False,
        ),
    ]
    return page_html(
        TEMPLATE,
        title=title,
        headline=facts.headline,
        sentences=facts.sentences,
        conditions=facts.conditions,
        figures=charts,
        colours=palette(names),
        tables=[overlap_table(facts), class_table(facts), shared_table(facts)],
    )
