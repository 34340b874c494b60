"""Shares by speed in recipes, races and their reports."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from paceline.cli.main import main
from paceline.recipes import Recipe
from paceline.recipes.assembly import make_setup
from paceline.reports import report_html
from paceline.reports.results import group_traces
from paceline.reports.shares import share_table
from paceline.runs import Race, simulate
from paceline.settings import SettingError
from paceline.traces.trace_files import read_traces, write_traces

SLOW = {"name": "slow-worker", "slow_factor": 3.0, "mean_seconds": 0.002, "persistence": 1}


def recipe_of(*, workers=4, rounds=40, **changes):
    settings = {"cluster": {"workers": workers}, "delay": SLOW, "data": {"split": "iid"}} | changes
    return Recipe(rounds=rounds).with_settings(**settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": {"name": "async"}}, r"async waits for nobody.*\(shares=speed\); give shares = equal"),
        ({"strategy": {"name": "hpsgd"}}, r"hpsgd averages.*full with on = ranks is ssgd with shares by speed"),
        ({"strategy": {"name": "ssgd"}}, r"full with on = ranks is ssgd with shares by speed"),
        ({"pruning": {"name": "fine-pruning"}}, r"batches of a pruned shard are of one size"),
        ({"pipeline": {"stages": 2}}, r"ranks of a pipeline are stages"),
    ],
)
def test_what_cannot_be_right_is_refused_before_it_starts(changes, said):
    Recipe().with_settings(**changes)
    with pytest.raises(SettingError, match=said):
        Recipe().with_settings(worker={"shares": "speed"}, **changes)


def test_a_fixed_part_larger_than_the_delay_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"at most the mean delay, 0.07 s.*fixed_seconds=0.1"):
        Recipe().with_settings(delay={"fixed_seconds": 0.1})
    file = tmp_path / "times.csv"
    file.write_text("1.0,2.0\n", encoding="utf-8")
    delay = {"name": "recorded", "file": str(file)}
    recipe = recipe_of(workers=2, delay=delay | {"fixed_seconds": 1.75})
    with pytest.raises(ValueError, match=r"times.csv.*at most the mean delay, 1.5 s.*fixed_seconds=1.75"):
        make_setup(recipe)
    assert make_setup(recipe_of(workers=2, delay=delay | {"fixed_seconds": 0.75})).fixed_seconds == 0.75


@pytest.mark.parametrize("on", ["server", "ranks"])
@pytest.mark.parametrize("late_work", ["partial", "complete"])
@pytest.mark.parametrize("network", [{}, {"worker_bits_per_second": 1e8, "server_bits_per_second": 1e9}])
def test_timing_only_takes_as_long_as_training_does(on, late_work, network):
    recipe = recipe_of(
        rounds=12,
        cluster={"workers": 4, "late_work": late_work},
        strategy={"name": "lgc", "on": on},
        worker={"shares": "speed"},
        network=network,
    )
    timed, trained = simulate(recipe, timing_only=True), simulate(recipe)
    assert timed.seconds == trained.seconds
    assert timed.trace.shares == trained.trace.shares
    assert timed.strategy == ("lgc+speed" if on == "server" else "lgc+speed@ranks")


def test_too_large_a_cluster_is_refused():
    recipe = recipe_of(workers=100_000, rounds=1000, worker={"shares": "speed"})
    with pytest.raises(ValueError, match=r"shares by speed plays every gradient.*at most 5,000,000.*100,000,000"):
        simulate(recipe, timing_only=True)


def test_a_race_has_a_lane_for_each_strategy_with_each_of_the_shares():
    recipe = recipe_of(rounds=20)
    race = Race(recipe, ["full", "lgc@ranks"], shares=["equal", "speed"], seeds=2, timing_only=True)
    for _ in race:
        pass
    assert race.lanes == [
        f"{name} {seed}" for name in ("full", "full+speed", "lgc@ranks", "lgc+speed@ranks") for seed in (0, 1)
    ]
    assert [result.strategy for result in race.results] == [lane.split()[0] for lane in race.lanes]
    assert [result.trace.shares is not None for result in race.results] == ["+speed" in lane for lane in race.lanes]
    alone = simulate(recipe.with_strategy("full+speed"), timing_only=True)
    assert alone.summary == race.results[2].summary
    equal = simulate(recipe.with_strategy("full"), timing_only=True)
    assert equal.summary == race.results[0].summary


@pytest.mark.parametrize(
    ("strategies", "shares", "said"),
    [
        (["full", "async"], ["equal", "speed"], "async waits for nobody"),
        (["full", "local-sgd"], ["speed"], "local-sgd averages"),
        (["full"], ["speed", "speed"], "shares 'speed' is given twice"),
        (["full"], ["sped"], "shares must be .equal. or .speed."),
        (["full+speed"], ["speed"], "names its shares"),
    ],
)
def test_a_race_of_what_cannot_have_shares_is_refused(strategies, shares, said):
    with pytest.raises(ValueError, match=said):
        Race(recipe_of(), strategies, shares=shares, timing_only=True)


def test_the_command_line_races_shares_and_says_what_they_came_to(tmp_path, capsys):
    options = ["--timing-only", "--workers", "4", "--rounds", "40", "--delay", "slow-worker"]
    options += ["--delay.mean-seconds", "0.002", "--out", str(tmp_path / "race")]
    assert main(["race", "--strategies", "full", "--shares", "equal,speed", *options]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    rows = [line.split()[0] for line in printed.splitlines() if line.strip().startswith("full")]
    assert rows[:2] == ["full", "full+speed"]
    assert re.search(r"with these shares, since\s+round \d+,\s+a\s+round\s+takes", printed)
    page = (tmp_path / "race" / "report.html").read_text(encoding="utf-8")
    assert "Shares by speed" in page
    found = json.loads((tmp_path / "race" / "results.json").read_text(encoding="utf-8"))["results"]
    assert [each["strategy"] for each in found] == ["full", "full+speed"]
    assert "shares" not in found[0]
    shares = found[1]["shares"]
    assert sum(each["samples"] for each in shares["workers"]) == 4 * 32
    assert shares["round_seconds"] < 0.6 * shares["equal_seconds"]
    traces = read_traces(tmp_path / "race")
    assert traces[0].shares is None
    assert traces[1].shares.batch == 4 * 32


def test_a_command_refuses_shares_in_one_line(tmp_path, capsys):
    code = main(["race", "--shares", "equal,speed", "--timing-only", "--out", str(tmp_path / "race")])
    assert code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert "async waits for nobody" in line
    assert main(["simulate", "--shares", "fast", "--timing-only", "--out", str(tmp_path / "one")]) == 2
    assert "'fast'" in capsys.readouterr().err


def test_the_setting_of_a_recipe_holds_in_a_race_that_says_nothing_of_shares(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('rounds = 10\n[worker]\nshares = "speed"\n', encoding="utf-8")
    race = Race(Recipe.load(file), ["full", "lgc"], timing_only=True)
    assert race.lanes == ["full+speed", "lgc+speed"]


# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_trace_survives_its_file_and_one_of_before_has_no_shares(tmp_path):
    trace = simulate(recipe_of(worker={"shares": "speed"}), timing_only=True).trace
    assert trace.shares is not None
    write_traces(tmp_path, [trace])
    assert read_traces(tmp_path)[0].shares == trace.shares


def test_of_many_workers_the_table_shows_those_with_the_smallest_shares_and_the_others_in_one_row():
    recipe = recipe_of(workers=60, rounds=40, worker={"shares": "speed"}, strategy={"name": "full"})
    trace = simulate(recipe, timing_only=True).trace
    table = share_table(group_traces([trace]))
    assert len(table.rows) <= 10
    assert table.rows[0][0] == "w0"
    assert table.rows[-1][0].endswith("others, mean")
    console = Console(width=80, file=io.StringIO())
    console.print(table.rich())
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
    assert "Shares by speed" in report_html([trace])


def test_shares_that_never_changed_are_said_to_be_equal():
    recipe = recipe_of(worker={"shares": "speed"}, delay={"name": "shifted-exponential", "mean_seconds": 0.0})
    trace = simulate(recipe, timing_only=True).trace
    assert trace.shares.changes == 0
    assert "shares stayed equal" in share_table(group_traces([trace])).caption


def test_a_report_of_equal_shares_has_no_such_table():
    trace = simulate(recipe_of(), timing_only=True).trace
    assert share_table(group_traces([trace])) is None
    assert "Shares by speed" not in report_html([trace])


@pytest.mark.parametrize("place", ["server", "ranks"])
def test_the_commands_on_a_folder_know_the_strategy_of_such_a_run(place, tmp_path, capsys):
    folder = str(tmp_path / "run")
    options = ["--workers", "4", "--rounds", "30", "--delay", "slow-worker", "--timing-only", "--on", place]
    assert main(["simulate", "--shares", "speed", *options, "--out", folder]) == 0
    for command in (["what-if", folder], ["what-if", folder, "--k", "2"], ["diagnose", folder], ["report", folder]):
        assert main(command) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert main(["what-if", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"].startswith("lgc+speed")


# -- what they are for -------------------------------------------------------------------------------------------------


def with_hiccups(file, seed, *, workers=8, rows=400):
    """Delays of a cluster in which one worker is always slow, and any may take four times as long for once."""
    draw = np.random.default_rng(seed)
    times = 0.05 * (1 + 0.04 * draw.random((rows, workers)))
    times *= np.where(draw.random((rows, workers)) < 0.1, 4.0, 1.0)
    times[:, 0] *= 4.0
    np.savetxt(file, times, delimiter=",", fmt="%.6f")
    return {"name": "recorded", "file": str(file)}


@pytest.mark.slow
def test_with_one_slow_worker_and_random_stragglers_lgc_with_shares_is_first_at_the_target(tmp_path):
    """K leaves out one of eight: without shares always the slow one, so that everybody else is waited for."""
    recipe = Recipe(seed=200, rounds=100, evaluate_every=5).with_settings(
        cluster={"workers": 8, "late_work": "partial"},
        strategy={"k": 7},
        data={"split": "iid"},
        delay=with_hiccups(tmp_path / "times.csv", 200),
    )
    race = Race(recipe, ["lgc", "full+speed", "lgc+speed"])
    for _ in race:
        pass
    seconds = {result.strategy: result.seconds_to_target for result in race.results}
    assert None not in seconds.values()
    assert seconds["lgc+speed"] < 0.9 * min(seconds["lgc"], seconds["full+speed"])
