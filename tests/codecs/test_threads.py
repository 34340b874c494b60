"""Work over threads: all of it, once, and the same whoever does it; in a forked child too."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs import QSGD, machine_code
from tests.contracts.codec_variants import seeded, vector_of

DEADLINE_SECONDS = 60


@pytest.fixture
def three_threads(monkeypatch):
    monkeypatch.setattr(machine_code, "LEAST_ELEMENTS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


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


def test_a_thread_that_gets_no_turn_is_not_waited_for_and_one_that_gets_one_takes_its_share(three_threads):
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


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_part_raises_comes_through(place):
    def fails(first, last):
        if first == place:
            raise ArithmeticError(f"unit {first}")
        return first

    with pytest.raises(ArithmeticError, match=f"unit {place}"):
        machine_code.in_threads(fails, 3, machine_code.LEAST_ELEMENTS, most=3)


def test_many_senders_at_once_send_what_each_would_alone(three_threads):
    codec, vector = QSGD(levels=7), vector_of("normal", 30_011, 1)
    alone = [codec.encode(vector, seeded(seed)) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: codec.encode(vector, seeded(seed)), range(12)))
        vectors = list(pool.map(codec.decode, together))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert all(torch.equal(codec.decode(payload), found) for payload, found in zip(alone, vectors, strict=True))


def _encode_in_child(vector: torch.Tensor, answers) -> None:
    answers.send_bytes(bytes(QSGD().encode(vector, seeded(1)).tolist()))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork here")
def test_a_forked_child_makes_threads_of_its_own(three_threads):
    vector = vector_of("normal", 30_011, 1)
    ours = QSGD().encode(vector, seeded(1))  # now there are threads, and a child has none of them
    context = multiprocessing.get_context("fork")
    answers, to_us = context.Pipe(duplex=False)
    child = context.Process(target=_encode_in_child, args=(vector, to_us), daemon=True)
    child.start()
    try:
        assert answers.poll(DEADLINE_SECONDS), "the child waits for threads that it does not have"
        assert answers.recv_bytes() == bytes(ours.tolist())
    finally:
        child.kill()
        child.join(DEADLINE_SECONDS)
