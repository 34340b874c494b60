"""How every test runs: torch on one thread, with as little time as can be for memory, and never for ever.

Tests run side by side, and small tensors make threads wait more than work. A test that takes longer than `timeout` in
pyproject.toml fails, with the stacks of its threads and of the processes that it started. Where not even that helps
(its main thread stays in C code), the tester is ended 90 seconds later, stacks first.
"""

import ctypes
import faulthandler
import gc
import inspect
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import settings
from pytest_timeout import is_debugging

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start
# torch asks for the name behind the address of every connection to a store; a resolver that leaves out an answer now
# and then, as containers' do, is asked again after 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# What a tester frees it keeps for its next tensor. By glibc's own settings each large tensor is mapped anew, and the
# kernel has to clear its pages: a sixth of the time of the tests of networks. The processes that tests start have
# glibc's own settings, as a user's have. Numbers of <malloc.h>: M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD.
KEEP_MEMORY = {-4: 0, -1: 2**31 - 1, -2: 2**24}

QUICK, QUICK_EXAMPLES = bool(os.environ.get("PACELINE_TESTS_QUICK")), 10
LONG = bool(os.environ.get("PACELINE_TESTS_LONG"))
OF_ONE_TEST = "_hypothesis_internal_use_settings"  # where hypothesis keeps what a test's own @settings says
# A slow machine is no failure, and a test is no lottery. A law that names no examples has 30, in the long run 100.
settings.register_profile("paceline", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("long", settings.get_profile("paceline"), max_examples=100)
settings.register_profile("quick", settings.get_profile("paceline"), max_examples=QUICK_EXAMPLES)
settings.load_profile("quick" if QUICK else "long" if LONG else "paceline")


TESTS = Path(__file__).parent / "tests"
INTEGRATIONS = bool(os.environ.get("PACELINE_TESTS_INTEGRATIONS"))
FRAMEWORKS = ("huggingface", "lightning", "ray")
NEEDS_EXTRAS = {
    TESTS / "integrations",
    *(TESTS.parent / "src" / "paceline" / name for name in FRAMEWORKS),
    *(TESTS.parent / "docs" / f"{name}.md" for name in FRAMEWORKS),
}
OURS = ("tests.", "experiments.")
STARTERS = {"tests.warm", "subprocess", "multiprocessing", "torch.multiprocessing"}
COMPILERS, COMPILED_WITHIN_SECONDS = 2, 300.0
AGAIN_SECONDS, STUCK_SECONDS = 20.0, 90.0  # beyond a test's limit
STACKS = pytest.StashKey[str]()
_compilers = []
_stderr = os.dup(2)  # the terminal, whatever is captured


def pytest_configure(config):
    """Let SIGINT interrupt; let a tester keep its memory."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup: what tests start would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    libc = ctypes.CDLL(None)
    if hasattr(config, "workerinput") and hasattr(libc, "mallopt"):
        for setting, value in KEEP_MEMORY.items():
            libc.mallopt(setting, value)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
    """Fork all testers from one process that has loaded torch; while they look for tests, compile the kernels."""
    if not QUICK:  # few testers, which start no process
        from tests import warm

        command = [sys.executable, "-m", "tests.compiled"]
        parts = [[*command, str(part), str(COMPILERS)] for part in range(COMPILERS)]
        _compilers.extend(warm.Popen(part, cwd=TESTS.parent, finalized=False) for part in parts)
        subprocess.Popen = warm.Tester  # execnet starts testers by it


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished():
    """Begin no test before the kernels are there: each tester, and each process of its own, would compile them too."""
    while _compilers:
        _compilers.pop().wait(COMPILED_WITHIN_SECONDS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Start half as many testers more than there are cores: while one waits for an end or a silence, others compute.

    What `make quick` runs does not wait; there a tester more would only import torch once more.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS") or QUICK:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + (cores + 1) // 2


def pytest_ignore_collect(collection_path):
    """Leave what needs Trainer, Lightning or Ray to `make test-integrations`, what takes long to `make test-long`."""
    if not INTEGRATIONS and collection_path in NEEDS_EXTRAS:
        return True
    return True if not LONG and collection_path == TESTS / "long" else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Look for doctests in what users read, not in the tests, whose helpers would be imported for nothing."""
    found = yield
    hidden = TESTS in file_path.parents and file_path.parent.name != "oracles"
    return [one for one in found if not (isinstance(one, DoctestModule) and hidden)]


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Mark what starts processes, which `make quick` leaves out; there, no test tries more than a few examples.

    Tests that share a fixture of their module stay on one tester: each tester would make it again.
    """
    found: dict[object, bool] = {}
    for item in items:
        _stay_together(item)
        fixtures = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).values()
        functions = [getattr(item, "function", None), *(fixture.func for several in fixtures for fixture in several)]
        if any(_starts_processes(function, found) for function in functions):
            item.add_marker("processes")
        asked = getattr(functions[0], OF_ONE_TEST, None)
        if QUICK and asked is not None and asked.max_examples > QUICK_EXAMPLES:
            setattr(functions[0], OF_ONE_TEST, settings(asked, max_examples=QUICK_EXAMPLES))


def _stay_together(item):
    """Put a test into a group with those that share its module's fixtures, parameter by parameter."""
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    wide = [name for name, made in known.items() if made[-1].scope in ("module", "session") and made[-1].baseid]
    if wide and not item.get_closest_marker("xdist_group"):
        indices = getattr(getattr(item, "callspec", None), "indices", {})
        params = "-".join(str(indices[name]) for name in sorted(wide) if name in indices)
        item.add_marker(pytest.mark.xdist_group(f"{item.module.__name__}:{params}"))


def _starts_processes(thing, found):
    """Whether a function or class of the tests names what starts processes, or another that does."""
    thing = inspect.unwrap(getattr(getattr(thing, "hypothesis", None), "inner_test", thing))
    home = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None) or ""
    if home in STARTERS:
        return True
    if not home.startswith(OURS) or not (inspect.isfunction(thing) or inspect.isclass(thing)):
        return False
    if thing not in found:
        found[thing] = False  # while it is looked into: functions may name each other
        parts = [thing]
        if inspect.isclass(thing):
            members = [member for kind in thing.__mro__ for member in vars(kind).values()]
            parts = [getattr(member, "fget", getattr(member, "__func__", member)) for member in members]
        names = [value for part in map(inspect.unwrap, parts) if inspect.isfunction(part) for value in _named_by(part)]
        found[thing] = any(_starts_processes(value, found) for value in names)
    return found[thing]


def _named_by(function):
    """Yield the globals that a function's code names, and what it names of the tests' own modules."""
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            yield value
            if inspect.ismodule(value) and value.__name__.startswith(OURS):
                yield from (vars(value).get(other) for other in code.co_names)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Let the garbage collector pass over what stays until the end: torch, thousands of tests and their modules."""
    gc.collect()
    gc.freeze()


def pytest_timeout_set_timer(item, settings):
    """Interrupt the test when its time is over, again where its cleaning up hangs too, and else end the tester."""
    if not hasattr(signal, "SIGALRM"):
        return None

    def out_of_time(number, frame):
        if not is_debugging():
            item.stash.setdefault(STACKS, _stacks_of_all())
            pytest.fail(f"Timeout (>{settings.timeout:g} s)")

    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_SECONDS)
    faulthandler.dump_traceback_later(settings.timeout + STUCK_SECONDS, exit=True, file=_stderr)
    return True


def pytest_timeout_cancel_timer(item):
    """Stop what `pytest_timeout_set_timer` has begun."""
    if not hasattr(signal, "SIGALRM"):
        return None
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    return True


def _stacks_of_all():
    """Return the stacks of this process's threads and of the processes that tests have started, as text."""
    from tests import warm

    with tempfile.TemporaryFile("w+") as stacks:
        faulthandler.dump_traceback(stacks)
        stacks.seek(0)
        return stacks.read() + warm.stacks_of_children()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Show where threads and processes stood when the test's time was over."""
    report = yield
    if STACKS in item.stash:
        report.sections.append(("stacks when the time was over", item.stash[STACKS]))
    return report
