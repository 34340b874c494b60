"""Two hosts and a cable between them: network namespaces of this machine, at 200 Mbit/s. Needs root and iproute2."""

from __future__ import annotations

import time

import pytest

from experiments.core.hosts import ADDRESSES, Cable, why_not
from paceline import Recipe, simulate
from paceline.drivers.served.keys import make_keys
from paceline.traces.journal import Evaluated, StepRecord, WorkerJoined, WorkerLeft
from tests import warm
from tests.cluster.harness import PACELINE, end
from tests.cluster.peers import Visited

SERVER, PORT = ADDRESSES[0], 29400

pytestmark = pytest.mark.xdist_group("two_hosts")  # one cluster for all of them


class TwoHosts(Visited):
    """The server on one host and the workers on the other."""

    def __init__(self, folder, cable, keys, **options):
        super().__init__(folder, start=0, **options)
        self._cable, self._keys = cable, keys

    def __enter__(self):
        super().__enter__()
        self.add_workers(range(self.workers))
        return self

    @property
    def address(self):
        return f"{SERVER}:{PORT}"

    def start_server(self, *, resume=False):
        command = ["ip", "netns", "exec", self._cable.hosts[0], *PACELINE, "serve", "--listen", self.address]
        command += ["--tls", str(self._keys / "server"), "--out", str(self.run), *self._options]
        with self._log_path.open("ab") as log:
            self.server = warm.Popen(command, stdout=log, stderr=log)
        self.until_log(r"server at 10\.77\.0\.1:29400")

    def add_workers(self, numbers):
        for number in numbers:
            command = ["ip", "netns", "exec", self._cable.hosts[1], *PACELINE, "work", self.address]
            command += ["--tls", str(self._keys / "worker"), "--number", str(number), "--threads", "1"]
            with (self.folder / f"worker-{number}.log").open("wb") as log:
                self._packs.append(warm.Popen(command, stdout=log, stderr=log))

    @property
    def pids(self):
        return {number: pack.pid for number, pack in enumerate(self._packs) if pack.poll() is None}


@pytest.fixture(scope="module")
def cable():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Cable() as cable:
        yield cable


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, hosts=[SERVER])
    return folder


def until_still(cluster):
    """Wait until no round has closed for a second: nobody is there, so at most the round that was open may close."""
    before = cluster.round
    at = [before, time.monotonic()]

    def still():
        if cluster.round != at[0]:
            at[:] = [cluster.round, time.monotonic()]
        assert at[0] <= before + 1, f"{at[0] - before} rounds closed without workers"
        return time.monotonic() - at[1] > 1

    cluster.until(still, "the model stands still")


def test_a_run_with_qsgd_trains_as_well_and_counts_the_bytes_that_the_interface_counts(tmp_path, cable, keys):
    settings = (("codec.name", "qsgd"), ("data.split", "iid"))
    before = cable.bytes_at_first()
    with TwoHosts(tmp_path, cable, keys, workers=3, strategy="full", rounds=120, settings=settings) as cluster:
        assert cluster.server.wait(90) == 0, cluster.log
        assert cluster.round == 120
        for pack in cluster._packs:
            assert pack.wait(20) == 0
        on_the_wire = [now - then for now, then in zip(cable.bytes_at_first(), before, strict=True)]
        steps = [record for record in cluster.records if isinstance(record, StepRecord)]
        counted = [sum(step.sent_bytes for step in steps), sum(step.received_bytes for step in steps)]
        assert counted == [pytest.approx(measured, rel=0.03) for measured in on_the_wire]
        losses = [record.loss for record in cluster.records if isinstance(record, Evaluated)]
        assert cluster.replay()["identical"]
    sections = {"cluster": {"workers": 3}, "strategy": {"name": "full"}, "data": {"split": "iid"}}
    exact = simulate(Recipe(rounds=120).with_settings(**sections))
    assert max(counted) < exact.trace.sent_bytes / 6
    assert losses[-1] == pytest.approx(exact.loss, rel=0.05)


def test_after_a_cut_that_outlasts_the_silence_workers_come_back_by_themselves_and_training_goes_on(
    tmp_path, cable, keys
):
    with TwoHosts(tmp_path, cable, keys, workers=3, k=2) as cluster:
        cluster.until_round(5)
        cable.cut()
        try:
            cluster.until_alive(set(), seconds=30)
            until_still(cluster)  # who leaves may close the open round, and its line comes after the last one left
        finally:
            cable.mend()
        cluster.until_alive({0, 1, 2}, seconds=45)
        cluster.until_goes_on(10)
        assert all(pack.poll() is None for pack in cluster._packs)
        joined = [record.worker for record in cluster.records if isinstance(record, WorkerJoined)]
        left = [record for record in cluster.records if isinstance(record, WorkerLeft)]
        assert sorted(joined[:3]) == [0, 1, 2]
        assert len(joined) >= 6
        assert {record.worker for record in left} == {0, 1, 2}
        assert any("silent for 3 s" in record.reason for record in left)
        cluster.stop()
        assert cluster.replay()["identical"]
        for pack in cluster._packs:
            end(pack)
