"""paceline.watch on three real ranks: the bits that it leaves alone, and the times that it finds."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline.traces.recorded_run import read_run
from paceline.traces.step_times import read_times, times_path
from tests.distributed.ranks import Ranks
from tests.waiting import until

pytestmark = pytest.mark.xdist_group("watching")  # one launch for all of them
RANKS, SLEEP_SECONDS = 3, 0.2


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("three"), RANKS, "tests.watching.jobs") as ranks:
        yield ranks


def test_a_watched_model_has_the_bits_of_one_that_nobody_watches(three, tmp_path):
    for found in three.do("same_bits", folder=str(tmp_path)):
        assert found["differ"] == {}
        assert len(found["kinds"]) == 11


def test_in_join_as_well_however_gradients_are_divided(three, tmp_path):
    assert three.do("same_bits_in_join", folder=str(tmp_path)) == [{}] * RANKS


@pytest.mark.parametrize("slow", ["input", "forward", "backward", "optimiser"])
def test_a_rank_that_sleeps_is_found_in_its_phase_and_in_the_others_waits(three, tmp_path, slow):
    folder, late = tmp_path / "run", 1
    found = three.do("phases", folder=str(folder), slow_rank=late, slow=slow, sleep_seconds=SLEEP_SECONDS)
    assert read_run(folder).kind == "watched"
    for rank, times in enumerate(found):
        assert times["sync"] == "ddp"
        assert times["ended"] == "closed"
        assert [each["step"] for each in times["steps"]] == list(range(4))
        assert len({len(each["buckets"]) for each in times["steps"][1:]}) == 1
        for each in times["steps"]:
            names = ("input", "forward", "backward", "wait", "optimiser", "other")
            parts = sum(each[f"{name}_seconds"] for name in names)
            assert parts == pytest.approx(each["seconds"], abs=1e-5)
            assert all(ready <= done <= each["seconds"] + 1e-5 for ready, done in each["buckets"])
        for each in times["steps"][1:3]:
            if rank == late:
                assert each[f"{slow}_seconds"] > 0.9 * SLEEP_SECONDS
        starts = [(each["started_seconds"], each["seconds"]) for each in times["steps"]]
        assert all(began + took <= after + 1e-5 for (began, took), (after, _) in itertools.pairwise(starts))
    for other in (0, 2):  # what the machine does beside meets all ranks alike, over two steps
        here, there = (sum(found[rank]["steps"][step][f"{slow}_seconds"] for step in (1, 2)) for rank in (late, other))
        assert here > there
    # A rank's lateness is the largest wait for the first bucket minus its own.
    step = 3 if slow == "optimiser" else 2  # who is late in its optimiser comes late to the next step
    waits = [(times["steps"][step]["buckets"][0]) for times in found]
    waited = [done - ready for ready, done in waits]
    lateness = [max(waited) - each for each in waited]
    assert max(range(RANKS), key=lateness.__getitem__) == late
    assert lateness[late] > 0.5 * SLEEP_SECONDS
    assert found[0]["sizes"] == found[late]["sizes"]
    assert len(found[0]["sizes"]) == 2  # DDP makes its buckets anew after the first step
    assert found[0]["sizes"][1][0] == 1


def test_accumulated_gradients_are_one_step(three, tmp_path):
    for times in three.do("phases", folder=str(tmp_path / "run"), steps=5, accumulate=3):
        assert len(times["steps"]) == 5  # no_sync() tells, also before the first optimizer.step()
        assert all(each["forward_seconds"] > 0 for each in times["steps"])


def test_hooks_that_come_later_work_as_without_a_watch_and_earlier_ones_are_left_alone(three, tmp_path):
    for found in three.do("later_hooks", folder=str(tmp_path)):
        for name in ("compress", "fp16", "power-sgd", "builtin"):
            assert found[name], f"{name}: other parameters than without a watch"
            after, before = found[f"{name} after"], found[f"{name} before"]
            assert after["refused"]
            assert before["refused"]
            assert len(after["buckets"]) == len(before["buckets"]) == 5
            assert min(after["buckets"]) > 0
            assert before["buckets"] == [0] * 5
            assert after["notes"] == []
            assert "communication hook before" in before["notes"][0]


def test_evaluations_between_steps_are_in_no_phase(three, tmp_path):
    for times in three.do("evaluations", folder=str(tmp_path / "run"), sleep_seconds=SLEEP_SECONDS):
        assert len(times["steps"]) == 4
        other = [each["other_seconds"] for each in times["steps"]]
        assert other[2] > 0.9 * SLEEP_SECONDS
        assert max(other) == other[2]


def test_a_copy_of_a_watched_model_is_not_watched(three, tmp_path):
    for found in three.do("copies", folder=str(tmp_path)):
        assert found == {"steps": 1, "hooks": 0, "ddp": 2}


def test_a_sharded_model_has_phases(three, tmp_path):
    for kinds in three.do("sharded", folder=str(tmp_path)):
        for times in kinds:
            assert times["sync"] == "fsdp"
            assert len(times["steps"]) == 3
            for each in times["steps"]:
                assert min(each["forward_seconds"], each["backward_seconds"], each["optimiser_seconds"]) > 0


def test_a_compiled_model_has_the_times_of_its_buckets(three, tmp_path):
    for found in three.do("compiled", folder=str(tmp_path)):
        for name, steps in found.items():
            assert len(steps) == 3, name
            assert all(buckets for buckets, _ in steps), name
            assert name == "after" or all(backward for _, backward in steps), name


def test_links_to_both_neighbours_are_timed_at_once_and_after_ten_and_a_hundred_steps(three, tmp_path):
    for rank, times in enumerate(three.do("links", folder=str(tmp_path / "run"))):
        both = sorted([(rank + 1) % RANKS, (rank - 1) % RANKS])
        to = [each[0] for each in times["links"]]
        assert [sorted(to[first : first + 2]) for first in range(0, len(to), 2)] == [both, both, both]
        assert all(rate > 1e5 and latency > 0 for _, rate, latency in times["links"])
        assert len(times["steps"]) == 101


def test_a_rank_that_does_not_see_the_folder_sends_its_lines(three, tmp_path):
    folder = tmp_path / "run"
    found = three.do("remote", folder=str(folder), others_folder=str(tmp_path / "elsewhere"))
    assert found[0]["own"] == found[2]["own"] == str(folder)
    assert found[1]["own"] != str(folder)
    there = times_path(Path(found[1]["own"]), "rank", 1).read_bytes()
    assert times_path(folder, "rank", 1).read_bytes() == there
    assert [each["steps"] for each in found] == [6] * RANKS
    assert sorted(read_run(folder).times["rank"]) == [0, 1, 2]
    assert list((folder / "times").glob("seen-*")) == []


def test_a_folder_that_is_taken_or_named_differently_is_refused_on_all_ranks(three, tmp_path):
    taken = tmp_path / "taken"
    three.do("phases", folder=str(taken), steps=1)
    for rank, (first, second) in enumerate(three.do("refused", folder=str(tmp_path), taken=str(taken))):
        assert first.startswith("FolderTakenError")
        assert f"{taken} holds a run" in first
        assert second.startswith("WatchError: all ranks must watch into the same folder"), rank
    assert not (tmp_path / "a").exists()


def test_other_options_on_one_rank_are_refused_on_all_before_a_group_is_made(three, tmp_path):
    for found in three.do("other_options", folder=str(tmp_path)):
        assert all("all ranks must call watch() with the same" in each for each in found["errors"])
        assert [each.split("same ")[1].split(":")[0] for each in found["errors"]] == ["probe_links", "buckets"]
        assert found["sum"] == RANKS


def test_a_closed_watch_leaves_no_threads_and_no_connections(three, tmp_path):
    for found in three.do("closed_again", folder=str(tmp_path)):
        assert all(last <= first for first, last in zip(found[0], found[-1], strict=True)), found


def test_optimisers_with_shards_end_the_same_steps_on_all_ranks(three, tmp_path):
    for times in three.do("sharded_optimiser", folder=str(tmp_path / "run")):
        assert [each["step"] for each in times["steps"]] == list(range(12))
        assert len(times["links"]) == 4
        assert times["notes"] == []


def test_a_killed_ranks_file_can_be_read_also_when_it_was_on_another_machine(tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "ranks").mkdir()
    with Ranks(tmp_path / "ranks", 2, "tests.watching.jobs") as ranks:
        ranks.tell("remote", folder=str(folder), others_folder=str(tmp_path / "elsewhere"), killed=1)
        ranks.answers([0])
        path = times_path(folder, "rank", 1)
        until(lambda: path.exists() and len(read_times(path).steps) >= 6, "six steps", every_seconds=0.1)
        ranks.kill(1)
    assert len(read_times(path).steps) == 6
    assert read_times(path).ended is None


def test_ranks_wait_for_the_slow_one_where_ddp_sends_buffers_and_their_forward_pass_does_not(three, tmp_path):
    *prompt, slow = three.do("buffers", folder=str(tmp_path / "run"))
    assert all(each["wait"] > slow["wait"] + 0.05 for each in prompt)
    assert all(each["forward"] < each["wait"] for each in prompt)
    assert not any(each["own"] for each in (*prompt, slow))
