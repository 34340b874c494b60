"""paceline inside TorchTrainer, on two ranks of a real Ray: the loops of docs/ray.md, and the traps it names."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.xdist_group("ray")


def test_the_loops_of_the_page(cluster):
    folder = cluster.folder / "trainer"
    folder.mkdir()
    code, text = cluster.run(["-m", "tests.integrations.ray.torch_jobs", str(folder)], seconds=200)
    assert code == 0, text
    found = json.loads(next(line for line in text.splitlines() if line.startswith("found ")).removeprefix("found "))
    assert found["metrics"]["paceline/steps"] == 24  # Ray's own result: of rank 0's last report with a checkpoint
    for seen in found["seen"]:
        # 512 samples, 2 ranks, batches of 32: 8 steps an epoch; two epochs, and a third after going on
        averaged, compressed, rounds = seen["reports"][:3], seen["reports"][3:6], seen["reports"][6:]
        assert [each["paceline/steps"] for each in averaged] == [8, 16, 24]
        assert averaged[-1]["paceline/averages"] > averaged[0]["paceline/averages"] > 0
        assert seen["files"] == ["rank-0.pt", "rank-1.pt"]
        assert len(compressed) == 3
        assert 0 < compressed[-1]["paceline/payload_bytes"] < compressed[-1]["paceline/gradient_bytes"]
        assert compressed[-1]["paceline/steps"] < 3 * 8  # some samples sat out: the sampler was kept
        assert rounds[-1]["paceline/rounds"] >= 8
        assert rounds[-1]["paceline/used"] > 0

        assert seen["shape"] == [2, 20]  # by Ray's own function: one sample, as if it were a batch
        assert "paceline.ray.prepare_data_loader" in seen["observe"]
        assert "BatchSampler" in seen["refused"]
        assert "add_dist_sampler=False" in seen["refused"]
        assert seen["kept"] == [True, 8]
        assert seen["plain"] == ["DistributedSampler", 8]
        assert "figures of one name (epoch)" in seen["twice"]
