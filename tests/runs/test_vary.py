"""A race over values of a setting: its lanes, what is refused, and what results, table and page say of it."""

from __future__ import annotations

import json

import pytest
import torch

from paceline import Race, Recipe, simulate
from paceline.cli.simulate import values_to_vary
from paceline.reports import results_table
from paceline.reports.curves import frontier_chart
from paceline.reports.report import report_html
from paceline.reports.results import group_traces
from paceline.runs import as_document

SMALL = Recipe(rounds=6, evaluate_every=6)


def run(race):
    for _ in race:
        pass
    return race


def test_every_strategy_runs_with_every_value_and_once_where_the_setting_means_nothing():
    race = Race(SMALL, ["full", "fastest-k", "lgc"], vary={"strategy.k": [5, 6]}, timing_only=True)
    assert race.lanes == ["full", "fastest-k k=5", "fastest-k k=6", "lgc k=5", "lgc k=6"]
    assert race.varied[0] == {}
    assert [each.strategy.k for each in race.recipes[1:]] == [5, 6, 5, 6]


def test_a_lane_is_the_run_that_the_value_would_have_alone():
    race = run(Race(SMALL, ["full", "lgc"], vary={"strategy.k": [3, 10]}))
    alone = [SMALL.with_strategy("full"), *(SMALL.with_settings(strategy={"k": k}) for k in (3, 10))]
    for found, recipe in zip(race.results, alone, strict=True):
        assert torch.equal(found.parameters, simulate(recipe).parameters)


def test_several_settings_are_varied_together_and_seeds_come_on_top():
    vary = {"strategy.k": [5, 6], "cluster.late_blocks": [1, "random"]}
    race = Race(SMALL, ["fastest-k", "lgc"], vary=vary, seeds=2, timing_only=True)
    assert race.lanes[:4] == ["fastest-k k=5 0", "fastest-k k=5 1", "fastest-k k=6 0", "fastest-k k=6 1"]
    assert race.lanes[4:6] == ["lgc k=5 late_blocks=1 0", "lgc k=5 late_blocks=1 1"]
    assert len(race.lanes) == 4 + 8
    assert race.varied[-1] == {"strategy.k": 6, "cluster.late_blocks": "random"}


@pytest.mark.parametrize(
    ("names", "vary", "lanes"),
    [
        (["full", "hpsgd"], {"strategy.period": [2, 4]}, ["full", "hpsgd period=2", "hpsgd period=4"]),
        (["full", "lgc"], {"optimizer.lr": [0.1, 0.2]}, ["full lr=0.1", "full lr=0.2", "lgc lr=0.1", "lgc lr=0.2"]),
        (["lgc@ranks", "lgc"], {"strategy.k": [4]}, ["lgc@ranks k=4", "lgc k=4"]),
    ],
)
def test_what_means_something_to_whom(names, vary, lanes):
    assert Race(SMALL, names, vary=vary, timing_only=True).lanes == lanes


BAD = {
    "an unknown key": (
        {"strategy.kk": [5]},
        "unknown setting in strategy 'kk'; did you mean 'k'? choose from name, k,",
    ),
    "an unknown section": (
        {"strategie.k": [5]},
        "unknown setting 'strategie.k'; did you mean 'strategy.KEY'? choose from seed,",
    ),
    "a section alone": ({"strategy": [{"k": 5}]}, "unknown setting 'strategy'"),
    "seeds": ({"seed": [1, 2]}, "a race over seeds is seeds="),
    "strategies": ({"strategy.name": ["lgc"]}, "a race is over strategies in any case"),
    "data": ({"data.name": ["digits"]}, "the lanes of a race share their data"),
    "no values": ({"strategy.k": []}, "vary needs a list of values for strategy.k"),
    "a value that cannot be": ({"strategy.k": [5, 11]}, "k must be between 1 and workers (k=11, workers=10)"),
    "a value of another type": ({"strategy.k": ["many"]}, "k must be a whole number or 'auto' or 'none' (k='many')"),
    "a value twice": ({"strategy.k": [5, 5]}, "strategy.k = '5' is given twice"),
    "nobody's": ({"strategy.period": [2]}, "strategy.period means nothing to full, lgc"),
    "too many": ({"optimizer.lr": [0.001 * n for n in range(1, 200)]}, "at most 100 values of a setting"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_varied_is_refused(name):
    vary, words = BAD[name]
    with pytest.raises(ValueError) as caught:
        Race(SMALL, ["full", "lgc"], vary=vary, timing_only=True)
    assert words in str(caught.value)


def test_a_model_that_is_given_as_an_object_has_no_name_to_vary():
    with pytest.raises(ValueError, match="the model is given as an object"):
        Race(SMALL, ["lgc"], vary={"model.name": ["mlp"]}, model=torch.nn.Sequential(torch.nn.Flatten()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("strategy.k=5..8", {"strategy.k": [5, 6, 7, 8]}),
        ("k=5,7,auto", {"strategy.k": [5, 7, "auto"]}),
        ("optimizer.lr=0.1,0.2", {"optimizer.lr": [0.1, 0.2]}),
        ("model.name=mlp,lenet", {"model.name": ["mlp", "lenet"]}),
        ("late-blocks=1,random", {"cluster.late_blocks": [1, "random"]}),
        ("strategy.scale_partial=true,samples", {"strategy.scale_partial": [True, "samples"]}),
        ("network.latency_seconds=1ms,0.5", {"network.latency_seconds": [0.001, 0.5]}),
    ],
)
def test_values_on_the_command_line_have_the_types_of_their_settings(text, expected):
    assert values_to_vary(text) == expected


@pytest.mark.parametrize("text", ["k", "k=", "k=9..5", "k=1..900", "k=1.5", "nothing=1", "strategy.kk=1"])
def test_text_that_says_no_values_is_refused(text):
    with pytest.raises(ValueError, match="--vary: "):
        values_to_vary(text)


@pytest.fixture(scope="module")
def finished():
    return run(Race(SMALL, ["full", "lgc"], vary={"strategy.k": [5, 7]}))


def test_results_say_which_value_each_run_had(finished):
    document = json.loads(json.dumps(as_document(finished.recipe, finished.results, finished.varied)))
    assert [each.get("varied") for each in document["results"]] == [None, {"strategy.k": 5}, {"strategy.k": 7}]


def test_table_and_page_tell_the_values_apart_and_claim_no_single_one(finished):
    traces = [result.trace for result in finished.results]
    assert [group.label for group in group_traces(traces)] == ["full", "lgc k=5", "lgc k=7"]
    page, caption = report_html(traces), str(results_table(traces).caption)
    assert "lgc k=5" in page
    assert "Time and loss at the end" in page
    assert "K=" not in caption
    assert "non-IID(3)" in caption


def test_a_point_for_each_lane_with_its_value_and_accuracy(finished):
    groups = group_traces([result.trace for result in finished.results])
    chart = frontier_chart(groups)
    points = [each for each in chart.data if "text" in each]
    assert [each["legendgroup"] for each in points] == ["s0", "s1", "s2"]
    for point, result, name in zip(points, finished.results, ("full", "k=5", "k=7"), strict=True):
        assert point["text"] == [f"{name}, {100 * result.accuracy:.1f} %"]
        assert point["x"] == pytest.approx([result.seconds], rel=1e-5)
        assert point["y"] == pytest.approx([result.loss], rel=1e-5)


def test_a_race_in_which_nothing_varies_has_no_such_chart():
    plain = run(Race(SMALL, ["full", "lgc"]))
    assert frontier_chart(group_traces([result.trace for result in plain.results])) is None
