"""What payloads cost on a link, against what the gradients themselves would take: on a clock of the test's own."""

from __future__ import annotations

import pytest

from paceline.drivers.ranks.exchanging import Underway
from paceline.drivers.ranks.link_watch import LAST_WATCHED, PROBED_STEPS, LinkWatch

BYTES_PER_SECOND = 1e6


def underway(spans, busy_seconds=0.0):
    return Underway(protocol=None, finished=[], busy_seconds=busy_seconds, on_wire=spans)


def watched(*, vector_bytes, coding, spans, late=(), probes_fail=False):
    """The costs that were told, and the steps after which there was a probe; `late` ones wait for another rank."""
    watch, told, probed = LinkWatch(vector_bytes), [], []
    for step in range(1, LAST_WATCHED + 9):
        slower = 9 if step < 7 else 1  # kernels are compiled
        told.append(watch.end_step({underway([span], slower * coding / len(spans)) for span in spans}))
        probe = watch.probe()
        if probe is not None:
            probed.append(step)
            seconds = next(probe).tensor.nbytes / BYTES_PER_SECOND + (step in late) * 5.0
            watch.probed(underway([] if probes_fail else [(step, step + seconds)]))
    return [costs for costs in told if costs is not None], probed


@pytest.mark.parametrize(("coding", "dearer"), [(0.1, False), (0.3, False), (0.4, True)])
def test_costs_are_told_once_and_are_dearer_where_the_gradients_would_be_on_the_wire_for_less(coding, dearer):
    """Two payloads that overlap are 0.3 s on the wire; the gradients, of 0.64 MB, would be 0.64 s."""
    spans = [(0.0, 0.2), (0.1, 0.3)]
    (costs,), probed = watched(vector_bytes=640_000, coding=coding, spans=spans, late=PROBED_STEPS[1:])
    assert costs.wire_seconds == pytest.approx(0.3)
    assert costs.coding_seconds == pytest.approx(coding)
    assert costs.plain_seconds == pytest.approx(0.64)
    assert costs.is_dearer is dearer
    assert tuple(probed) == PROBED_STEPS


def test_the_probe_is_a_megabyte_at_the_most_and_stands_for_all_of_a_large_gradient():
    assert next(_third_probe(100_000_000)).tensor.nbytes == 1 << 20
    (costs,), _ = watched(vector_bytes=100_000_000, coding=0.0, spans=[(0.0, 1.0)])
    assert costs.plain_seconds == pytest.approx(100.0)


def _third_probe(vector_bytes):
    watch = LinkWatch(vector_bytes)
    for _ in range(PROBED_STEPS[0]):
        watch.end_step([])
    return watch.probe()


def test_where_no_probe_came_through_nothing_is_told():
    assert watched(vector_bytes=1000, coding=1.0, spans=[(0.0, 1.0)], probes_fail=True)[0] == []
