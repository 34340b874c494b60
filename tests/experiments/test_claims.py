"""How claims are judged: an order can be turned round, a limit can be missed, and nobody wins by not finishing."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.core.claims import ahead, falling, within
from experiments.core.story import NAN, Claim, Findings, Runs

FIGURES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=5, unique=True)


@given(FIGURES)
def test_of_all_orders_only_the_sorted_one_holds(values):
    for best, reverse in (("high", True), ("low", False)):
        for order in itertools.permutations(values):
            claim = ahead("an order", {f"lane {place}": value for place, value in enumerate(order)}, best=best)
            assert claim.holds == (list(order) == sorted(values, reverse=reverse))


def test_a_lane_must_be_ahead_by_more_than_the_margin_and_may_be_behind_by_as_much():
    assert ahead("ahead", {"a": 1.2, "b": 1.0}, best="high", by=0.1).holds
    assert not ahead("ahead", {"a": 1.05, "b": 1.0}, best="high", by=0.1).holds
    assert not ahead("ahead", {"a": 1.0, "b": 1.0}, best="high").holds
    assert ahead("not behind", {"a": 0.95, "b": 1.0}, best="high", by=0.1, strictly=False).holds
    assert not ahead("not behind", {"a": 0.85, "b": 1.0}, best="high", by=0.1, strictly=False).holds


@pytest.mark.parametrize("missing", [{"a": NAN, "b": 1.0}, {"a": 1.0, "b": NAN}, {"a": NAN, "b": NAN}])
@pytest.mark.parametrize("best", ["high", "low"])
@pytest.mark.parametrize("strictly", [True, False])
def test_a_figure_that_is_missing_makes_an_order_false(missing, best, strictly):
    claim = ahead("an order", missing, best=best, strictly=strictly)
    assert not claim.holds
    assert "none" in claim.because


def test_a_limit_holds_at_both_ends_and_not_beyond():
    assert [within("", value, least=1.0, most=2.0).holds for value in (0.99, 1.0, 2.0, 2.01)] == [
        False,
        True,
        True,
        False,
    ]
    assert not within("", NAN, most=2.0).holds


@given(FIGURES)
def test_what_falls_does_not_rise(values):
    down = sorted(values, reverse=True)
    assert falling("", down).holds
    assert not falling("", down, rising=True).holds
    assert falling("", down[::-1], rising=True).holds


def test_a_fall_may_pause_by_its_slack_but_must_come_down_in_all():
    assert falling("", [3.0, 1.0, 1.1], slack=0.2).holds
    assert not falling("", [3.0, 1.0, 1.3], slack=0.2).holds
    assert not falling("", [1.0, 1.1], slack=0.2).holds
    assert not falling("", [3.0, NAN, 1.0]).holds
    assert not falling("", [3.0]).holds


def test_a_mean_over_seeds_needs_every_seed():
    runs = Runs(all=[{"loss": 1.0}, {"loss": 3.0}], one=[{"loss": 1.0}, {"loss": None}])
    assert runs.mean("loss")["all"] == 2.0
    assert all(math.isnan(found["one"]) for found in (runs.mean("loss"), runs.spread("loss")))
    assert runs.mean("loss", lost=lambda key: 0.0)["one"] == 0.5


def test_what_is_not_judged_is_neither_met_nor_missed():
    claims = [
        Claim(kind="winner", text="a wins", holds=False, because="1 and 2", judged=judged) for judged in (True, False)
    ]
    findings = Findings(claims=claims)
    assert findings.missed == [claims[0]]
    assert claims[0].line.startswith("same winner: no, because 1 and 2")
    assert claims[1].line.startswith("reported: ")
