"""Shares by speed in a report: the samples of each worker, and how long a round takes with them and with equal ones."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from paceline.quantities import count_text, duration_text, percent_text, seconds_text
from paceline.reports.results import TraceGroup
from paceline.reports.table import PlainTable
from paceline.traces.records import ShareSummary, Trace, WorkerShare

HEADINGS = ("worker", "samples", "of the\nbatch", "predicted\n(s)", "measured\n(s)", "with equal\nshares (s)")
MOST_SHOWN = 10  # rows in a terminal


def share_table(groups: Sequence[TraceGroup], *, most: int = MOST_SHOWN) -> PlainTable | None:
    """Return a table of the shares that each strategy came to, in its first run; None where all have equal ones.

    Of many workers those with the smallest shares are shown, and the others in one row; `most` are the rows of all.

    >>> from paceline.traces import Trace
    >>> workers = (WorkerShare(worker=0, samples=10, predicted_seconds=0.3, seconds=0.31, equal_seconds=0.9),
    ...            WorkerShare(worker=1, samples=50, predicted_seconds=0.3, seconds=0.3, equal_seconds=0.18))
    >>> summary = ShareSummary(workers=workers, changes=1, since=4, predicted_seconds=0.3, round_seconds=0.31,
    ...                        equal_seconds=0.9)
    >>> trace = Trace(strategy="full+speed", seed=0, workers=2, recipe={}, rounds_done=9, seconds=9.0, shares=summary)
    >>> table = share_table([TraceGroup(label="full+speed", strategy="full+speed", traces=(trace,))])
    >>> table.rows[0]
    ['w0', '10', '16.7 %', '0.300', '0.310', '0.900']
    >>> table.caption
    'full+speed: with these shares, since round 4, a round takes 310 ms (predicted: 300 ms); with equal ones 900 ms.'
    """
    shown = [(group, _first(group)) for group in groups if _first(group) is not None]
    if not shown:
        return None
    for_each = max(3, most // len(shown))
    rows = [
        row
        for group, trace in shown
        if trace is not None and trace.shares is not None
        for row in _rows(_prefix(group, trace, several=len(shown) > 1), trace.shares, for_each)
    ]
    caption = " ".join(share_sentence(group) for group, _ in shown)
    return PlainTable(title="Shares by speed", headings=HEADINGS, rows=rows, caption=caption)


def share_sentence(group: TraceGroup) -> str:
    """Return what a strategy's shares came to: the time of a round, predicted, measured, and with equal shares.

    Times are means over the seeds.
    """
    summaries = [trace.shares for trace in group.traces if trace.shares is not None]
    if not any(summary.changes for summary in summaries):
        return f"{group.label}: shares stayed equal, since no other ones would have been quicker by enough."
    rounds, equal, predicted = (
        _mean([getattr(summary, name) for summary in summaries])
        for name in ("round_seconds", "equal_seconds", "predicted_seconds")
    )
    since = f"since round {summaries[0].since}" if len(summaries) == 1 else f"means over {len(summaries)} seeds"
    if rounds is None or equal is None:
        return f"{group.label}: shares changed in the last round, so no time is known with them."
    told = "" if predicted is None else f" (predicted: {duration_text(predicted)})"
    return (
        f"{group.label}: with these shares, {since}, a round takes {duration_text(rounds)}{told}; "
        f"with equal ones {duration_text(equal)}."
    )


def _first(group: TraceGroup) -> Trace | None:
    return next((trace for trace in group.traces if trace.shares is not None), None)


def _prefix(group: TraceGroup, trace: Trace, *, several: bool) -> str:
    seed = f" seed {trace.seed}" if len(group.traces) > 1 else ""
    return f"{group.label}{seed}, " if several or seed else ""


def _rows(prefix: str, summary: ShareSummary, most: int) -> list[list[str]]:
    workers = list(summary.workers)
    if len(workers) > most:
        smallest = sorted(workers, key=lambda share: (share.samples, share.worker))[: most - 1]
        shown = sorted(smallest, key=lambda share: share.worker)
        rest = [share for share in workers if share not in smallest]
        return [*(_row(prefix, summary, share) for share in shown), _row_of_others(prefix, summary, rest)]
    return [_row(prefix, summary, share) for share in workers]


def _row(prefix: str, summary: ShareSummary, share: WorkerShare) -> list[str]:
    return [
        f"{prefix}w{share.worker}",
        f"{share.samples:,}",
        percent_text(share.samples / summary.batch, 1),
        seconds_text(share.predicted_seconds),
        seconds_text(share.seconds),
        seconds_text(share.equal_seconds),
    ]


def _row_of_others(prefix: str, summary: ShareSummary, others: Sequence[WorkerShare]) -> list[str]:
    """Return the row of all workers that have none of their own: means of each."""
    return [
        f"{prefix}{len(others):,} others, mean",
        count_text(fmean(share.samples for share in others)),
        percent_text(fmean(share.samples for share in others) / summary.batch, 1),
        seconds_text(fmean(share.predicted_seconds for share in others)),
        seconds_text(fmean(share.seconds for share in others)),
        seconds_text(fmean(share.equal_seconds for share in others)),
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None
