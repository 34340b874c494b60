"""What is named in recordings whose delays are known, and what is not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.diagnosis import diagnose, evidence, timings_of, verdict
from paceline.reports.diagnosis_page import headline
from paceline.traces import Round, Trace, Work, step_times
from paceline.traces.recorded_run import NoRunError, read_run
from paceline.traces.trace_files import write_traces
from tests.diagnosis.recordings import USUAL, Delay, served, watched
from tests.reports.race_traces import race

GOLDEN = Path(__file__).parents[1] / "golden"
NOISE = st.sampled_from([("lognormal", 0.02), ("lognormal", 0.1), ("pareto", 0.1), ("bursts", 0.3)])
few_examples = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def recorded(make, *arguments, **more):
    with tempfile.TemporaryDirectory() as folder:
        return read_run(make(Path(folder), *arguments, **more))


def adds_up(found):
    """Assert that the parts of everybody's time are its time, and that what is said is finite."""
    for worker in found.by_worker:
        assert math.isclose(sum(worker.parts.values()), found.run_seconds, rel_tol=1e-9)
        assert min(worker.parts.values()) >= 0
    assert 0 <= found.saved_seconds <= found.run_seconds
    json.dumps(dataclasses.asdict(found), allow_nan=False)
    assert verdict(found)
    assert evidence(found)


# -- somebody is slow --------------------------------------------------------------------------------------------------


@few_examples
@given(
    ranks=st.sampled_from([2, 3, 4, 8]),
    seed=st.integers(0, 2**20),
    noise=NOISE,
    phase=st.sampled_from(list(USUAL)),
    busy=st.booleans(),
    data=st.data(),
)
def test_a_rank_that_is_200_ms_late_is_named_with_its_phase_since_when_and_cost(ranks, seed, noise, phase, busy, data):
    rank, first = data.draw(st.integers(0, ranks - 1)), data.draw(st.sampled_from([0, 15]))
    delay = Delay(rank=rank, phase=phase, first=first, busy=busy)
    found = diagnose(recorded(watched, ranks, 60, seed=seed, kind=noise[0], spread=noise[1], delays=[delay]))
    adds_up(found)
    assert found.status == "slow"
    slow = found.suspects[0]
    assert (slow.members, slow.phases, slow.pattern) == ((rank,), (phase,), "chronic")
    assert abs(slow.since_step - first) <= 3
    assert slow.until_step is None
    assert slow.busy == ("computed more" if busy else "waited")
    assert 0.15 < slow.late_seconds < 0.25
    assert 0.75 * 0.2 * (57 - max(0, first - 3)) < slow.saved_seconds < 0.2 * 60 * 1.25


@pytest.mark.parametrize("make", [watched, served])
def test_the_time_without_the_slow_one_is_the_time_of_a_run_that_has_none(make):
    slow = diagnose(recorded(make, 6, 80, seed=11, delays=[Delay(rank=4)]), skip=0)
    none = diagnose(recorded(make, 6, 80, seed=11), skip=0)
    assert math.isclose(slow.run_seconds - slow.saved_seconds, none.run_seconds, rel_tol=0.03)


def test_one_that_is_late_now_and_then_and_one_that_paused_once():
    found = diagnose(recorded(watched, 4, 120, seed=5, delays=[Delay(rank=1, probability=0.2, phase="input")]))
    assert (found.status, found.suspects[0].members, found.suspects[0].pattern) == ("slow", (1,), "intermittent")
    assert found.suspects[0].phases == ("input",)
    assert 0.1 < found.suspects[0].late_share < 0.3
    found = diagnose(recorded(watched, 4, 120, seed=5, delays=[Delay(rank=3, seconds=5.0, first=50, last=50)]))
    assert (found.status, found.suspects[0].members, found.suspects[0].since_step) == ("once", (3,), 50)
    assert "Nobody is slow as a rule" in verdict(found)[0]


def test_a_delay_that_ends_has_an_end():
    found = diagnose(recorded(watched, 4, 120, seed=5, delays=[Delay(rank=1, first=30, last=69)]))
    slow = found.suspects[0]
    assert abs(slow.since_step - 30) <= 3
    assert abs(slow.until_step - 69) <= 3


def test_two_slow_ranks_are_both_named_and_cost_together_what_the_slower_alone_does_not_show():
    delays = [Delay(rank=1, seconds=0.3), Delay(rank=4, seconds=0.2)]
    found = diagnose(recorded(watched, 6, 80, seed=2, delays=delays), skip=0)
    none = diagnose(recorded(watched, 6, 80, seed=2), skip=0)
    assert [each.members for each in found.suspects] == [(1,), (4,)]
    # While one is there, the other one hides behind it: alone each saves less than both do.
    alone = [each.saved_seconds for each in found.suspects]
    assert 0.07 * 80 < alone[0] < 0.13 * 80
    assert alone[1] < 0.01 * 80
    assert math.isclose(found.run_seconds - found.saved_seconds, none.run_seconds, rel_tol=0.03)


@pytest.mark.parametrize(("ranks", "slow"), [(4, (2, 3)), (8, (2, 3, 5)), (8, (1, 2, 5, 6))])
def test_ranks_that_are_equally_slow_hide_behind_each_other_and_are_judged_together(ranks, slow):
    run = recorded(watched, ranks, 80, seed=3, delays=[Delay(rank=rank, seconds=0.05) for rank in slow])
    found, none = diagnose(run, skip=0), diagnose(recorded(watched, ranks, 80, seed=3), skip=0)
    adds_up(found)
    assert found.status == "slow"
    assert sorted(each.members[0] for each in found.suspects if each.matters) == list(slow)
    truth = found.run_seconds - none.run_seconds
    assert all(each.saved_seconds < 0.2 * truth for each in found.suspects)  # without one of them
    assert math.isclose(found.saved_seconds, truth, rel_tol=0.15)
    assert "together the run would have taken" in verdict(found)[-1]
    assert not any("Without it" in sentence for sentence in verdict(found))


def test_a_slow_host_and_an_equally_slow_rank_elsewhere_are_both_named():
    delays = [Delay(rank=rank, seconds=0.1) for rank in (2, 3, 4)]
    found = diagnose(recorded(watched, 6, 80, seed=3, hosts=list("aabbcc"), delays=delays))
    assert {(each.members, each.whole_host) for each in found.suspects if each.matters} == {
        ((2, 3), True),
        ((4,), False),
    }


def test_all_who_are_slow_alike_are_named_where_the_first_k_close_a_round():
    delays = [Delay(rank=rank) for rank in (1, 2, 5)]
    found = diagnose(recorded(served, 8, 60, seed=4, k=6, delays=delays))
    assert sorted(each.members for each in found.suspects if each.matters) == [(1,), (2,), (5,)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_saving_leaves_the_ordinary_noise_of_the_slow_one(ranks):
    """The noise of a step is twice the delay: what is saved is what the same noise takes less without it."""
    conditions = {"seed": 3, "spread": 0.3}
    found = diagnose(recorded(watched, ranks, 400, delays=[Delay(rank=1, seconds=0.01)], **conditions), skip=0)
    truth = found.run_seconds - diagnose(recorded(watched, ranks, 400, **conditions), skip=0).run_seconds
    assert [each.members for each in found.suspects] == [(1,)]
    assert math.isclose(found.suspects[0].saved_seconds, truth, rel_tol=0.35)


def test_slow_in_turns_and_several_pauses_are_seen():
    turns = [Delay(rank=0, last=99), Delay(rank=1, first=100)]
    found = diagnose(recorded(watched, 4, 200, seed=3, delays=turns))
    assert {(each.members, each.rule, each.chance) for each in found.suspects if each.matters} == {
        ((0,), "stretch", None),
        ((1,), "stretch", None),
    }
    assert headline(found).startswith("Rank 1 and 1 other are slow")
    stops = [Delay(rank=1, seconds=20.0, first=at, last=at) for at in (50, 130, 200, 280)]
    found = diagnose(recorded(watched, 4, 300, seed=3, delays=stops))
    assert (found.status, found.suspects[0].members, found.suspects[0].since_step) == ("slow", (1,), 50)
    assert math.isclose(found.saved_seconds, 80.0, rel_tol=0.05)
    pauses = [Delay(rank=0, seconds=20.0, first=90, last=90), Delay(rank=1, seconds=20.0, first=200, last=200)]
    found = diagnose(recorded(watched, 4, 300, seed=3, delays=pauses))
    assert found.status == "once"
    assert {(each.members, each.since_step, each.until_step) for each in found.suspects} == {
        ((0,), 90, 90),
        ((1,), 200, 200),
    }


@pytest.mark.parametrize(("first", "last"), [(30, 10**9), (37, 611)])
def test_since_when_is_told_to_the_step_in_a_long_run(first, last):
    delays = [Delay(rank=1, seconds=0.05, first=first, last=last), Delay(rank=1, first=500, last=last)]
    slow = diagnose(recorded(watched, 3, 800, seed=3, delays=delays)).suspects[0]
    assert abs(slow.since_step - first) <= 2
    assert slow.until_step is None if last > 800 else abs(slow.until_step - last) <= 2


def test_a_delay_that_ended_is_told_in_the_past():
    found = diagnose(recorded(watched, 4, 120, seed=5, delays=[Delay(rank=1, first=30, last=69)]))
    assert headline(found).startswith("Rank 1 was slow, and cost ")


def test_a_host_all_of_whose_ranks_are_slow_is_named_instead_of_its_ranks():
    hosts = ["a", "a", "b", "b", "c", "c"]
    delays = [Delay(rank=2, seconds=0.1), Delay(rank=3, seconds=0.1)]
    found = diagnose(recorded(watched, 6, 60, seed=3, hosts=hosts, delays=delays))
    assert [(each.members, each.whole_host, each.host) for each in found.suspects] == [((2, 3), True, "b")]
    assert verdict(found)[0].startswith("Host b (ranks 2, 3)")
    alone = diagnose(recorded(watched, 6, 60, seed=3, hosts=hosts, delays=delays[:1]))
    assert [(each.members, each.whole_host) for each in alone.suspects] == [((2,), False)]


def test_a_slow_link_makes_nobody_late_and_is_named_by_its_probe():
    rates = [(0, 1, 1e9), (1, 2, 1e8), (2, 3, 1e9), (3, 0, 1e9)]
    found = diagnose(recorded(watched, 4, 60, seed=3, wire=0.2, links=rates, bucket_bytes=1_500_000))
    assert found.status == "link"
    assert [(link.source, link.target) for link in found.links if link.slow] == [(1, 2)]
    adds_up(found)
    # Where the bytes of a step are too few for that link to explain the wire, it is not blamed.
    few = diagnose(recorded(watched, 4, 60, seed=3, wire=0.2, links=rates, bucket_bytes=1_000))
    assert few.status in ("nobody", "cannot tell")


# -- nobody is slow ----------------------------------------------------------------------------------------------------


def test_hardly_anybody_is_named_in_balanced_runs():
    """Chance has its share, which is bounded: of these 48 runs it names somebody in one, and calls it small."""
    named = []
    for kind in ("lognormal", "pareto", "bursts"):
        for seed in range(16):
            ranks, steps, spread = (2, 4, 8, 16)[seed % 4], (30, 60)[seed // 4 % 2], (0.05, 0.3)[seed // 8]
            found = diagnose(recorded(watched, ranks, steps, seed=seed, kind=kind, spread=spread))
            adds_up(found)
            if found.status not in ("nobody", "cannot tell", "once"):
                named.append((kind, seed, verdict(found)))
    assert len(named) <= 1, named


def test_who_is_a_little_late_is_called_small():
    found = diagnose(recorded(watched, 4, 200, seed=6, spread=0.02, delays=[Delay(rank=2, seconds=0.002)]))
    assert (found.status, found.suspects[0].members) == ("small", (2,))
    assert "small" in verdict(found)[0]


def test_what_chance_could_hide_is_less_in_a_longer_record():
    short, long = (diagnose(recorded(watched, 4, steps, seed=8, spread=0.3)) for steps in (40, 640))
    assert long.hidden_seconds / long.run_seconds < short.hidden_seconds / short.run_seconds


# -- a server: the K-th arrival closes a round -------------------------------------------------------------------------


def test_a_slow_worker_costs_what_the_others_wait_and_little_where_nobody_waits_for_it():
    delays = [Delay(rank=2)]
    full = diagnose(recorded(served, 8, 60, seed=4, strategy="full", delays=delays))
    assert (full.status, full.suspects[0].members, full.suspects[0].phases) == ("slow", (2,), ("computing",))
    lgc = diagnose(recorded(served, 8, 60, seed=4, k=6, delays=delays))
    assert [each.members for each in lgc.suspects] == [(2,)]
    assert lgc.suspects[0].saved_seconds < 0.1 * full.suspects[0].saved_seconds
    assert lgc.status in ("harmless", "slow")
    dropped = diagnose(recorded(served, 8, 60, seed=4, k=6, strategy="fastest-k", delays=delays))
    assert any("Worker 2 is mostly dropped" in sentence for sentence in evidence(dropped))
    assert any("labels that are mostly on worker 2" in sentence for sentence in evidence(dropped))
    for found in (full, lgc, dropped):
        adds_up(found)


def test_a_worker_behind_a_slow_link_is_late_on_its_link():
    found = diagnose(recorded(served, 4, 60, seed=4, slow_link=(1, 0.1)))
    assert (found.suspects[0].members, found.suspects[0].phases) == ((1,), ("transfer",))


@pytest.mark.parametrize("phase", ["input", "forward", "backward"])
def test_the_step_times_of_workers_tell_the_phase_and_those_of_the_server_its_part(phase):
    found = diagnose(recorded(served, 4, 60, seed=4, phases=True, delays=[Delay(rank=1, phase=phase, busy=True)]))
    adds_up(found)
    assert (found.suspects[0].members, found.suspects[0].phases) == ((1,), (phase,))
    assert found.suspects[0].busy == "computed more"
    assert math.isclose(found.total["server"], 0.003 * 57, rel_tol=0.05)


@pytest.mark.parametrize("name", ["served", "served-stopped"])
def test_journals_of_the_last_release_are_diagnosed(name):
    adds_up(diagnose(read_run(GOLDEN / name)))


# -- records that are not whole ----------------------------------------------------------------------------------------


def test_a_rank_that_was_killed_or_has_no_file_is_told_and_the_others_are_compared(tmp_path):
    folder = watched(tmp_path, 4, 90, seed=9, killed=[1], delays=[Delay(rank=2)])
    (folder / "times" / "rank-3.jsonl").unlink()
    with (folder / "times" / "rank-0.jsonl").open("ab") as file:
        file.write(b'{"kind":"step_timed","times":[90,1,nu')
    found = diagnose(read_run(folder))
    adds_up(found)
    assert found.suspects[0].members == (2,)
    assert any("No times of rank 3" in note for note in found.notes)
    assert any("Rank 1 ends with step 59" in note for note in found.notes)
    assert next(worker for worker in found.by_worker if worker.number == 1).parts["gone"] > 0


def altered(path):
    """Change one digit in the middle of a file."""
    data = bytearray(path.read_bytes())
    place = next(at for at in range(len(data) // 2, len(data)) if data[at : at + 1].isdigit())
    data[place] = ord("1") if data[place] != ord("1") else ord("2")
    path.write_bytes(data)


@pytest.mark.parametrize("kind", [watched, served])
def test_one_altered_file_of_step_times_is_left_out_with_a_note_and_the_run_is_diagnosed(tmp_path, kind):
    folder = kind(tmp_path, 4, 60, seed=4, delays=[Delay(rank=2)], **({"phases": True} if kind is served else {}))
    path = sorted((folder / "times").glob("*-1.jsonl"))[0]
    altered(path)
    found = diagnose(read_run(folder))
    adds_up(found)
    assert found.suspects[0].members == (2,)
    (note,) = [note for note in found.notes if "left out" in note]
    assert note.startswith(f"{path.name} is left out: {path}:".capitalize())
    assert "the line is not as it was written" in note


def test_a_script_of_which_no_file_can_be_read_is_refused_with_the_reason(tmp_path):
    folder = watched(tmp_path, 1, 20, seed=4)
    altered(folder / "times" / "rank-0.jsonl")
    with pytest.raises(
        NoRunError, match=r"holds no times that can be read: rank-0\.jsonl is left out: .*not as it was"
    ):
        read_run(folder)


def test_a_rank_without_a_file_may_be_whom_all_wait_for(tmp_path):
    folder = watched(tmp_path, 4, 60, seed=9, spread=0.02, delays=[Delay(rank=3)])
    (folder / "times" / "rank-3.jsonl").write_bytes(b'{"kind":"times_beg')  # killed in its first line
    found = diagnose(read_run(folder))
    adds_up(found)
    assert (found.status, found.missing) == ("cannot tell", (3,))
    assert "the times of rank 3 are not here" in verdict(found)[0]
    assert not any("No gradient was lost" in sentence for sentence in evidence(found))


def test_files_of_two_launches_have_no_step_in_common(tmp_path):
    folder = watched(tmp_path, 2, 20, seed=9)
    path = folder / "times" / "rank-1.jsonl"
    times = step_times.read_times(path)
    later = [dataclasses.replace(line, step=line.step + 100) for line in times.steps]
    path.write_bytes(b"".join(map(step_times.times_line, [times.began, *later])))
    with pytest.raises(NoRunError, match="no two ranks have a line of the same steps"):
        diagnose(read_run(folder))


def test_a_worker_that_is_late_to_the_end_is_so_to_the_end():
    found = diagnose(recorded(served, 8, 80, seed=4, k=6, delays=[Delay(rank=2, seconds=2.0)]))
    assert (found.suspects[0].members, found.suspects[0].until_step) == ((2,), None)


def test_sums_of_steps_are_steps(monkeypatch):
    monkeypatch.setattr(step_times, "LINES_AT_A_STRIDE", 40)
    run = recorded(watched, 4, 200, seed=9, delays=[Delay(rank=2, first=60)])
    assert max(line.steps for line in run.times["rank"][0].steps) > 2
    found = diagnose(run)
    adds_up(found)
    assert (found.steps + found.skipped_steps, found.suspects[0].members) == (200, (2,))
    assert 0.15 < found.suspects[0].late_seconds < 0.25
    assert abs(found.suspects[0].since_step - 60) <= 4


def test_one_rank_and_few_steps_cannot_tell():
    for found in (diagnose(recorded(watched, 1, 60, seed=1)), diagnose(recorded(watched, 4, 6, seed=1))):
        adds_up(found)
        assert found.status == "cannot tell"
        assert verdict(found)[0].startswith("Cannot tell who is slow")


def test_a_skip_that_leaves_nothing_is_refused(tmp_path):
    run = recorded(watched, 2, 20, seed=1)
    assert len(timings_of(run, skip=5).step) == 15
    with pytest.raises(NoRunError, match="--skip 20 leaves no step of 20"):
        timings_of(run, skip=20)
    later = {
        number: dataclasses.replace(
            times, steps=tuple(dataclasses.replace(line, step=line.step + 1_000) for line in times.steps)
        )
        for number, times in run.times["rank"].items()
    }
    assert len(timings_of(dataclasses.replace(run, times={"rank": later}), skip=5).step) == 15  # from a checkpoint on


def test_few_synchronisations_are_too_few_however_many_steps_they_are():
    run = recorded(watched, 2, 140, seed=1)
    windows = {
        number: dataclasses.replace(
            times,
            steps=tuple(
                line if (line.step + 1) % 20 == 0 else dataclasses.replace(line, wait_seconds=0.0, buckets=())
                for line in times.steps
            ),
        )
        for number, times in run.times["rank"].items()
    }
    found = diagnose(dataclasses.replace(run, times={"rank": windows}), skip=0)
    assert (found.synchronisations, found.steps, found.status) == (7, 140, "cannot tell")
    assert "7 synchronisations after the warm-up are too few" in verdict(found)[0]


# -- runs without a journal --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trace", race(workers=10, rounds=40), ids=lambda trace: trace.strategy)
def test_simulated_runs_of_every_strategy_are_diagnosed(trace, tmp_path):
    write_traces(tmp_path, [trace])
    found = diagnose(read_run(tmp_path))
    adds_up(found)
    assert (found.kind, found.skipped_steps) == ("simulated", 0)
    if trace.strategy == "async":
        assert found.coupling == "none"
        assert found.saved_seconds == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_that_is_slow_between_averages_costs_time_only_where_the_others_wait(waits, tmp_path):
    write_traces(tmp_path, [averages(ranks=4, rounds=30, slow=2, waits=waits)])
    found = diagnose(read_run(tmp_path))
    adds_up(found)
    assert found.suspects[0].members == (2,)
    assert (found.status, found.coupling) == (("slow", "all") if waits else ("harmless", "none"))
    assert (found.suspects[0].saved_seconds > 0) == waits
    assert waits or "limits how often an average is made" in verdict(found)[0]


def averages(*, ranks, rounds, slow, waits):
    """The trace of ranks that average: windows of a second, of two on the slow one; all wait, or all train on."""
    random = np.random.default_rng(1)
    started, works, ends = np.zeros(ranks), [], [0.0]
    for version in range(rounds):
        finished = started + random.uniform(0.95, 1.05, ranks) + (np.arange(ranks) == slow)
        sent = finished.max()
        for rank in range(ranks):
            works.append(
                Work(
                    worker=rank,
                    version=version,
                    started_seconds=started[rank],
                    finished_seconds=finished[rank],
                    sent_seconds=sent,
                    arrived_seconds=sent + 0.1,
                )
            )
        ends.append(sent + 0.1)
        started = np.full(ranks, sent + 0.1) if waits else finished
    closings = [
        Round(version=version, opened_seconds=opened, closed_seconds=max(opened, closed), k=ranks, used=ranks, late=0)
        for version, (opened, closed) in enumerate(itertools.pairwise(ends))
    ]
    return Trace(
        strategy="local-sgd" if waits else "hpsgd",
        seed=0,
        workers=ranks,
        recipe={},
        rounds_done=rounds,
        seconds=ends[-1],
        averaged=True,
        clock="real",
        rounds=tuple(closings),
        works=tuple(works),
    )


@pytest.mark.parametrize(
    ("sync", "says"),
    [("averaging", "averages of all ranks, of which no end is recorded"), ("ddp", "a script that is watched")],
)
def test_a_run_of_ranks_that_was_killed_is_called_what_it_is(sync, says, tmp_path):
    """Ranks that average write their trace at the end: until then their step times are all there is."""
    from paceline.diagnosis import diagnose_timings
    from paceline.reports.diagnosis_page import diagnosis_page
    from paceline.traces.recorded_run import read_run
    from paceline.traces.step_times import FORMAT, StepTimes, TimesBegan, TimesWriter, times_path

    for rank in range(2):
        writer = TimesWriter(times_path(tmp_path, "rank", rank))
        writer.write(
            TimesBegan(
                format=FORMAT,
                paceline="0.2.0",
                noun="rank",
                number=rank,
                workers=2,
                host="here",
                launch="1a",
                sync=sync,
            )
        )
        for step in range(30):
            writer.write(StepTimes(step=step, started_seconds=step / 4, seconds=0.25, forward_seconds=0.2))
        writer.close()
    run = read_run(tmp_path)
    timings = timings_of(run)
    page = diagnosis_page(diagnose_timings(run, timings), timings)
    assert says in page
    assert ("a script that is watched" in page) == (sync == "ddp")
