"""Recipes whose workers average among themselves: read, raced, timed, refused."""

from __future__ import annotations

import pytest

from paceline import Race, Recipe, simulate
from paceline.cli.main import main
from paceline.exchanges.plans import AUTO, PLANS
from paceline.recipes import SettingError, read_recipe
from paceline.recipes.assembly import load_data, make_member, make_strategy, make_training, planned
from paceline.recipes.sections import CODEC_PLANS
from paceline.strategies.averaging import AVERAGING

SMALL = Recipe(rounds=12, evaluate_every=4).with_settings(cluster={"workers": 4}, strategy={"k": 2})


def test_every_member_can_be_raced_beside_a_strategy_with_a_server():
    race = Race(SMALL, strategies=["full", *AVERAGING])
    for _ in race:
        pass
    assert [result.strategy for result in race.results] == ["full", *AVERAGING]
    for result in race.results:
        assert result.trace.averaged == (result.strategy in AVERAGING)
        assert result.rounds >= 12
        assert result.loss is not None
        assert result.trace.used >= 4 * 12


@pytest.mark.parametrize("name", AVERAGING)
def test_timing_only_takes_as_long_as_training_does(name):
    slow = SMALL.with_settings(strategy={"name": name}, network={"worker_bits_per_second": 1e7})
    trained, timed = simulate(slow), simulate(slow, timing_only=True)
    assert timed.loss is None
    # A message has a few words of its worker beside the numbers, which timing leaves out.
    assert timed.seconds == pytest.approx(trained.seconds, rel=1e-3)
    assert timed.rounds == trained.rounds


@pytest.mark.parametrize("plan", ["gather", "two-step"])
def test_timing_only_knows_what_a_plan_costs(plan):
    slow = SMALL.with_settings(
        strategy={"name": "local-sgd"},
        network={"worker_bits_per_second": 1e6, "latency_seconds": 0.01},
        codec={"name": "qsgd", "plan": plan},
    )
    trained, timed = simulate(slow), simulate(slow, timing_only=True)
    assert timed.seconds == pytest.approx(trained.seconds, rel=1e-2)
    assert timed.trace.sent_bytes == pytest.approx(trained.trace.sent_bytes, rel=2e-2)


def test_a_plan_is_written_out_for_the_record_of_averages_and_nowhere_else():
    dataset = load_data(SMALL)
    for strategy, codec, plan in [
        ("hpsgd", {"name": "one-bit"}, "gather"),  # a small model
        ("hpsgd", {"name": "one-bit", "plan": "two-step"}, "two-step"),
        ("hpsgd", {"name": "int8-sum"}, "all-reduce"),
        ("hpsgd", {}, "auto"),
        ("lgc", {"name": "one-bit"}, "auto"),
    ]:
        recipe = SMALL.with_settings(strategy={"name": strategy}, codec=codec)
        assert planned(recipe, make_training(recipe, dataset)).codec.plan == plan


def test_a_plan_that_cannot_be_is_refused():
    assert (AUTO, *PLANS) == CODEC_PLANS
    with pytest.raises(SettingError, match="plan"):
        SMALL.with_settings(codec={"name": "qsgd", "plan": "ring"})
    with pytest.raises(ValueError, match="cannot be exchanged by 'all-reduce'"):
        simulate(SMALL.with_settings(strategy={"name": "hpsgd"}, codec={"name": "qsgd", "plan": "all-reduce"}))
    with pytest.raises(SettingError, match="replicas of a pipeline take the quickest plan"):
        SMALL.with_settings(codec={"name": "qsgd", "plan": "gather"}, pipeline={"stages": 2})


def test_settings_reach_the_members_that_have_them():
    given = {"period": 5, "normalize": True, "rebase": True, "overlap": True, "outer_rate": 0.5, "outer_momentum": 0.3}
    recipe = SMALL.with_settings(strategy=given)
    members = {name: make_member(recipe.with_strategy(name)) for name in AVERAGING}
    assert members["psgd"].period is None
    assert members["psgd"].normalize
    assert members["ssgd"] == AVERAGING["ssgd"]
    assert (members["local-sgd"].period, members["local-sgd"].overlap) == (5, False)
    assert (members["hpsgd"].period, members["hpsgd"].rebase, members["hpsgd"].outer.rate) == (5, True, 1.0)
    diloco = members["diloco"]
    assert (diloco.overlap, diloco.rebase, diloco.outer.rate, diloco.outer.momentum) == (True, True, 0.5, 0.3)
    assert make_member(SMALL.with_strategy("diloco")) == AVERAGING["diloco"]


def test_what_cannot_be_is_refused():
    with pytest.raises(SettingError, match="rebase needs overlap: bmuf waits"):
        SMALL.with_settings(strategy={"name": "bmuf", "rebase": True})
    with pytest.raises(ValueError, match=r"period must be between 1 and 1,000,000,000 \(period=0\)"):
        read_recipe(overrides={"strategy.name": "hpsgd", "strategy.period": "0"})
    with pytest.raises(ValueError, match="hpsgd has no server; choose from full"):
        make_strategy(SMALL.with_strategy("hpsgd"))
    with pytest.raises(ValueError, match="unknown strategy 'hpsdg'; did you mean 'hpsgd'"):
        read_recipe(overrides={"strategy.name": "hpsdg"})


def test_a_race_without_a_server_needs_no_k(tmp_path, capsys):
    """A K that four workers cannot have plays no part where nobody takes a K."""
    arguments = ["race", "--strategies", "ssgd,hpsgd", "--workers", "4", "--k", "7", "--rounds", "3", "--timing-only"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "hpsgd" in capsys.readouterr().out
    assert main(["race", "--strategies", "ssgd,lgc", "--workers", "4", "--k", "7", "--out", str(tmp_path)]) == 2
    assert "k must be between 1 and workers (k=7, workers=4)" in capsys.readouterr().err
