"""What-if: a run is played again to the digit, remedies keep the laws of time, and what cannot be told is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import platform

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.analysis.what_if import answer as answering
from paceline.analysis.what_if import remedies
from paceline.analysis.what_if.answer import Wanted, what_if
from paceline.analysis.what_if.checking import delay_rows
from paceline.analysis.what_if.measured_run import WhatIfError, measured_run
from paceline.analysis.what_if.replayed_times import play, played_error
from paceline.cli.main import main
from paceline.recipes import Recipe
from paceline.runs import simulate
from paceline.strategies import LGC, Async, FastestK, Full
from paceline.traces.step_times import (
    FORMAT,
    BucketsMade,
    ServerTimes,
    StepTimes,
    TimesBegan,
    TimesWriter,
    WorkerTimes,
    times_path,
)
from paceline.traces.trace_files import write_traces
from tests.analysis.what_if_runs import BYTES, costs_of, recorded

TIME = st.floats(0.02, 0.5)
COLUMNS = st.lists(st.lists(TIME, min_size=30, max_size=30).map(tuple), min_size=2, max_size=5).map(tuple)
STRATEGY = st.sampled_from([Full(), LGC(k=1), LGC(k=2), FastestK(k=2), Async()])
quick = settings(max_examples=40, deadline=None)


def seconds(remedy) -> float:
    return play(remedy.run).seconds


# -- played again ------------------------------------------------------------------------------------------------------


@quick
@given(columns=COLUMNS, server=st.sampled_from([0.0, 0.004, 0.05]), on=st.sampled_from(["server", "ranks"]))
def test_a_run_that_waits_for_all_is_played_again_exactly(columns, server, on) -> None:
    run = measured_run(recorded(columns, costs=costs_of(len(columns), server=server, on=on), on=on))
    assert bool(run.links) == (on == "server")
    assert abs(played_error(run, play(run)).total) < 1e-5


@pytest.mark.parametrize("on", ["server", "ranks"])
@pytest.mark.parametrize("strategy", [LGC(k=1), LGC(k=2), FastestK(k=2), Async()], ids=str)
def test_a_run_in_which_somebody_is_late_is_played_again_nearly_always_exactly(strategy, on) -> None:
    """Now and then a worker comes just before or just after a close, and what follows is another run."""
    if on == "ranks" and isinstance(strategy, Async):
        return
    random, errors = np.random.default_rng(5), []
    for number in range(24):
        workers = 2 + number % 4
        columns = tuple(tuple(random.uniform(0.05, 0.4, 30).tolist()) for _ in range(workers))
        run = measured_run(recorded(columns, strategy, costs=costs_of(workers, on=on), on=on))
        errors.append(abs(played_error(run, play(run)).total))
    assert sorted(errors)[len(errors) // 2] < 0.001
    assert sorted(errors)[len(errors) * 3 // 4] < 0.03


@pytest.mark.parametrize("late_work", ["partial", "complete"])
@pytest.mark.parametrize("name", ["full", "lgc", "fastest-k", "async", "lgc@ranks", "full+speed", "lgc+speed@ranks"])
def test_a_simulated_run_is_played_again_exactly(tmp_path, name, late_work) -> None:
    recipe = Recipe(rounds=30).with_strategy(name).with_settings(
        cluster={"workers": 5, "late_work": late_work}, strategy={"k": 3}, network={"latency_seconds": 0.004}
    )  # fmt: skip
    result = simulate(recipe)
    write_traces(tmp_path, [result.trace])
    found = what_if(tmp_path, Wanted(without=(1,)))
    assert found.replayed_seconds == pytest.approx(found.run.seconds, rel=0.01 if "@" in name else 1e-5)
    assert found.error.median_round < 1e-5
    assert any("every remedy is played with the sizes that the run had" in note for note in found.notes) == (
        "+speed" in name
    )


@pytest.mark.parametrize("late_blocks", [1, "random"])
def test_blocks_that_late_workers_were_said_to_have_done_say_nothing_of_their_times(tmp_path, late_blocks) -> None:
    recipe = Recipe(rounds=30).with_settings(cluster={"workers": 5}, strategy={"k": 3})
    found = []
    for each in (recipe, recipe.with_settings(cluster={"late_blocks": late_blocks})):
        (tmp_path / str(each.cluster.late_blocks)).mkdir()
        write_traces(tmp_path / str(each.cluster.late_blocks), [simulate(each).trace])
        found.append(what_if(tmp_path / str(each.cluster.late_blocks), Wanted(without=(1,))))
    plain, some = ([(each.name, each.seconds) for each in answer.predictions] for answer in found)
    assert plain == some


@pytest.mark.parametrize(("name", "period"), [("local-sgd", 4), ("ssgd", "auto")])
def test_a_simulated_run_that_averages_is_played_again(tmp_path, name, period) -> None:
    settings = {"cluster": {"workers": 4}, "delay": {"persistence": 20}, "network": {"latency_seconds": 0.004}}
    recipe = Recipe(rounds=40).with_strategy(name).with_settings(strategy={"period": period}, **settings)
    write_traces(tmp_path, [simulate(recipe).trace])
    found = what_if(tmp_path, Wanted(period=(8,)))
    assert abs(found.error.total) < 0.01
    longer = next(each for each in found.predictions if "period 8" in each.name)
    assert longer.seconds <= found.run.seconds  # who waits for the others more seldom is not held up longer


def test_windows_that_differ_in_their_steps_need_step_times(tmp_path) -> None:
    write_traces(tmp_path, [simulate(Recipe(rounds=20).with_strategy("hpsgd"), timing_only=True).trace])
    with pytest.raises(WhatIfError, match=r"no step times of its ranks .* record it again"):
        what_if(tmp_path)


# -- what was measured -------------------------------------------------------------------------------------------------


@quick
@given(columns=COLUMNS, strategy=STRATEGY)
def test_each_workers_draws_keep_their_order_and_what_was_cut_short_is_marked(columns, strategy) -> None:
    made = recorded(columns, strategy)
    run = measured_run(made)
    for own, found in zip(columns, run.draws, strict=True):
        for number, draw in enumerate(found):
            if draw.mark != "guessed":
                assert draw.seconds == pytest.approx(own[number % len(own)], rel=1e-6)
    cut = sum(each.blocks_done < each.blocks for step in made.journal.records[1:] for each in step.arrivals)
    assert sum(draw.mark == "extrapolated" for column in run.draws for draw in column) == cut


def test_who_was_slow_for_a_while_is_slow_for_as_long_again() -> None:
    slow_for_ten = tuple([0.1] * 10 + [0.4] * 10 + [0.1] * 10)
    run = measured_run(recorded(((0.1,) * 30, slow_for_ten), LGC(k=1), rounds=30))
    times = [draw.seconds for draw in run.draws[1] if draw.mark != "guessed"]

    def lag_one(series):
        series = np.asarray(series) - np.mean(series)
        return float((series[1:] * series[:-1]).sum() / (series**2).sum())

    assert lag_one(times) == pytest.approx(lag_one(slow_for_ten[: len(times)]), abs=1e-6)
    again = [row[1] for row in delay_rows(run)]
    assert again[: len(run.draws[1])] == again[len(run.draws[1]) : 2 * len(run.draws[1])]


def test_a_worker_that_the_end_cut_off_is_at_least_as_slow_as_it_had_been_by_then() -> None:
    run = measured_run(recorded(((0.1,) * 30, (0.1,) * 29 + (9.0,), (0.1, 50.0)), FastestK(k=1), rounds=30, blocks=1))
    assert run.draws[2][-1].mark == "guessed"
    assert run.draws[2][-1].seconds > 2.0


def test_one_slow_link_is_found_and_not_taken_for_slow_computing() -> None:
    costs = costs_of(3)
    slow = dataclasses.replace(costs.links[1], up=dataclasses.replace(costs.links[1].up, latency_seconds=0.2))
    costs = dataclasses.replace(costs, links=(costs.links[0], slow, costs.links[2]))
    run = measured_run(recorded(((0.1,) * 5,) * 3, costs=costs))
    times = [link.down.seconds(BYTES) + link.up.seconds(BYTES) for link in run.links]
    assert times == pytest.approx([0.008, 0.203, 0.008], abs=1e-5)
    typical = [run.typical_seconds(worker) for worker in range(3)]
    assert typical == pytest.approx([typical[0]] * 3, abs=1e-6)
    assert 0.1 <= typical[0] < 0.11


def test_no_prediction_is_shorter_than_what_the_cores_of_this_machine_need() -> None:
    run = measured_run(recorded(((0.1,) * 5,) * 3))
    cores = os.cpu_count() or 1
    busy = dataclasses.replace(run, processor_seconds=float(cores))  # 60 batches, a second of every core for each
    assert play(busy).seconds == pytest.approx(play(run).seconds)  # they were elsewhere
    here = dataclasses.replace(busy, hosts=frozenset({platform.node()}))
    assert play(here).seconds == pytest.approx(60.0)


# -- laws of remedies --------------------------------------------------------------------------------------------------


@quick
@given(columns=COLUMNS)
def test_nobody_straggles_is_the_bound_and_fewer_to_wait_for_are_never_slower(columns) -> None:
    run = measured_run(recorded(columns))
    as_it_was, bound = play(run).seconds, seconds(remedies.nobody_straggles(run))
    assert bound <= as_it_was + 1e-6
    for worker in range(run.workers):
        assert bound <= seconds(remedies.with_links(run, 1.0, worker)) + 1e-6
        if run.workers > 2:
            assert seconds(remedies.without(run, worker)) <= as_it_was + 1e-6
    assert seconds(remedies.with_strategy(run, "fastest-k", k=run.workers)) == pytest.approx(as_it_was, abs=1e-6)


@quick
@given(columns=COLUMNS, factors=st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)))
def test_a_faster_link_is_never_slower(columns, factors) -> None:
    costs = costs_of(len(columns), down=0.05, up=0.05)
    run = measured_run(recorded(columns, costs=costs))
    slow, fast = (seconds(remedies.with_links(run, factor)) for factor in sorted(factors))
    assert fast <= slow + 1e-9
    one, same = (seconds(remedies.with_links(run, factor, 0)) for factor in (10.0, 1.0))
    assert one <= same + 1e-9
    assert same == pytest.approx(play(run).seconds, abs=1e-6)


def test_a_remedy_is_what_the_simulator_says_of_the_changed_run() -> None:
    """Predicted from `full` alone; the run with the other strategy was played with the true times."""
    random = np.random.default_rng(3)
    columns = tuple(tuple(random.uniform(0.05, 0.3, 60).tolist()) for _ in range(5))
    run = measured_run(recorded(columns, rounds=40))
    for name, strategy in (("lgc", LGC(k=3)), ("fastest-k", FastestK(k=3)), ("async", Async())):
        real = measured_run(recorded(columns, strategy, rounds=40)).seconds
        assert seconds(remedies.with_strategy(run, name, k=3)) == pytest.approx(real, rel=0.06), name


def test_a_codec_changes_the_bytes_and_adds_the_seconds_of_coding() -> None:
    run = measured_run(recorded(((0.1,) * 5,) * 3, costs=costs_of(3, down=0.1, up=0.1)))
    assert run.transfer_seconds == pytest.approx(0.2, abs=1e-5)

    def cost(text, elements):
        if text == "identity":
            return remedies.CodecCost(payload_bytes=4 * elements, encode_seconds=0.0, decode_seconds=0.0)
        return remedies.CodecCost(payload_bytes=elements, encode_seconds=0.01, decode_seconds=0.01)

    coded = remedies.with_codec(run, "small", cost_of=cost).run
    assert coded.up_bytes == BYTES // 4
    assert coded.transfer_seconds == pytest.approx(0.2 / 4, rel=0.1)
    saved, coding = 0.2 * 3 / 4, 0.02 + 0.02  # by the workers, and by the server
    per_round = play(run).seconds / run.rounds - play(coded).seconds / run.rounds
    assert per_round == pytest.approx(saved - coding, abs=0.01)


def test_the_servers_own_seconds_are_those_of_the_same_version_also_after_a_hole() -> None:
    """A full disk lost the first ten steps; versions 10 to 19 had the seconds of 0 to 9 then."""
    whole = recorded(((0.1,) * 25,) * 3, costs=costs_of(3, server=0.05))
    first, records = whole.journal.records[0], whole.journal.records[11:]
    with_hole = dataclasses.replace(whole, journal=dataclasses.replace(whole.journal, records=(first, *records)))
    about = {"format": FORMAT, "paceline": "0.2.0", "number": 0, "workers": 3, "host": "", "launch": ""}
    own = [0.001 * (1 + version) for version in range(20)]  # below 0.05, so each counts
    times = WorkerTimes(
        began=TimesBegan(noun="server", sync="server", **about),
        server=tuple(
            ServerTimes(version=version, closed_seconds=0.0, step_seconds=seconds, send_seconds=0.0, decode_seconds=0.0)
            for version, seconds in enumerate(own)
        ),
    )
    for run, lost in ((whole, 0), (with_hole, 10)):
        measured = measured_run(dataclasses.replace(run, times={"server": {0: times}}))
        assert measured.server_seconds == pytest.approx(own[lost:], abs=2e-6)
        assert measured.versions == tuple(range(lost, 20))


@pytest.mark.parametrize("text", ["qsgd", "qsgd levels=7", "identity"])
def test_the_codec_that_is_in_place_is_not_proposed_and_refused_where_it_is_asked_for(text) -> None:
    run = dataclasses.replace(
        measured_run(recorded(((0.1,) * 5,) * 3, costs=costs_of(3, down=0.1, up=0.1))), codec=text
    )
    proposed = [each.name for each in answering._sensible(run)]
    assert ("codec qsgd" in proposed) == (text == "identity")
    with pytest.raises(WhatIfError, match=f"the run has codec {text} already"):
        remedies.with_codec(run, text)
    with pytest.raises(WhatIfError, match="already"):
        remedies.with_codec(dataclasses.replace(run, codec="qsgd levels=7"), "qsgd")


def test_what_was_never_seen_is_guessed() -> None:
    run = recorded(((0.1,) * 40, (1.0,) * 40, (0.1,) * 40), FastestK(k=2), rounds=40, blocks=1)
    measured = measured_run(run)
    assert play(measured).unseen_share < 0.1
    assert play(remedies.with_strategy(measured, "full").run).unseen_share > 0.2  # it draws 40 times, and was seen 4
    assert remedies.added(measured, 2).mark == remedies.replaced(measured, 1).mark == "guessed"
    assert remedies.with_strategy(measured, "lgc@ranks").mark == "guessed"
    assert remedies.with_strategy(measured, "lgc").mark == "modelled"


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_run_that_cannot_be_played_again_is_refused(monkeypatch) -> None:
    """The slow worker leaves after three rounds, and the others go on without it: the simulator would wait for it."""
    made = recorded(((0.1,) * 40, (0.1,) * 40, (2.0,) * 3), rounds=3)
    others = recorded(((0.1,) * 40, (0.1,) * 40), rounds=40)
    end, versions, tail = made.trace.seconds, 3, []
    for step in others.journal.records[1:]:
        moved = tuple(
            dataclasses.replace(each, at_seconds=each.at_seconds + end, version=each.version + 3, draw=each.draw + 3)
            for each in step.arrivals
        )
        tail.append(
            dataclasses.replace(
                step, at_seconds=step.at_seconds + end, opened_seconds=step.opened_seconds + end, arrivals=moved,
                version=step.version + versions, fresh=tuple((who, at + versions) for who, at in step.fresh),
            )
        )  # fmt: skip
    journal = dataclasses.replace(made.journal, records=(*made.journal.records, *tail))
    changed = dataclasses.replace(made, journal=journal)
    monkeypatch.setattr(answering, "read_run", lambda folder, strategy: changed)
    with pytest.raises(WhatIfError, match=r"more than 10% off, so nothing is predicted from it .*; record it again"):
        what_if("runs/made")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(without=(7,)), "--without must be between 0 and 2, the workers' numbers"),
        (Wanted(replace=(3,)), "--replace must be between 0 and 2"),
        (Wanted(k=(4,)), "K must be between 1 and 3, the number of workers, or auto"),
        (Wanted(strategies=("fulll",)), "unknown strategy 'fulll'; did you mean 'full'"),
        (Wanted(links=((5, 2.0),)), "--link must be between 0 and 2"),
        (Wanted(add=(100_000,)), "--add must be between 1 and 10,000"),
    ],
)
def test_a_remedy_that_there_is_not_is_refused_in_a_line(monkeypatch, wanted, words) -> None:
    monkeypatch.setattr(answering, "read_run", lambda folder, strategy: recorded(((0.1,) * 5,) * 3))
    with pytest.raises(ValueError, match="(?i)" + words.replace("'", ".")):
        what_if("runs/made", wanted)


# -- DDP scripts -------------------------------------------------------------------------------------------------------


def watched(folder, times, wire=0.02, ranks=None):
    """Files of step times as ranks of a DDP script leave them: times[rank][step] of computing, and a wire for all."""
    for rank, own in enumerate(times):
        if ranks is not None and rank not in ranks:
            continue
        writer = TimesWriter(times_path(folder, "rank", rank))
        writer.write(
            TimesBegan(
                format=FORMAT, paceline="0.2.0", noun="rank", number=rank, workers=len(times), host=f"node-{rank}",
                launch="1", sync="ddp",
            )
        )  # fmt: skip
        writer.write(BucketsMade(step=0, bytes=(4_000_000,)))
        at = 0.0
        for step, computing in enumerate(own):
            slowest = max(each[step] for each in times)
            writer.write(
                StepTimes(
                    step=step, started_seconds=at, seconds=slowest + wire, forward_seconds=computing,
                    wait_seconds=slowest - computing + wire,
                )
            )  # fmt: skip
            at += slowest + wire
        writer.close()


def test_a_watched_script_is_played_again_and_its_remedies_are_known(tmp_path) -> None:
    times = [[0.1, 0.12] * 20, [0.1] * 40, [0.3, 0.1] * 20]
    watched(tmp_path, times)
    found = what_if(tmp_path, Wanted(without=(2,), links=((None, 2.0),), strategies=("lgc", "hpsgd")))
    expected = sum(max(column) + 0.02 for column in zip(*times, strict=True))
    assert found.run.seconds == pytest.approx(expected - 0.02)
    assert abs(found.error.total) < 1e-6
    by_name = {each.name: each.seconds for each in found.predictions}
    assert by_name["without rank 2"] == pytest.approx(39 * 0.02 + sum(map(max, zip(*times[:2], strict=True))), rel=1e-3)
    assert by_name["links 2 times as fast"] == pytest.approx(expected - 40 * 0.01, rel=0.01)
    assert "paceline.LGCSync" in next(e.remedy.advice for e in found.predictions if e.name.startswith("lgc"))


def test_a_rank_without_times_is_named_and_played_like_the_rank_in_the_middle(tmp_path) -> None:
    times = [[0.1, 0.12] * 20, [0.1] * 40, [0.3, 0.1] * 20, [0.1, 0.11] * 20]
    watched(tmp_path, times)
    path = tmp_path / "times" / "rank-1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step_timed"', b'"step_tamed"', 1))
    found = what_if(tmp_path, Wanted(without=(2,)))
    assert found.run.workers == 4
    note = "no times of rank 1 are here: played like the rank in the middle of each step"
    assert any(note == each for each in found.notes)
    assert any(f"{path.name} is left out: {path}:" in each for each in found.notes), found.notes
    by_name = {each.name: each.seconds for each in found.predictions}
    others = sum(max(column) for column in zip(times[0], times[1], times[3], strict=True)) + 39 * 0.02
    assert by_name["without rank 2"] == pytest.approx(others, rel=0.01)
    for rank in (0, 3):
        (tmp_path / "times" / f"rank-{rank}.jsonl").unlink()
    with pytest.raises(WhatIfError, match="no times of ranks 0, 1, 3 of 4"):
        what_if(tmp_path)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_of_80_columns_or_a_document(tmp_path, capsys) -> None:
    recipe = Recipe(rounds=20).with_settings(cluster={"workers": 4, "late_work": "partial"})
    write_traces(tmp_path, [simulate(recipe).trace])
    assert main(["what-if", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "nobody straggles" in out
    assert "To do it: " in out
    assert "losses are not" in out
    assert "measured" in out
    assert main(["what-if", str(tmp_path), "--k", "2,auto", "--link", "0.5,1:2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["remedies"]) == 5
    assert abs(document["resimulation_error"]) < 1e-5
    seconds = [each["predicted_seconds"] for each in document["remedies"]]
    assert seconds == sorted(seconds)
    assert document["remedies"][0]["bound"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", "two"], "--k must be a list of whole numbers or auto"),
        (["--link", "fast"], "--link must be a list of factors"),
        (["--link", "0"], "--link must be a list of factors"),
        (["--without", "-1"], "--without must be a list of workers' numbers"),
        (["--codec", "qsdg"], "did you mean 'qsgd'"),
        (["--on", "moon"], "--on must be ranks"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(tmp_path, capsys, arguments, words) -> None:
    assert main(["what-if", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("forked_workers")
def test_a_check_runs_the_remedy_for_real_with_the_recorded_delays(tmp_path, capsys, monkeypatch) -> None:
    """Real processes; of the time only that it was measured is held, for a busy machine takes as long as it likes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    delays = ["--inject-delays", "--delay", "slow-worker", "--delay.mean-seconds", "0"]
    asked = ["--workers", "2", "--rounds", "6", "--strategy", "full", "--out", "run"]
    assert main(["train", *asked, *delays]) == 0
    capsys.readouterr()
    assert main(["what-if", "run", "--replace", "0", "--link", "2", "--check", "--json", "--out", "checks"]) == 0
    document = json.loads(capsys.readouterr().out)
    by_name = {each["name"]: each for each in document["remedies"]}
    replaced = by_name["worker 0 like the median"]
    assert replaced["measured_seconds"] > 0
    assert replaced["off"] is not None
    assert by_name["links 2 times as fast"]["check"] == "links are not shaped here"
    rows = (tmp_path / "checks" / "check-0" / "delays.csv").read_text().splitlines()
    first, second = map(float, rows[1].split(","))
    assert first == second < 0.25  # the slow one takes as long as the other
