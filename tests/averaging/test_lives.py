"""How the processes end: soon, with the exit code that their error has, and with nothing held on to."""

from __future__ import annotations

import pytest

from tests.distributed.lives import Lives


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    return Lives("tests.averaging.scenes", tmp_path_factory.mktemp("lives"))


def test_a_rank_that_names_a_frozen_one_exits_as_any_error_does_and_does_not_wait_for_it(lives):
    """An average is under way, whose timeout is ten minutes: the exit takes less, and is no SIGABRT."""
    (code,), (said, _) = lives("stopped")
    assert code == 1, said
    assert "RankGoneError: rank 1 is gone: not heard of for" in said


def test_a_script_that_forgets_to_close_ends_with_its_last_line(lives):
    (code,), (said, _) = lives("unclosed")
    assert code == 0, said
    assert "under way True" in said


def test_a_second_process_group_in_one_process_finds_the_port_free(lives):
    codes, said = lives("twice")
    assert codes == [0, 0], said
    assert [each.split() for each in said] == [["6", "6"]] * 2


def test_a_rank_that_never_begins_is_waited_for_no_longer_than_the_timeout(lives):
    codes, (said, other) = lives("late")
    assert codes == [1, 0], (said, other)
    assert "RankGoneError: rank 0 waited 1.5 s for rank 1 to begin averaging" in said
