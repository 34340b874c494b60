"""Under which conditions the numbers hold, in words: without them no two results can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.reports.groups import Group
from paceline.traces import Trace


def conditions(groups: Sequence[Group]) -> list[str]:
    """Clock, kind of late work, target and seeds, each as a short phrase.

    >>> asked = {"target_loss": 0.5}
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe=asked, rounds_done=5, seconds=1.0)
    >>> conditions([Group(label="full", strategy="full", traces=(trace, trace))])
    ['2 workers', 'virtual seconds', 'late work partial', 'timing only, nothing was trained', '2 seeds, means']
    """
    traces = [trace for group in groups for trace in group.traces]
    workers = sorted({trace.workers for trace in traces})
    plural = "" if workers == [1] else "s"
    phrases = [
        f"{_joined(f'{count:,}' for count in workers)} worker{plural}",
        f"{_joined(sorted({trace.clock for trace in traces}))} seconds",
        f"late work {_joined(sorted({trace.late_work for trace in traces}))}",
    ]
    targets = target_losses(traces)
    trained = any(trace.evaluations for trace in traces)
    if not trained:
        phrases.append("timing only, nothing was trained")
    elif targets:
        phrases.append(f"target loss {_joined(f'{target:g}' for target in targets)}")
    phrases += _setting(traces[0].recipe, trained=trained)
    phrases.append(_seeds([len(group.traces) for group in groups]))
    return phrases


def _setting(recipe: Mapping[str, Any], *, trained: bool) -> list[str]:
    """What the runs of a race share, as far as the recipe says: data, network, K, delays."""
    data, delay = recipe.get("data", {}), recipe.get("delay", {})
    dealt = {
        "non-iid": f"non-IID({data.get('classes_per_worker')})",
        "dirichlet": f"Dirichlet({data.get('alpha')})",
    }.get(data.get("split"), data.get("split"))
    network, k = recipe.get("model", {}).get("name"), recipe.get("strategy", {}).get("k")
    words = [data.get("name"), dealt, network] if trained else []
    words += [k and f"K={k}", delay.get("name") and f"{delay['name']} delays"]
    if delay.get("persistence") and delay.get("name") != "recorded":
        words.append(f"persistence {delay['persistence']}")
    return [str(word) for word in words if word]


def target_losses(traces: Sequence[Trace]) -> list[float]:
    """The target losses the recipes name: none, one, or (in a mixed report) several.

    >>> asked = {"target_loss": 0.5}
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe=asked, rounds_done=5, seconds=1.0)
    >>> target_losses([trace, trace])
    [0.5]
    """
    named = {trace.recipe.get("target_loss") for trace in traces}
    return sorted(float(target) for target in named if isinstance(target, int | float))


def _seeds(runs: Sequence[int]) -> str:
    if set(runs) == {1}:
        return "1 seed"
    return f"{_joined(str(count) for count in sorted(set(runs)))} seeds, means"


def _joined(names: Iterable[str]) -> str:
    return " and ".join(names)
