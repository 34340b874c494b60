"""The laws of the seats, whoever comes and goes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drivers.served.membership import NoSeatError, Seats

SHARDS, MOST = 3, 5
WISHES = (None, *range(MOST + 2))

_seat = st.tuples(st.just("seat"), st.sampled_from(WISHES))
_leave = st.tuples(st.just("leave"), st.integers(0, MOST))
_draw = st.tuples(st.just("draw"), st.integers(0, MOST - 1), st.integers(0, 9))
_again = st.tuples(st.just("again"))
histories = st.lists(_seat | _seat | _leave | _draw | _again, max_size=40)


def play(moves):
    """Let the moves happen; after each: the seats, who is seated (number -> shard), what was asked and answered."""
    seats, held = Seats(shards=SHARDS, most=MOST), {}
    for kind, *values in moves:
        answer, before = None, dict(held)
        if kind == "seat":
            try:
                answer = seats.take(wish=values[0])
                held[answer.worker] = answer.shard
            except NoSeatError:
                answer = "no room"
        elif kind == "leave":
            seats.release(values[0])
            held.pop(values[0], None)
        elif kind == "draw":
            seats.drawn(*values)
        else:
            state = seats.state_dict()
            seats = Seats(shards=SHARDS, most=MOST)
            seats.load_state_dict(state)
            held.clear()
        yield seats, before, held, (kind, *values), answer


@given(moves=histories)
def test_no_number_is_given_twice_and_there_is_room_until_the_most_are_there(moves):
    for seats, before, held, (kind, *_), answer in play(moves):
        assert len(seats._held) == len(held) <= MOST
        if kind == "seat":
            assert (answer == "no room") == (len(before) == MOST)
            if answer != "no room":
                assert answer.worker not in before
                assert 0 <= answer.worker < MOST


@given(moves=histories)
def test_a_shard_is_held_by_whoever_has_its_number_and_shared_only_when_all_are_held(moves):
    for _, before, _, (kind, *_), answer in play(moves):
        if kind != "seat" or answer == "no room":
            continue
        if answer.worker < SHARDS:
            assert answer.shard == answer.worker
        else:
            assert set(range(SHARDS)) <= set(before), "a shard was free"
            holders = Counter(before.values())
            assert holders[answer.shard] == min(holders[shard] for shard in range(SHARDS))


@given(moves=histories)
def test_a_wish_is_granted_if_its_number_is_free_and_no_shard_would_stay_without_a_worker(moves):
    for _, before, _, (kind, *values), answer in play(moves):
        if kind != "seat" or answer == "no room" or values[0] is None:
            continue
        wish = values[0]
        free_shard = any(shard not in before for shard in range(SHARDS))
        if wish < MOST and wish not in before and (wish < SHARDS or not free_shard):
            assert answer.worker == wish


@given(moves=histories)
def test_no_batch_that_has_arrived_is_given_out_again(moves):
    furthest = Counter()
    for seats, _, _, (kind, *values), answer in play(moves):
        if kind == "draw":
            worker, draw = values
            furthest[worker] = max(furthest[worker], draw + 1)
        if kind == "seat" and answer != "no room":
            assert answer.first_draw == furthest[answer.worker]
        assert [seats.next_draw(worker) for worker in range(MOST)] == [furthest[worker] for worker in range(MOST)]


def test_seats_without_room_for_its_shards_is_refused():
    with pytest.raises(ValueError, match="shards=3, most=2"):
        Seats(shards=3, most=2)
