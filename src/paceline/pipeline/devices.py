"""What a model is placed on: devices in a row, and the links between neighbours.

    device 0 ──link 0── device 1 ──link 1── device 2
        └───────────────link 2─────────────────┘        only where a device holds several pieces

A device of speed 2 takes half the seconds that were measured. A link takes `latency + bytes / bytes per second` for a
message, the same in both directions, and nothing where there is nothing to send.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from paceline.decoding import Between
from paceline.pipeline.profile import MOST, Seconds, Whole


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device; `memory_bytes` is what a model may take of it, None for as much as it likes.

    >>> Device(name="gpu", speed=2.0, memory_bytes=8 * 2**30)
    Device(name='gpu', speed=2.0, memory_bytes=8589934592)
    >>> Device(speed=0)
    Traceback (most recent call last):
    ValueError: speed must be above 0 and finite (speed=0)
    """

    name: str = ""
    speed: Annotated[float, Between(0, MOST)] = 1.0
    memory_bytes: Whole | None = None

    def __post_init__(self) -> None:
        if not _is_real(self.speed) or not 0 < self.speed < math.inf:
            raise ValueError(f"speed must be above 0 and finite (speed={self.speed!r})")
        if self.memory_bytes is not None:
            whole_number("memory_bytes", self.memory_bytes, most=2**60)


@dataclass(frozen=True, kw_only=True)
class Link:
    """The connection between two devices.

    >>> Link(bytes_per_second=1000.0, latency_seconds=0.5).seconds(2000)
    2.5
    >>> Link(latency_seconds=0.5).seconds(0)
    0.0
    """

    bytes_per_second: Annotated[float, Between(0, MOST, infinite=True)] = math.inf
    latency_seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        if not _is_real(self.bytes_per_second) or not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be above 0 (bytes_per_second={self.bytes_per_second!r})")
        if not _is_real(self.latency_seconds) or not 0 <= self.latency_seconds < math.inf:
            given = f"latency_seconds={self.latency_seconds!r}"
            raise ValueError(f"latency_seconds must be at least 0 and finite ({given})")

    def seconds(self, message_bytes: int) -> float:
        """Return how long a message takes; an empty one is not sent."""
        return self.latency_seconds + message_bytes / self.bytes_per_second if message_bytes else 0.0


def ring(links: Link | Sequence[Link], devices: int, chunks: int) -> tuple[Link, ...]:
    """Return one link behind each device, the last one leading back to the first.

    One Link stands for all. Where each device holds one piece the way back is not used, and need not be given. A device
    that is alone hands pieces to itself, which takes no time.

    >>> ring(Link(latency_seconds=1.0), devices=2, chunks=1)
    (Link(bytes_per_second=inf, latency_seconds=1.0), Link(bytes_per_second=inf, latency_seconds=1.0))
    >>> ring([Link()], devices=2, chunks=2)
    Traceback (most recent call last):
    ValueError: links must be one Link, or 2 of them: the last leads back to the first device, as chunks=2 (links has 1)
    """
    if isinstance(links, Link):
        return (Link(),) if devices == 1 else (links,) * devices
    links = tuple(links)
    for link in links:
        if not isinstance(link, Link):
            raise TypeError(f"links must be a Link or several of them (found {link!r})")
    if len(links) == devices:
        return links
    if len(links) == devices - 1 and (chunks == 1 or devices == 1):
        return (*links, Link())
    needed = f"{devices} of them: the last leads back to the first device, as chunks={chunks}"
    if chunks == 1:
        needed = f"{devices - 1} of them, one between each device and the next"
    raise ValueError(f"links must be one Link, or {needed} (links has {len(links)})")


def whole_number(name: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """Return a whole number that is within its range; ValueError if it is not.

    >>> whole_number("chunks", 0)
    Traceback (most recent call last):
    ValueError: chunks must be a whole number of at least 1 (chunks=0)
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < least:
        raise ValueError(f"{name} must be a whole number of at least {least} ({name}={value!r})")
    if most is not None and int(value) > most:
        raise ValueError(f"{name} must be between {least} and {most} ({name}={value})")
    return int(value)


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
