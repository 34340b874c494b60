"""Runs and a sampler's state of version 0.1, with the defaults of fine-pruning: they go on with the same decisions.

Decisions are compared exactly, weights within 1e-4: another processor rounds the losses otherwise.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.runs.cluster import WorkerOptions
from paceline.runs.replaying import replay
from tests import warm
from tests.golden.machine import AnyFingerprint

GOLDEN = Path(__file__).parent / "golden_pruning"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
MODEL = "tests.data.golden_pruning:linear"


def test_a_samplers_state_goes_on_in_mid_epoch_with_the_same_batches():
    expected = EXPECTED["sampler"]
    pruning = paceline.FinePruning(expected["samples"], batch_size=expected["batch_size"], seed=expected["seed"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the state says no settings, so there are none to differ
        pruning.load_state_dict(torch.load(GOLDEN / "fine_pruning.pt", weights_only=True))
    assert pruning.epoch == expected["epoch"]
    for size, crc32 in zip(expected["sizes"], expected["crc32"], strict=True):
        epoch, taken = pruning.epoch, []
        for batch in pruning:
            pruning.observe(torch.tensor([((index * 37 + epoch * 11) % 64) / 64 for index in batch]))
            taken += batch
        assert (len(taken), zlib.crc32(np.array(taken, np.int32).tobytes())) == (size, crc32)


def test_a_new_state_says_its_settings_and_another_sampler_warns_of_its_own():
    state = paceline.FinePruning(64, batch_size=8).state_dict()
    assert (state["settings"]["window"], state["settings"]["starting_point"]) == (60, 30)
    other = paceline.FinePruning(64, batch_size=8, window=20, starting_point=10)
    with pytest.warns(UserWarning, match=r"other settings \(window=60, here 20; starting_point=30, here 10\)"):
        other.load_state_dict(state)


def test_a_served_run_replays_with_the_same_samples_left_out(monkeypatch):
    ends = []
    # On another kind of processor weights differ in their last bits, at which a replay would end.
    monkeypatch.setattr("paceline.drivers.replayed.served_run.fingerprint", AnyFingerprint)
    replay(
        GOLDEN / "served",
        WorkerOptions(model=MODEL),
        on_end=lambda batches, training, module: ends.append((batches.pruned, module)),
    )
    pruned, module = ends[0]
    assert {"sat_out": pruned.sat_out, "passes": list(pruned.passes)} == EXPECTED["served"]
    kept = load_file(GOLDEN / "served" / "checkpoint-00000060" / "tensors.safetensors")["parameters"]
    found = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    torch.testing.assert_close(found, kept, rtol=0, atol=1e-4)


def test_ranks_resume_with_what_their_checkpoints_know_of_the_samples(tmp_path):
    folder = tmp_path / "ranks"
    shutil.copytree(GOLDEN / "ranks", folder)
    own = ["--model", "tests.data.golden_pruning:linear"]
    command = [sys.executable, "-m", "paceline", "train", "--resume", str(folder), *own]
    root = Path(__file__).parents[2]
    ended = warm.run(command, cwd=root, capture_output=True, text=True, timeout=120, nursing=True)
    assert ended.returncode == 0, ended.stderr
    for rank in ("0", "1"):
        checkpoint = folder / f"rank-{rank}" / "checkpoint-00000060"
        order = json.loads((checkpoint / "state.json").read_text())["pruning"][rank]["order"]
        tensors = load_file(checkpoint / "tensors.safetensors")
        times_pruned = tensors[f"state.pruning.{rank}.order.policy.times_pruned"].numpy()
        found = {name: order[name] for name in ("sat_out", "whole_passes", "position")}
        assert found | {"times_pruned_crc32": zlib.crc32(times_pruned.tobytes())} == EXPECTED["ranks"][rank]
        weights = load_file(GOLDEN / "ranks_end.safetensors")["weights"]
        torch.testing.assert_close(tensors["state.sync.replica.shared"], weights, rtol=0, atol=1e-4)
