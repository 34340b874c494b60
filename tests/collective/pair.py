"""Two ranks, for the tests of the DDP hook."""

from __future__ import annotations

from tests.collective.ranks import Ranks


class Pair(Ranks):
    """Two ranks on gloo, on the loopback."""

    def __init__(self, folder):
        super().__init__(folder, 2, "jobs")
