"""The first sentence of a report, computed from its numbers: what was gained, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.quantities import count_text, loss_text, percent_text, seconds_text
from paceline.reports.results import Result, baseline

# A loss this much above that of `full` still counts as kept.
NEARLY = 0.05


def headline(rows: Sequence[Result]) -> str:
    """The sentence on top.

    >>> def row(name, saved, loss):
    ...     return Result(label=name, strategy=name, seconds=6.5, saved=saved, loss=loss)
    >>> headline([row("full", None, 0.2), row("lgc", 0.33, 0.202), row("fastest-k", 0.34, 0.3)])
    'lgc finished 33 % sooner than full, with a loss 1 % higher'
    """
    full = baseline(rows)
    best = hero(rows)
    if full is not None and best is not None:
        return against_full(best, full)
    first = min(rows, key=lambda row: (row.diverged, row.stopped, row.seconds))
    if first.diverged:
        who = first.label if len(rows) == 1 else f"All {len(rows)} strategies"
        return f"{who} diverged: try a smaller learning rate"
    loss = "" if first.loss is None else f", with a loss of {loss_text(first.loss)}"
    if first.stopped:
        return f"{_stopped(first)}, {seconds_text(first.seconds)} s after its start{loss}"
    rivals = sum(not row.diverged and not row.stopped and row.clock == first.clock for row in rows) > 1
    rounds = f"{count_text(first.rounds)} round" + ("" if first.rounds == 1 else "s")
    return f"{first.label} finished {'first,' if rivals else rounds} in {seconds_text(first.seconds)} s{loss}"


def hero(rows: Sequence[Result]) -> Result | None:
    """The strategy the headline is about: the soonest of those that keep the loss of `full`, or nearly.

    Soonest at the target, where there is one and it was reached; where all lose more, the one losing least.

    >>> hero([]) is None
    True
    """
    full = baseline(rows)
    rivals = [row for row in rows if row.saved is not None and full is not None and row.clock == full.clock]
    trained = [row for row in rivals if row.loss is not None]
    if full is None or full.loss is None or not trained:
        return min(rivals, key=lambda row: row.seconds, default=None)
    limit = full.loss * (1.0 + NEARLY)
    good = [row for row in trained if row.loss is not None and row.loss <= limit]
    if not good:
        return min(trained, key=lambda row: row.loss or 0.0)
    there = [row for row in good if row.seconds_to_target is not None]
    return min(there or good, key=lambda row: row.seconds_to_target or row.seconds)


def against_full(row: Result, full: Result) -> str:
    """One strategy held against `full`: time first, then loss.

    >>> row = Result(label="lgc", strategy="lgc", diverged=1)
    >>> against_full(row, row)
    'lgc diverged'
    """
    if row.diverged:
        return f"{row.label} diverged" + ("" if row.diverged == row.runs else f" in {row.diverged} of {row.runs} runs")
    if row.stopped:
        return _stopped(row)
    if row.saved is None or row.clock != full.clock:
        return f"{row.label} finished in {seconds_text(row.seconds)} s"
    said = f"{row.label} {_time_phrase(row.saved, full.label)}{_loss_phrase(row.loss, full.loss)}"
    if round(row.rounds) == round(full.rounds):
        return said
    return f"{said} ({count_text(row.rounds)} rounds against {count_text(full.rounds)})"


def beyond_the_headline(rows: Sequence[Result], target_loss: float | None) -> list[str]:
    """What a reader asks next: the target loss, and the other strategies.

    >>> beyond_the_headline([], None)
    []
    """
    full, best = baseline(rows), hero(rows)
    sentences = []
    if best is not None and full is not None and target_loss is not None:
        sentences += _target_sentence(best, full, target_loss)
    others = [row for row in rows if row is not best and row is not full]
    if full is not None and others and not all(row.diverged for row in rows):
        said = [against_full(row, full) for row in others]
        sentences.append("; ".join(said) + ".")
    return sentences


def _stopped(row: Result) -> str:
    if row.runs > 1:
        return f"{row.label} was stopped early in {row.stopped} of {row.runs} runs"
    return f"{row.label} stopped after {count_text(row.rounds)} of {count_text(row.asked or 0)} rounds"


def _target_sentence(best: Result, full: Result, target_loss: float) -> list[str]:
    if best.seconds_to_target is None:
        return []
    start = f"{best.label} reached the target loss of {target_loss:g} in {seconds_text(best.seconds_to_target)} s"
    if full.seconds_to_target is None:
        return [f"{start}; {full.label} did not reach it."]
    saved = 1.0 - best.seconds_to_target / full.seconds_to_target if full.seconds_to_target else 0.0
    return [f"{start}, {full.label} in {seconds_text(full.seconds_to_target)} s: {_sooner(saved)}."]


def _sooner(saved: float) -> str:
    if abs(saved) < 0.005:
        return "no difference"
    return f"{percent_text(abs(saved))} {'sooner' if saved > 0 else 'later'}"


def _time_phrase(saved: float, full: str) -> str:
    if abs(saved) < 0.005:
        return f"took as long as {full}"
    return f"finished {_sooner(saved)} than {full}"


def _loss_phrase(loss: float | None, full_loss: float | None) -> str:
    if loss is None or full_loss is None or full_loss <= 0:
        return ""
    ratio = loss / full_loss
    if abs(ratio - 1.0) < 0.005:
        return ", with the same loss"
    if ratio >= 2.0:
        return f", with {ratio:.1f} times its loss"
    return f", with a loss {percent_text(abs(ratio - 1.0))} {'higher' if ratio > 1 else 'lower'}"
