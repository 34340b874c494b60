"""A process that is forked from the nursery does what one that is started from nothing does."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from tests import warm

pytestmark = pytest.mark.skipif(warm.FROM_NOTHING, reason="no process is forked here")
PROGRAM = """
import atexit, os, sys
atexit.register(lambda: print("the end"))
print(__name__, __file__, sys.argv, sys.path[:2], os.getcwd(), os.environ["WORD"], sys.stdin.read())
print("a word", file=sys.stderr)
"""
FROM_A_FORK = "import sys; print('torch' in sys.modules)"
SPAWNS = """
import multiprocessing, subprocess, sys

def loaded(answers):
    answers.put(("torch" in sys.modules, sys.argv))

if __name__ == "__main__":
    print(subprocess.run([sys.executable, "-c", "import sys; print('torch' in sys.modules)"], stdout=-1).stdout)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=loaded, args=(answers,))
    process.start()
    print(answers.get())
    process.join()
    print(process.exitcode)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "spawns.py").write_text(SPAWNS)
    return tmp_path


COMMANDS = {
    "a module": ["-m", "program", "a", "--b"],
    "a file": ["program.py", "a"],
    "a line": ["-c", "import sys; print(__name__, sys.argv, sys.path[:2], sys.stdin.read())", "a", "-m"],
    "what is set for the line after it": ["-c", "twice = lambda x: 2 * x\nprint([twice(x) for x in (1, 2)])"],
    "unbuffered": ["-u", "-c", "import os; print('said'); os._exit(3)"],
    "an exit code": ["-c", "raise SystemExit(7)"],
    "last words": ["-c", "raise SystemExit('no')"],
    "an error": ["-c", "import math\nmath.sqrt(-1)"],
    "a signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM); signal.pause()"],
    "an interrupt": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()"],
    "a module that is not there": ["-m", "nowhere"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_forked_or_started_from_nothing_it_says_the_same_and_ends_alike(command, folder):
    settings = {"cwd": folder, "env": os.environ | {"WORD": "word", "PYTHONPATH": "/there"}}
    settings |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    found = []
    for popen in (subprocess.Popen, warm.Popen, functools.partial(warm.Popen, finalized=False)):
        with popen([sys.executable, *command], **settings) as process:
            said, errors = process.communicate("asked", timeout=60)
        found.append((process.returncode, said, errors.splitlines()[-1:]))
    assert found == [found[0]] * 3


def test_it_has_loaded_torch_already_and_one_from_nothing_has_not():
    settings = {"capture_output": True, "text": True, "timeout": 60}
    command = [sys.executable, "-c", FROM_A_FORK]
    assert warm.run(command, **settings).stdout == "True\n"
    assert subprocess.run(command, check=False, **settings).stdout == "False\n"


def test_its_parent_is_who_started_it_and_a_new_session_is_its_own():
    program = "import os; print(os.getppid(), os.getsid(0) == os.getpid())"
    for session in (False, True):
        with warm.Popen([sys.executable, "-c", program], stdout=-1, text=True, start_new_session=session) as process:
            assert process.communicate(timeout=60)[0].split() == [str(os.getpid()), str(session)]


def test_files_that_are_passed_on_keep_their_numbers():
    reads, writes = os.pipe()
    program = f"import os; os.write({writes}, b'here')"
    assert warm.run([sys.executable, "-c", program], pass_fds=[writes], timeout=60).returncode == 0
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        assert told.read() == b"here"  # and then it ends: nobody else has that file


def test_it_is_ended_by_a_signal_and_waited_for_as_any_child():
    process = warm.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"], stdout=-1)
    with process:
        assert process.stdout.readline() == b"up\n"
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL


def test_a_run_that_takes_too_long_is_ended():
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.5)
    assert time.monotonic() - began < 60


def test_what_a_nursing_process_starts_is_forked_too(folder):
    done = warm.run([sys.executable, "spawns.py"], cwd=folder, nursing=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [r"b'True\n'", "(True, ['spawns.py'])", "0"], done.stderr


def test_any_other_command_is_started_as_ever(tmp_path):
    done = warm.run(["sh", "-c", "pwd; exit 5"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (5, f"{tmp_path}\n")
