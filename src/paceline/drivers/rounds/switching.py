"""How often a thread that is busy in Python hands over Python's lock, while rounds are open.

The exchange thread asks for the lock a few times a round, and gets it after sys.getswitchinterval() each time; that is
5 ms by default. Measured with 4 ranks, one of them busy in Python (benchmark `lgc-ranks`, part `python-lock`): a round
of 13 ms takes 24 to 35 ms at the default, and 16 to 17 ms at SWITCH_SECONDS.
"""

from __future__ import annotations

import sys

SWITCH_SECONDS = 0.0005  # how often a thread that is busy in Python hands over its lock; Python's default is 5 ms

_OPEN: list[float] = []  # for each open synchronizer: the switch interval that it found


def release_lock_often() -> None:
    """Let the lock change hands often, until as many calls of `release_lock_rarely` have come."""
    _OPEN.append(sys.getswitchinterval())
    sys.setswitchinterval(min(SWITCH_SECONDS, _OPEN[0]))


def release_lock_rarely() -> None:
    """Go back to what was before, if this is the last."""
    found = _OPEN[0]
    _OPEN.pop()
    if not _OPEN:
        sys.setswitchinterval(found)
