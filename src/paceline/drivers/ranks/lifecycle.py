"""The life of something that ranks do together: it ends once, in good order or with its first error.

constructor:          _constructing ── an error ──> the others hear of it, and nothing is left behind
with ... as sync:     __exit__ ── no error ──> close: all ranks leave together
                               └─ an error ──> _fail keeps it, _end lets go of everything at once
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, Self

from paceline.distributed import first_line
from paceline.distributed.stores import private_store
from paceline.drivers.ranks.group import RankGroup
from paceline.drivers.ranks.heartbeats import Heartbeats


class RankLifecycle(ABC):
    """The base of averaging and rounds; `has_ended` are the words of errors after the end, which are `error_type`s.

    >>> class Walk(RankLifecycle):
    ...     has_ended, error_type = "the walk has ended", RuntimeError
    ...     def close(self): self._end()
    ...     def _end(self): self._ended = True
    >>> with Walk() as walk:
    ...     pass
    >>> walk._check_alive()
    Traceback (most recent call last):
    RuntimeError: the walk has ended: this was closed
    """

    has_ended: ClassVar[str]
    error_type: ClassVar[type[Exception]]
    _group: RankGroup
    _heartbeats: Heartbeats

    def __init__(self) -> None:
        self._ended = False
        self._failure: BaseException | None = None

    @abstractmethod
    def close(self) -> None:
        """End with all ranks together."""

    @abstractmethod
    def _end(self) -> None:
        """Let go of threads, hooks and the group, once."""

    @contextmanager
    def _constructing(self) -> Iterator[None]:
        """Where one rank's constructor fails when the ranks have met, tell the others why, and leave nothing behind."""
        try:
            yield
        except BaseException as error:
            if hasattr(self, "_heartbeats"):
                self._heartbeats.stop(reason_of(error))
            self._group.close(pending=False)
            raise

    def _begin_heartbeats(self, name: str, silence_seconds: float) -> None:
        """Tell the others from now on that this rank lives, or why not; `name` is that of the ranks' work."""
        group = self._group
        self._heartbeats = Heartbeats(private_store(name), group.ranks, group.rank, silence_seconds=silence_seconds)
        self._heartbeats.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._fail(error)
            self._end()

    def _fail(self, error: BaseException) -> None:
        """Keep the first error."""
        if self._failure is None:
            self._failure = error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self.error_type(f"{self.has_ended} with an error: {first_line(self._failure)}") from self._failure
        if self._ended:
            raise self.error_type(f"{self.has_ended}: this was closed")


def reason_of(error: BaseException | None) -> str:
    """Return an error as the reason why a rank leaves; "" if there is none.

    >>> reason_of(ValueError("no such rank")), reason_of(None)
    ('ValueError: no such rank', '')
    """
    return "" if error is None else f"{type(error).__name__}: {first_line(error)}"
