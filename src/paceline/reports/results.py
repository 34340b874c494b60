"""One row per strategy: means over seeds, and what was saved against the one that waits for everybody at every step.

That is `full` where there is a server, and `ssgd` where workers average among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.reports.groups import Group
from paceline.traces import Summary, summarise

BASELINES = ("full", "ssgd")  # the first of them that ran is what the others are held against
WITHOUT_A_SERVER = {"ssgd", "local-sgd", "bmuf", "diloco", "hpsgd", "psgd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the runs of one strategy came to. Numbers are means over seeds; None is "cannot be said".

    `saved` is the share of the time of the baseline that was saved; it is None for the baseline itself, where there is
    none on the same clock, and where either diverged or was stopped: a run that broke off early saved nothing.
    `stopped` counts the runs that did fewer rounds than the `asked` ones without diverging.

    >>> Result(label="lgc", strategy="lgc", seconds=6.5, saved=0.35).saved
    0.35
    """

    label: str
    strategy: str
    runs: int = 1
    diverged: int = 0
    stopped: int = 0
    reached: int = 0
    clock: str = "virtual"
    asked: float | None = None
    rounds: float = 0.0
    seconds: float = 0.0
    saved: float | None = None
    seconds_to_target: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    used: float = 0.0
    late: float = 0.0
    dropped: float = 0.0


def results(groups: Sequence[Group]) -> list[Result]:
    """The rows of the table, in the order of the groups.

    >>> from paceline.traces import Trace
    >>> def run(name, seconds):
    ...     trace = Trace(strategy=name, seed=0, workers=2, recipe={}, rounds_done=5, seconds=seconds)
    ...     return Group(label=name, strategy=name, traces=(trace,))
    >>> [row.saved for row in results([run("full", 4.0), run("lgc", 3.0)])]
    [None, 0.25]
    """
    first: dict[str, Group] = {}
    against = baseline_name(group.strategy for group in groups)
    for group in groups:
        if group.strategy == against:
            first.setdefault(group.traces[0].clock, group)
    return [_result(group, _seconds_of(first.get(group.traces[0].clock), group)) for group in groups]


def baseline_name(strategies: Iterable[str]) -> str:
    """The strategy that the others are held against.

    >>> baseline_name(["hpsgd", "ssgd"]), baseline_name(["ssgd", "full"]), baseline_name([]), baseline_name(["hpsgd"])
    ('ssgd', 'full', 'full', 'ssgd')
    """
    ran = set(strategies)
    served, averaged = BASELINES
    otherwise = averaged if ran and ran <= WITHOUT_A_SERVER else served
    return next((name for name in BASELINES if name in ran), otherwise)


def baseline(rows: Iterable[Result]) -> Result | None:
    """The row of the baseline, if it is there.

    >>> baseline([]) is None
    True
    """
    rows = list(rows)
    against = baseline_name(row.strategy for row in rows)
    return next((row for row in rows if row.strategy == against), None)


def _seconds_of(full: Group | None, group: Group) -> float | None:
    if full is None or full is group or any(trace.diverged or trace.stopped for trace in full.traces):
        return None
    return fmean(trace.seconds for trace in full.traces)


def _result(group: Group, full_seconds: float | None) -> Result:
    rows = [summarise(trace) for trace in group.traces]
    diverged = sum(trace.diverged for trace in group.traces)
    stopped = sum(trace.stopped for trace in group.traces)
    seconds = fmean(row.seconds for row in rows)
    reached = [row.seconds_to_target for row in rows if row.seconds_to_target is not None]
    comparable = full_seconds is not None and full_seconds > 0 and not diverged and not stopped
    return Result(
        label=group.label,
        strategy=group.strategy,
        runs=len(rows),
        diverged=diverged,
        stopped=stopped,
        reached=len(reached),
        clock=group.traces[0].clock,
        asked=group.traces[0].rounds_asked,
        rounds=fmean(row.rounds for row in rows),
        seconds=seconds,
        saved=1.0 - seconds / full_seconds if comparable and full_seconds else None,
        # A mean over the lucky seeds only would flatter: all reach the target, or there is no mean.
        seconds_to_target=fmean(reached) if len(reached) == len(rows) else None,
        loss=_mean_or_none([row.loss for row in rows]),
        accuracy=_mean_or_none([row.accuracy for row in rows]),
        **_gradients(rows),
    )


def _gradients(rows: list[Summary]) -> dict[str, float]:
    return {name: fmean(getattr(row, name) for row in rows) for name in ("used", "late", "dropped")}


def _mean_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None
