"""Where the figures of a run go: a log is any function of figures, by name, and the step that they are of.

    log(figures: dict[str, float], step: int)

It is the form that loggers have anyway, so most of them are logs as they are, and there is no interface of handlers and
back-ends to adapt to:

    run = wandb.init(project="mine")                sync = paceline.HPSGD(model, optimizer, log=run.log)
    mlflow.start_run()                              sync = paceline.HPSGD(model, optimizer, log=mlflow.log_metrics)
    writer = paceline.loggers.tensorboard("runs")   sync = paceline.HPSGD(model, optimizer, log=writer)

Every part that may be given a log has `figures()` too, for who would rather ask: bytes, waits, late and dropped work.
Each rank has figures of its own; give a log to one of them, usually rank 0.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from paceline.errors import PacelineError
from paceline.user_code import find, is_code

log = logging.getLogger("paceline")

__all__ = ["GuardedLog", "Log", "LoggerError", "TensorBoardLog", "every", "prefixed", "tensorboard"]

Log: TypeAlias = Callable[[dict[str, float], int], object]
PREFIX, TENSORBOARD = "paceline/", "tensorboard"


class LoggerError(PacelineError, ValueError):
    """A logger that cannot be had here.

    >>> raise LoggerError("TensorBoard is not installed")
    Traceback (most recent call last):
    paceline.loggers.LoggerError: TensorBoard is not installed
    """


def prefixed(figures: Mapping[str, float]) -> dict[str, float]:
    """Return figures by the names that they have in a logger, where others log too.

    >>> prefixed({"sent_bytes": 1024})
    {'paceline/sent_bytes': 1024}
    """
    return {f"{PREFIX}{name}": value for name, value in figures.items()}


def every(steps: int, to: Log) -> Log:
    """Return a log that passes on what is at least so many steps after the last that it has passed on.

    >>> log = every(10, lambda figures, step: print(step))
    >>> for step in range(25):
    ...     log({}, step)
    0
    10
    20
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1 (steps={steps})")
    last: int | None = None

    def pass_on(figures: dict[str, float], step: int) -> None:
        nonlocal last
        if last is None or step >= last + steps or step < last:  # less: training has begun again
            last = step
            to(figures, step)

    return pass_on


class GuardedLog:
    """Hands figures to a log; one that fails is told of once, and not called again: training goes on.

    >>> guarded = GuardedLog(lambda figures, step: print(figures, step))
    >>> guarded({"late": 3}, 7)
    {'paceline/late': 3} 7
    >>> GuardedLog(None)({"late": 3}, 7)
    """

    def __init__(self, to: Log | None) -> None:
        if to is not None and not callable(to):
            raise ValueError(f"log must be a function of figures and a step, such as run.log (it is {to!r:.60})")
        self._to = to

    def __bool__(self) -> bool:
        return self._to is not None

    def __call__(self, figures: Mapping[str, float], step: int) -> None:
        if self._to is None:
            return
        try:
            self._to(prefixed(figures), step)
        except Exception as error:  # whatever a logger raises: the run is worth more
            self._to = None
            log.warning("nothing is logged any more: the log failed at step %d with %r", step, error)


class TensorBoardLog:
    """A log that writes event files, for `tensorboard --logdir`; made by `tensorboard`. Close it at the end.

    Its folder is made when the first figures come: a run that is refused leaves nothing behind.
    """

    def __init__(self, open_writer: Callable[[], Any]) -> None:
        self._open_writer = open_writer
        self._writer: Any = None

    def __call__(self, figures: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            self._writer = self._open_writer()
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is not written yet."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def tensorboard(folder: str | Path) -> TensorBoardLog:
    """Return a log that writes to a folder for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LoggerError(
            f"TensorBoard is not installed: pip install 'paceline[tensorboard]' (or tensorboard); {error}"
        ) from error
    return TensorBoardLog(functools.partial(SummaryWriter, str(folder)))


def check_log(name: str) -> None:
    """Refuse what names no log, before anything is begun.

    >>> check_log("tensorbord")
    Traceback (most recent call last):
    paceline.loggers.LoggerError: unknown log 'tensorbord'; give tensorboard, or a function of your own as ...
    """
    if name == TENSORBOARD:
        try:
            import tensorboard as _  # noqa: F401
        except ImportError as error:
            raise LoggerError("--log tensorboard: it is not installed; pip install 'paceline[tensorboard]'") from error
    elif is_code(name):
        found = find("log", name)
        if not callable(found):
            raise LoggerError(f"--log {name} names a {type(found).__name__}; name a function of figures and a step")
    elif name:
        raise LoggerError(
            f"unknown log {name!r}; give {TENSORBOARD}, or a function of your own as module:function, "
            "such as my_logs:log"
        )


def named_log(name: str, folder: Path) -> Log | None:
    """Return the log that was named on a command line for a run in a folder; None where none was.

    >>> named_log("", Path("runs/train")) is None
    True
    """
    check_log(name)
    if name == TENSORBOARD:
        return tensorboard(folder / TENSORBOARD)
    found: Log | None = find("log", name) if name else None
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
