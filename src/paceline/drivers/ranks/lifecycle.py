"""The life of something that ranks do together: it ends once, in good order or with its first error.

with ... as sync:     __exit__ ── no error ──> close: all ranks leave together
                               └─ an error ──> _fail keeps it, _end lets go of everything at once
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

from paceline.distributed import first_line


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

    def __init__(self) -> None:
        self._ended = False
        self._failure: BaseException | None = None

    @abstractmethod
    def close(self) -> None:
        """End with all ranks together."""

    @abstractmethod
    def _end(self) -> None:
        """Let go of threads, hooks and the group, once."""

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
