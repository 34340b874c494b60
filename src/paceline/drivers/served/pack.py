"""N workers on this machine from one process that has loaded torch already.

    train --- the pack's parent: imports torch once, then forks
                |--- worker 0
                |--- worker 1 ...

Importing torch takes a second or two of processor time, and forking takes milliseconds. No thread is started before the
fork (gRPC starts its own with the first connection). A child ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def run_pack(numbers: Sequence[int], work: Callable[[int], None]) -> int:
    """Fork a child per number, run `work` in it, and wait for all; returns how many ended with an error."""
    end_with_parent()
    children: dict[int, int] = {}
    for number in numbers:
        pid = os.fork()
        if pid == 0:
            _child(number, work)
        children[pid] = number

    def pass_on(signum: int, frame: object) -> None:
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to every child itself
    failed = 0
    while children:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            break
        if pid in children:
            del children[pid]
            failed += bool(status)
    return failed


def _child(number: int, work: Callable[[int], None]) -> None:
    code = 1
    try:
        end_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server says when it is over
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work(number)
        code = 0
    except (OSError, ValueError) as error:
        print(f"paceline: worker {number}: {' '.join(str(error).split())}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def end_with_parent() -> None:
    """Ask the system to end this process when its parent ends (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
