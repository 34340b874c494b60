"""The parts of which strategies' states are made, as readers: what a checkpoint says is checked before it is loaded.

A state's `form` names its fields and their readers, beside the `state_dict` that writes them.
"""

from __future__ import annotations

from typing import Any

from paceline.decoding import list_reader, must_be, reader_of

COUNT = reader_of(int, (0, 2**53))  # of steps or samples: whole numbers that a float holds
WORKER = reader_of(int, (0, 1_000_000))
WORKERS = list_reader(WORKER)
SECONDS = reader_of(float, (0, 1e16))
SHARE = reader_of(float, (0, 1))


def nothing(value: Any) -> tuple[()]:
    """Read a list that is empty wherever a state is kept, which is between two rounds.

    >>> nothing([])
    ()
    """
    if value != []:
        raise must_be("empty between two rounds", value)
    return ()
