"""The tables on pruning, for the terminal and the page: classes, and labels that look wrong."""

from __future__ import annotations

from paceline.quantities import loss_text, percent_text
from paceline.reports.pruning_facts import PruningFacts
from paceline.reports.table import PlainTable


def class_table(facts: PruningFacts, *, most: int) -> PlainTable:
    """Every class, or those that are pruned most for their size.

    >>> from paceline.traces.pruning_record import empty_record
    >>> class_table(PruningFacts(empty_record()), most=10).rows
    [['0', '1', '100.0 %', '0', '0.0 %', '0.00', '0']]
    """
    rows, cut = facts.classes, ""
    if len(rows) > most:
        rows = sorted(rows, key=lambda each: -each.beyond)[:most]
        cut = f" The {most} of {len(facts.classes):,} classes that are pruned most for their size."
    return PlainTable(
        title="Classes",
        headings=("class", "samples", "share", "prunings", "share", "times its\nshare", "labels that\nlook wrong"),
        rows=[
            [
                each.name,
                f"{each.samples:,}",
                percent_text(each.share, 1),
                f"{each.prunings:,}",
                percent_text(each.pruned_share, 1),
                f"{each.beyond:.2f}",
                f"{each.wrong:,}",
            ]
            for each in rows
        ],
        caption=f"Times its share: share of the prunings over share of the samples.{cut}",
    )


def suspect_table(facts: PruningFacts, *, most: int) -> PlainTable:
    """The labels that look wrong, the surest first.

    >>> from paceline.traces.pruning_record import empty_record
    >>> suspect_table(PruningFacts(empty_record()), most=10).rows
    []
    """
    record, found = facts.record, facts.suspects
    rows = [
        [
            str(number),
            record.classes[record.label[number]],
            record.classes[record.guess[number]],
            percent_text(float(record.guess_probability[number]), 1),
            percent_text(float(record.label_probability[number]), 1),
            loss_text(float(record.loss[number])),
            f"{record.times_pruned[number]:,}",
        ]
        for number in found[:most].tolist()
    ]
    cut = f" The {most} surest of {len(found):,}." if len(found) > most else ""
    return PlainTable(
        title="Labels that look wrong",
        headings=("sample", "label", "model says", "sure by", "of the label", "loss", "times\npruned"),
        rows=rows,
        caption=f"Sample: its number in the training data, from 0.{cut}",
    )
