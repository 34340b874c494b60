"""Numbers as people say them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time as people say it.

    >>> duration(0.0000123), duration(0.0123), duration(1.23), duration(200)
    ('12 us', '12.3 ms', '1.23 s', '200 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            value = seconds / scale
            return (
                f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
            )
    return f"{seconds * 1e6:.0f} us"


def size(number_of_bytes: float) -> str:
    """Bytes as people say them.

    >>> size(512), size(2_500_000), size(3_000_000_000)
    ('512 B', '2.5 MB', '3.0 GB')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number_of_bytes >= scale:
            return f"{number_of_bytes / scale:.1f} {unit}"
    return f"{number_of_bytes:.0f} B"
