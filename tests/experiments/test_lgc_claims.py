"""The claims on late gradients, judged on digits: which bars there are, and which lane must meet them."""

from __future__ import annotations

import pytest

from tests.experiments.telling import EXPERIMENTS, TOY, conclude, judged, swapped

LOSSES = {"full": 1.0, "fastest-k": 9.0, "lgc": 0.99}
SECONDS = {"full": 10.0, "fastest-k": 6.0, "lgc": 6.4}
OUTCOMES = {key: {"loss": LOSSES[key[3]], "seconds": SECONDS[key[3]]} for key in EXPERIMENTS["claims"].jobs(TOY)}


def test_whole_late_work_is_judged_by_four_bars_and_partial_work_is_reported():
    found = conclude("claims", OUTCOMES)
    assert [claim.judged for claim in found.claims] == [True] * 4 + [False] * 4
    assert all(claim.holds and claim.kind == "bar" for claim in found.claims)
    (table,) = found.tables
    assert [row[3:] for row in table.rows[:2]] == [("36.0 %", ">= 30.0 %"), ("0.990", "<= 1.030")]
    assert found.numbers["runs"]["complete 1 50 lgc"] == {"seconds": [6.4], "loss": [0.99]}


@pytest.mark.parametrize(
    ("lanes", "wrong"),
    [
        (("lgc", "fastest-k"), "loss"),
        (("lgc", "full"), "time saved by lgc"),
        (("full", "fastest-k"), "loss, fastest-k / full"),
    ],
)
def test_lanes_that_have_each_other_s_figures_miss_their_bars(lanes, wrong):
    assert all(judged("claims", OUTCOMES, wrong))
    assert not any(judged("claims", swapped(OUTCOMES, *lanes), wrong))


@pytest.mark.parametrize("lane", LOSSES)
def test_a_lane_that_diverged_meets_no_bar_of_its_loss(lane):
    gone = {key: found | {"loss": None} if key[3] == lane else found for key, found in OUTCOMES.items()}
    assert all(judged("claims", gone, "time saved"))
    assert not any(judged("claims", gone, "loss, lgc" if lane != "fastest-k" else "loss, fastest-k"))
