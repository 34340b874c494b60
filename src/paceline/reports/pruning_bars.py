"""The two charts of the page on pruning, as plain HTML: bars of boxes, no script."""

from __future__ import annotations

from html import escape

from paceline.quantities import percent_text
from paceline.reports.pruning_facts import Bin, PruningFacts

MOST_CLASSES = 100
WIDEST = 72  # percent of the room: beside the longest bar there is a place for its number


def time_bars(facts: PruningFacts) -> str:
    """How many samples were pruned how often, with those whose label looks wrong marked.

    >>> from paceline.traces.pruning_record import empty_record
    >>> "<small>1</small>" in time_bars(PruningFacts(empty_record()))
    True
    """
    most = max(each.samples for each in facts.bins)
    wrong = '<span class="key"><i class="swatch wrong-part"></i>of these, labels that look wrong</span>'
    return (
        '<section class="card"><h2>Times pruned</h2>'
        '<p class="caption">How many samples sat out in so many epochs.</p>'
        f'<div class="legend"><span class="key"><i class="swatch used"></i>samples</span>'
        f'{wrong if len(facts.suspects) else ""}</div><div class="bars times">'
        f"{''.join(_time_bar(each, most) for each in facts.bins)}</div></section>"
    )


def _time_bar(each: Bin, most: int) -> str:
    share = f'<b class="wrong-part" style="width: {100 * each.wrong / each.samples:.2f}%"></b>' if each.wrong else ""
    told = f"{each.samples:,}" + (f", {each.wrong:,} look wrong" if each.wrong else "")
    bar = f'<i class="used" style="width: {WIDEST * each.samples / most:.2f}%">{share}</i>' if each.samples else ""
    return f'<span class="what">{each.text}&times;</span><span class="bar">{bar}<small>{told}</small></span>'


def class_bars(facts: PruningFacts) -> str:
    """Of each class, its share of the samples beside its share of the prunings.

    >>> from paceline.traces.pruning_record import empty_record
    >>> '<span class="what">0</span>' in class_bars(PruningFacts(empty_record()))
    True
    """
    rows, cut = facts.classes, ""
    if len(rows) > MOST_CLASSES:
        rows = sorted(rows, key=lambda each: -each.beyond)[:MOST_CLASSES]
        cut = f" The {MOST_CLASSES} of {len(facts.classes):,} that are pruned most for their size."
    most = max(max(each.share, each.pruned_share) for each in rows)
    bars = "".join(
        f'<span class="what">{escape(each.name)}</span><span class="pair" title="{each.samples:,} samples, '
        f'{each.prunings:,} prunings"><i class="share" style="width: {100 * each.share / most:.2f}%"></i>'
        f'<i class="used" style="width: {100 * each.pruned_share / most:.2f}%"></i></span>'
        f'<span class="how">{percent_text(each.pruned_share, 1)}, {each.beyond:.2f}&times;</span>'
        for each in rows
    )
    return (
        '<section class="card"><h2>Classes</h2>'
        '<p class="caption">Are some classes pruned more than others? Share of all prunings, and how many times the '
        f"share of the samples that is.{cut}</p>"
        '<div class="legend"><span class="key"><i class="swatch share"></i>share of the samples</span>'
        '<span class="key"><i class="swatch used"></i>share of the prunings</span></div>'
        f'<div class="bars classes">{bars}</div></section>'
    )
