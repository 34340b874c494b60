"""LocalRanks on one machine: who is told of when they end, and how."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from paceline.distributed import RankGoneError
from paceline.drivers.ranks.launch import LocalRanks
from paceline.drivers.ranks.rendezvous import joined
from tests.waiting import until

DEADLINE_SECONDS = 60.0


def run(be_rank, tmp_path, world=3):
    return LocalRanks(be_rank, world, logs=tmp_path).wait()


def wait_for_ever(place):
    time.sleep(2 * DEADLINE_SECONDS)
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
    monkeypatch.setattr("paceline.drivers.ranks.launch.GRACE_SECONDS", 0.1)
    monkeypatch.setattr("paceline.processes.END_SECONDS", 0.1)
    began = time.monotonic()

    def deaf(place):
        if place.rank == 1:
            return 4
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 1)  # SIG_IGN; Python would do it in the main thread only
        return wait_for_ever(place)

    ranks = LocalRanks(deaf, 3, logs=tmp_path)
    with pytest.raises(RankGoneError, match=r"^rank 1 ended with code 4$"):
        ranks.wait()
    until(lambda: not ranks.processes.running(), "all have ended")  # on a busy machine SIGKILL takes a while
    for pid in ranks.processes.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert time.monotonic() - began < DEADLINE_SECONDS


# -- ranks that do not outlive who started them, and never become it ---------------------------------------------------


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def leave_pid(folder):
    """What a rank does that is there for ever, once it has said who it is."""

    def be(place):
        said = folder / f"{place.rank}.pid"
        said.with_suffix(".new").write_text(str(os.getpid()))
        said.with_suffix(".new").rename(said)
        return wait_for_ever(place)

    return be


@pytest.fixture
def who_starts(tmp_path):
    """A process that starts three ranks and waits for them, and what it does on SIGTERM."""
    started = []

    def start(on_sigterm):
        pid = os.fork()
        if not pid:
            try:
                signal.signal(signal.SIGTERM, on_sigterm)
                LocalRanks(leave_pid(tmp_path), 3, logs=tmp_path).wait()
            finally:
                os._exit(7)
        started.append(pid)
        until(lambda: len(list(tmp_path.glob("*.pid"))) == 3, "the ranks start")
        return pid, [int(path.read_text()) for path in tmp_path.glob("*.pid")]

    yield start
    for pid in started:
        os.kill(pid, signal.SIGKILL)  # it is not reaped before: the number is nobody else's
        os.waitpid(pid, 0)


@pytest.mark.parametrize(
    ("on_sigterm", "number"),
    [(signal.default_int_handler, signal.SIGTERM), (signal.SIG_DFL, signal.SIGTERM), (signal.SIG_DFL, signal.SIGKILL)],
)
def test_however_the_one_who_started_them_ends_its_ranks_end(who_starts, on_sigterm, number):
    """They went on as orphans, and wrote checkpoints beside those of the next run."""
    starter, ranks = who_starts(on_sigterm)
    assert all(map(is_running, ranks))
    os.kill(starter, number)
    until(lambda: not any(map(is_running, [starter, *ranks])), "the ranks end with who started them")


def test_a_fork_that_fails_ends_those_that_were_forked_before(tmp_path, monkeypatch):
    fork, forked = os.fork, []

    def third_fails():
        if len(forked) == 2:
            raise BlockingIOError("no more processes")
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", third_fails)
    with pytest.raises(BlockingIOError):
        LocalRanks(wait_for_ever, 3, logs=tmp_path)
    assert len(forked) == 2
    for pid in forked:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_whose_reader_is_gone_ends_as_a_rank(tmp_path, monkeypatch):
    """It left the flush of a broken pipe by the exception, and went on as a second one who waits for the ranks."""

    class Broken:
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            if os.getpid() != starter:
                raise BrokenPipeError

    starter = os.getpid()
    monkeypatch.setattr(sys, "stdout", Broken())
    monkeypatch.setattr(sys, "stderr", Broken())
    assert run(lambda place: 0, tmp_path) == 0
    assert run(lambda place: 5, tmp_path) == 5
    with pytest.raises(RankGoneError, match=r"^rank 1 ended with code 1$"):
        run(lambda place: 1 // (1 - place.rank) - 1, tmp_path, world=2)
    assert os.getpid() == starter


# -- a death where nobody beats yet, or any more -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["before it meets the others", "when it has met them", "at the end"])
def test_a_rank_that_dies_outside_of_training_is_named(tmp_path, monkeypatch, stage):
    """While it loads data, before the first average, in the last words: the others wait for it, and are ended."""
    monkeypatch.setattr("paceline.drivers.ranks.launch.GRACE_SECONDS", 0.5)

    def be(place):
        dies = place.rank == 1
        if dies and stage == "before it meets the others":
            os.kill(os.getpid(), signal.SIGKILL)
        with joined(place, timeout_seconds=DEADLINE_SECONDS) as gather:
            if dies and stage == "when it has met them":
                os.kill(os.getpid(), signal.SIGKILL)
            gather.gather("begin to train", None)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            gather.gather("tell its times", None)
        return 0

    began = time.monotonic()
    with pytest.raises(RankGoneError, match=r"^rank 1 was ended by SIGKILL$"):
        run(be, tmp_path, world=2)
    assert time.monotonic() - began < DEADLINE_SECONDS


def test_a_rank_that_refuses_after_the_meeting_tells_the_others_at_once(tmp_path):
    def be(place):
        try:
            with joined(place, timeout_seconds=DEADLINE_SECONDS) as gather:
                if place.rank == 1:
                    raise ValueError("the disk is full")
                gather.gather("begin to train", None)
        except RankGoneError as error:
            (tmp_path / "said").write_text(str(error))
            return 3
        except ValueError:
            return 4
        return 0

    assert run(be, tmp_path, world=2) == 3
    assert (tmp_path / "said").read_text() == "rank 1 has left: ValueError: the disk is full (it was to begin to train)"
