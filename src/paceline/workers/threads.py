"""How many threads torch gets for a model.

A pass of a small network is shorter than the time its threads take to meet, many times so where other processes want
the cores too. The rule goes by the model alone, never by a measurement: the number of threads is part of what makes a
result the same to the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

SMALL_MODEL_PARAMETERS = 300_000


def can_start(threads: int) -> bool:
    """Return whether this process may have so many threads at once, by starting them; torch would end the process.

    >>> can_start(4)
    True
    """
    over = threading.Event()
    started = []
    try:
        for _ in range(threads):
            each = threading.Thread(target=over.wait, daemon=True)
            each.start()
            started.append(each)
    except (RuntimeError, MemoryError):
        return False
    finally:
        over.set()
        for each in started:
            each.join()
    return True


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch use this number of threads, and as many as before afterwards.

    >>> with torch_threads(1):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(parameters: int) -> AbstractContextManager[None]:
    """Use one thread for a small model; for any other, as many as torch was set to.

    >>> with threads_for(1000):
    ...     torch.get_num_threads()
    1
    """
    return torch_threads(1 if parameters < SMALL_MODEL_PARAMETERS else torch.get_num_threads())
