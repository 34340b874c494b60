"""Wait for what other threads and processes do: a question asked again and again, until its deadline.

until((folder / "port").exists, "the server's port")
until(lambda: rounds() > 30, "30 rounds", log=lambda: path.read_text(), process=server)
"""

from __future__ import annotations

import time

DEADLINE_SECONDS = 60.0


class Late(AssertionError):  # noqa: N818 - what happened
    """Something did not happen in time."""


def until(happened, what, *, seconds=DEADLINE_SECONDS, every_seconds=0.02, process=None, log=lambda: ""):
    """Ask until the answer is true, and return it.

    Args:
        happened: The question: a function of nothing.
        what: What is waited for; it stands in the failure.
        seconds: The deadline.
        every_seconds: The pause between two questions.
        process: Who is to bring it about: that it has ended by itself is a failure too.
        log: Called on failure, for what helps to find out why.
    """
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        code = None if process is None else process.poll()
        if code is not None:
            raise Late(f"{what}: the process has ended with {code}\n{log()}")
        if time.monotonic() > deadline:
            raise Late(f"{what}: not within {seconds:g} s\n{log()}")
        time.sleep(every_seconds)
    return found


def until_there(*paths, **settings):
    """Wait until all these files are there."""
    names = ", ".join(path.name for path in paths)
    until(lambda: all(path.exists() for path in paths), names, **settings)
