"""Whoever waits for the compiler is told so, once; and kernels are as they must be."""

import importlib
import logging
import math
import pkgutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import paceline.codecs
import paceline.training
from paceline.codecs import kernels, machine_code

DEADLINE_SECONDS = 30


class Slow:
    """A kernel that compiles until somebody is told, and has nothing to compile the second time."""

    def __init__(self, told: threading.Event) -> None:
        self.signatures: list[str] = []
        self.stats = SimpleNamespace(cache_misses={"int64": 1}, cache_path=None)
        self._told = told

    def __call__(self, number: int) -> int:
        assert self.signatures or self._told.wait(DEADLINE_SECONDS)
        self.signatures.append("int64")
        return number + 1


def _check_that_no_timer_runs() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(DEADLINE_SECONDS)  # one that was cancelled goes at once
            assert not thread.is_alive()


@pytest.fixture
def told(monkeypatch):
    event = threading.Event()
    monkeypatch.setattr(machine_code, "_announced", event)
    monkeypatch.setattr(machine_code, "ANNOUNCED_AFTER_SECONDS", 0.001)
    return event


def test_compiling_is_told_once_in_a_process(told, caplog):
    slow = Slow(told)
    assert machine_code.call(slow, 1) == 2
    assert machine_code.call(slow, 2) == 3
    assert machine_code.call(Slow(told), 3) == 4
    _check_that_no_timer_runs()  # the first may be in the middle of its sentence
    records = [record for record in caplog.records if record.name == "paceline.codecs"]
    assert [record.levelno for record in records] == [logging.WARNING]
    assert "compiles its kernels for this machine" in records[0].message


def test_of_processes_that_compile_at_the_same_time_one_says_so(tmp_path):
    code = (
        "import sys; from paceline.codecs.machine_code import _is_first_to_compile as first;"
        "print(first(sys.argv[1]), flush=True); sys.stdin.read()"
    )
    folder = tmp_path / "cache"
    first = subprocess.Popen(
        [sys.executable, "-c", code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == "True\n"
    assert not machine_code._is_first_to_compile(str(folder))
    first.communicate(timeout=DEADLINE_SECONDS)  # it has compiled: whoever compiles now compiles anew
    assert machine_code._is_first_to_compile(str(folder))
    assert list(folder.iterdir()) == []


def test_what_is_quick_is_not_told_and_leaves_no_timer(told, monkeypatch, caplog):
    monkeypatch.setattr(machine_code, "ANNOUNCED_AFTER_SECONDS", 10 * DEADLINE_SECONDS)
    told.set()
    assert machine_code.call(Slow(told), 1) == 2
    _check_that_no_timer_runs()
    assert not caplog.records


def test_loading_what_was_compiled_before_is_not_told(told, caplog):
    loading = Slow(told)
    loading.stats.cache_misses.clear()
    machine_code._announce(loading)
    assert not caplog.records
    assert not told.is_set()


def test_what_a_kernel_raises_comes_through_and_leaves_no_timer(told):
    def fails(number):
        raise ZeroDivisionError

    fails.signatures = []
    with pytest.raises(ZeroDivisionError):
        machine_code.call(fails, 1)
    _check_that_no_timer_runs()


def test_kernels_release_python_s_lock_divide_as_numpy_does_and_are_kept_on_disk():
    @machine_code.kernel
    def divided(left, right):
        return left / right

    assert divided(1.0, 0.0) == math.inf
    for kernel in (kernels.qsgd_encode, kernels.qsgd_decode, kernels.one_bit_encode, kernels.one_bit_decode):
        assert kernel.targetoptions["nogil"]
        assert kernel.stats.cache_path


def kernels_in(module):
    """The kernels that a module can name, by the name."""
    return {name: each for name, each in vars(module).items() if hasattr(each, "py_func")}


def calls_elsewhere(module):
    """Calls of a module's own kernels to what stands in another file."""
    for name, kernel in kernels_in(module).items():
        if kernel.py_func.__module__ == module.__name__:
            for called in kernel.py_func.__code__.co_names:
                found = vars(module).get(called)
                home = getattr(getattr(found, "py_func", found), "__module__", None) if callable(found) else None
                if str(home).startswith("paceline") and home != module.__name__:
                    yield f"{module.__name__}.{name} calls {home}.{called}"


def test_a_kernel_calls_no_function_of_another_file():
    """What is kept on disk is compiled anew when the kernel's own file changes: a helper's file is not looked at."""
    packages = (paceline.codecs, paceline.training)
    modules = [
        importlib.import_module(f"{package.__name__}.{each.name}")
        for package in packages
        for each in pkgutil.iter_modules(package.__path__)
    ]
    assert len({kernel for module in modules for kernel in kernels_in(module).values()}) > 30
    assert [call for module in modules for call in calls_elsewhere(module)] == []


folded = kernels.folded


def total(lanes):
    return folded(lanes)


def test_a_call_to_a_kernel_of_another_file_is_found():
    module = SimpleNamespace(__name__=__name__, folded=folded, total=SimpleNamespace(py_func=total))
    assert list(calls_elsewhere(module)) == [f"{__name__}.total calls paceline.codecs.kernels.folded"]
