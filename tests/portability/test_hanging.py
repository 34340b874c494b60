"""No test hangs for ever: not where SIGINT is ignored, not where a process that it started never ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_SECONDS = 240
pytestmark = [
    pytest.mark.skipif(warm.FROM_NOTHING, reason="no process is forked here"),
    pytest.mark.xdist_group("hanging"),  # one run for both
]
HANGS = """
import signal, sys, threading, time
from tests import test_warm, warm

def test_that_is_interrupted(tmp_path):
    test_warm.test_forked_or_started_from_nothing_it_says_the_same_and_ends_alike(
        test_warm.COMMANDS["an interrupt"], tmp_path
    )

def beside():
    time.sleep(600)

def test_that_hangs():
    threading.Thread(target=beside, daemon=True).start()
    code = "import os, time\\ndef in_the_child(): print('up', flush=True); time.sleep(600)\\nin_the_child()"
    process = warm.Popen([sys.executable, "-c", code], stdout=-1)
    try:
        process.stdout.readline()
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # its time is over now, not in two minutes
        process.wait()
    finally:
        process.kill()
"""


def ignore_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What pytest prints of two tests, one that is interrupted and one that hangs; it is started as by `nohup`."""
    file = tmp_path_factory.mktemp("tests") / "test_hangs.py"
    file.write_text(HANGS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rpf",
        "-p",
        "no:xdist",
        "-p",
        "conftest",
        "-c",
        ROOT / "pyproject.toml",
    ]
    done = subprocess.run(
        [*command, "--rootdir", ROOT, file, "--timeout", "120"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=ENDS_WITHIN_SECONDS,
        preexec_fn=ignore_interrupts,
    )
    assert done.returncode == 1, done.stdout
    return done.stdout


def test_where_interrupts_are_ignored_what_tests_start_can_be_interrupted(printed):
    """`nohup make test &` ignores SIGINT; what tests started inherited that, and one waited for ever."""
    assert re.search(r"PASSED .*test_that_is_interrupted", printed), printed


def test_a_test_that_hangs_fails_and_tells_where_its_threads_and_processes_stood(printed):
    assert re.search(r"FAILED .*test_that_hangs", printed), printed
    assert "Timeout (>120 s)" in printed
    assert "in beside" in printed
    assert "in in_the_child" in printed
