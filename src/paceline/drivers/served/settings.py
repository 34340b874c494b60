"""The settings of a served run: what is trained, with whom, and how long the server waits for what."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from paceline.decoding import MOST_BLOCKS, MOST_COUNT, MOST_NUMBER
from paceline.errors import PacelineError
from paceline.strategies import STRATEGIES, Strategy
from paceline.training.train_state import Schedule
from paceline.training.training import Measurement, finite_or_none
from paceline.workers.flat import FlatModel

LEAST_SECONDS, MOST_SECONDS = 0.001, 10**9  # as messages can say them


class Measure(Protocol):
    """Measures a copy of the model."""

    def load(self, model: FlatModel) -> None:
        """Take over the parameters and buffers of the model that is trained."""

    def __call__(self) -> Measurement:
        """Measure the copy."""


class ServeError(PacelineError, ValueError):
    """A run that cannot be served as it is asked for: a setting, a folder or a checkpoint."""


class EvaluateError(ServeError):
    """An `evaluate` that raised, or returned no loss and no accuracy.

    >>> raise EvaluateError("evaluate must return ...")
    Traceback (most recent call last):
    paceline.drivers.served.settings.EvaluateError: evaluate must return ...
    """


def measured_values(returned: object) -> Measurement:
    """Return the loss, the accuracy and perhaps the test loss that a user's `evaluate` has returned.

    Raise EvaluateError if it has returned anything else.

    >>> measured_values((0.53, 0.91))
    Measurement(loss=0.53, accuracy=0.91, test_loss=None)
    >>> measured_values([torch.tensor(0.5), None, 0.625])
    Measurement(loss=0.5, accuracy=None, test_loss=0.625)
    >>> measured_values(0.53)
    Traceback (most recent call last):
    paceline.drivers.served.settings.EvaluateError: evaluate must return two numbers, the loss and the accuracy of the
    model it is given, as in (0.53, 0.91), and may return its test loss as a third; it returned a float: 0.53
    """
    try:
        found = [None if value is None else float(value) for value in returned]  # type: ignore[attr-defined]
        loss, accuracy, test_loss = [*found, None] if len(found) == 2 else found
        if loss is None:
            raise TypeError
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of more than one number
        shown = " ".join(repr(returned).split())
        raise EvaluateError(
            "evaluate must return two numbers, the loss and the accuracy of the model it is given, as in (0.53, 0.91), "
            "and may return its test loss as a third; "
            f"it returned a {type(returned).__name__}: {shown if len(shown) <= 80 else shown[:79] + '…'}"
        ) from None
    return Measurement(loss=loss, accuracy=accuracy, test_loss=finite_or_none(test_loss))


def measured_by(evaluate: Callable[[nn.Module], object], module: nn.Module) -> Measurement:
    """Return what a user's `evaluate` finds, or raise EvaluateError.

    >>> measured_by(lambda module: 1 / 0, nn.Identity())
    Traceback (most recent call last):
    paceline.drivers.served.settings.EvaluateError: evaluate raised ZeroDivisionError: division by zero
    """
    try:
        returned = evaluate(module)
    except Exception as error:
        raise EvaluateError(f"evaluate raised {type(error).__name__}: {error}") from error
    return measured_values(returned)


def _check_whole(name: str, value: object, *, least: int, most: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
        raise ServeError(f"{name} must be a whole number between {least} and {most:,} ({name}={value!r})")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the server waits, and how many may be there at once: every wait has an end.

    `silence`: a worker that says nothing for so long is gone. `stall`: so is a worker that has work and gets no further
    for so long. `gather`: how long the first round waits for all workers before it begins with those who came. `hello`
    and `joining`: from opening a stream to the first message, and from there to being ready. No wait is infinite.

    >>> Limits(silence_seconds=3).beat_seconds
    1.0
    """

    silence_seconds: float = 15.0
    stall_seconds: float = 120.0
    gather_seconds: float = 60.0
    hello_seconds: float = 10.0
    joining_seconds: float = 300.0
    farewell_seconds: float = 2.0
    most_strangers: int = 64
    most_bad_gradients: int = 3

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name.startswith("most_"):
                _check_whole(each.name, value, least=1, most=MOST_NUMBER)
                continue
            least = 0 if each.name == "gather_seconds" else LEAST_SECONDS
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (is_number and least <= value <= MOST_SECONDS):  # NaN is in no range
                raise ServeError(
                    f"{each.name} must be a number of seconds between {least:g} and {MOST_SECONDS:,} "
                    f"({each.name}={value!r})"
                )

    @property
    def beat_seconds(self) -> float:
        """How often the server sends a sign of life."""
        return self.silence_seconds / 3


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """All that a served run is made of; `recipe` is that of its beginning, which journal and checkpoints hold.

    `rounds` may be others than the recipe's, and `changes` are the settings that were given again with them.
    `recipe_defaults` are the values of settings that an older checkpoint's recipe lacks. `data` is a sketch of the data
    (`paceline.data.sketch`) that workers compare with theirs; a script's server has none.

    >>> ServerSettings.__dataclass_fields__["codec"].default
    'identity'
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule | None
    strategy: Strategy
    rounds: int
    workers: int
    folder: Path
    codec: str = "identity"
    blocks: int = 4
    seed: int = 0
    most_workers: int = 0
    limits: Limits = field(default_factory=Limits)
    measure: Measure | None = None
    evaluate_every: int = 10
    checkpoint_every: int = 50
    recipe: Mapping[str, Any] = field(default_factory=dict)
    recipe_defaults: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = {"workers": MOST_NUMBER, "most_workers": MOST_NUMBER, "blocks": MOST_BLOCKS}
        for name in ("rounds", "workers", "most_workers", "blocks", "evaluate_every", "checkpoint_every"):
            least = 0 if name == "most_workers" else 1  # 0: twice as many as workers
            _check_whole(name, getattr(self, name), least=least, most=most.get(name, MOST_COUNT))
        if 0 < self.most_workers < self.workers:
            raise ServeError(
                f"most_workers must be 0 or at least workers (most_workers={self.most_workers}, workers={self.workers})"
            )

    @property
    def recipe_of_workers(self) -> dict[str, Any]:
        """The recipe as it is now, for workers: with the run's rounds, and the settings that were given again."""
        if not self.recipe:
            return {}
        changed = {section: {**self.recipe.get(section, {}), **values} for section, values in self.changes.items()}
        return {**self.recipe, **changed, "rounds": self.rounds}

    @property
    def total(self) -> dict[str, Any]:
        """What an extension of the run changes, as checkpoints hold it."""
        return {"rounds": self.rounds, "changes": {name: dict(values) for name, values in self.changes.items()}}

    @property
    def strategy_name(self) -> str:
        """The name of the strategy."""
        return next(name for name, kind in STRATEGIES.items() if isinstance(self.strategy, kind))

    @property
    def identity(self) -> dict[str, Any]:
        """What makes a script's run this run and no other, as plain values: whoever resumes it gives the same.

        Rounds, limits, intervals and `most_workers` may change. The optimiser's numbers (rate, momentum) are those of
        the checkpoint, as whenever torch loads an optimiser's state.
        """
        return {
            "strategy": self.strategy_name,
            **dataclasses.asdict(self.strategy),
            "seed": self.seed,
            "workers": self.workers,
            "blocks": self.blocks,
            "optimizer": type(self.optimizer).__name__,
            "schedule": "none" if self.schedule is None else type(self.schedule).__name__,
        }
