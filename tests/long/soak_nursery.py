"""`python -m tests.long.soak_nursery`: forks workers and bad guests on demand, from a process that has torch loaded.

    stdin:   {"kind": "worker", "address": "127.0.0.1:40001", "number": 3, "seed": 17}    a line per child
    stdout:  {"started": 4711, "kind": "worker"}      {"ended": 4711, "code": -9}

It never opens a connection and never starts a thread: only so are its children sound. Good workers, and the processes
of runs beside, end as any Python process does; bad guests just end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from typing import Any

from paceline.processes import end_with_parent
from tests.long.soak_guests import be_guest

POLL_SECONDS = 0.02


def main() -> int:
    """Fork and reap until standard input ends."""
    import sklearn.datasets  # noqa: F401 - slow to import: once for all, before the forks
    import torch
    import torch._dynamo  # what the first optimiser loads: two seconds

    import paceline.cli
    import paceline.drivers.served.job
    import paceline.drivers.served.run
    import paceline.runs.cluster
    import paceline.training  # noqa: F401

    torch.set_num_threads(1)
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell({"ready": True})
    rest = b""
    while True:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            data = os.read(0, 65536)
            if not data:
                return 0
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                start(json.loads(line))
        reap()


def start(order: dict[str, Any]) -> None:
    """Fork a child for an order."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # a worker is told to leave once it knows how to
    pid = os.fork()
    if pid == 0:
        _child(order)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    tell({"started": pid, "kind": order["kind"]})


def _child(order: dict[str, Any]) -> None:
    """Do what was ordered, and end: SystemExit goes up to the interpreter's own end."""
    code = 1
    try:
        end_with_parent()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        be_guest(order)
        code = 0
    except SystemExit:
        raise
    except BaseException as error:
        print(f"{order['kind']} {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr)
        if not isinstance(error, OSError):
            traceback.print_exc()
    sys.stderr.flush()
    if order["kind"] == "worker":
        sys.exit(code)
    os._exit(code)


def reap() -> None:
    """Tell who has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def tell(what: dict[str, Any]) -> None:
    """One line to whoever started us."""
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
