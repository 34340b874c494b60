"""What the runs of each strategy came to: one row per strategy, with means over seeds.

Traces that differ in nothing but their seed form a group, and each group becomes a row. What a row saved is measured
against the strategy that waits for everybody at every step: `full` where there is a server, and `ssgd` or `full@ranks`
where there is none; with shares by speed only where nobody ran without.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, TypeAlias

from paceline.errors import PacelineError
from paceline.quantities import count_text, loss_text, percent_text, seconds_text
from paceline.traces import Trace, summarise

BASELINES = (  # the first of them that ran is what the others are compared with
    "full",
    "ssgd",
    "full@ranks",
    "full+speed",
    "full+speed@ranks",
)
Goal: TypeAlias = Literal["loss", "accuracy"]
WITHOUT_A_SERVER = {"ssgd", "local-sgd", "bmuf", "diloco", "hpsgd", "psgd"}


class ReportError(PacelineError, ValueError):
    """A report that cannot be made from what was given."""


# -- groups ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceGroup:
    """The runs of one strategy on one clock, one per seed. The label tells groups of one strategy apart.

    >>> TraceGroup(label="lgc", strategy="lgc", traces=()).label
    'lgc'
    """

    label: str
    strategy: str
    traces: tuple[Trace, ...]


def group_traces(traces: Sequence[Trace]) -> list[TraceGroup]:
    """Return the traces in groups, in the order in which the strategies first come.

    >>> def run(name, seed, k):
    ...     return Trace(strategy=name, seed=seed, workers=4, rounds_done=1, seconds=1.0,
    ...                  recipe={"seed": seed, "strategy": {"name": name, "k": k}})
    >>> runs = [run("full", 0, 4), run("lgc", 0, 3), run("lgc", 1, 3), run("lgc", 0, 2)]
    >>> [(group.label, len(group.traces)) for group in group_traces(runs)]
    [('full', 1), ('lgc k=3', 2), ('lgc k=2', 1)]
    >>> group_traces([])
    Traceback (most recent call last):
    paceline.reports.results.ReportError: a report needs at least one trace (traces=0)
    """
    if not traces:
        raise ReportError("a report needs at least one trace (traces=0)")
    together: dict[str, list[Trace]] = {}
    for trace in traces:
        settings = dict(_without_seeds(trace.recipe))
        key = json.dumps([trace.strategy, trace.clock, sorted(settings.items())], default=str)
        together.setdefault(key, []).append(trace)
    groups = list(together.values())
    return [
        TraceGroup(label=_label(group[0], groups), strategy=group[0].strategy, traces=tuple(group)) for group in groups
    ]


def _label(trace: Trace, groups: list[list[Trace]]) -> str:
    """Return the strategy's name and, where several groups have it, the settings in which they differ."""
    alike = [group[0] for group in groups if group[0].strategy == trace.strategy]
    name = trace.strategy
    if len(alike) == 1:
        return name
    if len({other.clock for other in alike}) > 1:
        name += " real" if trace.clock == "real" else " simulated"
    same = [dict(_without_seeds(other.recipe)) for other in alike]
    mine = dict(_without_seeds(trace.recipe))
    differing = [key for key in mine if any(other.get(key) != mine[key] for other in same)]
    return " ".join([name, *(f"{key.rsplit('.', 1)[-1]}={mine[key]}" for key in differing)])


def _without_seeds(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        if key == "seed":
            continue
        if isinstance(value, Mapping):
            yield from _without_seeds(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """The results of one group. Numbers are means over seeds; None stands for a number that is not known.

    `saved` is the share of the time of the baseline that was saved; it is None for the baseline itself, where there is
    none on the same clock, and where either diverged or was stopped: a run that broke off early saved nothing.
    `stopped` counts the runs that did fewer rounds than the `asked` ones without diverging. `target_accuracy` is None
    where the recipe asks for none; `reached` and `reached_accuracy` count the runs that came to their targets.

    >>> ResultRow(label="lgc", strategy="lgc", seconds=6.5, saved=0.35).saved
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
    test_loss: float | None = None
    target_accuracy: float | None = None
    reached_accuracy: int = 0
    seconds_to_accuracy: float | None = None
    used: float = 0.0
    late: float = 0.0
    dropped: float = 0.0


def results(groups: Sequence[TraceGroup]) -> list[ResultRow]:
    """Return a row for each group, in order.

    >>> from paceline.traces import Trace
    >>> def run(name, seconds):
    ...     trace = Trace(strategy=name, seed=0, workers=2, recipe={}, rounds_done=5, seconds=seconds)
    ...     return TraceGroup(label=name, strategy=name, traces=(trace,))
    >>> [row.saved for row in results([run("full", 4.0), run("lgc", 3.0)])]
    [None, 0.25]
    """
    first: dict[str, TraceGroup] = {}
    against = baseline_name(group.strategy for group in groups)
    for group in groups:
        if group.strategy == against:
            first.setdefault(group.traces[0].clock, group)
    return [_result(group, _seconds_of(first.get(group.traces[0].clock), group)) for group in groups]


def baseline_name(strategies: Iterable[str]) -> str:
    """Return the strategy with which the others are compared.

    >>> baseline_name(["hpsgd", "ssgd"]), baseline_name(["ssgd", "full"]), baseline_name([]), baseline_name(["hpsgd"])
    ('ssgd', 'full', 'full', 'ssgd')
    >>> baseline_name(["lgc@ranks", "full@ranks"]), baseline_name(["lgc@ranks"]), baseline_name(["lgc@ranks", "lgc"])
    ('full@ranks', 'full@ranks', 'full')
    """
    ran = set(strategies)
    with_rounds = ran - WITHOUT_A_SERVER
    on_ranks = with_rounds and all(name.endswith("@ranks") for name in with_rounds)
    otherwise = "full@ranks" if on_ranks else "full" if with_rounds or not ran else "ssgd"
    return next((name for name in BASELINES if name in ran), otherwise)


def baseline(rows: Iterable[ResultRow]) -> ResultRow | None:
    """Return the row of the baseline, or None if it did not run.

    >>> baseline([]) is None
    True
    """
    rows = list(rows)
    against = baseline_name(row.strategy for row in rows)
    return next((row for row in rows if row.strategy == against), None)


def _seconds_of(baseline: TraceGroup | None, group: TraceGroup) -> float | None:
    """Return the baseline's mean time, where `group` can be compared with it."""
    if baseline is None or baseline is group or any(trace.diverged or trace.stopped for trace in baseline.traces):
        return None
    return fmean(trace.seconds for trace in baseline.traces)


def _result(group: TraceGroup, baseline_seconds: float | None) -> ResultRow:
    rows = [summarise(trace) for trace in group.traces]
    diverged = sum(trace.diverged for trace in group.traces)
    stopped = sum(trace.stopped for trace in group.traces)
    seconds = fmean(row.seconds for row in rows)
    reached = [row.seconds_to_target for row in rows if row.seconds_to_target is not None]
    accurate = [row.seconds_to_accuracy for row in rows if row.seconds_to_accuracy is not None]
    asked = group.traces[0].recipe.get("target_accuracy")
    return ResultRow(
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
        saved=1.0 - seconds / baseline_seconds if baseline_seconds and not diverged and not stopped else None,
        # A mean over the lucky seeds only would flatter: all reach the target, or there is no mean.
        seconds_to_target=fmean(reached) if len(reached) == len(rows) else None,
        loss=_mean_or_none([row.loss for row in rows]),
        accuracy=_mean_or_none([row.accuracy for row in rows]),
        test_loss=_mean_or_none([row.test_loss for row in rows]),
        target_accuracy=float(asked) if isinstance(asked, int | float) else None,
        reached_accuracy=len(accurate),
        seconds_to_accuracy=fmean(accurate) if len(accurate) == len(rows) else None,
        used=fmean(row.used for row in rows),
        late=fmean(row.late for row in rows),
        dropped=fmean(row.dropped for row in rows),
    )


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


# -- cells -------------------------------------------------------------------------------------------------------------


def goal_of(rows: Iterable[ResultRow]) -> Goal:
    """Return which target the runs of a report are compared by: the accuracy where somebody asks for one.

    A recipe has a target loss unless it says otherwise, and a target accuracy only if it says so.

    >>> lgc = ResultRow(label="lgc", strategy="lgc", target_accuracy=0.9)
    >>> goal_of([lgc]), goal_of([])
    ('accuracy', 'loss')
    """
    return "accuracy" if any(row.target_accuracy is not None for row in rows) else "loss"


def seconds_to_goal(row: ResultRow, goal: Goal) -> float | None:
    """Return the seconds to the target, of all runs of a row; None where one did not come to it."""
    return row.seconds_to_target if goal == "loss" else row.seconds_to_accuracy


def cells(row: ResultRow, goal: Goal = "loss") -> list[str]:
    """Return a row's cells after its name, as the terminal shows them; `goal` says which target the fourth is of.

    >>> row = ResultRow(label="lgc", strategy="lgc", rounds=10, seconds=6.5, saved=0.35, seconds_to_target=4.0,
    ...                 loss=0.2, accuracy=0.9, used=70, late=30)
    >>> cells(row)
    ['10', '6.50', '35 %', '4.00', '0.2000', '90.0 %', '70', '30', '0']
    """
    return [
        count_text(row.rounds),
        seconds_text(row.seconds),
        percent_text(row.saved),
        target_text(row, goal),
        final_loss_text(row),
        percent_text(row.accuracy, 1),
        count_text(row.used),
        count_text(row.late),
        count_text(row.dropped),
    ]


def final_loss_text(row: ResultRow) -> str:
    """Return the final loss, or how many runs diverged.

    >>> from dataclasses import replace
    >>> row = ResultRow(label="lgc", strategy="lgc", runs=3, loss=0.5)
    >>> [final_loss_text(replace(row, diverged=runs)) for runs in (0, 1, 3)]
    ['0.5000', '1/3 div.', 'diverged']
    """
    if not row.diverged:
        return loss_text(row.loss)
    return "diverged" if row.diverged == row.runs else f"{row.diverged}/{row.runs} div."


def target_text(row: ResultRow, goal: Goal = "loss") -> str:
    """Return the seconds to the target loss or accuracy, or how many runs reached it where not all did.

    >>> target_text(ResultRow(label="lgc", strategy="lgc", runs=3, reached=2))
    '2/3'
    """
    seconds, reached = seconds_to_goal(row, goal), row.reached if goal == "loss" else row.reached_accuracy
    return f"{reached}/{row.runs}" if seconds is None and reached else seconds_text(seconds)


def accuracy_text(share: float) -> str:
    """Return a target accuracy as it was given, as a percentage.

    >>> accuracy_text(0.9), accuracy_text(0.985)
    ('90 %', '98.5 %')
    """
    return f"{100 * share:.10g} %"
