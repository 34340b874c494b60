"""LARS takes small layers many at once; tests have small layers only, and are about its other way as well."""

from __future__ import annotations

import pytest

from paceline.optim import lars_steps


@pytest.fixture(autouse=True)
def no_layer_is_small(monkeypatch):
    """What "fused" stands for in these tests is the kernel."""
    monkeypatch.setattr(lars_steps, "_LEAST_ELEMENTS_IN_ONE_PASS", 0)
