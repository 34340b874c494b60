"""What a message costs: latency, the worker's link, the server's link."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.simulated.network import Direction, Network

rates = st.floats(1e3, 1e9)
sizes = st.integers(1, 10**6)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(worker=rates, server=rates, latency=st.floats(0, 1), size=sizes, at=st.floats(0, 100))
def test_a_single_message_takes_the_latency_and_its_bits_through_the_narrower_link(worker, server, latency, size, at):
    network = Network(latency_seconds=latency, worker_bits_per_second=worker, server_bits_per_second=server)
    arrival = Direction(network, workers=1).arrival(worker=0, at_seconds=at, message_bytes=size)
    assert arrival == pytest.approx(at + latency + size * 8 / min(worker, server), rel=1e-12)


def test_a_free_network_costs_the_latency_alone_however_much_is_sent():
    direction = Direction(Network(latency_seconds=0.25), workers=2)
    assert [direction.arrival(worker=0, at_seconds=1.0, message_bytes=10**9) for _ in range(3)] == [1.25] * 3


@settings(deadline=None, max_examples=50, derandomize=True)
@given(size=sizes, server=rates, count=st.integers(1, 8))
def test_the_servers_link_carries_one_message_after_the_other(size, server, count):
    direction = Direction(Network(server_bits_per_second=server), workers=count)
    arrivals = [direction.arrival(worker=w, at_seconds=0.0, message_bytes=size) for w in range(count)]
    assert arrivals == pytest.approx([(n + 1) * size * 8 / server for n in range(count)])


def test_workers_own_links_do_not_disturb_each_other():
    direction = Direction(Network(worker_bits_per_second=8.0), workers=3)
    assert [direction.arrival(worker=w, at_seconds=0.0, message_bytes=5) for w in (0, 1, 2, 0)] == [5, 5, 5, 10]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(
    messages=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.integers(1, 1000)), min_size=1, max_size=20),
    worker=st.floats(1e2, 1e5),
    server=st.floats(1e2, 1e5),
)
def test_no_link_carries_more_bits_than_it_has_time_for(messages, worker, server):
    """Conservation: the last arrival is no earlier than the busy time of any link, and links send in order."""
    direction = Direction(Network(worker_bits_per_second=worker, server_bits_per_second=server), workers=4)
    at, arrivals, bits = 0.0, [], [0, 0, 0, 0]
    for sender, wait, size in messages:
        at += wait
        bits[sender] += 8 * size
        arrivals.append((sender, at, size, direction.arrival(worker=sender, at_seconds=at, message_bytes=size)))
    first = arrivals[0][1]
    last = max(arrival for *_, arrival in arrivals)
    assert last >= first + sum(bits) / server * (1 - 1e-12)
    for one in range(4):
        own = [(ready, size, arrival) for sender, ready, size, arrival in arrivals if sender == one]
        assert [arrival for *_, arrival in own] == sorted(arrival for *_, arrival in own)
        if own:
            assert own[-1][2] >= own[0][0] + bits[one] / worker * (1 - 1e-12)
        assert all(arrival >= ready + 8 * size / min(worker, server) * (1 - 1e-12) for ready, size, arrival in own)


def test_a_worker_with_a_queue_on_its_own_link_does_not_hold_up_the_others():
    """Worker 0 has three messages to send over its slow link; the server's fast link is idle meanwhile."""
    network = Network(worker_bits_per_second=8.0, server_bits_per_second=8000.0)
    direction = Direction(network, workers=2)
    for _ in range(3):
        direction.arrival(worker=0, at_seconds=0.0, message_bytes=10)
    assert direction.arrival(worker=1, at_seconds=0.0, message_bytes=10) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"latency_seconds": -0.1}, "latency_seconds=-0.1"),
        ({"latency_seconds": math.nan}, "latency_seconds=nan"),
        ({"worker_bits_per_second": 0.0}, "worker_bits_per_second=0.0"),
        ({"server_bits_per_second": -5.0}, "server_bits_per_second=-5.0"),
        ({"server_bits_per_second": math.nan}, "server_bits_per_second=nan"),
    ],
)
def test_bad_values_are_refused_with_what_was_given(bad, message):
    with pytest.raises(ValueError, match=message):
        Network(**bad)
