"""Under which conditions the numbers hold, in words: without them no two results can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from paceline.reports.groups import Group
from paceline.traces import Trace

MOST_STOPPED = 4


def conditions(groups: Sequence[Group]) -> list[str]:
    """Cluster, clock, target, setting and seeds, each as a short phrase; what was simulated is not said of a real run.

    >>> asked = {"target_loss": 0.5, "delay": {"name": "pareto", "inject": False}}
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe=asked, rounds_done=5, seconds=1.0)
    >>> conditions([Group(label="full", strategy="full", traces=(trace,))])
    ['2 workers', 'virtual seconds', 'late work partial', 'timing only, nothing was trained', 'pareto delays', '1 seed']
    >>> from dataclasses import replace
    >>> conditions([Group(label="full", strategy="full", traces=(replace(trace, clock="real"),))])
    ['real cluster, 2 workers', 'wall-clock seconds since the first round began', 'no evaluation recorded', '1 seed']
    """
    traces = [trace for group in groups for trace in group.traces]
    simulated = [trace for trace in traces if trace.clock == "virtual"]
    real = [trace for trace in traces if trace.clock == "real"]
    phrases = [_cluster(simulated, real), clock_words(traces, began=" since the first round began")]
    served = [trace for trace in simulated if not trace.averaged]
    if served:
        phrases.append(f"late work {_joined(sorted({trace.late_work for trace in served}))}")
    targets = target_losses(traces)
    evaluated = any(trace.evaluations for trace in traces)
    if evaluated:
        phrases += [f"target loss {_joined(f'{target:g}' for target in targets)}"] if targets else []
    else:
        # A real run trains, also one that ended before its first evaluation.
        phrases.append("no evaluation recorded" if real else "timing only, nothing was trained")
    phrases += _setting(traces[0].recipe, trained=evaluated or bool(real), served=not all(t.averaged for t in traces))
    phrases += _pipelines(real)
    phrases += _simulated_delays(simulated) + _injected_delays(real) + _codecs(traces) + _prunings(traces)
    phrases += _stopped(groups)
    phrases.append(_seeds(groups))
    return phrases


def clock_words(traces: Sequence[Trace], *, began: str = "") -> str:
    """On which clock times are: a simulation's, or the wall's; `began` is said of the wall's alone.

    >>> clock_words([Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0, clock="real")])
    'wall-clock seconds'
    """
    words = {"virtual": "virtual seconds", "real": f"wall-clock seconds{began}"}
    return _joined(words[clock] for clock in sorted({trace.clock for trace in traces}, reverse=True))


def _cluster(simulated: Sequence[Trace], real: Sequence[Trace]) -> str:
    said = [f"real cluster, {_workers(real)}"] if real else []
    said += [f"simulated cluster, {_workers(simulated)}" if real else _workers(simulated)] if simulated else []
    return _joined(said)


def _workers(traces: Sequence[Trace]) -> str:
    counts = sorted({trace.workers for trace in traces})
    return f"{_joined(f'{count:,}' for count in counts)} worker{'' if counts == [1] else 's'}"


def _setting(recipe: Mapping[str, Any], *, trained: bool, served: bool) -> list[str]:
    """What the runs of a race share, as far as the recipe says: data, network, K."""
    data = _section(recipe, "data")
    dealt = {
        "non-iid": f"non-IID({data.get('classes_per_worker')})",
        "dirichlet": f"Dirichlet({data.get('alpha')})",
    }.get(str(data.get("split")), data.get("split"))
    network, k = _section(recipe, "model").get("name"), _section(recipe, "strategy").get("k")
    words = [data.get("name"), dealt, network] if trained else []
    return [str(word) for word in [*words, served and k and f"K={k}"] if word]


def _simulated_delays(traces: Sequence[Trace]) -> list[str]:
    delay = _section(traces[0].recipe, "delay") if traces else {}
    words = [f"{delay['name']} delays"] if delay.get("name") else []
    return words + _persistence(delay)


def _injected_delays(traces: Sequence[Trace]) -> list[str]:
    """How real workers were slowed down on purpose; else their delays are their own."""
    delays = [_section(trace.recipe, "delay") for trace in traces]
    injected = [delay for delay in delays if delay.get("inject") is True]
    if not injected:
        return []
    kinds = dict.fromkeys(", ".join([str(delay.get("name")), *_persistence(delay)]) for delay in injected)
    rest = "" if len(injected) == len(delays) else " (not in all runs)"
    return [f"injected delays: {_joined(kinds)}{rest}"]


def _persistence(delay: Mapping[str, Any]) -> list[str]:
    said = delay.get("persistence") and delay.get("name") != "recorded"
    return [f"persistence {delay['persistence']}"] if said else []


def _pipelines(traces: Sequence[Trace]) -> list[str]:
    """The stages that each worker of a real run was, where its model was cut."""
    sections = [_section(trace.recipe, "pipeline") for trace in traces]
    cut = [section for section in sections if isinstance(section.get("stages"), int) and section["stages"] > 1]
    kinds = dict.fromkeys(
        f"{each['stages']} stages, {each.get('schedule')}, {each.get('microbatches')} micro-batches" for each in cut
    )
    return [f"pipeline: {_joined(kinds)}{'' if len(cut) == len(sections) else ' (not in all runs)'}"] if cut else []


def _stopped(groups: Sequence[Group]) -> list[str]:
    short = [
        f"{group.label} ({trace.rounds_done:,} of {trace.rounds_asked:,} rounds)"
        for group in groups
        for trace in group.traces
        if trace.stopped
    ]
    shown = short[:MOST_STOPPED] + ([f"{len(short) - MOST_STOPPED} more"] if len(short) > MOST_STOPPED else [])
    return [f"stopped early: {_joined(shown)}"] if short else []


def _codecs(traces: Sequence[Trace]) -> list[str]:
    names = {str(_section(trace.recipe, "codec").get("name", "identity")) for trace in traces}
    if not names - {"identity"}:
        return []
    down = fmean(trace.sent_bytes for trace in traces) / 1e6
    up = fmean(trace.received_bytes for trace in traces) / 1e6
    moved = f" ({down:,.1f} MB to workers, {up:,.1f} MB back)" if down or up else ""
    if all(trace.averaged for trace in traces):
        moved = f" ({down:,.1f} MB sent)" if down else ""
    return [f"codec {_joined(sorted(names))}{moved}"]


def _prunings(traces: Sequence[Trace]) -> list[str]:
    """Who was left out, and how many: where every run that prunes knows it."""
    pruning = [trace for trace in traces if _section(trace.recipe, "pruning").get("name", "none") != "none"]
    if not pruning or not any(trace.evaluations for trace in traces):
        return []
    names = _joined(sorted({str(_section(trace.recipe, "pruning")["name"]) for trace in pruning}))
    shares = [trace.pruned.share_pruned for trace in pruning if trace.pruned is not None]
    known = f", {100 * fmean(shares):.0f} % of the samples sat out" if len(shares) == len(pruning) else ""
    return [f"pruning: {names}{known}"]


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a recipe; a real run of a script has none, and a journal can hold anything there."""
    section = recipe.get(name)
    return section if isinstance(section, Mapping) else {}


def target_losses(traces: Sequence[Trace]) -> list[float]:
    """The target losses the recipes name: none, one, or (in a mixed report) several.

    >>> asked = {"target_loss": 0.5}
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe=asked, rounds_done=5, seconds=1.0)
    >>> target_losses([trace, trace])
    [0.5]
    """
    named = {trace.recipe.get("target_loss") for trace in traces}
    return sorted(float(target) for target in named if isinstance(target, int | float))


def _seeds(groups: Sequence[Group]) -> str:
    runs = [len(group.traces) for group in groups]
    if set(runs) == {1}:
        return "1 seed"
    again = any(len({trace.seed for trace in group.traces}) < len(group.traces) for group in groups)
    return f"{_joined(str(count) for count in sorted(set(runs)))} {'runs' if again else 'seeds'}, means"


def _joined(names: Iterable[str]) -> str:
    return " and ".join(names)
