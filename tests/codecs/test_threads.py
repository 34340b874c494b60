"""Work over threads, torch's or our own: all of it, once, and the same whoever does it; in a forked child too."""

import math
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs import QSGD, machine_code
from paceline.processes import in_new_thread
from tests.contracts.codec_variants import seeded, vector_of

DEADLINE_SECONDS = 60


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setattr(machine_code, "LEAST_ELEMENTS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def use_team(monkeypatch, used):
    monkeypatch.setattr(machine_code, "LATE_SECONDS", math.inf)
    monkeypatch.setattr(machine_code._team, "_calls_without", 0 if used else 10**9)
    monkeypatch.setattr(machine_code._team, "_forked_thread", None)  # a tester is forked before torch has any threads


@pytest.fixture(params=["team", "pool"])
def either(request, monkeypatch):
    if request.param == "team" and machine_code._parallel_region() is None:
        pytest.skip("this torch has no threads of GNU's OpenMP")
    use_team(monkeypatch, request.param == "team")


@given(units=st.integers(0, 50), unit_elements=st.sampled_from((1, 4096, 65_536, 10**6)), most=st.integers(1, 6))
def test_every_unit_is_worked_on_once_and_in_order(units, unit_elements, most):
    parts = machine_code.in_threads(lambda first, last: (first, last), units, unit_elements, most=most)
    assert [unit for first, last in parts for unit in range(first, last)] == list(range(units))
    assert len(parts) <= max(1, units * unit_elements // machine_code.LEAST_ELEMENTS)
    assert len(parts) == 1 or most > 1


def test_threads_are_not_woken_for_little():
    here = threading.get_ident()
    ran = machine_code.in_threads(lambda first, last: threading.get_ident(), 1, machine_code.LEAST_ELEMENTS, most=4)
    assert ran == [here]


def test_a_thread_that_gets_no_turn_is_not_waited_for_and_one_that_gets_one_takes_its_share(three_threads, monkeypatch):
    use_team(monkeypatch, False)
    busy, free = threading.Event(), threading.Event()
    pool = machine_code._pool(3)
    held = [pool.submit(lambda: (busy.set(), free.wait(DEADLINE_SECONDS))) for _ in range(2)]
    assert busy.wait(DEADLINE_SECONDS)
    here = threading.get_ident()
    assert set(machine_code.in_threads(lambda first, last: threading.get_ident(), 24, 1)) == {here}
    free.set()
    assert all(future.result(DEADLINE_SECONDS) for future in held)
    met = threading.Barrier(3, timeout=DEADLINE_SECONDS)  # only three threads at once get past it
    assert len(machine_code.in_threads(lambda first, last: met.wait(), 24, 1)) == 24


@pytest.mark.skipif(machine_code._parallel_region() is None, reason="this torch has no threads of GNU's OpenMP")
def test_kernels_run_on_the_threads_that_torch_has_and_start_none(three_threads, monkeypatch):
    use_team(monkeypatch, True)
    torch.ones(300_000).add_(1.0)  # now torch has its threads
    before = set(os.listdir("/proc/self/task"))
    met = threading.Barrier(3, timeout=DEADLINE_SECONDS)
    ran = machine_code.in_threads(lambda first, last: (met.wait(), threading.get_native_id())[1], 24, 1)
    assert len(set(ran)) == 3
    assert {str(thread) for thread in ran} <= before


@pytest.mark.skipif(machine_code._parallel_region() is None, reason="this torch has no threads of GNU's OpenMP")
def test_a_team_whose_thread_comes_late_is_left_alone_for_a_while(three_threads, monkeypatch):
    use_team(monkeypatch, True)
    monkeypatch.setattr(machine_code, "LATE_SECONDS", -1.0)
    used = []
    for _ in range(machine_code.CALLS_WITHOUT_TEAM + 3):
        before = machine_code._team._calls_without
        assert sum(machine_code.in_threads(lambda first, last: last - first, 24, 1)) == 24
        used.append(machine_code._team._calls_without > before)
    assert [call for call, late in enumerate(used) if late] == [0, machine_code.CALLS_WITHOUT_TEAM + 1]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_part_raises_comes_through(place, either):
    def fails(first, last):
        if first == place:
            raise ArithmeticError(f"unit {first}")
        return first

    with pytest.raises(ArithmeticError, match=f"unit {place}"):
        machine_code.in_threads(fails, 3, machine_code.LEAST_ELEMENTS, most=3)


def test_many_senders_at_once_send_what_each_would_alone(three_threads, either):
    codec, vector = QSGD(levels=7), vector_of("normal", 30_011, 1)
    alone = [codec.encode(vector, seeded(seed)) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: codec.encode(vector, seeded(seed)), range(12)))
        vectors = list(pool.map(codec.decode, together))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert all(torch.equal(codec.decode(payload), found) for payload, found in zip(alone, vectors, strict=True))


def _encode_in_child(vector: torch.Tensor, answers) -> None:
    def encoded() -> bytes:
        return bytes(QSGD().encode(vector, seeded(1)).tolist())

    answers.send_bytes(encoded() + in_new_thread(encoded))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork here")
def test_a_forked_child_makes_threads_of_its_own(three_threads, either):
    vector = vector_of("normal", 30_011, 1)
    for _ in range(2):  # the first loads the kernels
        ours = QSGD().encode(vector, seeded(1))
    # Now there are threads, and a child has none of them.
    context = multiprocessing.get_context("fork")
    answers, to_us = context.Pipe(duplex=False)
    child = context.Process(target=_encode_in_child, args=(vector, to_us), daemon=True)
    child.start()
    try:
        assert answers.poll(DEADLINE_SECONDS), "the child waits for threads that it does not have"
        assert answers.recv_bytes() == 2 * bytes(ours.tolist())
    finally:
        child.kill()
        child.join(DEADLINE_SECONDS)
