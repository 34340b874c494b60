"""Ranks on one machine: who is told of when they end, and how."""

from __future__ import annotations

import os
import signal
import time

import pytest

from paceline.drivers.collective.common import RankGoneError
from paceline.drivers.collective.launch import Ranks

DEADLINE_SECONDS = 60.0


def run(be_rank, tmp_path, world=3):
    return Ranks(be_rank, world, logs=tmp_path).wait()


def wait_for_ever(place):
    time.sleep(DEADLINE_SECONDS)
    return 0


def test_all_went_well(tmp_path):
    def fine(place):
        os.write(1, f"{place.rank} of {place.world}\n".encode())
        return 0

    assert run(fine, tmp_path) == 0
    assert (tmp_path / "rank-2.log").read_text() == "2 of 3\n"


def test_a_rank_that_ends_badly_is_named_with_its_last_words(tmp_path):
    def second_fails(place):
        os.write(2, b"starting\nthe disk is full\n")
        return 3 if place.rank == 1 else 0

    with pytest.raises(RankGoneError, match=r"^rank 1 ended with code 3: the disk is full$"):
        run(second_fails, tmp_path)


def test_one_that_a_signal_ended_is_named_rather_than_those_who_tell_of_it(tmp_path):
    def last_is_killed(place):
        if place.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    with pytest.raises(RankGoneError, match=r"^rank 2 was ended by SIGKILL$"):
        run(last_is_killed, tmp_path)


def test_what_rank_0_has_told_itself_is_not_told_again(tmp_path):
    assert run(lambda place: 2, tmp_path) == 2


def test_an_exception_ends_the_rank_and_nothing_else(tmp_path):
    def raises(place):
        if place.rank:
            raise ZeroDivisionError("not me")
        return 0

    with pytest.raises(RankGoneError, match=r"^rank 1 ended with code 1"):
        run(raises, tmp_path)


def test_those_who_never_end_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.drivers.collective.launch.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("paceline.drivers.collective.launch.END_SECONDS", 0.1)
    began = time.monotonic()

    def deaf(place):
        if place.rank == 1:
            return 4
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return wait_for_ever(place)

    ranks = Ranks(deaf, 3, logs=tmp_path)
    with pytest.raises(RankGoneError, match=r"^rank 1 ended with code 4$"):
        ranks.wait()
    for pid in ranks._pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert time.monotonic() - began < DEADLINE_SECONDS
