"""Real workers and ranks that leave samples out: what a replay computes is what they did, through a death too."""

from __future__ import annotations

import os
import signal

import pytest

from paceline.runs.replaying import replay
from tests.cluster.harness import Cluster
from tests.cluster.test_faults import STOPPED_BY_SIGTERM
from tests.cluster.test_ranks import ended, ranks_of, said, started, wait_for_checkpoints

FINE = {"name": "fine-pruning", "window": 50, "starting-point": 0, "block": 1, "count": 1}
SERVED = (("worker.batch-size", 160), ("evaluate-every", 1000), *((f"pruning.{key}", FINE[key]) for key in FINE))
RANKS = """
rounds = 24
evaluate_every = 24
[data]
split = "iid"
[worker]
batch_size = 240
[cluster]
workers = 2
[server]
checkpoint_every = 6
silence_seconds = 4
[pruning]
name = "fine-pruning"
window = 50
starting_point = 0
block = 1
count = 1
"""


def left_out(folder):
    """How many samples sat out, as a replay that is the run to the last bit says."""
    found = []
    verdict = replay(folder, on_end=lambda batches, training, module: found.append(batches.pruned.sat_out))
    assert verdict.identical, verdict.difference
    return found[0]


@pytest.mark.parametrize("strategy", ["lgc", "fastest-k"])
def test_a_served_run_replays_to_the_last_bit_and_whoever_comes_back_begins_empty(strategy, tmp_path):
    with Cluster(tmp_path, workers=3, k=2, strategy=strategy, settings=SERVED) as cluster:
        cluster.until_round(20)
        if strategy == "lgc":
            cluster.kill_worker(1)
            cluster.until_alive({0, 2})
            cluster.add_workers([1])
            cluster.until_alive({0, 1, 2})
            cluster.until_delivers(1)
            cluster.until_goes_on(15)
        assert cluster.stop() == STOPPED_BY_SIGTERM, cluster.log
        assert "Traceback" not in cluster.log
    assert left_out(cluster.run) > 0


@pytest.mark.parametrize("strategy", ["hpsgd", "ssgd"])
def test_ranks_replay_to_the_last_bit_also_after_a_death(strategy, tmp_path):
    """A replay knows nothing of the death: what the ranks kept of their samples is what they would have known."""
    recipe, folder = tmp_path / "pruned.toml", tmp_path / "run"
    recipe.write_text(RANKS)
    if strategy == "ssgd":
        run = started("paceline", "train", recipe, "--strategy", strategy, "--out", folder, tmp_path=tmp_path)
        assert ended(run, tmp_path) == 0, said(tmp_path)
    else:
        slowed = ("--inject-delays", "true", "--delay.shift-seconds", "0.1", "--delay.mean-seconds", "0")
        run = started("paceline", "train", recipe, "--strategy", strategy, "--out", folder, *slowed, tmp_path=tmp_path)
        try:
            wait_for_checkpoints(run, folder, tmp_path)
            os.kill(ranks_of(run)[1], signal.SIGKILL)
            assert ended(run, tmp_path) == 1
        finally:
            run.kill()
        again = started("paceline", "train", "--resume", folder, tmp_path=tmp_path)
        assert ended(again, tmp_path) == 0, said(tmp_path)
    assert left_out(folder) > 0


RARE = """
import torch

def data():
    dice = torch.Generator().manual_seed(4)
    inputs, targets = torch.rand(600, 64, generator=dice), (torch.arange(600) % 10 == 0).long()
    return (inputs, targets), (inputs[:60], targets[:60])

def net(input_shape, classes):
    return torch.nn.Linear(64, classes)
"""


@pytest.mark.parametrize("place", ["server", "ranks"])
def test_a_real_worker_says_what_fine_pruning_takes_from_a_rare_class(place, tmp_path):
    (tmp_path / "rare.py").write_text(RARE)
    options = {"--strategy": "full", "--on": place, "--workers": 1, "--rounds": 60, "--batch-size": 100}
    options |= {"--data": "rare:data", "--model": "rare:net", "--data.split": "iid", "--out": tmp_path / "run"}
    options |= {f"--pruning.{key}": value for key, value in FINE.items()}
    given = [text for option in options.items() for text in option]
    assert ended(started("paceline", "train", *given, tmp_path=tmp_path), tmp_path) == 0, said(tmp_path)
    assert "paceline: warning: worker 0: fine-pruning lets " in said(tmp_path)
    assert "pruned.py" not in said(tmp_path)
