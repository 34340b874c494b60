"""What payloads cost on a link, against what the gradients themselves would take: on a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.drivers.ranks import link_watch
from paceline.drivers.ranks.exchanging import Underway
from paceline.drivers.ranks.link_watch import WATCHED_STEPS, LinkWatch

BYTES_PER_SECOND = 1e6


@pytest.fixture
def link(monkeypatch):
    """A link of 1 MB/s: an all-reduce takes as long as its bytes do, and the first of each kind ten times as long."""
    now, seen = [0.0], []

    def all_reduce(tensor, group):
        seen.append(tensor.nbytes)
        now[0] += tensor.nbytes / BYTES_PER_SECOND * (10 if seen.count(tensor.nbytes) == 1 else 1)

    monkeypatch.setattr(link_watch.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(link_watch.time, "perf_counter", lambda: now[0])
    return seen


def watched(ranks, *, coding, spans, vector_bytes, steps=WATCHED_STEPS + 5):
    """The costs that were told, and the bytes of the probe."""
    watch = LinkWatch(SimpleNamespace(size=lambda: ranks))
    told, given = [], 0
    for step in range(steps):
        given += watch.begin_step(vector_bytes)
        slower = 9 if step < 3 else 1  # kernels are compiled
        taken = [
            Underway(protocol=None, finished=[], busy_seconds=slower * coding / len(spans), on_wire=[span])
            for span in spans
        ]
        told.append(watch.end_step(taken, vector_bytes))
    return [costs for costs in told if costs is not None], given


@pytest.mark.parametrize(("coding", "dearer"), [(0.1, False), (0.3, False), (0.4, True)])
def test_costs_are_told_once_and_are_dearer_where_the_gradients_would_be_on_the_wire_for_less(link, coding, dearer):
    """Two payloads that overlap are 0.3 s on the wire; the gradients, of 0.64 MB, would be 0.64 s."""
    (costs,), given = watched(4, coding=coding, spans=[(0.0, 0.2), (0.1, 0.3)], vector_bytes=640_000)
    assert costs.wire == pytest.approx(0.3)
    assert costs.coding == pytest.approx(coding)
    assert costs.plain == pytest.approx(0.64)
    assert costs.is_dearer is dearer
    assert link == [4, 640_000, 640_000]
    assert given == 2 * 960_000  # twice around a ring of four


def test_the_probe_is_a_megabyte_at_the_most_and_stands_for_all_of_a_large_gradient(link):
    (costs,), _ = watched(2, coding=0.0, spans=[(0.0, 1.0)], vector_bytes=100_000_000)
    assert max(link) == 1 << 20
    assert costs.plain == pytest.approx(100.0)


def test_one_rank_alone_is_not_watched_and_nor_is_one_whose_group_is_broken(link, monkeypatch):
    assert watched(1, coding=1.0, spans=[(0.0, 1.0)], vector_bytes=1000) == ([], 0)

    def gone(tensor, group):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(link_watch.dist, "all_reduce", gone)
    assert watched(2, coding=1.0, spans=[(0.0, 1.0)], vector_bytes=1000) == ([], 0)
