"""Processes that need not load torch: each is forked from one that has.

Loading torch, and what its first optimizer loads, takes four seconds of a core; most tests with real processes would
spend their time on nothing else. So one process per tester, the nursery, loads all of it once, and becomes what it is
asked to be: `python -m MODULE ...`, `python -c CODE` or `python FILE`. Everything else is as if it had been started
from nothing: its own arguments, folder, environment and files, an exit code, signals, and whoever asked as its parent:

    tester ---- "be `python -m paceline serve`, with these files" ----> nursery
       |                                                                   | forks
       |                                                                (midwife) --- forks ---> paceline serve
       |  <--------------- its number -------------------------------- (exits)                         |
       '--------------- its parent from now on: orphans go to the nearest subreaper -------------------'

`Popen` and `run` are those of `subprocess`, and start any other command as those do. A process that is started with
`nursing=True` has a nursery of its own, for what it starts itself (with `subprocess`, or with multiprocessing's spawn).
So has a `Tester`, for what it starts by this module: torch is loaded once for all testers and their nurseries.
Where nobody asks how Python ends, `finalized=False` ends a process as soon as its exit functions have run: to take all
modules to pieces copies 200 MB that a forked process shares with the nursery, in 0.4 seconds of a core.
Whoever is forked here writes its stacks to one file when it gets SIGUSR1, and so do the processes that it forks: when a
test hangs, `stacks_of_children` tells where each of them stands.

What only a first start can show (what is imported when, and in which order) is tested with `subprocess` itself; and
with PACELINE_TESTS_START_FROM_NOTHING=1 in the environment every process is started so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.process
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PR_SET_NAME, PR_SET_CHILD_SUBREAPER, CLONE_NEWNET = 15, 36, 0x40000000
NAME = b"nursery"  # /proc/PID/comm, for whoever counts children
OUT_OF_THE_WAY = 300  # files that are handed over wait up here until their places are free
ROOT = Path(__file__).parents[1]
FROM_NOTHING = bool(os.environ.get("PACELINE_TESTS_START_FROM_NOTHING")) or sys.platform != "linux"
BORN_WITHIN_SECONDS = 120.0  # the first waits for the nursery to load
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # a process with threads cannot be forked safely
COLD = subprocess.Popen
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
USUAL = {  # settings that the nursery does not know, and how they are unless somebody sets them
    "executable": (None,), "preexec_fn": (None,), "shell": (False,), "gid": (None,), "gids": (None,), "uid": (None,),
    "umask": (-1,), "process_group": (-1, None),
}  # fmt: skip

_libc = ctypes.CDLL(None, use_errno=True)


class Popen(COLD):
    """`subprocess.Popen`, but for commands of this Python, which are forked from the nursery."""

    role = "program"

    def __init__(self, args, *rest, nursing=False, finalized=True, **settings):
        self._finalized = finalized and not _unfinalized
        if nursing:
            self.role = "nursing program"
        super().__init__(args, *rest, **settings)

    def _execute_child(self, *given):
        """What `subprocess.Popen` does when the pipes are made."""
        told = inspect.signature(COLD._execute_child).bind(self, *given).arguments
        host, arguments = _of_this_python(told["args"])
        unusual = any(told.get(name, usual[0]) not in usual for name, usual in USUAL.items())
        if arguments is None or unusual or FROM_NOTHING:
            super()._execute_child(*given)
            return
        files = {number: number for number in (0, 1, 2, *told["pass_fds"])}
        ours = {0: told["p2cread"], 1: told["c2pwrite"], 2: told["errwrite"]}
        files |= {place: file for place, file in ours.items() if file != -1}
        self.pid = born(
            arguments, files, cwd=told["cwd"], env=told["env"], session=told["start_new_session"], host=host,
            role=self.role, finalized=self._finalized,
        )  # fmt: skip
        self._child_created = True
        self._close_pipe_fds(*(told[name] for name in PIPES))


class Tester(Popen):
    """A process in which tests run. It has a nursery of its own, and `subprocess` starts from nothing there."""

    role = "tester"


def run(args, *, timeout, check=False, capture_output=False, nursing=False, finalized=True, **settings):
    """`subprocess.run`, of which the tests need this much."""
    if capture_output:
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(args, nursing=nursing, finalized=finalized, **settings) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _of_this_python(args):
    """The network namespace and the arguments of a command of this Python; None for the arguments of another."""
    args, host = [args] if isinstance(args, str | bytes) else list(map(os.fspath, args)), None
    if args[:3] == ["ip", "netns", "exec"]:
        host, args = args[3], args[4:]
    known = args[0] == sys.executable and (args[1] in ("-m", "-c", "-u") or not args[1].startswith("-"))
    return host, args[1:] if known else None


# -- the tester's side --------------------------------------------------------------------------------------------

_nursery: socket.socket | None = None
_stacks = None  # the file to which processes write their stacks
_unfinalized = False  # this process, and so what it starts


def born(arguments, files, *, cwd=None, env=None, session=False, host=None, role="program", finalized=True):
    """Start a process; `files` says which of the caller's files has which number there. Returns its process id."""
    nursery = _open_nursery()
    order = {"arguments": arguments, "cwd": os.fspath(cwd or os.getcwd()), "session": session, "host": host}
    order |= {
        "env": dict(os.environ if env is None else env),
        "places": list(files),
        "role": role,
        "finalized": finalized,
    }
    nursery.settimeout(BORN_WITHIN_SECONDS)
    _adopting(True)
    try:
        _say(nursery, order, list(files.values()))
        answer, _ = _hear(nursery)
    except TimeoutError:
        raise TimeoutError(f"the nursery has not answered in {BORN_WITHIN_SECONDS:g} s") from None
    finally:
        _adopting(False)
    if answer is None:
        raise RuntimeError("the nursery is gone")
    return answer["pid"]


def _open_nursery():
    global _nursery, _stacks
    if _nursery is None:
        if os.environ.get("PACELINE_TESTS_QUICK"):
            raise RuntimeError("a process is started in `make quick`: conftest.py did not see that this test does")
        _nursery, theirs = socket.socketpair()
        _stacks = _file_for_stacks()
        with theirs:
            files = [theirs.fileno(), _stacks.fileno()]
            code = f"from tests.warm import nurse; nurse{tuple(files)}"  # its __main__ has nothing in it
            nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            nursery = COLD(
                [sys.executable, "-c", code],
                pass_fds=files,
                cwd=ROOT,
                env=os.environ | ONE_THREAD,
                **nothing,
            )
        atexit.register(_close_nursery, nursery)
    return _nursery


def _file_for_stacks():
    return tempfile.TemporaryFile("a+")


def _close_nursery(process):
    _nursery.close()
    process.wait(20)


def _adopting(willing):
    """Orphans among our descendants become our children, or not."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, int(willing), 0, 0, 0)


def stacks_of_children(within_seconds=10.0):
    """Return the stacks of all processes that descend from this one and were forked from the nursery, as text."""
    if _stacks is None:
        return ""
    _stacks.seek(0)
    _stacks.truncate()
    asked = [pid for pid in _descendants(os.getpid()) if _catches(pid, signal.SIGUSR1)]
    deadline, text = time.monotonic() + within_seconds, ""
    for pid in asked:  # one after the other, each to its end: a stack is written in many small pieces
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        before, last = text, None
        while time.monotonic() < deadline and (text == before or text != last):
            time.sleep(0.05)
            _stacks.seek(0)
            last, text = text, _stacks.read()
    _stacks.seek(0)
    return f"processes {asked}:\n{_stacks.read()}"


def _descendants(pid):
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _catches(pid, number):
    """Whether a process has a handler for a signal: else the signal would end it."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _say(connection, message, files=()):
    body = json.dumps(message).encode()
    socket.send_fds(connection, [len(body).to_bytes(4, "little")], files)
    connection.sendall(body)


def _hear(connection):
    """A message and the files that came with it; (None, []) when the other side is gone."""
    head, files, _, _ = socket.recv_fds(connection, 4, 64, socket.MSG_WAITALL)
    if len(head) < 4:
        return None, []
    body, size = b"", int.from_bytes(head, "little")
    while len(body) < size:
        piece = connection.recv(size - len(body))
        if not piece:
            return None, files
        body += piece
    return json.loads(body), files


# -- the nursery's side -------------------------------------------------------------------------------------------


def nurse(connection, stacks):
    """Be the nursery, and in each process that was asked for, whatever it is to be."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    _load()
    _write_stacks_to(stacks)
    os.close(stacks)
    connection = socket.socket(fileno=connection)
    while connection is not None:
        order, files = _next_order(connection)
        connection = _settle(order, files)
    if order["finalized"]:
        _be(*order["arguments"])
    else:
        _be_and_exit(*order["arguments"])


def _write_stacks_to(file):
    """Write this process's stacks there, and those of the processes that it forks, when one of them gets SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, file=fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY))


def _load():
    """All that the tests' processes would load."""
    sys.modules["pyarrow"] = None  # where it is installed, pandas loads it, and it starts a thread
    import numpy  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch._dynamo
    import torch.distributed.run  # noqa: F401

    import paceline

    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(Exception):  # who needs it is told
                importlib.import_module(module.name)
    del sys.modules["pyarrow"]
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    gc.freeze()


def _next_order(connection):
    """Fork whatever is asked for, until nobody asks; returns, with its order, in each process that was asked for."""
    _libc.prctl(PR_SET_NAME, NAME, 0, 0, 0)
    while True:
        order, files = _hear(connection)
        if order is None:
            os._exit(0)
        told, tell = os.pipe()
        adopted, adopt = os.pipe()
        midwife = os.fork()
        if midwife == 0:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            for end in (told, tell, adopt):
                os.close(end)
            connection.close()
            os.read(adopted, 1)  # until its parent is who asked for it
            os.close(adopted)
            return order, files
        os.waitpid(midwife, 0)
        child = int(os.read(told, 20))
        for end in (told, tell, adopted, adopt, *files):
            os.close(end)
        _say(connection, {"pid": child})


def _settle(order, files):
    """Take one's place; returns the connection of the nursery that this process is to be, None if it is to be none."""
    waiting = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, OUT_OF_THE_WAY) for file in files]
    for file in files:
        os.close(file)
    for file, place in zip(waiting, order["places"], strict=True):
        os.dup2(file, place)
        os.close(file)
    _libc.prctl(PR_SET_NAME, b"python", 0, 0, 0)
    if order["session"]:
        os.setsid()
    if order["host"]:
        _enter_host(order["host"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.modules["numpy"].random.seed()  # torch begins with the same seed in every process, numpy with another in each
    return None if order["role"] == "program" else _nurse_own(order["places"], order["role"])


def _enter_host(name):
    """As `ip netns exec` does."""
    namespace = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    if _libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {name}")
    os.close(namespace)


def _nurse_own(places, role):
    """A nursery for what this process starts, forked before there is a thread; there the connection is returned."""
    global _nursery, _stacks
    ours, theirs = socket.socketpair()
    _stacks = _file_for_stacks() if role == "tester" else None
    nursery = os.fork()
    if nursery == 0:
        ours.close()
        if _stacks is not None:
            _write_stacks_to(_stacks.fileno())
            _stacks = None
        nowhere = os.open(os.devnull, os.O_RDWR)
        for place in places:  # whoever waits for the end of a file waits for that process alone
            os.dup2(nowhere, place)
        os.close(nowhere)
        return theirs
    theirs.close()
    _nursery = ours
    if role == "tester":
        faulthandler.unregister(signal.SIGUSR1)  # it asks the others
        atexit.register(_close_nursery, _Forked(nursery))
        return None
    for module in list(sys.modules.values()):  # subprocess, and who has it from there
        if vars(module).get("Popen") is COLD:
            module.Popen = Popen
    importlib.import_module("multiprocessing.util").spawnv_passfds = _spawn
    return None


class _Forked:
    """A process that was forked here, to be waited for as `subprocess.Popen` is."""

    def __init__(self, pid):
        self._pid = pid

    def wait(self, seconds):
        deadline = time.monotonic() + seconds
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)


def _spawn(path, args, passfds):
    """How multiprocessing starts a Python; `args` are its name, options, and -c with what it is to run."""
    args = list(map(os.fsdecode, args))
    files = {place: place for place in (0, 1, 2, *passfds)}
    return born(args[args.index("-c") :], files, finalized=not _unfinalized)


def _be_and_exit(*arguments):
    """Be it, and exit without Python's finalization; an error ends the process as ever."""
    global _unfinalized
    _unfinalized, code = True, 0
    try:
        _be(*arguments)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _be(first, *arguments):
    """What Python does with its arguments. Whatever comes out of this, an exit or an error, ends the process."""
    importlib.invalidate_caches()
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    main = sys.modules["__main__"].__dict__
    sys.path[:1] = os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []
    if first == "-u":
        sys.stdout.reconfigure(line_buffering=True)
        first, *arguments = arguments
    if first == "-m":
        name = arguments[0]
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # it is __main__ now
        sys.argv = list(arguments)
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(name)
    elif first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        exec(compile(arguments[0], "<string>", "exec"), main)
    else:
        sys.argv = [first, *arguments]
        sys.path.insert(0, str(Path(first).parent.resolve()))
        main["__file__"] = os.path.abspath(first)
        exec(compile(Path(first).read_bytes(), main["__file__"], "exec"), main)
