"""The sentences of a report: what was gained and what it cost, and under which conditions the numbers hold.

Every sentence is computed from the results. Without their conditions no two results can be compared, so the table and
the page both list them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from paceline.quantities import count_text, loss_text, percent_text, seconds_text
from paceline.reports.results import Goal, ResultRow, TraceGroup, accuracy_text, baseline, goal_of, seconds_to_goal
from paceline.traces import Trace
from paceline.traces.worker_counts import dropped_sentence, mostly_dropped
from paceline.user_code import is_code

NEARLY = 0.05  # a loss that exceeds the baseline's by no more than this share counts as kept
MOST_STOPPED = 4
MOST_DROPPED = 4  # workers that are named
MOST_MISSING = 10  # sentences on what is missing

# -- what was gained, and what it cost ---------------------------------------------------------------------------------


def headline(rows: Sequence[ResultRow]) -> str:
    """Return the sentence on top of a report: who won, by how much, and what it cost.

    >>> def row(name, saved, loss, target=None):
    ...     return ResultRow(label=name, strategy=name, seconds=6.5, saved=saved, loss=loss, seconds_to_target=target)
    >>> headline([row("full", None, 0.2), row("lgc", 0.33, 0.202), row("fastest-k", 0.34, 0.3)])
    'lgc finished 33 % sooner than full, with a loss 1 % higher'
    >>> headline([row("full", None, 0.2, 4.0), row("lgc", 0.33, 0.202, 3.0), row("fastest-k", 0.34, 0.3, 2.0)])
    'lgc reached the target loss 25 % sooner than full, and ended with a loss 1 % higher'
    """
    against, best, goal = baseline(rows), best_row(rows), goal_of(rows)
    if best is not None and seconds_to_goal(best, goal) is not None:
        return _first_at_target(best, against, goal)
    if against is not None and best is not None:
        return comparison(best, against)
    first = min(rows, key=lambda row: (row.diverged, row.stopped, row.seconds))
    if first.diverged:
        diverged = first.label if len(rows) == 1 else f"All {len(rows)} strategies"
        return f"{diverged} diverged: try a smaller learning rate"
    loss = "" if first.loss is None else f", with a loss of {loss_text(first.loss)}"
    if first.stopped:
        return f"{_stopped(first)}, {seconds_text(first.seconds)} s after its start{loss}"
    rivals = sum(not row.diverged and not row.stopped and row.clock == first.clock for row in rows) > 1
    rounds = f"{count_text(first.rounds)} round" + ("" if first.rounds == 1 else "s")
    return f"{first.label} finished {'first,' if rivals else rounds} in {seconds_text(first.seconds)} s{loss}"


def best_row(rows: Sequence[ResultRow]) -> ResultRow | None:
    """Return the winner: the first at the target loss of those that end nearly as well as the baseline.

    Where somebody asks for a target accuracy, that is the target. The target is what makes runs comparable, so it
    decides where several runs of one clock went to their end and one of them reached it. Where none of those that came
    to it before the baseline keeps the baseline's loss, the first of all wins, and its loss is told. Where nobody came
    to the target, the winner is the soonest of those that nearly keep the baseline's loss; where all have a higher
    loss, the one with the least.

    >>> best_row([]) is None
    True
    """
    against = baseline(rows)
    clock = against.clock if against is not None else rows[0].clock if rows else ""
    racing = [row for row in rows if not row.diverged and not row.stopped and row.clock == clock]
    goal = goal_of(rows)
    seconds = {id(row): seconds_to_goal(row, goal) for row in rows}
    there = [row for row in racing if seconds[id(row)] is not None]
    limit = math.inf if against is None or against.loss is None else against.loss * (1.0 + NEARLY)
    if there and len(racing) > 1:
        found = None if against is None else seconds[id(against)]
        theirs = math.inf if found is None else found
        sooner = [row for row in there if row is not against and (seconds[id(row)] or 0.0) < theirs]
        as_good = [row for row in sooner if row.loss is not None and row.loss <= limit]
        return min(as_good or there, key=lambda row: (seconds[id(row)] or 0.0, row.seconds))
    rivals = [row for row in racing if row.saved is not None]
    trained = [row for row in rivals if row.loss is not None]
    if against is None or against.loss is None or not trained:
        return min(rivals, key=lambda row: row.seconds, default=None)
    good = [row for row in trained if row.loss is not None and row.loss <= limit]
    if not good:
        return min(trained, key=lambda row: row.loss or 0.0)
    return min(good, key=lambda row: row.seconds)


def _first_at_target(best: ResultRow, against: ResultRow | None, goal: Goal) -> str:
    """Return the headline of a race in which somebody reached the target."""
    ours, theirs = seconds_to_goal(best, goal), None if against is None else seconds_to_goal(against, goal)
    reached = f"{best.label} reached the target {goal}"
    if against is None or against is best or against.diverged or against.stopped:
        return f"{reached} first, in {seconds_text(ours)} s"
    if theirs is None:
        return f"{reached} in {seconds_text(ours)} s, which {against.label} did not"
    saved = 1.0 - (ours or 0.0) / theirs if theirs else 0.0
    time = "as soon as" if abs(saved) < 0.005 else f"{_sooner(saved)} than"
    loss = _loss_phrase(best.loss, against.loss).replace(", with", ", and ended with", 1)
    return f"{reached} {time} {against.label}{loss}"


def comparison(row: ResultRow, against: ResultRow) -> str:
    """Return how one strategy did compared with the baseline: time first, then loss.

    >>> row = ResultRow(label="lgc", strategy="lgc", diverged=1)
    >>> comparison(row, row)
    'lgc diverged'
    """
    if row.diverged:
        return f"{row.label} diverged" + ("" if row.diverged == row.runs else f" in {row.diverged} of {row.runs} runs")
    if row.stopped:
        return _stopped(row)
    if row.saved is None or row.clock != against.clock:
        return f"{row.label} finished in {seconds_text(row.seconds)} s"
    time = "took as long as" if abs(row.saved) < 0.005 else f"finished {_sooner(row.saved)} than"
    sentence = f"{row.label} {time} {against.label}{_loss_phrase(row.loss, against.loss)}"
    if round(row.rounds) == round(against.rounds):
        return sentence
    return f"{sentence} ({count_text(row.rounds)} rounds against {count_text(against.rounds)})"


def further_sentences(rows: Sequence[ResultRow], target: str) -> list[str]:
    """Return the sentences after the headline: on the target, as `target_words` has it, and on the other strategies.

    >>> further_sentences([], "")
    []
    """
    against, best, goal = baseline(rows), best_row(rows), goal_of(rows)
    sentences = []
    if best is not None and against is not None and target:
        sentences += _target_sentences(best, against, goal, target)
    others = [row for row in rows if row is not against and (row is not best or seconds_to_goal(row, goal) is not None)]
    if against is not None and others and not all(row.diverged for row in rows):
        sentences.append("; ".join(comparison(row, against) for row in others) + ".")
    return sentences


def dropped_sentences(groups: Sequence[TraceGroup]) -> list[str]:
    """Return a sentence for each worker of a real run whose work was mostly dropped, and what helps.

    >>> from paceline.traces.worker_counts import WorkerCounts
    >>> slow = WorkerCounts(worker=3, late=2, dropped=21, too_late=21, blocks=32, batch_samples=32)
    >>> trace = Trace(strategy="lgc", seed=0, workers=4, recipe={}, rounds_done=5, seconds=1.0, by_worker=(slow,))
    >>> dropped_sentences([TraceGroup(label="lgc", strategy="lgc", traces=(trace,))])[0].split(". ")[0]
    'Worker 3 is mostly dropped: 21 of its 23 gradients came too late'
    """
    found = [
        dropped_sentence(trace.strategy, counts)
        for group in groups
        for trace in group.traces
        for counts in mostly_dropped(trace.by_worker)
    ]
    more = len(found) - MOST_DROPPED
    named = [f"{sentence[:1].upper()}{sentence[1:]}" for sentence in found[:MOST_DROPPED]]
    return [*named, *([f"So are {more:,} more."] if more > 0 else [])]


def missing_sentences(groups: Sequence[TraceGroup]) -> list[str]:
    """Return what of the runs is not in their records, a sentence each.

    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0, missing=("a is gone",))
    >>> missing_sentences([TraceGroup(label="full", strategy="full", traces=(trace,))])
    ['A is gone.']
    """
    alone = len(groups) == 1 and len(groups[0].traces) == 1
    found = [
        (f"{words[:1].upper()}{words[1:]}" if alone else f"{group.label}: {words}") + "."
        for group in groups
        for trace in group.traces
        for words in trace.missing
    ]
    more = len(found) - MOST_MISSING
    return [*found[:MOST_MISSING], *([f"{more:,} more such sentences are left out."] if more > 0 else [])]


def _stopped(row: ResultRow) -> str:
    if row.runs > 1:
        return f"{row.label} was stopped early in {row.stopped} of {row.runs} runs"
    return f"{row.label} stopped after {count_text(row.rounds)} of {count_text(row.asked or 0)} rounds"


def target_words(traces: Sequence[Trace]) -> str:
    """Return the target that the runs of a report are compared by, if they all have the same; else nothing.

    >>> asked = {"target_loss": 0.05, "target_accuracy": 0.9}
    >>> target_words([Trace(strategy="full", seed=0, workers=2, recipe=asked, rounds_done=5, seconds=1.0)])
    '90 %'
    """
    accuracies, losses = target_accuracies(traces), target_losses(traces)
    if accuracies:
        return accuracy_text(accuracies[0]) if len(accuracies) == 1 else ""
    return f"{losses[0]:g}" if len(losses) == 1 else ""


def _target_sentences(best: ResultRow, against: ResultRow, goal: Goal, target: str) -> list[str]:
    ours, theirs = seconds_to_goal(best, goal), seconds_to_goal(against, goal)
    if ours is None:
        return []
    if best is against or theirs is None:
        return [f"The target {goal} is {target}."]
    both = f"in {seconds_text(ours)} s, {against.label} in {seconds_text(theirs)} s"
    return [f"{best.label} came to the target {goal} of {target} {both}."]


def _sooner(saved: float) -> str:
    if abs(saved) < 0.005:
        return "no difference"
    return f"{percent_text(abs(saved))} {'sooner' if saved > 0 else 'later'}"


def _loss_phrase(loss: float | None, baseline_loss: float | None) -> str:
    if loss is None or baseline_loss is None or baseline_loss <= 0:
        return ""
    ratio = loss / baseline_loss
    if abs(ratio - 1.0) < 0.005:
        return ", with the same loss"
    if ratio >= 2.0:
        return f", with {ratio:.1f} times its loss"
    return f", with a loss {percent_text(abs(ratio - 1.0))} {'higher' if ratio > 1 else 'lower'}"


# -- under which conditions --------------------------------------------------------------------------------------------


def conditions(groups: Sequence[TraceGroup]) -> list[str]:
    """Return cluster, clock, target, setting and seeds as short phrases; a real run has none of the simulated ones.

    >>> asked = {"target_loss": 0.5, "delay": {"name": "pareto", "inject": False}}
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe=asked, rounds_done=5, seconds=1.0)
    >>> conditions([TraceGroup(label="full", strategy="full", traces=(trace,))])
    ['2 workers', 'virtual seconds', 'late work partial', 'timing only, nothing was trained', 'pareto delays', '1 seed']
    >>> from dataclasses import replace
    >>> conditions([TraceGroup(label="full", strategy="full", traces=(replace(trace, clock="real"),))])
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
        accuracies = target_accuracies(traces)
        phrases += [f"target accuracy {_joined(map(accuracy_text, accuracies))}"] if accuracies else []
    else:
        # A real run trains, also one that ended before its first evaluation.
        phrases.append("no evaluation recorded" if real else "timing only, nothing was trained")
    phrases += _setting(traces, trained=evaluated or bool(real), served=not all(t.averaged for t in traces))
    phrases += _pipelines(real)
    phrases += _simulated_delays(simulated) + _injected_delays(real) + _codecs(traces) + _prunings(traces)
    phrases += _stopped_runs(groups)
    phrases.append(_seeds(groups))
    return phrases


def clock_words(traces: Sequence[Trace], *, began: str = "") -> str:
    """Return the name of the clock that times are read from; `began` is added to that of real runs.

    >>> clock_words([Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0, clock="real")])
    'wall-clock seconds'
    """
    words = {"virtual": "virtual seconds", "real": f"wall-clock seconds{began}"}
    return _joined(words[clock] for clock in sorted({trace.clock for trace in traces}, reverse=True))


def _cluster(simulated: Sequence[Trace], real: Sequence[Trace]) -> str:
    if not real:
        return _workers(simulated)
    return f"real cluster, {_workers(real)}" + (f" and simulated cluster, {_workers(simulated)}" if simulated else "")


def _workers(traces: Sequence[Trace]) -> str:
    counts = sorted({trace.workers for trace in traces})
    return f"{_joined(f'{count:,}' for count in counts)} worker{'' if counts == [1] else 's'}"


def _setting(traces: Sequence[Trace], *, trained: bool, served: bool) -> list[str]:
    """Return data, network, a loss of the user's own and K, as far as the recipes have them and agree."""
    data = _agreed(traces, "data")
    amounts = {"non-iid": ("non-IID", data.get("classes_per_worker")), "dirichlet": ("Dirichlet", data.get("alpha"))}
    name, amount = amounts.get(str(data.get("split")), (data.get("split"), None))
    dealt = name if amount is None else f"{name}({amount})"
    with_k = [trace for trace in traces if trace.strategy.startswith(("fastest-k", "lgc"))]
    model, k = _agreed(traces, "model"), _agreed(with_k or traces, "strategy").get("k")
    loss = model.get("loss")
    own_loss = f"loss {loss}" if isinstance(loss, str) and is_code(loss) else ""
    words = [data.get("name"), dealt, model.get("name"), own_loss] if trained else []
    return [str(word) for word in [*words, served and k and f"K={k}"] if word]


def _simulated_delays(traces: Sequence[Trace]) -> list[str]:
    delay = _agreed(traces, "delay")
    words = [f"{delay['name']} delays"] if delay.get("name") else []
    return words + _persistence(delay)


def _injected_delays(traces: Sequence[Trace]) -> list[str]:
    """Return by which delay models real workers were slowed down on purpose."""
    delays = [_section(trace.recipe, "delay") for trace in traces]
    injected = [delay for delay in delays if delay.get("inject") is True]
    if not injected:
        return []
    kinds = dict.fromkeys(", ".join([str(delay.get("name")), *_persistence(delay)]) for delay in injected)
    rest = "" if len(injected) == len(delays) else " (not in all runs)"
    return [f"injected delays: {_joined(kinds)}{rest}"]


def _persistence(delay: Mapping[str, Any]) -> list[str]:
    known = delay.get("persistence") and delay.get("name") != "recorded"
    return [f"persistence {delay['persistence']}"] if known else []


def _pipelines(traces: Sequence[Trace]) -> list[str]:
    """Return the stages, schedule and micro-batches of the real runs whose model was cut."""
    sections = [_section(trace.recipe, "pipeline") for trace in traces]
    cut = [section for section in sections if isinstance(section.get("stages"), int) and section["stages"] > 1]
    kinds = dict.fromkeys(
        f"{each['stages']} stages, {each.get('schedule')}, {each.get('microbatches')} micro-batches" for each in cut
    )
    return [f"pipeline: {_joined(kinds)}{'' if len(cut) == len(sections) else ' (not in all runs)'}"] if cut else []


def _stopped_runs(groups: Sequence[TraceGroup]) -> list[str]:
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
    on_ranks = all(trace.averaged or trace.strategy.endswith("@ranks") for trace in traces)
    moved = f"{down:,.1f} MB sent" if on_ranks else f"{down:,.1f} MB to workers, {up:,.1f} MB back"
    return [f"codec {_joined(sorted(names))}{f' ({moved})' if down or (up and not on_ranks) else ''}"]


def _prunings(traces: Sequence[Trace]) -> list[str]:
    """Return the pruning policies, and the share of samples left out where every run that prunes knows it."""
    pruning = [trace for trace in traces if _section(trace.recipe, "pruning").get("name", "none") != "none"]
    if not pruning or not any(trace.evaluations for trace in traces):
        return []
    names = _joined(sorted({str(_section(trace.recipe, "pruning")["name"]) for trace in pruning}))
    shares = [trace.pruned.share_pruned for trace in pruning if trace.pruned is not None]
    known = f", {100 * fmean(shares):.0f} % of the samples sat out" if len(shares) == len(pruning) else ""
    return [f"pruning: {names}{known}"]


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a recipe; a run of a script has none, and a journal can hold anything there."""
    section = recipe.get(name)
    return section if isinstance(section, Mapping) else {}


def _agreed(traces: Sequence[Trace], name: str) -> dict[str, Any]:
    """Return the settings of a section that are the same in all runs: what differs stands in their labels."""
    sections = [_section(trace.recipe, name) for trace in traces]
    first = sections[0] if sections else {}
    return {key: value for key, value in first.items() if all(each.get(key) == value for each in sections)}


def target_losses(traces: Sequence[Trace]) -> list[float]:
    """Return the target losses of the recipes: none, one, or (in a mixed report) several.

    >>> asked = {"target_loss": 0.5}
    >>> trace = Trace(strategy="full", seed=0, workers=2, recipe=asked, rounds_done=5, seconds=1.0)
    >>> target_losses([trace, trace])
    [0.5]
    """
    return _named(traces, "target_loss")


def target_accuracies(traces: Sequence[Trace]) -> list[float]:
    """Return the target accuracies of the recipes, as `target_losses` does the losses.

    >>> target_accuracies([Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0)])
    []
    """
    return _named(traces, "target_accuracy")


def _named(traces: Sequence[Trace], name: str) -> list[float]:
    found = {trace.recipe.get(name) for trace in traces}
    return sorted(float(target) for target in found if isinstance(target, int | float))


def _seeds(groups: Sequence[TraceGroup]) -> str:
    runs = [len(group.traces) for group in groups]
    if set(runs) == {1}:
        return "1 seed"
    again = any(len({trace.seed for trace in group.traces}) < len(group.traces) for group in groups)
    return f"{_joined(str(count) for count in sorted(set(runs)))} {'runs' if again else 'seeds'}, means"


def _joined(names: Iterable[str]) -> str:
    return " and ".join(names)
