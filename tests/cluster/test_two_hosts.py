"""Two hosts and a cable between them: network namespaces of this machine, at 200 Mbit/s. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess

import pytest

from paceline.drivers.served.keys import make_keys
from paceline.traces.journal import Evaluated, WorkerJoined, WorkerLeft
from tests.cluster.harness import PACELINE, Late, end, until
from tests.cluster.peers import Visited

SERVER, WORKERS, PORT = "10.77.0.1", "10.77.0.2", 29400
SHAPE = ("root", "tbf", "rate", "200mbit", "burst", "256kb", "latency", "50ms")

pytestmark = pytest.mark.xdist_group("two_hosts")  # one cluster for all of them


def _run(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=20)


def _why_not():
    if os.geteuid() != 0:
        return "two hosts: making network namespaces needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "two hosts: ip and tc (iproute2) are needed"
    name = f"pl{os.getpid()}x"
    made = _run("ip", "netns", "add", name)
    _run("ip", "netns", "del", name)
    return f"two hosts: no network namespace can be made ({made.stderr.strip()})" if made.returncode else None


class Cable:
    """Two namespaces joined by a pair of interfaces."""

    def __init__(self):
        number = os.getpid()
        self.server, self.workers = f"pl{number}s", f"pl{number}w"
        self._ends = {self.server: f"pv{number}s", self.workers: f"pv{number}w"}

    def __enter__(self):
        try:
            for host in self._ends:
                _do("ip", "netns", "add", host)
            names = list(self._ends.values())
            _do("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for (host, interface), address in zip(self._ends.items(), (SERVER, WORKERS), strict=True):
                _do("ip", "link", "set", interface, "netns", host)
                _do("ip", "-n", host, "addr", "add", f"{address}/24", "dev", interface)
                _do("ip", "-n", host, "link", "set", "lo", "up")
                _do("ip", "-n", host, "link", "set", interface, "up")
                _do("tc", "-n", host, "qdisc", "add", "dev", interface, *SHAPE)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for host, interface in self._ends.items():
            _run("ip", "link", "del", interface)  # one that never got into its namespace
            _run("ip", "netns", "del", host)

    def cut(self):
        _do("ip", "-n", self.server, "link", "set", self._ends[self.server], "down")

    def mend(self):
        _do("ip", "-n", self.server, "link", "set", self._ends[self.server], "up")


def _do(*command):
    done = _run(*command)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


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
        command = ["ip", "netns", "exec", self._cable.server, *PACELINE, "serve", "--listen", self.address]
        command += ["--tls", str(self._keys / "server"), "--out", str(self.run), *self._options]
        with self._log_path.open("ab") as log:
            self.server = subprocess.Popen(command, stdout=log, stderr=log)
        self.until_log(r"server at 10\.77\.0\.1:29400")

    def add_workers(self, numbers):
        for number in numbers:
            command = ["ip", "netns", "exec", self._cable.workers, *PACELINE, "work", self.address]
            command += ["--tls", str(self._keys / "worker"), "--number", str(number), "--threads", "1"]
            with (self.folder / f"worker-{number}.log").open("wb") as log:
                self._packs.append(subprocess.Popen(command, stdout=log, stderr=log))

    @property
    def pids(self):
        return {number: pack.pid for number, pack in enumerate(self._packs) if pack.poll() is None}


@pytest.fixture(scope="module")
def cable():
    reason = _why_not()
    if reason:
        pytest.skip(reason)
    with Cable() as cable:
        yield cable


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, hosts=[SERVER])
    return folder


def test_a_short_run_between_two_hosts_comes_to_its_end(tmp_path, cable, keys):
    with TwoHosts(tmp_path, cable, keys, workers=3, k=2, rounds=30) as cluster:
        assert cluster.server.wait(90) == 0, cluster.log
        assert cluster.round == 30
        for pack in cluster._packs:
            assert pack.wait(20) == 0
        losses = [record.loss for record in cluster.records if isinstance(record, Evaluated)]
        assert losses[-1] < losses[0]
        assert cluster.replay()["identical"]


def test_after_a_cut_that_outlasts_the_silence_workers_come_back_by_themselves_and_training_goes_on(
    tmp_path, cable, keys
):
    with TwoHosts(tmp_path, cable, keys, workers=3, k=2) as cluster:
        cluster.until_round(5)
        cable.cut()
        try:
            cluster.until_alive(set(), seconds=30)
            cut_at = cluster.round
            with contextlib.suppress(Late):  # nobody is there: the model stands still
                until(lambda: cluster.round > cut_at, "a round without workers", seconds=1)
            assert cluster.round == cut_at
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
