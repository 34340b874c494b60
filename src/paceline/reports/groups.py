"""Which traces belong together: the runs of one strategy, on one clock, that differ in nothing but their seed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.traces import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The runs of one strategy, one per seed. The label tells groups of one strategy apart.

    >>> Group(label="lgc", strategy="lgc", traces=()).label
    'lgc'
    """

    label: str
    strategy: str
    traces: tuple[Trace, ...]


def group_traces(traces: Sequence[Trace]) -> list[Group]:
    """Put the seeds of a strategy together, in the order in which the strategies first come.

    >>> def run(name, seed, k):
    ...     return Trace(strategy=name, seed=seed, workers=4, rounds_done=1, seconds=1.0,
    ...                  recipe={"seed": seed, "strategy": {"name": name, "k": k}})
    >>> runs = [run("full", 0, 4), run("lgc", 0, 3), run("lgc", 1, 3), run("lgc", 0, 2)]
    >>> [(group.label, len(group.traces)) for group in group_traces(runs)]
    [('full', 1), ('lgc k=3', 2), ('lgc k=2', 1)]
    >>> group_traces([])
    Traceback (most recent call last):
    ValueError: a report needs at least one trace (traces=0)
    """
    if not traces:
        raise ValueError("a report needs at least one trace (traces=0)")
    together: dict[str, list[Trace]] = {}
    for trace in traces:
        settings = dict(_without_seeds(trace.recipe))
        key = json.dumps([trace.strategy, trace.clock, sorted(settings.items())], default=str)
        together.setdefault(key, []).append(trace)
    groups = list(together.values())
    return [Group(label=_label(group[0], groups), strategy=group[0].strategy, traces=tuple(group)) for group in groups]


def _label(trace: Trace, groups: list[list[Trace]]) -> str:
    """The strategy's name, and where that is not enough, the settings in which its groups differ."""
    alike = [group[0] for group in groups if group[0].strategy == trace.strategy]
    same = [dict(_without_seeds(other.recipe)) for other in alike]
    if len(same) == 1:
        return trace.strategy
    name = trace.strategy
    if len({other.clock for other in alike}) > 1:
        name += " real" if trace.clock == "real" else " simulated"
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
