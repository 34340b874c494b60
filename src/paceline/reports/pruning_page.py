"""The page of `paceline inspect-pruning`: who is pruned again and again, with images, in one file without scripts.

    headline
    times pruned, counted     |   share of samples beside share of prunings, by class
    labels that look wrong: the surest as images, then a table
    by class: a row of its most pruned, a row of its least pruned

A page holds at most `MOST_IMAGES` images. First the suspects get theirs; what is left is shared among the classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.quantities import percent_text
from paceline.reports.chart import PAGE_COLOURS
from paceline.reports.page import asset, colour_variables, prose
from paceline.reports.pictures import data_uris
from paceline.reports.pruning_bars import class_bars, time_bars
from paceline.reports.pruning_facts import PruningFacts
from paceline.reports.pruning_tables import suspect_table
from paceline.reports.pruning_words import CAUTION, conditions, headline, sentences
from paceline.traces.pruning_record import PruningRecord

MOST_IMAGES = 200
MOST_SUSPECTS = 24
FEWEST_IN_A_ROW = 3
MOST_LISTED = 300
MARK = '<b class="mark" title="the label looks wrong">?</b>'
ROWS = ("most pruned", "least pruned")


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The samples that a page shows: the surest suspects, and of each class its most and its least pruned.

    >>> Shown(suspects=(4,), classes={0: ((4, 1), (7,))}).numbers
    [1, 4, 7]
    """

    suspects: tuple[int, ...]
    classes: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def numbers(self) -> list[int]:
        """All of them, each once: the images that a page wants."""
        rows = (number for pair in self.classes.values() for row in pair for number in row)
        return sorted({*self.suspects, *rows})


def shown(record: PruningRecord, *, most: int = 12) -> Shown:
    """Whom the page of a record shows, with at most `most` samples in a row.

    >>> from paceline.traces.pruning_record import empty_record
    >>> shown(empty_record()).classes
    {0: ((), (0,))}
    """
    if not 1 <= most <= MOST_IMAGES:
        raise ValueError(f"most must be between 1 and {MOST_IMAGES} images in a row (most={most})")
    facts = PruningFacts(record)
    first = facts.suspects[: min(MOST_SUSPECTS, 2 * most)].tolist()
    held = [each for each in facts.classes if each.samples]
    room = (MOST_IMAGES - len(first)) // len(ROWS)
    if len(held) * FEWEST_IN_A_ROW > room:  # too many classes: those that are pruned beyond their share
        held = sorted(held, key=lambda each: -each.beyond)[: room // FEWEST_IN_A_ROW]
    each = min(most, room // len(held))
    rows = {
        one.number: (
            tuple(facts.most_pruned(one.number, each).tolist()),
            tuple(facts.least_pruned(one.number, each).tolist()),
        )
        for one in sorted(held, key=lambda one: one.number)
    }
    return Shown(suspects=tuple(first), classes=rows)


def pruning_page(
    record: PruningRecord,
    images: Mapping[int, NDArray[Any]] | None = None,
    *,
    title: str = "paceline inspect-pruning",
    most: int = 12,
    notes: Sequence[str] = (),
) -> str:
    """The page as text; `images` are those of `shown(record, most=most).numbers`, or none.

    >>> from paceline.traces.pruning_record import empty_record
    >>> "<h1>Nothing was pruned" in pruning_page(empty_record())
    True
    """
    facts, whom = PruningFacts(record), shown(record, most=most)
    given = images if images is not None else {}
    tiles = _Tiles(facts, data_uris({number: given[number] for number in whom.numbers if number in given}))
    return Template(asset("pruning.html")).substitute(
        title=escape(title),
        headline=prose(headline(facts)),
        said="".join(f"<p>{prose(sentence)}</p>" for sentence in (*sentences(facts), *notes)),
        conditions="".join(f"<li>{escape(phrase)}</li>" for phrase in conditions(facts)),
        times=time_bars(facts),
        classes=class_bars(facts),
        suspects=_suspects(facts, whom, tiles),
        rows=_rows(facts, whom, tiles),
        style=colour_variables(PAGE_COLOURS) + asset("page.css"),
    )


class _Tiles:
    """Samples as figures: the image if there is one, else the number."""

    def __init__(self, facts: PruningFacts, uris: Mapping[int, str]) -> None:
        self._facts, self._uris = facts, uris

    def list(self, numbers: Sequence[int], label: str) -> str:
        items = "".join(f"<li>{self._figure(number)}</li>" for number in numbers)
        return f'<ul class="pictures" aria-label="{escape(label)}">{items}</ul>'

    def _figure(self, number: int) -> str:
        record, wrong = self._facts.record, bool(self._facts.wrong[number])
        label, guess = (escape(record.classes[which[number]]) for which in (record.label, record.guess))
        times = f"{record.times_pruned[number]}&times;"
        picture = f'<div class="number">#{number}</div>'
        if number in self._uris:
            picture = f'<img src="{self._uris[number]}" alt="Sample {number}, labelled {label}" loading="lazy">'
        other = ' class="other"' if record.guess[number] != record.label[number] else ""
        return (
            f"<figure{' class=looks-wrong' if wrong else ''}>{picture}{MARK if wrong else ''}"
            f"<figcaption><b>{times}</b> #{number}<span>label {label}</span>"
            f"<span{other}>model {guess} <i>{self._sure(number)}</i></span></figcaption></figure>"
        )

    def _sure(self, number: int) -> str:
        return percent_text(float(self._facts.record.guess_probability[number])).replace(" ", "\u00a0")


def _suspects(facts: PruningFacts, whom: Shown, tiles: _Tiles) -> str:
    if not whom.suspects:
        return f'<section class="card"><h2>No label looks wrong</h2><p class="caption">{escape(CAUTION)}</p></section>'
    table, all_of_them = suspect_table(facts, most=MOST_LISTED), len(facts.suspects)
    cut = f" The {len(whom.suspects)} surest of {all_of_them:,}:" if len(whom.suspects) < all_of_them else ""
    return (
        f'<section class="card"><h2>{escape(table.title)}</h2><p class="caption">{escape(CAUTION + cut)}</p>'
        f"{tiles.list(whom.suspects, table.title)}"
        f"<details><summary>As a table</summary>{table.html()}</details></section>"
    )


def _rows(facts: PruningFacts, whom: Shown, tiles: _Tiles) -> str:
    kinds = ("hard", "easy") if facts.prunes_the_hard else ("easy", "hard")
    said = (
        f"Of each class the most pruned, which are {kinds[0]} here, and the least pruned, the {kinds[1]}. "
        "12\u00d7: pruned 12 times. #7: number 7 of the training data. Framed, with a ?: the label looks wrong."
    )
    left_out = np.count_nonzero([each.samples for each in facts.classes]) - len(whom.classes)
    if left_out:
        said += f" {left_out} classes that are pruned less for their size are not shown."
    parts = [f'<section class="card"><h2>Class by class</h2><p class="caption">{escape(said)}</p>']
    for label, pair in whom.classes.items():
        each = facts.classes[label]
        parts.append(f"<h3>{escape(each.name)}<small>{each.samples:,} samples, {each.prunings:,} prunings</small></h3>")
        for name, numbers in zip(ROWS, pair, strict=True):
            if numbers:
                parts.append(f'<p class="row">{name}</p>{tiles.list(numbers, f"{each.name}, {name}")}')
    return "\n".join([*parts, "</section>"])
