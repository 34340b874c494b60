"""No test hangs for ever: not where SIGINT is ignored, not where a process that it started never ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
ENDS_WITHIN_SECONDS = 240
HANGS = """
import signal, sys, threading, time
from tests import warm

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


def pytest_of(*arguments, **settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=ENDS_WITHIN_SECONDS, **settings
    )


def ignore_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.skipif(warm.FROM_NOTHING, reason="no process is forked here")
def test_where_interrupts_are_ignored_what_tests_start_can_be_interrupted():
    """`nohup make test &` ignores SIGINT; what tests started inherited that, and one waited for ever."""
    done = pytest_of("tests/test_warm.py", "-k", "an and interrupt", "--timeout", 60, preexec_fn=ignore_interrupts)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(warm.FROM_NOTHING, reason="no process is forked here")
def test_a_test_that_hangs_fails_and_tells_where_its_threads_and_processes_stood(tmp_path):
    file = tmp_path / "test_hangs.py"
    file.write_text(HANGS)
    done = pytest_of("-p", "conftest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, file, "--timeout", 120)
    assert done.returncode == 1, done.stdout
    assert "Timeout (>120 s)" in done.stdout
    assert "in beside" in done.stdout
    assert "in in_the_child" in done.stdout
