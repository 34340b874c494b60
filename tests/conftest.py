"""What tests of several folders ask for."""

from __future__ import annotations

import functools
import subprocess

import pytest

import paceline.runs.cluster  # noqa: F401 - before the fixture: it names subprocess.Popen as a type
from tests import warm


@pytest.fixture
def forked_workers(monkeypatch):
    """Fork the workers of servers in this process from the nursery; started from nothing, they would load torch."""
    monkeypatch.setattr(subprocess, "Popen", functools.partial(warm.Popen, finalized=False))
