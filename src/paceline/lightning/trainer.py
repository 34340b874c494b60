"""What paceline's parts ask of a Trainer: that it is Lightning's, who its ranks are, and its loggers.

`lightning` and `pytorch_lightning` are the same code under two names, and their classes do not know each other: a
callback of one in a Trainer of the other is called, and every `isinstance` in it says no.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from paceline.errors import PacelineError
from paceline.loggers import prefixed

log = logging.getLogger("paceline.lightning")


class LightningError(PacelineError, ValueError):
    """What cannot be done in this Trainer, and what to give it instead.

    >>> raise LightningError("give Trainer(strategy='ddp')")
    Traceback (most recent call last):
    paceline.lightning.trainer.LightningError: give Trainer(strategy='ddp')
    """


def check_trainer(trainer: Any, part: str) -> None:
    """Refuse a Trainer of another package.

    >>> check_trainer(Trainer(barebones=True, accelerator="cpu"), "Compress")
    >>> check_trainer(object(), "Compress")
    Traceback (most recent call last):
    paceline.lightning.trainer.LightningError: paceline.lightning.Compress needs a Trainer of `lightning`, ...
    """
    if not isinstance(trainer, Trainer):
        kind = type(trainer)
        raise LightningError(
            f"paceline.lightning.{part} needs a Trainer of `lightning`, and this is {kind.__module__}.{kind.__name__}: "
            "write `import lightning` in place of `import pytorch_lightning` (pip install lightning)"
        )


def has_gradient_scaler(trainer: Any) -> bool:
    """Whether gradients are scaled on their way, as for float16."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def log_figures(trainer: Any, figures: Mapping[str, float]) -> None:
    """Give figures to all loggers of the Trainer, at its `log_every_n_steps`; call it when a batch ends.

    Lightning's own callbacks ask the same question (LearningRateMonitor): `log_every_n_steps` counts optimiser steps.
    """
    if trainer.loggers and not trainer.fit_loop._should_accumulate() and trainer._logger_connector.should_update_logs:
        for logger in trainer.loggers:
            logger.log_metrics(prefixed(figures), step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def tell(sentence: str) -> None:
    """Print a line where Lightning prints its own, on rank 0."""
    rank_zero_info(f"paceline: {sentence}")
