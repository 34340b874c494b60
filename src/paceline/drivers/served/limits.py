"""How long the server waits, and for how many: every wait has an end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times in seconds, and how many may be there at once.

    `silence`: a worker that says nothing for so long is gone. `stall`: so is one that has work and gets no further.
    `gather`: how long the first round waits for all workers before it begins with those who came. `hello` and
    `joining`: from opening a stream to the first message, and from there to being ready.

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
        for name in ("silence_seconds", "stall_seconds", "hello_seconds", "joining_seconds", "farewell_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0 ({name}={getattr(self, name)})")

    @property
    def beat_seconds(self) -> float:
        """How often each side says that it is alive."""
        return self.silence_seconds / 3
