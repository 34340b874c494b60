"""Recipes whose ranks add up the rounds themselves: read, raced, timed, refused."""

from __future__ import annotations

import json

import pytest
import torch

from paceline import Race, Recipe, simulate
from paceline.cli.main import main
from paceline.strategies.averaging import AVERAGING

SMALL = Recipe(rounds=12, evaluate_every=4).with_settings(cluster={"workers": 4}, strategy={"k": 2})
SLOW_LINKS = {"latency_seconds": 0.002, "worker_bits_per_second": 1e8}


def test_a_recipe_that_does_not_say_who_adds_up_means_a_server():
    document = Recipe().to_document()
    assert document["strategy"].pop("on") == "server"
    assert Recipe.from_document(document) == Recipe()


@pytest.mark.parametrize("name", AVERAGING)
def test_strategies_that_average_have_no_server_whatever_the_setting_says(name):
    recipe = Recipe().with_settings(strategy={"name": name, "on": "ranks"}, codec={"name": "qsgd"})
    assert not recipe.strategy.rounds_on_ranks
    assert recipe.strategy.label == name
    assert recipe.with_strategy("full").strategy.rounds_on_ranks


@pytest.mark.parametrize("late_work", ["partial", "complete"])
@pytest.mark.parametrize("name", ["full", "fastest-k", "lgc"])
def test_what_is_learned_on_ranks_is_what_a_server_learns_where_messages_cost_nothing(name, late_work):
    recipe = SMALL.with_settings(cluster={"late_work": late_work})
    found, expected = (simulate(recipe.with_strategy(each)) for each in (f"{name}@ranks", name))
    assert (found.strategy, expected.strategy) == (f"{name}@ranks", name)
    assert torch.equal(found.parameters, expected.parameters)
    assert found.trace.evaluations == expected.trace.evaluations


def test_the_ring_carries_parameters_and_buffers_with_training_and_without():
    recipe = SMALL.with_settings(
        network=SLOW_LINKS, model={"name": "tests.golden.network:tiny"}, cluster={"late_work": "partial"}
    ).with_strategy("lgc@ranks")
    trained, timed = simulate(recipe), simulate(recipe, timing_only=True)
    assert timed.seconds == pytest.approx(trained.seconds, rel=1e-12)
    buffers = 2 * 24 + 1  # BatchNorm's means, variances and counter
    assert timed.trace.sent_bytes == trained.trace.sent_bytes == 12 * 2 * 3 * 4 * (len(trained.parameters) + buffers)
    assert trained.trace.evaluations[-1].seconds == trained.seconds == trained.trace.seconds


def on_ranks(codec, plan="auto", **more):
    return SMALL.with_settings(codec={"name": codec, "plan": plan, **more}).with_strategy("lgc@ranks")


@pytest.mark.parametrize(
    ("codec", "plan", "times_smaller"),
    [
        ("bfloat16", "all-reduce", 2),
        ("qsgd", "gather", 4),
        ("one-bit", "two-step", 32),
        ("int8-sum", "auto", 4),
    ],
)
def test_encoded_rounds_send_what_their_plan_says_with_training_and_without(codec, plan, times_smaller):
    network = {"model": {"name": "tests.golden.network:tiny"}, "network": SLOW_LINKS}
    recipe = on_ranks(codec, plan).with_settings(**network)
    trained, timed = simulate(recipe), simulate(recipe, timing_only=True)
    assert timed.seconds == pytest.approx(trained.seconds, rel=1e-3)
    assert timed.trace.sent_bytes == pytest.approx(trained.trace.sent_bytes, rel=0.06)  # payloads begin at full words
    exact = simulate(SMALL.with_settings(**network).with_strategy("lgc@ranks"))
    buffer_bytes = 12 * 2 * 3 * 4 * (2 * 24 + 1)
    smaller = (exact.trace.sent_bytes - buffer_bytes) / (trained.trace.sent_bytes - buffer_bytes)
    assert 0.55 * times_smaller < smaller <= times_smaller  # of so small a model headers are a good part


@pytest.mark.parametrize("plan", ["gather", "two-step"])
def test_rounds_that_are_encoded_and_lose_nothing_are_those_of_an_all_reduce(plan):
    found, expected = simulate(on_ranks("identity", plan)), simulate(on_ranks("identity"))
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found.parameters, simulate(on_ranks("qsgd", plan)).parameters)


def test_a_race_has_a_strategy_with_a_server_and_on_ranks_side_by_side():
    entries = ["full", "full@ranks", "lgc", "lgc@ranks", "ssgd", "hpsgd"]
    race = Race(SMALL.with_settings(network=SLOW_LINKS), strategies=entries, timing_only=True)
    assert race.lanes == entries
    assert len({progress.round for _, progress in race}) >= 12
    assert [result.strategy for result in race.results] == entries
    seconds = {result.strategy: result.seconds for result in race.results}
    assert seconds["lgc@ranks"] < seconds["full@ranks"]
    assert seconds["full@ranks"] != seconds["full"]


def test_a_recipe_on_ranks_races_on_ranks_and_async_with_its_server():
    on_ranks = SMALL.with_settings(strategy={"on": "ranks"})
    assert Race(on_ranks, timing_only=True).lanes == ["full@ranks", "fastest-k@ranks", "lgc@ranks", "async"]
    assert Race(on_ranks, strategies=["lgc@server", "lgc"], timing_only=True).lanes == ["lgc", "lgc@ranks"]
    with pytest.raises(ValueError, match="strategy 'lgc@ranks' is given twice"):
        Race(on_ranks, strategies=["lgc", "lgc@ranks"], timing_only=True)


@pytest.mark.parametrize(
    ("entry", "more", "words"),
    [
        ("async@ranks", [], ["async has no rounds"]),
        ("lgc@rank", [], ["on must be 'server' or 'ranks'", "on='rank'"]),
        ("lgd@ranks", [], ["unknown strategy 'lgd'", "did you mean 'lgc'"]),
        ("lgc@ranks", ["--codec", "qsgd", "--codec.plan", "all-reduce"], ["QSGD", "by 'all-reduce'", "two-step"]),
        ("lgc@ranks", ["--codec", "int8-sum", "--workers", "43"], ["at most 42 ranks (there are 43)"]),
        ("lgc@ranks", ["--codec", "qsgd", "--codec.lossless", "elias"], ["timing only cannot know the bytes"]),
    ],
)
def test_what_cannot_race_is_refused_in_a_line(entry, more, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["race", "--strategies", f"full,{entry}", "--timing-only", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert [word for word in words if word not in line] == []


def test_table_document_and_page_name_the_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    names = ["full@ranks", "fastest-k@ranks", "lgc", "lgc@ranks", "ssgd", "hpsgd"]
    given = ["--strategies", ",".join(names), "--rounds", "1000", "--timing-only"]
    assert main(["race", *given, "--out", "shown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.split()[1:2] in (["1,000"], ["1,001"], ["1,002"])] == names
    assert max(map(len, lines)) <= 80
    assert main(["simulate", "--on", "ranks", "--rounds", "5", "--timing-only", "--json", "--out", "one"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["results"][0]["strategy"] == "lgc@ranks"
    assert document["recipe"]["strategy"]["on"] == "ranks"
    page = (tmp_path / "shown/report.html").read_text(encoding="utf-8")
    for name in names:
        assert f"</i>{name}</th>" in page
