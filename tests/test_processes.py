"""The supervisor of forked processes: what it starts ends as it should, and is started while there are no threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from paceline import processes
from paceline.processes import Processes

DEADLINE_SECONDS = 60.0


@pytest.fixture
def children():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # children inherit what another test may have left
    children = Processes()
    yield children
    children.end()
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def sleep_for_ever():
    time.sleep(2 * DEADLINE_SECONDS)
    return 0


def test_codes_are_what_the_functions_return_or_the_signals_that_ended_them(children):
    children.fork(lambda: 0)
    children.fork(lambda: 3)
    children.fork(lambda: 1 // 0)
    children.fork(lambda: os.kill(os.getpid(), signal.SIGKILL) or 0)
    assert children.wait(DEADLINE_SECONDS) == [0, 3, 1, -signal.SIGKILL]
    assert children.running() == []


def test_a_wait_ends_with_the_first_failure_if_it_is_asked_to(children):
    children.fork(sleep_for_ever)
    children.fork(lambda: 5)
    assert children.wait(DEADLINE_SECONDS, until_failure=True) == [None, 5]
    children.send_signal(signal.SIGTERM)
    assert children.wait(DEADLINE_SECONDS) == [-signal.SIGTERM, 5]


def test_one_that_does_not_hear_sigterm_is_killed(children, monkeypatch):
    monkeypatch.setattr(processes, "END_SECONDS", 0.2)

    def deaf():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(told, b"deaf")
        return sleep_for_ever()

    hears, told = os.pipe()
    children.fork(deaf)
    assert os.read(hears, 4) == b"deaf"
    children.end()
    assert children.wait(DEADLINE_SECONDS) == [-signal.SIGKILL]
    for end in (hears, told):
        os.close(end)


def test_what_a_child_writes_goes_to_its_log(children, tmp_path):
    children.fork(lambda: os.write(1, b"out\n") + os.write(2, b"err\n") - 8, log=tmp_path / "log")
    assert children.wait(DEADLINE_SECONDS) == [0]
    assert (tmp_path / "log").read_text() == "out\nerr\n"


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux shows the threads of a process")
def test_a_process_that_has_only_imported_has_one_thread_when_it_forks():
    """Python 3.12 and later warn of a fork beside threads; those that imports start are gone by then."""
    script = """
import os, numpy, scipy.linalg, torch
import paceline.drivers.averaging.job
from paceline.processes import Processes
children = Processes()
children.fork(lambda: 0)
print(children.wait(), len(os.listdir("/proc/self/task")))
"""
    command = [sys.executable, "-W", "error::DeprecationWarning:paceline.processes", "-c", script]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert found.stdout.split("\n")[0] == "[0] 1", found.stderr


def test_exit_codes_are_known_where_signals_of_children_are_ignored():
    # As under some runners: the kernel then keeps no exit codes, and a wait for children finds none.
    program = (
        "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from paceline.processes import Processes\n"
        "children = Processes(); children.fork(lambda: 3); children.fork(lambda: 0); print(children.wait())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[3, 0]"
