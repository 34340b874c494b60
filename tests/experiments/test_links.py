"""What the timings of ranks over links make of their figures, and that a switch is gone when it is left."""

from __future__ import annotations

import subprocess

import pytest

from experiments.core.hosts import Switch, why_not
from experiments.core.story import Numbers
from experiments.timings import averaging, codec_losses, links, plans, slow_link
from experiments.timings.links import FP16, NO_HOOK, QSGD
from paceline.traces.journal import StepRecord, WorkerJoined
from tests.experiments.telling import EXPERIMENTS, TOY

POWER_SGD = "torch: power-sgd, rank 4"


def _turn(lane, seconds, wire_bytes=1e6, told=None):
    return {
        "lane": lane,
        "seconds": [seconds],
        "wire_bytes": wire_bytes,
        "packets": 100,
        "reported_bytes": told,
        "processor_seconds": 0.0,
    }


def _holds(turns):
    return {claim.text: claim.holds for claim in links.claims_of({8: links.rows_of(turns)})}


# -- links -------------------------------------------------------------------------------------------------------------


def test_links_are_judged_by_speed_and_bytes():
    lanes = [_turn(NO_HOOK, 4.0), _turn(FP16, 2.0), _turn(POWER_SGD, 0.5)]
    lanes += [_turn("bfloat16", 2.1), _turn(QSGD, 0.4, 0.3e6, 0.29e6)]
    holds = _holds(lanes)
    assert set(holds.values()) == {True}
    assert any("qsgd" in text and POWER_SGD in text for text in holds)

    slower = _holds([*lanes[:3], _turn("bfloat16", 2.2), _turn(QSGD, 2.5, 0.5e6, 0.4e6)])
    assert set(slower.values()) == {False}
    assert len(slower) == len(holds) == 5


def test_bytes_that_no_lane_tells_are_a_miss():
    lanes = [_turn(NO_HOOK, 4.0), _turn(FP16, 2.0), _turn("bfloat16", 2.0), _turn(QSGD, 1.0, 0.3e6)]
    assert [text for text, holds in _holds(lanes).items() if not holds] == [
        "8 ranks: bytes as told against the interface's, the worst"
    ]


def test_a_lane_that_sends_next_to_nothing_is_not_judged_by_what_gloo_adds():
    lanes = [_turn(NO_HOOK, 4.0), _turn(FP16, 2.0), _turn("bfloat16", 2.0, 1e6, 0.99e6), _turn(QSGD, 1.0, 0.3e6)]
    assert all(_holds([*lanes, _turn("sparsifier", 1.0, 40_000.0, 10_000.0)]).values())
    assert not all(_holds([*lanes, _turn("sparsifier", 1.0, 60_000.0, 10_000.0)]).values())


def test_a_lane_s_best_pass_counts_with_the_bytes_of_that_pass():
    turns = [_turn(NO_HOOK, 4.0), _turn(FP16, 2.0), _turn(QSGD, 3.0, 5.0), _turn(QSGD, 1.0, 6.0), _turn(QSGD, 2.0, 7.0)]
    row = links.rows_of(turns)[-1]
    assert (row["seconds"], row["wire_bytes"], row["of_no_hook"], row["of_fp16"]) == (1.0, 6.0, 4.0, 2.0)


def test_every_pass_takes_all_lanes_in_turn():
    job = links.Job(ranks=2, lanes=[NO_HOOK, FP16], passes=2)
    assert job.turns == [(0, NO_HOOK), (0, FP16), (1, NO_HOOK), (1, FP16)]
    assert len(job.labels) == 1 + len(job.turns)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_a_choice_of_several_plans_is_judged_by_its_own_turns():
    turn = {"kind": "turn", "rate": 50e6, "codec": QSGD}
    lines = [{"kind": "choice", "codec": QSGD, "plans": ["two-step", "gather"]}]
    lines += [turn | {"plan": plan, "seconds": [seconds]} for plan, seconds in (("gather", 2.0), ("auto", 1.5))]
    (cell,) = plans.cells_of(lines, 4)
    assert (cell["choice"], cell["of_best"]) == ("gather + two-step", 1.0)


def test_costs_are_found_again():
    lines = {}
    for ranks in (2, 4, 8):
        line = {"kind": "collectives", "rate": 200e6}
        share = (ranks - 1) / ranks * plans.LARGE_BYTES / 24e6
        for name, hops, moved in (
            ("all_reduce", 2 * (ranks - 1), 2),
            ("all_gather", ranks - 1, 1),
            ("all_to_all", 0, 1),
        ):
            line[f"tiny_{name}_seconds"] = 1e-3 + 2e-4 * hops
            line[f"large_{name}_seconds"] = 1e-3 + 2e-4 * hops + moved * share
        lines[ranks] = [line]
    lines[8][0]["tiny_all_reduce_seconds"] += 1.0  # ranks that wait for the processor
    costs = plans.fitted(lines, cores=4)
    assert costs["collective_seconds"] == pytest.approx(1e-3)
    assert costs["hop_seconds"] == pytest.approx(2e-4)
    assert costs["bytes_per_second"] == {"200 Mbit/s": pytest.approx(24e6)}


@pytest.mark.parametrize("job", [plans.Job(), plans.Job(rates=[50e6], codecs=["bfloat16", QSGD], passes=1)])
def test_every_line_of_the_plans_has_a_label(job):
    turns = len(job.rates) * job.passes * len(job.lanes)
    assert len(job.labels) == 2 * len(job.codecs) + len(job.rates) + turns


# -- codec-losses ------------------------------------------------------------------------------------------------------


def test_every_codec_is_judged_by_its_mean_over_seeds():
    losses = {"none": (0.5, 0.4), "qsgd": (0.55, 0.4), "top-k": (0.55, 0.405)}
    lines = [
        {"seed": seed, "codec": codec, "loss": each[seed], "plans": ["two-step"]}
        for seed in range(2)
        for codec, each in losses.items()
    ]
    claims = codec_losses.claims_of("early", codec_losses.rows_of(lines))
    assert [(claim.text, claim.holds) for claim in claims] == [
        ("qsgd's mean, early", True),
        ("top-k's mean, early", False),
    ]


def test_a_codec_with_which_training_diverged_is_a_miss():
    lines = [
        {"seed": 0, "codec": codec, "loss": loss, "plans": []} for codec, loss in (("none", 0.5), ("a", float("nan")))
    ]
    (claim,) = codec_losses.claims_of("early", codec_losses.rows_of(lines))
    assert not claim.holds


# -- averaging ---------------------------------------------------------------------------------------------------------

PLAN = averaging.Plan(seeds=[0, 1], ratios=[1.0, 2.0], rounds=2, optimisers=[[0.05, 0.0]], loss_seconds=9.0)
WAITS = {"ddp": 2.5, "ssgd": 3.0, "local-sgd": 1.25, "hpsgd": 1.02, averaging.PAPER: 1.02, "psgd": 1.0}


def _line(stretch, lanes):
    """Return a line in which a lane's steps take as long as those of the lane that `lanes` says."""
    seconds = WAITS.get(lanes.get(stretch.lane, stretch.lane), 1.5)
    about = {"part": stretch.part, "lane": stretch.lane, "ratio": stretch.ratio, "turn": stretch.turn}
    if stretch.part == "loss":
        times = [step * seconds for step in range(4)]
        losses = {"losses": [3.0, 1.0, 1.0, 1.0], "times": times, "steps": 8}
        return about | {"rate": stretch.rate, "momentum": stretch.momentum, **losses}
    steps = [8.0 + stretch.turn] * 4  # the second round is the best
    return about | {
        "computation": 1.0,
        "steps": steps,
        "seconds": [8.0 * seconds] * 4,
        "optimiser": [0.0] * 4,
        "processor": [1.0] * 4,
        "averages": 0 if stretch.lane == "psgd" else 10,
        "windows": [[1, 2, 3, 4]],
    }


def _told(change=lambda line: line, **lanes):
    first = {"part": "all-reduce", "parameters": 7, "seconds": [1.0, 2.0, 3.0]}
    lines = [first, *(change(_line(stretch, lanes)) for stretch in averaging.stretches(PLAN))]
    return list(averaging.conclusions(lines, PLAN))


def _held(told):
    return [each.holds for each in told if hasattr(each, "holds")]


def test_hpsgd_is_judged_beside_the_limit_and_beside_those_who_wait():
    assert _held(_told()) == [True, True, True, True, True]
    assert _held(_told(hpsgd="ssgd", ssgd="hpsgd")) == [False, False, False, False, False]


def test_samples_per_second_are_those_of_the_best_round():
    (numbers,) = [each for each in _told() if isinstance(each, Numbers)]
    psgd = next(row for row in numbers.values["speed"] if row["lane"] == "psgd")
    assert psgd["1"] == {"best": 32 * 4 * 9 / 8, "rounds": [32 * 4 * 1.0, 32 * 4 * 9 / 8]}


def test_a_lane_that_never_comes_to_the_target_wins_nothing():
    def lost(line):
        return line | {"losses": [9.0] * 4} if line["part"] == "loss" and line["lane"] == "hpsgd" else line

    told = _told(lost)
    assert _held(told) == [True, True, False, False, True]
    losses = [each for each in told if "Loss by the clock" in getattr(each, "title", "")]
    assert next(row for row in losses[0].rows if row[0] == "hpsgd")[-2:] == ("never", "-")


def test_a_lane_that_is_at_the_target_with_one_seed_only_has_no_time_to_it():
    def lost(line):
        both = line["part"] == "loss" and line["lane"] == "hpsgd" and line["turn"] == 1
        return line | {"losses": [9.0] * 4} if both else line

    assert _held(_told(lost)) == [True, True, False, False, True]


def test_in_a_round_of_averaging_every_lane_has_a_turn():
    turns = averaging.stretches(PLAN)
    speed = [(stretch.turn, stretch.ratio, stretch.lane) for stretch in turns if stretch.part == "speed"]
    assert speed[:7] == [(0, 1.0, lane) for lane in averaging.SPEED_LANES] + [(0, 2.0, "ddp")]
    assert [stretch.turn for stretch in turns if stretch.part == "slow"] == [0] * 4 + [1] * 4
    assert len(set(turns)) == len(turns)


# -- slow-link ---------------------------------------------------------------------------------------------------------


def _journal(monkeypatch, steps, joins):
    records = [object.__new__(WorkerJoined) for _ in range(joins)]
    for at_seconds in steps:
        record = object.__new__(StepRecord)
        object.__setattr__(record, "at_seconds", at_seconds)
        records.append(record)
    monkeypatch.setattr(slow_link, "read_journal", lambda trace: type("Journal", (), {"records": records}))


@pytest.mark.parametrize(
    ("steps", "joins", "holds"),
    [
        ([1.0, 3.3], 2, [True, True, True]),
        ([1.0, 3.4], 2, [True, False, True]),
        ([1.0, 3.3], 3, [True, True, False]),
        ([1.0], 2, [False, False, True]),  # no time of a run that was given up
    ],
)
def test_a_slow_link_is_judged_by_rounds_seconds_and_reconnections(monkeypatch, tmp_path, steps, joins, holds):
    def measured(plan):
        yield from ()
        return slow_link.figures_of(plan, tmp_path) | {"wire_bytes": [(1, 2), (3, 4)], "log": ""}

    _journal(monkeypatch, steps, joins)
    monkeypatch.setattr(slow_link, "measured", measured)
    monkeypatch.setattr(slow_link, "why_not", lambda: None)
    assert [claim.holds for claim in _tell("slow-link").claims] == holds


# -- hosts -------------------------------------------------------------------------------------------------------------


def _tell(name):
    return EXPERIMENTS[name].tell(TOY, lambda jobs: pytest.fail("a timing has no jobs"))


@pytest.mark.parametrize("name", ["links", "plans", "averaging", "slow-link"])
def test_where_there_can_be_no_hosts_it_is_skipped_with_the_reason(name, monkeypatch):
    for module in (links, plans, averaging, slow_link):
        monkeypatch.setattr(module, "why_not", lambda: "it needs root")
    found = _tell(name)
    assert found.skipped == "it needs root"
    assert not found.claims


def test_nothing_of_a_switch_is_left_after_an_error():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    switch = Switch(3)

    def fail_inside():
        with switch:
            switch.shape(200e6)
            assert _namespaces().issuperset(switch.hosts)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert not any(name.startswith(f"pl{switch.number}") for name in _namespaces())


def _namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}
