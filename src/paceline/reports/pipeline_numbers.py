"""Times and sizes as the terminal writes them in a plan, and the unit that suits an axis."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time with about three digits.

    >>> duration(0.0000123), duration(0.0123), duration(1.23), duration(200)
    ('12 us', '12.3 ms', '1.23 s', '200 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            value = seconds / scale
            digits = 2 if value < 10 else 1 if value < 100 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def size(number_of_bytes: float) -> str:
    """Bytes with one decimal.

    >>> size(512), size(2_500_000), size(3_000_000_000)
    ('512 B', '2.5 MB', '3.0 GB')
    """
    unit, scale = size_unit(number_of_bytes)
    return f"{number_of_bytes / scale:.1f} {unit}" if scale > 1 else f"{number_of_bytes:.0f} B"


def time_unit(longest_seconds: float) -> tuple[str, float]:
    """The unit of an axis that reaches so far, and its length in seconds.

    >>> time_unit(2.5), time_unit(0.02), time_unit(0.0)
    (('s', 1.0), ('ms', 0.001), ('us', 1e-06))
    """
    return next(((unit, scale) for unit, scale in (("s", 1.0), ("ms", 1e-3)) if longest_seconds >= scale), ("us", 1e-6))


def size_unit(most_bytes: float) -> tuple[str, float]:
    """The unit of an axis of bytes that reaches so far.

    >>> size_unit(2_500_000), size_unit(10)
    (('MB', 1000000.0), ('B', 1.0))
    """
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next(((unit, scale) for unit, scale in units if most_bytes >= scale), ("B", 1.0))


def shortened(name: str, room: int) -> str:
    """A name in at most so many characters; its middle is left out.

    >>> shortened("encoder.layers.11.mlp.fc", 11)
    'encod…lp.fc'
    """
    if len(name) <= room:
        return name
    front = (room - 1) // 2
    return f"{name[:front]}…{name[len(name) - (room - 1 - front) :]}"
