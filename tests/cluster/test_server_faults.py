"""A server that is stopped, killed, or has no room on its disk: its run goes on from the newest whole checkpoint."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from contextlib import suppress

import pytest
import torch

from paceline.traces.checkpoints import read_newest
from paceline.traces.journal import Resumed, RunEnded, StepRecord
from paceline.traces.step_times import read_all_times
from tests import warm
from tests.cluster.harness import PACELINE, Cluster
from tests.cluster.test_faults import PACED, STOPPED_BY_SIGTERM, assert_stops_and_replays, lines

EVERY_ROUND = (("checkpoint-every", 1),)


def checkpoints(cluster):
    return sorted(path for path in cluster.run.iterdir() if path.name.startswith("checkpoint-"))


def resumes(cluster, workers):
    """The server comes back on its port, and the workers find it by themselves."""
    before = len(cluster.events(Resumed))
    cluster.start_server(resume=True)
    cluster.until(lambda: len(cluster.events(Resumed)) > before, "the trace says so")
    cluster.until_alive(workers)
    cluster.until_goes_on()
    return cluster.events(Resumed)[-1]


def number(checkpoint):
    return int(checkpoint.name.rpartition("-")[2])


def test_a_full_run_that_is_killed_on_its_way_and_stopped_equals_an_undisturbed_one_bit_for_bit(tmp_path):
    chance = random.Random(7)
    (tmp_path / "undisturbed").mkdir()
    # Delays change who comes first, and nothing else: for `full` the order of arrivals does not matter.
    with Cluster(tmp_path, workers=3, strategy="full", settings=(*PACED, *EVERY_ROUND)) as cluster:
        cluster.until_round(chance.randrange(3, 12))
        cluster.kill_server()
        assert all(times.steps for times in read_all_times(cluster.run)["worker"].values())
        assert resumes(cluster, range(3)).version >= 1

        cluster.until_goes_on(chance.randrange(3, 12))
        assert_stops_and_replays(cluster)
        times = read_all_times(cluster.run)
        assert [step.version for step in times["server"][0].server] == list(range(cluster.round))
        draws = {worker: {step.step for step in found.steps} for worker, found in times["worker"].items()}
        arrived = [arrival for step in cluster.events(StepRecord) for arrival in step.arrivals]
        assert all(arrival.draw in draws[arrival.worker] for arrival in arrived)
        assert all(found.ended is not None for noun in times for found in times[noun].values())
        found = read_newest(cluster.run)[0]
        assert found.version == cluster.round
    undisturbed = Cluster(tmp_path / "undisturbed", workers=3, strategy="full", rounds=found.version)
    with undisturbed:
        assert undisturbed.server.wait(120) == 0, undisturbed.log
        expected = read_newest(undisturbed.run)[0]
    assert found.version == expected.version
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert found.state["roster"] == expected.state["roster"]


def test_a_server_that_is_stopped_then_killed_goes_on_from_the_newest_whole_checkpoint(tmp_path):
    chance = random.Random(11)
    with Cluster(tmp_path, workers=3, k="auto", settings=(*PACED, *EVERY_ROUND)) as cluster:
        cluster.until_round(chance.randrange(5, 15))
        assert cluster.stop() == STOPPED_BY_SIGTERM, cluster.log
        stopped_at = cluster.round
        assert isinstance(cluster.records[-1], RunEnded)
        assert number(checkpoints(cluster)[-1]) == stopped_at
        assert f"paceline serve --resume {cluster.run}" in cluster.log
        assert not lines(cluster, "worker 0 left"), "nobody left: the server stopped"
        assert resumes(cluster, range(3)).version == stopped_at

        cluster.until_goes_on(chance.randrange(5, 15))
        cluster.kill_server()
        before, newest = checkpoints(cluster)[-2:]
        tensors = bytearray((newest / "tensors.safetensors").read_bytes())
        tensors[-1] ^= 1
        (newest / "tensors.safetensors").write_bytes(tensors)
        resumed = resumes(cluster, range(3))
        assert cluster.until_log(f"^checkpoint {number(newest):08d} is refused: tensors.safetensors was altered")
        assert resumed.version == number(before)
        assert_stops_and_replays(cluster)

        for path in checkpoints(cluster):
            shutil.rmtree(path)
        nothing = warm.run(
            [*PACELINE, "serve", "--listen", "127.0.0.1:0", "--resume", str(cluster.run)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert nothing.returncode == 2
        (line,) = [line for line in nothing.stderr.splitlines() if line.strip()]
        assert line == f"paceline: error: {cluster.run} has no whole checkpoint to resume from"


@pytest.fixture
def tiny_disk(tmp_path):
    """A run folder on a disk of its own, of 16 megabytes: enough for the report of a short run."""
    if os.geteuid():
        pytest.skip("only root can mount a tiny disk: a full disk is not tried")
    folder = tmp_path / "run"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tiny disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_training_goes_on_when_the_disk_is_full_and_an_older_checkpoint_stays(tmp_path, tiny_disk):
    settings = (*PACED, ("checkpoint-every", 5), ("evaluate-every", 1000))
    with Cluster(tmp_path, workers=3, k=2, rounds=400, settings=settings) as cluster:
        cluster.until(lambda: len(checkpoints(cluster)) >= 2, "two checkpoints")
        filler = tiny_disk / "filler"
        fill(filler)
        line = cluster.until_log("cannot write checkpoint .* No space left on device; the one before .* stays")
        cluster.until_log("cannot write the journal .* No space left on device")
        cluster.until_log("times/.*No space left on device; training goes on, and its step times are not whole")
        stays = read_newest(cluster.run)[0]
        assert f"({stays.version}) stays" in line

        filler.unlink()  # there is room again
        cluster.until_log("the disk takes them again")
        newest = read_newest(cluster.run)[0]
        assert newest.version > stays.version
        taken = [record.version for record in cluster.events(StepRecord)]
        assert taken == sorted(set(taken)), "with holes, and in order"
        assert cluster.stop() == STOPPED_BY_SIGTERM, cluster.log
        assert "Traceback" not in cluster.log
        assert len(lines(cluster, "cannot write checkpoint")) <= 2, "once when it happens, once at the end"
        assert lines(cluster, "records of the trace are lost")
        assert len(lines(cluster, "step times are not whole")) == 1
        assert read_all_times(cluster.run)["server"][0].ended is not None


def fill(file):
    """Write until nothing more fits."""
    with file.open("wb", buffering=0) as filler:
        for size in (2**16, 2**12, 2**8):
            with suppress(OSError):
                while True:
                    filler.write(bytes(size))
