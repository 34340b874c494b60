"""How the processes end: soon, with the exit code that their error has, none of them aborted."""

from __future__ import annotations

import pytest

from tests.distributed.lives import Lives


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    return Lives("tests.rounds.scenes", tmp_path_factory.mktemp("lives"))


@pytest.mark.parametrize("number", range(2))
def test_who_closes_and_ends_takes_the_end_from_nobody(lives, number):
    """Rank 0 keeps the store: it may not be gone before all have read that all leave."""
    codes, said = lives(f"closed-{number}")
    assert codes == [0, 0], said


@pytest.mark.parametrize("number", range(6))
def test_scripts_that_forget_to_close_end_with_their_last_line_and_abort_never(lives, number):
    """One may hear that the other has come to its end, or that the store is gone with it: an error, and no signal."""
    codes, said = lives(f"unclosed-{number}")
    for code, words in zip(codes, said, strict=True):
        assert code == 0 or (code == 1 and "RankGoneError: rank" in words), (codes, said)
    assert 0 in codes


def test_who_goes_on_hears_that_another_has_come_to_the_end_of_its_script(lives):
    codes, said = lives("unclosed_alone")
    assert codes == [1, 0], said
    assert "RankGoneError: rank 1 has left: RoundsError: the end of its script, without close()" in said[0]


def test_an_error_of_the_rank_that_keeps_the_store_is_heard_before_the_store_is_gone(lives):
    codes, said = lives("raised")
    assert codes == [1, 1], said
    assert "ZeroDivisionError: out of luck" in said[0]
    assert "RankGoneError: rank 0 has left: ZeroDivisionError: out of luck" in said[1]


def test_a_report_to_a_store_that_does_not_answer_is_not_waited_for(lives):
    (code,), (_, said) = lives("frozen")
    assert code == 1, said
    assert "RankGoneError: rank 0 is gone" in said
