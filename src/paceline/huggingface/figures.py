"""The parts of paceline that a Trainer carries, and their figures in Trainer's own log.

    compress(trainer, "qsgd")          trainer._paceline_parts = {"compression": ..., "pruning": ...}
    prune(trainer, "info-batch")                 │ figures() of each, at every log of training
                                                 ▼
    trainer.log({"loss": 2.3})         {"loss": 2.3, "paceline/sent_bytes": 81920.0, "paceline/pruned_share": 0.21}

A callback's `on_log` comes too late: by then Trainer has put the line into `state.log_history`, and whichever reporter
stands before that callback has already written it. So `trainer.log` itself is wrapped, once. Logs of an evaluation stay
as they are: the figures are those of training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import PacelineError
from paceline.loggers import prefixed

if TYPE_CHECKING:
    from transformers import Trainer

OF_TRAINING = ("loss", "train_loss")  # each log of training has one of these: while it runs, and at its end

APART = {
    frozenset({"averaging", "compression"}): "averaging keeps DDP away, whose gradients compress() would encode: give "
    "average() the codec",
    frozenset({"compression", "rounds"}): "rounds keep DDP away, whose gradients compress() would encode: give "
    "take_rounds() the codec",
    frozenset({"averaging", "rounds"}): "ranks that take rounds are equal after each, and nothing is left to average",
    frozenset({"pruning", "rounds"}): "a pruned epoch ends when all ranks have met, and ranks that take rounds come "
    "there at different times: it would wait for ever",
}


class PartsError(PacelineError, ValueError):
    """Parts of paceline that one Trainer cannot carry together.

    >>> raise PartsError("this trainer has compression already")
    Traceback (most recent call last):
    paceline.huggingface.figures.PartsError: this trainer has compression already
    """


class Part(Protocol):
    """What a Trainer carries: something with figures to log."""

    def figures(self) -> dict[str, float]:
        """Return the numbers worth logging now; none before training has begun."""


def check_part(trainer: Trainer, name: str) -> None:
    """Refuse a part that the trainer has already, or that cannot be beside one that it has."""
    parts: dict[str, Part] = getattr(trainer, "_paceline_parts", {})
    if name in parts:
        raise PartsError(f"this trainer has {name} already: make a new Trainer for another one")
    for other in parts:
        if (reason := APART.get(frozenset({name, other}))) is not None:
            raise PartsError(f"{name} and {other} cannot be in one Trainer: {reason}")


def add_part(trainer: Trainer, name: str, part: Part) -> None:
    """Let the trainer carry a part ("compression", "pruning", "averaging" or "rounds"), and log its figures.

    >>> class Bytes:
    ...     def figures(self):
    ...         return {"sent_bytes": 9.0}
    >>> class Trainer:
    ...     def log(self, logs, start_time=None):
    ...         print(logs)
    >>> trainer = Trainer()
    >>> add_part(trainer, "compression", Bytes())
    >>> trainer.log({"loss": 2.3})
    {'loss': 2.3, 'paceline/sent_bytes': 9.0}
    """
    check_part(trainer, name)
    if not hasattr(trainer, "_paceline_parts"):
        trainer._paceline_parts = {}
        _log_figures(trainer)
    trainer._paceline_parts[name] = part


def _log_figures(trainer: Trainer) -> None:
    plain_log = trainer.log

    def log(logs: dict[str, float], *more: Any, **named: Any) -> None:
        if any(name in logs for name in OF_TRAINING):
            for part in trainer._paceline_parts.values():
                logs |= prefixed(part.figures())
        plain_log(logs, *more, **named)

    trainer.log = log
