"""What the server's timings, and those of codecs, diagnosis and Trainer, say of figures that are made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from experiments.core.story import NAN, Findings, Size
from experiments.timings import cluster, codecs, diagnosis, overhead, server_memory, trainer
from paceline.traces.journal import Arrival, StepRecord
from tests.experiments.telling import EXPERIMENTS, TOY


def _found(telling):
    found = Findings()
    for told in telling:
        found.add(told)
    return found


def _verdicts(telling):
    return [claim.holds for claim in _found(telling).claims]


def _tell(name, **settings):
    return EXPERIMENTS[name].tell(TOY, lambda jobs: pytest.fail("a timing has no jobs"), **settings)


# -- cluster -----------------------------------------------------------------------------------------------------------


def _ran(lane, seconds, loss, predicted=NAN, difference=""):
    return cluster.Ran(lane=lane, seconds=seconds, loss=loss, predicted_seconds=predicted, difference=difference)


@pytest.mark.parametrize(
    ("gloo", "seconds", "loss", "verdicts"),
    [
        (9.5, 7.0, 1.02, [True, True, True]),
        (9.0, 7.0, 1.02, [False, True, True]),
        (9.5, 7.3, 1.02, [True, False, True]),
        (9.5, 7.0, 1.04, [True, True, False]),
        (9.5, 7.0, NAN, [True, True, False]),  # it diverged
    ],
)
def test_times_and_losses_of_real_runs_are_held_against_full_and_gloo(gloo, seconds, loss, verdicts):
    """The quickest run of a lane counts, and the mean of its losses."""
    runs = [_ran("full", 10.0, 0.9), _ran("lgc, scaled", seconds, loss), _ran("fastest-k", 1.0, 9.0)]
    runs += [_ran("full", 11.0, 1.1), _ran("lgc, scaled", 20.0, loss), _ran("fastest-k", 1.0, NAN)]
    found = _found(cluster.tell_strategies(runs, [_ran("gloo", gloo, 1.0), _ran("gloo", 30.0, 1.0)], "twice"))
    assert [claim.holds for claim in found.claims] == verdicts
    row = found.numbers["rows"][0]
    assert (row["seconds"], row["loss"], row["times_gloo"]) == (10.0, pytest.approx(1.0), 10.0 / gloo)


def test_a_run_that_is_not_replayed_alike_or_simulated_far_off_is_reported():
    runs = [_ran("full", 10.0, 1.0, predicted=9.1), _ran("full", 10.0, 1.0, predicted=11.2, difference="step 3")]
    found = _found(cluster.tell_checks(runs))
    assert [claim.holds for claim in found.claims] == [True, True, False, False]
    assert [claim.text for claim in found.missed] == [
        "full, run 2: how far the simulated time is off", "full, run 2: replayed from its trace"
    ]  # fmt: skip


def _step(version, fresh, seconds):
    """Return a step for which these workers were on time; seconds that model and gradient of each took on the wire."""
    arrivals = tuple(
        Arrival(worker=worker, version=version, draw=0, blocks_done=1, blocks=1, at_seconds=0.0, work_seconds=0.1,
                transfer_seconds=took, loss_mean=None, loss_variance=None, samples=32)
        for worker, took in seconds.items()
    )  # fmt: skip
    on_time = tuple((worker, version) for worker in fresh)
    return StepRecord(at_seconds=1.0, version=version, opened_seconds=0.0, fresh=on_time, late=(), dropped=(),
                      arrivals=arrivals, fingerprint=0, sent_bytes=0, received_bytes=0)  # fmt: skip


def test_only_gradients_whose_worker_was_on_time_before_tell_the_latency():
    """Worker 1 was late for step 0, so its model of version 1 waited for it; worker 2 is late for step 2."""
    records = [
        _step(0, (0, 2), {0: 9.0, 2: 9.0}),
        _step(1, (0, 1, 2), {0: 0.2, 1: 7.0, 2: 0.4}),
        _step(2, (0, 1), {0: 0.6, 1: 0.8, 2: 5.0}),
    ]
    assert cluster.latency_seconds(records) == pytest.approx(0.25)  # half of the median of 0.2, 0.4, 0.6 and 0.8
    assert cluster.latency_seconds(records[:1]) == 0.0


@pytest.mark.parametrize("rounds", [1, 100, 101, 300])
def test_gloo_s_ranks_write_as_many_lines_as_are_waited_for(rounds):
    every = cluster.ROUNDS_A_LINE
    assert cluster.lines_for(rounds) == len([draw for draw in range(1, rounds) if draw % every == 0]) + 1


# -- overhead ----------------------------------------------------------------------------------------------------------

LOCAL, TCP, HALF = overhead.SERVERS


def test_the_best_round_of_a_server_is_held_against_gloo_s_best():
    times = {overhead.GLOO: [1.0, 5.0], overhead.GLOO_SERVER: [9.0], LOCAL: [7.0, 1.3], TCP: [3.01, 8.0], HALF: [2.0]}
    assert _verdicts(overhead.tell_rounds("", times)) == [True, False, True]


def test_what_the_server_does_not_do_itself_is_left_for_the_network():
    parts = {"identity": {"decode": 0.1, "sum": 0.2}, "bfloat16": {"decode": 0.4, "sum": 0.2}}
    (table,) = _found(overhead.tell_parts(parts, {TCP: [0.9, 0.5], HALF: [0.7]})).tables
    assert table.rows[-1][1:] == ("200.0", "100.0")


@pytest.mark.parametrize(("seconds", "holds"), [([0.01, 0.04, 0.9], True), ([0.01, 0.06, 0.06], False)])
def test_the_median_time_that_an_entropy_code_keeps_the_event_loop_is_judged(seconds, holds):
    assert _verdicts(overhead.tell_gaps("", {"identity": [9.0], overhead.ENTROPY: seconds})) == [holds]


# -- server-memory -----------------------------------------------------------------------------------------------------

FULL = server_memory.Case(parameters=1_000_000, workers=2)


@pytest.mark.parametrize(("megabytes", "ended", "holds"), [(130, False, True), (131, False, False), (110, True, False)])
def test_a_server_that_holds_too_much_or_was_ended_misses_its_bar(megabytes, ended, holds):
    """2 gradients of 4 MB are held: 7.5 models of 4 MB above the start, which is at 100 MB."""
    figures = {"base": 100_000_000, "peak": 1_000_000 * megabytes, "held": 2, "ended": ended}
    found = _found(server_memory.tell({FULL: figures}))
    assert [claim.holds for claim in found.claims] == [holds]
    (row,) = found.numbers["rows"]
    assert (row["bar"], row["models"]) == (7.5, (megabytes - 100) / 4)
    assert found.tables[0].rows[0][5].startswith("> ") == ended


@pytest.mark.parametrize(
    ("changes", "most"), [({}, 15.0), ({"strategy": "lgc"}, 16.0), ({"codec": "qsgd levels=7"}, 16.0),
                          ({"codec": "bfloat16"}, 15.0), ({"local": True}, 15.0)]
)  # fmt: skip
def test_what_is_remembered_is_a_model_more(changes, most):
    assert server_memory.Case(parameters=1, workers=8, **changes).most_models(held=8) == most


def test_rows_of_the_memory_can_be_left_out_and_each_has_a_name_of_its_own():
    every = server_memory.cases_of((), (), ())
    assert len({case.name for case in every}) == len(every) == 29
    some = server_memory.cases_of(("10M",), ("8",), ("lgc",))
    assert [(case.parameters, case.workers, case.strategy, case.local) for case in some] == [(10**7, 8, "lgc", False)]
    assert {case.codec for case in server_memory.cases_of(("10M",), ("8",), ())} == {"identity", *server_memory.CODECS}


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("server-memory", {"sizes": ("2M",)}, "unknown size '2M'; .*choose from 1M, 10M, 50M"),
        ("server-memory", {"workers": ("3",)}, "unknown number of workers '3'"),
        ("server-memory", {"strategies": ("lgd",)}, "unknown strategy 'lgd'"),
        ("diagnosis", {"drivers": ("dpp",)}, "unknown driver 'dpp'; did you mean 'ddp'"),
    ],
)
def test_a_choice_that_is_not_there_is_refused(name, settings, error):
    with pytest.raises(ValueError, match=error):
        _tell(name, **settings)


# -- codecs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encode", "eager", "verdicts"),
    [(0.5, 3.0, [True, True, True]), (1.6, 9.0, [False, True, False]), (0.5, 2.4, [True, False, True]),
     (1.2, 4.0, [True, False, False])],
)  # fmt: skip
def test_codecs_are_held_against_copies_and_qsgd_against_eager_torch(encode, eager, verdicts):
    """Decoding takes as long as a copy: 2.5 copies at most for QSGD, which is first, and 2 for one-bit."""
    best = {codecs.CLONE: 1.0, codecs.COPY: 0.5}
    for name in codecs.CASES:
        best |= {f"{name} encode": encode, f"{name} decode, new memory": 1.0}
        best |= {f"{name} decode, warm memory (out=)": 0.25}
        best |= {f"{name} encode, eager torch": eager, f"{name} decode, eager torch": 5.0}
    rows = [codecs.row_of(name, best) for name in codecs.CASES]
    assert rows[0]["warm_copies"] == (encode + 0.25) / 0.5
    assert _verdicts(codecs.tell_bars(rows, "", 1.0)) == verdicts


# -- diagnosis ---------------------------------------------------------------------------------------------------------


def _diagnosed(*named, status="slow", links=()):
    suspects = [SimpleNamespace(members=members, phases=phases, matters=matters) for members, phases, matters in named]
    return SimpleNamespace(status=status, suspects=suspects, links=links)


@pytest.mark.parametrize(
    ("place", "found", "outcome"),
    [
        ("input", _diagnosed(((2,), ("input",), True)), "right"),
        ("input", _diagnosed(((2,), ("input",), True), ((3,), ("forward",), False)), "right"),
        ("input", _diagnosed(((2,), ("forward",), True)), "place"),
        ("input", _diagnosed(((2,), ("input",), True), ((3,), ("forward",), True)), "other"),
        ("input", _diagnosed(((1,), ("input",), True)), "other"),
        ("input", _diagnosed(((2,), ("input",), True), status="balanced"), "nobody"),
        ("link", _diagnosed(((2,), ("transfer",), True)), "right"),  # what a server calls it
        ("link", _diagnosed(status="link"), "other"),  # it does not know whose
        ("", _diagnosed(status="balanced"), "right"),
        ("", _diagnosed(((2,), ("input",), True)), "other"),
    ],
)
def test_a_diagnosis_is_right_if_it_names_the_rank_the_place_and_no_other(place, found, outcome):
    case = diagnosis.Case(name="", place=place, slow=2 if place else -1, seconds=0.2, steps=1, seed=0)
    assert diagnosis.outcome_of(case, found) == outcome


def _rows(wrong):
    """Return the rows of all cases under DDP; of each name in `wrong`, so many are wrong."""
    left, rows = dict(wrong), []
    for case in diagnosis.cases_of("ddp", Size()):
        bad = left.get(case.name, 0) > 0
        left[case.name] = left.get(case.name, 0) - bad
        row = {"name": case.name, "place": case.place, "slow": case.slow, "seconds": case.seconds, "words": "Words."}
        rows.append({**row, "right": not bad, "outcome": "other" if bad else "right"})
    return rows


@pytest.mark.parametrize(
    ("wrong", "verdicts", "small"),
    [
        ({}, [True, True], 15),
        ({"half a link": 1}, [True, True], 15),
        ({"half a link": 1, "+200 ms, input": 1}, [False, True], 15),
        ({"balanced": 1}, [True, False], 15),
        ({"+50 ms, forward": 5}, [True, True], 10),  # reported, not judged
    ],
)
def test_nineteen_of_twenty_are_right_and_none_is_named_in_a_balanced_run(wrong, verdicts, small):
    found = _found(diagnosis.tell("ddp", _rows(wrong)))
    assert [claim.holds for claim in found.claims] == verdicts
    first, *others = found.remarks
    assert f"{small} of 15" in first
    assert len(others) == sum(wrong.values())  # what it said where it was wrong


def test_other_seeds_slow_other_ranks_down():
    assert len(diagnosis.cases_of("server", Size())) == 45
    slow = [[case.slow for case in diagnosis.cases_of("ddp", Size(seeds=(seed,)))] for seed in (200, 201)]
    assert slow[0] != slow[1]


# -- trainer, and where there is no root -------------------------------------------------------------------------------


@pytest.mark.parametrize(("faster", "loss", "verdicts"), [(5.0, 1.02, [True, True]), (0.9, 1.03, [False, False])])
def test_a_trainer_s_lanes_are_compared(monkeypatch, faster, loss, verdicts):
    """Each lane's best turn counts, and the mean of its losses."""
    turns = [{"parameters": 7, "lane": trainer.DDP, "samples_per_second": rate, "loss": 1.0, "sent_bytes": 8e6}
             for rate in (9.0, 10.0)]  # fmt: skip
    turns += [{**turns[0], "lane": trainer.OURS, "samples_per_second": rate, "loss": end}
              for rate, end in ((10 * faster, loss - 0.01), (1.0, loss + 0.01))]  # fmt: skip

    class NoCable:
        hosts, interfaces = ("a", "b"), ("x", "y")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    def told(module, ranks, plan, labels, *, hosts, total):
        assert (ranks, len(labels), hosts) == (2, 2 * len(plan["seeds"]), [("a", "x"), ("b", "y")])
        return turns
        yield

    monkeypatch.setattr(trainer, "why_not", lambda: None)
    monkeypatch.setattr(trainer.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(trainer, "Cable", NoCable)
    monkeypatch.setattr(trainer, "told_by_ranks", told)
    assert [claim.holds for claim in _tell("trainer").claims] == verdicts


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(trainer.importlib.util, "find_spec", lambda name: None)
    found = _tell("trainer")
    assert found.skipped == "transformers and accelerate not installed: pip install 'paceline[huggingface]'"
    assert not found.claims


@pytest.mark.parametrize(("module", "name"), [(diagnosis, "diagnosis"), (trainer, "trainer")])
def test_without_root_it_is_skipped_and_nothing_is_judged(monkeypatch, module, name):
    monkeypatch.setattr(trainer.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(module, "why_not", lambda: "it needs root")
    found = _tell(name)
    assert found.skipped == "it needs root"
    assert not found.claims
