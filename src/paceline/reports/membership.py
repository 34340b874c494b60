"""Who came and went in a real run, as a short table: a reader sees at once why a lane is empty or a round was slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from paceline.quantities import seconds_text
from paceline.reports.groups import Group
from paceline.reports.numbers import shortened
from paceline.traces import Trace
from paceline.traces.records import NOT_YET

MOST_ROWS = 30
MOST_NAMES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something happened to some workers at one time; no workers: to the run itself.

    >>> Change(at_seconds=2.5, workers=(0, 3), what="came back").who
    'w0, w3'
    >>> Change(at_seconds=2.5, workers=tuple(range(10)), what="came back").who
    'w0, w1, w2, w3, w4, w5 and 4 more'
    """

    at_seconds: float
    workers: tuple[int, ...]
    what: str

    @property
    def who(self) -> str:
        """The workers by name, as far as there is room."""
        names = ", ".join(f"w{worker}" for worker in self.workers[:MOST_NAMES])
        more = len(self.workers) - MOST_NAMES
        return f"{names} and {more:,} more" if more > 0 else names or "the run"


def changes(trace: Trace) -> list[Change]:
    """What happened to the workers, in order of time; being sent home when the run ends is none of it.

    >>> from paceline.traces.records import Absence
    >>> away = Absence(worker=1, from_seconds=2.0, to_seconds=5.0, reason="its connection was lost")
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=9.0, absences=(away,))
    >>> [(change.at_seconds, change.who, change.what) for change in changes(trace)]
    [(2.0, 'w1', 'gone: its connection was lost'), (5.0, 'w1', 'came back')]
    """
    together: dict[tuple[float, str], list[int]] = {}
    for at_seconds, what, worker in _single(trace):
        together.setdefault((at_seconds, what), []).append(worker)
    found = [
        Change(at_seconds=at_seconds, workers=tuple(sorted(workers)), what=what)
        for (at_seconds, what), workers in together.items()
    ]
    # At the same moment (the clock stands while no server runs) one goes before one comes back.
    found.sort(key=lambda change: (change.at_seconds, change.what == "came back", change.workers))
    if trace.ended and trace.stopped:
        found.append(Change(at_seconds=trace.seconds, workers=(), what=f"ended: {trace.ended}"))
    return found


def _single(trace: Trace) -> Iterator[tuple[float, str, int]]:
    for absence in trace.absences:
        if absence.reason == NOT_YET:
            never = absence.to_seconds is None
            yield absence.to_seconds or 0.0, "never joined" if never else "joined", absence.worker
            continue
        if absence.to_seconds is None and absence.reason == trace.ended:
            continue
        yield absence.from_seconds, f"gone: {absence.reason}", absence.worker
        if absence.to_seconds is not None:
            yield absence.to_seconds, "came back", absence.worker


def came_and_went(groups: Sequence[Group]) -> str:
    """The section of the page; empty where everybody was there all the time, as in every simulation.

    >>> came_and_went([])
    ''
    """
    runs = [(group.label, trace) for group in groups for trace in group.traces]
    rows = [(f"{label}, seed {trace.seed}", change) for label, trace in runs for change in changes(trace)]
    if not rows:
        return ""
    named = len(runs) > 1
    head = _cells("th", [*(["Run"] if named else []), "Time (s)", "Who", "What"])
    body = "\n".join(
        f"<tr>{_cells('td', [*([run] if named else []), *_texts(change)])}</tr>" for run, change in rows[:MOST_ROWS]
    )
    left_out = len(rows) - MOST_ROWS
    more = f'<p class="note">and {left_out:,} more</p>' if left_out > 0 else ""
    return (
        '<section class="card" aria-labelledby="title-membership"><h2 id="title-membership">Who came and went</h2>'
        '<p class="caption">Seconds since the first round began. A server that is started again goes on at the time of '
        "its checkpoint: the time without a server is not counted.</p>"
        '<div class="scroller" tabindex="0" role="region" aria-label="Who came and went"><table class="events">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{more}</section>\n"
    )


def _texts(change: Change) -> list[str]:
    return [seconds_text(change.at_seconds), change.who, shortened(change.what)]


def _cells(kind: str, texts: Iterable[str]) -> str:
    scope = ' scope="col"' if kind == "th" else ""
    return "".join(f"<{kind}{scope}>{escape(text)}</{kind}>" for text in texts)
