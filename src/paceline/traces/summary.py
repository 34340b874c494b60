"""A trace in one line: the row of a table, the entry of a machine-readable result."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.traces.records import Evaluation, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run came to. `loss` and `accuracy` are None where nothing was trained or training diverged.

    >>> Summary(strategy="full", seed=0, rounds=1, seconds=2.0, loss=None, accuracy=None,
    ...         seconds_to_target=None, used=3, late=0, dropped=0).seconds
    2.0
    """

    strategy: str
    seed: int
    rounds: int
    seconds: float
    loss: float | None
    accuracy: float | None
    seconds_to_target: float | None
    used: int
    late: int
    dropped: int


def summarise(trace: Trace) -> Summary:
    """The line a trace comes to.

    >>> summarise(Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0)).rounds
    5
    """
    last = trace.evaluations[-1] if trace.evaluations and not trace.diverged else None
    return Summary(
        strategy=trace.strategy,
        seed=trace.seed,
        rounds=trace.rounds_done,
        seconds=trace.seconds,
        loss=last.loss if last else None,
        accuracy=last.accuracy if last else None,
        seconds_to_target=seconds_to_target(trace),
        used=trace.used,
        late=trace.late,
        dropped=sum(trace.dropped.values()),
    )


def seconds_to_target(trace: Trace) -> float | None:
    """When the training loss first reached the recipe's target, between evaluations on a straight line.

    >>> seconds_to_target(Trace(strategy="full", seed=0, workers=2, recipe={}, rounds_done=5, seconds=1.0))
    """
    target: float | None = trace.recipe.get("target_loss")
    if target is None:
        return None
    before: Evaluation | None = None
    for evaluation in trace.evaluations:
        if evaluation.loss <= target:
            if before is None:
                return evaluation.seconds
            share = (before.loss - target) / (before.loss - evaluation.loss)
            return before.seconds + share * (evaluation.seconds - before.seconds)
        before = evaluation
    return None
