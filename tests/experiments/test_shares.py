"""What measures rounds and shares on ranks: which turns count, what is judged, what a missing figure does."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from experiments.core.inside import InsideTime, around_nothing
from experiments.core.story import NAN, Claim, Size
from experiments.timings import lgc_ranks, lgc_ranks_round, shares, shares_lgc, watch
from experiments.timings.lgc_ranks import DDP, DOCUMENTED, measured_network, saving_rows, slow_rows, slow_seeds
from experiments.timings.lgc_ranks_round import BUSY, PLAIN, Plan, link_rows, lock_rows, round_rows
from experiments.timings.shares import BALANCE, KEPT, SCENARIOS, tell_accuracy, tell_jitter, tell_overhead
from experiments.timings.shares_lgc import FIGURES, delays
from paceline.drivers.rounds.switching import SWITCH_SECONDS
from paceline.drivers.simulated.network import ring_seconds
from tests.experiments.telling import EXPERIMENTS, TOY

FAMILY = ("lgc-ranks", "shares", "shares-lgc", "watch")


def _claims(telling):
    return {told.text: told for told in telling if isinstance(told, Claim)}


def _lines_are(monkeypatch, module, answer):
    """Let a module's ranks be answered for: `answer` returns the lines of a job, given its labels."""

    def told_by_ranks(name, ranks, job, labels, **more):
        lines = answer(job, labels)
        assert len(lines) == len(labels)
        return lines
        yield  # a generator, as ranks' is

    monkeypatch.setattr(module, "told_by_ranks", told_by_ranks)


# -- the list ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILY)
def test_they_are_listed_as_timings(name):
    assert EXPERIMENTS[name].of == "timings"


@pytest.mark.parametrize(("name", "part"), [("lgc-ranks", "rounds"), ("shares", "paces")])
def test_a_part_that_is_not_among_them_is_refused(name, part):
    with pytest.raises(ValueError, match=f"unknown part of {name} '{part}'"):
        EXPERIMENTS[name].tell(TOY, dict, parts=(part,))


# -- lgc-ranks ---------------------------------------------------------------------------------------------------------


def _turn(lane, seconds, rounds=(1.0,), processor=1.0):
    return {"lane": lane, "seconds": seconds, "rounds": list(rounds), "processor_seconds": processor}


def test_the_best_turn_of_each_lane_counts_and_the_median_of_all_its_rounds():
    rows = round_rows(
        [_turn(PLAIN, 2.0, [1.0, 3.0], 4.0), _turn("full", 9.0), _turn(PLAIN, 1.0, [5.0], 8.0), _turn("full", 1.5)]
    )
    assert rows[PLAIN] == {
        "best": 1.0, "median": 3.0, "processor": 4.0, "best_ratio": 1.0, "median_ratio": 1.0, "processor_ratio": 1.0
    }  # fmt: skip
    assert (rows["full"]["best_ratio"], rows["full"]["processor_ratio"]) == (1.5, 0.25)


def test_lanes_of_a_round_take_turns_and_each_writes_a_line():
    plan = Plan(part="round", address="", ranks=4, elements=1, turns=2, rounds=1)
    lanes = [PLAIN, "torch: ddp", "full", "lgc, K=3"]
    assert [(turn, lane) for turn, lane, _ in plan.lanes] == [(turn, lane) for turn in (0, 1) for lane in lanes]
    assert len(plan.labels) == 1 + len(plan.lanes)


def test_ranks_and_server_take_turns_on_the_link():
    plan = Plan(part="link", address="", ranks=4, elements=1, turns=2, rounds=1)
    once = [("full", PLAIN), ("full", "ranks"), ("full", "server"), ("lgc, K=3", "ranks"), ("lgc, K=3", "server")]
    assert [lane for _, *lane in plan.lanes] == [list(lane) for lane in once] * 2


@pytest.mark.parametrize(("ratio", "holds"), [(1.3, True), (1.31, False), (NAN, False)])
def test_a_round_is_held_against_the_plain_loop(monkeypatch, ratio, holds):
    lines = [_turn(PLAIN, 1.0), _turn("torch: ddp", 9.0), _turn("full", ratio), _turn("lgc, K=1", 1.0)]
    parts = {"parts": {"pack": 0.001}, "costs": DOCUMENTED["round"]}
    _lines_are(monkeypatch, lgc_ranks_round, lambda job, labels: [parts, *lines])
    found = EXPERIMENTS["lgc-ranks"].tell(TOY, dict, parts=("round",))
    assert [claim.holds for claim in found.claims] == [holds, True]


def test_the_best_turn_of_each_interval_counts_where_a_rank_is_busy(monkeypatch):
    turns = [
        {"busy": busy, "switch_seconds": interval, "seconds": seconds}
        for seconds in (0.03, 0.02)
        for busy in BUSY
        for interval in (0.005, SWITCH_SECONDS)
    ]
    turns[0]["seconds"] = 0.01
    assert lock_rows(turns)["sleep"] == {"python": 0.01, "ours": 0.02}
    _lines_are(monkeypatch, lgc_ranks_round, lambda job, labels: turns[: len(labels)])
    assert EXPERIMENTS["lgc-ranks"].tell(TOY, dict, parts=("python-lock",)).claims == []


def test_the_first_rounds_on_the_link_are_not_timed():
    line = {"where": "ranks", "strategy": "full", "times": [0.0, 5.0, 6.0, 7.0]}
    lines = [line, line | {"times": [0.0, 5.0, 9.0]}, line | {"where": "server", "times": [0.0, 1.0, 9.0]}]
    assert link_rows(lines, 2)["full"] == {"ranks": 1.0, "server": 0.25, "ratio": 4.0}


def test_without_a_cable_the_link_is_left_out_and_no_bar_judged(monkeypatch):
    monkeypatch.setattr(lgc_ranks_round, "why_not", lambda: "two hosts: making network namespaces needs root")
    found = EXPERIMENTS["lgc-ranks"].tell(TOY, dict, parts=("link",))
    assert found.remarks == [
        "lgc-ranks, link: skipped, and no bar judged: two hosts: making network namespaces needs root"
    ]
    assert (found.claims, found.skipped) == ([], "")


def _run(lane, seconds, loss=1.0, accuracy=0.5, outcomes=None):
    outcomes = [{"used": 1, "late": 2, "dropped": {"late": 3, "left": 1}}] if outcomes is None else outcomes
    return {"lane": lane, "seconds": seconds, "loss": loss, "accuracy": accuracy, "outcomes": outcomes}


def test_what_real_ranks_save_is_held_against_the_simulator():
    lines = [_run("full", 4.0), _run("lgc, K=3", 3.0), _run("full", 6.0), _run("lgc, K=3", 5.0, loss=2.0)]
    rows = saving_rows(lines, {"full": [4.0, 4.0], "lgc, K=3": [3.0, 3.0]}, {"full": [1.0] * 2, "lgc, K=3": [1.2] * 2})
    row = rows["lgc, K=3"]
    assert (row["saved"], row["simulated_saved"], row["of_simulated"]) == pytest.approx((0.2, 0.25, 0.8))
    assert (row["loss_ratio"], row["simulated_loss_ratio"]) == pytest.approx((1.5, 1.2))
    assert "of_simulated" not in rows["full"]


def test_where_the_simulator_saves_nothing_there_is_no_share_of_it():
    rows = saving_rows([_run("full", 4.0), _run("lgc, K=3", 3.0)], {"full": [4.0], "lgc, K=3": [4.0]},
                       {"full": [1.0], "lgc, K=3": [1.0]})  # fmt: skip
    assert math.isnan(rows["lgc, K=3"]["of_simulated"])


def test_points_are_those_that_ddp_has_more_and_the_slow_rank_s_gradients_are_counted():
    lines = [_run(DDP, 2.0, accuracy=0.9, outcomes=[{}, {}]), _run("lgc, K=3", 1.0, accuracy=0.895)] * 2
    rows = slow_rows(lines)
    assert (rows["lgc, K=3"]["of_time"], rows["lgc, K=3"]["points"]) == pytest.approx((0.5, 0.5))
    assert rows["lgc, K=3"]["slow_rank"] == [2, 4, 8]
    assert "slow_rank" not in rows[DDP]


@pytest.mark.parametrize(
    ("accuracies", "seconds", "verdicts"),
    [
        ((0.9, 0.9, 0.7), (2.0, 1.0, 1.0), [True, True, True]),
        ((0.9, 0.7, 0.9), (2.0, 1.0, 1.0), [False, True, False]),  # lgc and fastest-k have each other's
        ((0.9, 0.9, 0.7), (1.0, 2.0, 2.0), [True, False, True]),
    ],
)
def test_beside_a_slow_rank_lgc_is_as_good_in_half_of_the_time_and_fastest_k_is_not(
    monkeypatch, accuracies, seconds, verdicts
):
    _lines_are(
        monkeypatch, lgc_ranks,
        lambda job, labels: [
            _run(lane, took, accuracy=accuracy)
            for (lane, _), took, accuracy in zip(job["turns"], seconds, accuracies, strict=True)
        ],
    )  # fmt: skip
    found = EXPERIMENTS["lgc-ranks"].tell(TOY, dict, parts=("slow-rank",))
    assert [claim.holds for claim in found.claims] == verdicts


def test_later_seeds_of_a_slow_rank_begin_where_they_are_asked_for():
    assert next(slow_seeds(1)) == 2


def test_a_ring_at_the_measured_costs_takes_what_was_measured():
    for costs in DOCUMENTED.values():
        ring = ring_seconds(measured_network(costs), workers=4, message_bytes=int(costs["bytes"]))
        assert ring == pytest.approx(costs["large_seconds"], rel=1e-3)


# -- shares ------------------------------------------------------------------------------------------------------------


def _paced(lane, seconds, **more):
    inside = {"inside_seconds": 0.002, "inside_processor_seconds": 0.0005, "wrapping_seconds": 0.0001}
    return {"lane": lane, "steps": 10, "seconds": seconds, "ideal_seconds": 2.0, "changed_at": [], "shares": [8],
            **inside, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("ddp", "balance", "verdicts"),
    [
        ((6.0, 5.0), (9.0, 2.1), [True, True]),
        ((6.0, 4.6), (2.1, 2.1), [True, False]),
        ((6.0, 6.0), (2.2, 9.0), [False, True]),
    ],
)
def test_the_quickest_turn_of_each_lane_is_held_against_the_ideal_and_ddp(monkeypatch, ddp, balance, verdicts):
    """A launch for each lane, turn after turn."""
    seconds = {shares.DDP: list(ddp), BALANCE: list(balance)}
    launched = []

    def answer(job, labels):
        (lane,) = job["lanes"]
        launched.append((lane, job["steps"]))
        return [_paced(lane, seconds[lane].pop(0))]

    _lines_are(monkeypatch, shares, answer)
    monkeypatch.setattr(shares, "SCENARIOS", SCENARIOS[:1])
    monkeypatch.setattr(shares, "simulated_step", lambda job: 0.5)
    found = EXPERIMENTS["shares"].tell(Size(), dict, parts=("pace",))
    assert launched == [(shares.DDP, 12), (BALANCE, 50)] * 2
    assert [claim.holds for claim in found.claims] == verdicts


def test_a_change_of_shares_among_equal_ranks_is_a_miss():
    quiet, changed = [_paced(BALANCE, 1.0)] * 2, [_paced(BALANCE, 1.0), _paced(BALANCE, 1.0, changed_at=[5, 9])]
    claims = _claims(tell_jitter({"uniform": quiet, "gaussian": changed}, 60))
    assert [claim.holds for claim in claims.values()] == [True, False]


@pytest.mark.parametrize(
    ("seconds", "inside", "verdicts"), [(10.04, 0.005, [True, True]), (10.06, 0.0052, [False, False])]
)
def test_the_overhead_of_the_quickest_turns_is_judged_less_what_wrapping_takes(seconds, inside, verdicts):
    turns = {
        shares.DDP: [_paced(shares.DDP, 11.0), _paced(shares.DDP, 10.0)],
        BALANCE: [_paced(BALANCE, 12.0, inside_seconds=1.0), _paced(BALANCE, seconds, inside_seconds=inside)],
    }
    assert [claim.holds for claim in _claims(tell_overhead(turns)).values()] == verdicts


@pytest.mark.parametrize(("accuracy", "holds"), [(0.96, True), (0.98, True), (0.959, False), (0.981, False)])
def test_accuracy_may_be_a_point_away_in_either_direction(accuracy, holds):
    lines = {
        lane: [{"accuracy": each, "loss": 0.1, "shares": [32, 32]}] * 2
        for lane, each in ((shares.DDP, 0.97), (KEPT, 0.5), (BALANCE, accuracy))
    }
    assert [claim.holds for claim in _claims(tell_accuracy(lines)).values()] == [holds]


# -- shares-lgc --------------------------------------------------------------------------------------------------------


def _shares_lgc(monkeypatch, to_target, off=0.0):
    """Tell it of runs whose seconds to the target are those of their lane, real and simulated."""
    lanes = iter(shares_lgc.LANES)

    def compared(real, played):
        seconds = to_target[next(lanes)]
        return dict(zip(FIGURES, (seconds, seconds, 1.0, 1.0 - off), strict=True)) | {"shares": [32]}

    class Trained:
        def __init__(self, *arguments, **more):
            self.result = self

        trace = None

    monkeypatch.setattr(shares_lgc, "compared", compared)
    monkeypatch.setattr(shares_lgc, "train_recipe", Trained)
    monkeypatch.setattr(shares_lgc, "simulate", Trained)
    return EXPERIMENTS["shares-lgc"].tell(TOY, dict).claims


@pytest.mark.parametrize(
    ("both", "lgc", "speed", "holds"),
    [
        (1.0, 2.0, 1.5, True),
        (1.6, 2.0, 1.5, False),
        (NAN, 2.0, 1.5, False),
        (1.0, NAN, 1.5, False),
        (1.0, 2.0, NAN, False),
    ],
)
def test_both_together_are_held_against_the_better_one_alone(monkeypatch, both, lgc, speed, holds):
    """A lane that never came to the target makes the claim false, whichever lane it is."""
    claims = _shares_lgc(monkeypatch, {"full": 9.0, "full+speed": speed, "lgc": lgc, "lgc+speed": both})
    assert [claim.holds for claim in claims if "together" in claim.text] == [holds, holds]


@pytest.mark.parametrize(("off", "holds"), [(0.09, True), (-0.09, True), (0.11, False), (-0.11, False)])
def test_simulated_rounds_may_be_a_tenth_off(monkeypatch, off, holds):
    claims = _shares_lgc(monkeypatch, dict.fromkeys(shares_lgc.LANES, 1.0), off)
    assert [claim.holds for claim in claims if "round of" in claim.text] == [holds] * 4


def test_ranks_that_came_to_no_result_are_an_error(monkeypatch):
    class Trained:
        result = None

    monkeypatch.setattr(shares_lgc, "train_recipe", lambda *arguments, **more: Trained)
    with pytest.raises(RuntimeError, match="full, seed 200: the ranks came to no result"):
        EXPERIMENTS["shares-lgc"].tell(TOY, dict)


def test_delays_are_the_same_for_all_lanes_of_a_seed_and_one_in_ten_is_a_hiccup():
    table = delays(7, 2000, seconds=0.1)
    assert np.array_equal(table, delays(7, 2000, seconds=0.1))
    assert 0.08 < (table[:, 1:] > 0.3).mean() < 0.12


# -- watch -------------------------------------------------------------------------------------------------------------


def _watched(job, labels, inside=0.0001):
    processor = {watch.PLAIN: 0.0010, watch.AGAIN: 0.0012}
    own = {"inside_seconds": inside, "wrapping_seconds": 0.0, "started_seconds": 0.0}
    return [
        {"lane": lane, "processor_seconds": processor.get(lane, 0.002), **own} for _, lane in watch.Job(**job).turns
    ]


def test_the_plain_lane_is_measured_first_and_last_in_each_pass():
    lanes = [lane for _, lane in watch.Job(ranks=2, passes=2, steps=1).turns]
    assert lanes == list(watch.LANES) * 2
    assert (watch.LANES[0], watch.LANES[-1]) == (watch.PLAIN, watch.AGAIN)


@pytest.mark.parametrize(("inside", "holds"), [(0.0002, True), (0.00021, False)])
def test_what_is_inside_watch_is_judged_by_its_share_in_20_ms(monkeypatch, inside, holds):
    _lines_are(monkeypatch, watch, lambda job, labels: _watched(job, labels, inside))
    found = EXPERIMENTS["watch"].tell(Size(), dict)
    assert [claim.holds for claim in found.claims] == [holds, holds]
    assert {row["lane"]: row["added_seconds"] for row in found.numbers["rows"]["2"]}[watch.AGAIN] == pytest.approx(2e-4)


# -- the time inside ---------------------------------------------------------------------------------------------------


def test_a_wrapped_function_in_another_counts_once_and_a_failing_one_too():
    inside = InsideTime()

    class Parts:
        def outer(self):
            return self.inner()

        def inner(self):
            time.sleep(0.01)
            raise KeyError

        @staticmethod
        def alone(number):
            return number

    inside.wrap(Parts, "outer", "inner", "alone")
    with pytest.raises(KeyError):
        Parts().outer()
    assert inside.calls == 1
    assert inside.seconds >= 0.01 > inside.processor_seconds
    assert (Parts().alone(3), Parts.alone(4), inside.calls) == (3, 4, 3)


def test_what_is_left_out_is_not_among_the_processor_time():
    inside = InsideTime()

    def busy():
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    inside.wrapped(inside.left_out(busy))()
    assert inside.left_out_seconds >= 0.02
    assert inside.processor_seconds < 0.01
    inside.clear()
    assert (inside.seconds, inside.processor_seconds, inside.left_out_seconds, inside.calls) == (0.0, 0.0, 0.0, 0)
    assert around_nothing(3).calls == 3
