"""One Ray cluster for all tests of this folder: three raylets, of which tests kill some and start others."""

from __future__ import annotations

import pytest

from tests.integrations.ray.cluster import RayCluster


@pytest.fixture(scope="package")
def cluster():
    with RayCluster({"head": 2, "a": 1, "b": 1}) as started:
        yield started
