"""The example on Ray, on the cluster of these tests: all rounds are done, by workers on its nodes."""

from __future__ import annotations

import re

import pytest

from tests.examples.scripts import EXAMPLES

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]


def test_ray_cluster_trains_on_the_nodes(cluster):
    code, text = cluster.run([str(EXAMPLES / "ray_cluster.py"), "--address", cluster.address, "--rounds", "60"])
    assert code == 0, text
    assert all(f"worker {number} joined" in text for number in range(3)), text
    rounds, accuracy = re.search(r"(\d+) rounds in .* test accuracy ([\d.]+)", text).groups()
    assert int(rounds) == 60
    assert float(accuracy) > 0.6, text
    assert "gradients: 120 in time" in text  # K = 2 in each round
