"""TLS: workers with a certificate train, strangers neither join nor read nor slow anybody down."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import time

import pytest

from paceline.drivers.served.keys import make_keys
from paceline.drivers.served.security import worker_credentials
from paceline.traces.journal import Refused, WorkerJoined
from tests import warm
from tests.cluster.harness import PACELINE, end
from tests.cluster.peers import Peer, Visited, closed_by_peer, connect
from tests.cluster.test_faults import PACED
from tests.waiting import until

STRANGERS = 20
HELD = 0.5  # of the speed without strangers, at least
KNOCKING = """
import os, socket, ssl, sys, threading, time
os.nice(19)
address, count, certificate = sys.argv[1].rsplit(":", 1), int(sys.argv[2]), sys.argv[3]

def knock(number):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if number % 2:
        context.load_cert_chain(certificate + ".crt", certificate + ".key")
    while True:
        try:
            with socket.create_connection((address[0], int(address[1])), timeout=5) as plain:
                if number % 3 == 2:
                    plain.sendall(b"\\1\\0\\0\\0\\0\\0\\0\\0\\0" + bytes(9))
                    plain.recv(100)
                else:
                    with context.wrap_socket(plain) as secure:
                        secure.recv(100)
        except OSError:
            pass
        time.sleep(0.05)

for number in range(count):
    threading.Thread(target=knock, args=(number,), daemon=True).start()
print("knocking", flush=True)
time.sleep(600)
"""

pytestmark = pytest.mark.xdist_group("tls")  # one cluster for all of them


class SecureCluster(Visited):
    """A server with keys, and workers that have theirs."""

    def __init__(self, folder, keys, **options):
        self._keys = keys
        super().__init__(folder, serve=["--tls", str(keys / "server")], start=0, **options)

    def __enter__(self):
        super().__enter__()
        self.add_workers(range(self.workers))
        return self

    def add_workers(self, numbers):
        for number in numbers:
            command = [*PACELINE, "work", self.address, "--tls", str(self._keys / "worker"), "--number", str(number)]
            self._packs.append(warm.Popen([*command, "--threads", "1"], stderr=subprocess.DEVNULL, finalized=False))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "ours")
    make_keys(folder / "theirs")
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, keys):
    options = {"workers": 2, "strategy": "full", "settings": PACED}
    with SecureCluster(tmp_path_factory.mktemp("tls"), keys / "ours", **options) as cluster:
        cluster.until_round(3)
        yield cluster


def test_workers_with_the_right_certificate_train(cluster):
    cluster.until_goes_on(10)
    assert cluster.alive == {0, 1}


def _as(authority, prefix=None):
    """The credentials of someone who does not check what they show: only the server can refuse them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority)
    if prefix is not None:
        context.load_cert_chain(f"{prefix}.crt", f"{prefix}.key")
    return context


REFUSED = r"ended \((closed|SSLError: .*(alert|EOF)|SSLEOFError|ConnectionResetError|BrokenPipeError)"


@pytest.mark.parametrize("who", ["no certificate", "another CA's certificate", "no TLS"])
def test_a_stranger_can_neither_join_nor_read_the_model(cluster, keys, who):
    credentials = {
        "no certificate": lambda: _as(keys / "ours" / "ca.crt"),
        "another CA's certificate": lambda: _as(keys / "ours" / "ca.crt", keys / "theirs" / "worker"),
        "no TLS": lambda: None,
    }[who]()
    before = cluster.round
    with Peer(cluster.address, credentials=credentials) as peer, pytest.raises(AssertionError, match=REFUSED):
        peer.join()
    cluster.until_round(before + 5)
    assert {r.worker for r in cluster.records if isinstance(r, WorkerJoined)} == {0, 1}
    assert not [record for record in cluster.records if isinstance(record, Refused)]


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("no certificate", "it shows no certificate"),
        ("another CA's certificate", r"its certificate is not good here \(.+\)"),
        ("no TLS", "it does not speak TLS"),
    ],
)
def test_a_stranger_that_tls_refuses_leaves_a_line_in_the_log(cluster, keys, who, why):
    shown = {"no certificate": None, "another CA's certificate": keys / "theirs" / "worker"}
    credentials = _as(keys / "ours" / "ca.crt", shown[who]) if who in shown else None
    with Peer(cluster.address, credentials=credentials) as peer:
        peer_port = peer._socket.getsockname()[1]
        with pytest.raises(AssertionError, match=REFUSED):
            peer.join()
    cluster.until_log(rf"refused 127\.0\.0\.1:{peer_port}: {why}")


def test_a_worker_with_the_certificate_of_another_ca_is_told_what_is_wrong(cluster, keys):
    found = warm.run(
        [*PACELINE, "work", cluster.address, "--tls", str(keys / "theirs" / "worker"), "--patience-seconds", "1"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert found.returncode != 0
    first, last = found.stderr.splitlines()  # one when it begins to look, one when it gives up
    assert "no server at" in first
    assert "same CA" in last


def test_a_member_needs_a_worker_s_certificate_and_the_server_s_own_is_not_one(cluster, keys):
    ours = keys / "ours"
    credentials = _as(ours / "ca.crt", ours / "server")
    with Peer(cluster.address, credentials=credentials) as peer, pytest.raises(AssertionError, match=REFUSED):
        peer.join()


def test_with_the_right_certificate_a_peer_can_join(cluster, keys):
    with Peer(cluster.address, credentials=worker_credentials(keys / "ours" / "worker")) as peer:
        assert peer.greet().worker == 2  # a seat, but not a member: a full round would wait for it


def test_a_handshake_that_is_begun_and_left_lying_is_hung_up_on(cluster):
    connections = [connect(cluster.address) for _ in range(20)]
    try:
        context = ssl.create_default_context()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
        greeting = outgoing.read()
        for number, connection in enumerate(connections):
            connection.sendall(greeting[: number * len(greeting) // 20])
        cluster.until_goes_on(5)
        cluster.until(lambda: all(map(closed_by_peer, connections)), "it hangs up on all", seconds=30)
    finally:
        for connection in connections:
            connection.close()


def test_strangers_that_knock_all_the_time_do_not_slow_rounds(tmp_path, keys):
    with SecureCluster(tmp_path, keys / "ours", workers=2, strategy="full") as cluster:  # as fast as it can
        cluster.until_round(3)
        alone, besieged = _speeds(cluster, keys)
        assert max(besieged) >= HELD * max(alone), (alone, besieged)
        assert cluster.alive == {0, 1}
        assert {r.worker for r in cluster.records if isinstance(r, WorkerJoined)} == {0, 1}


def _speeds(cluster, keys):
    """Rounds a second, with and without strangers, by turns: two, and more where others had the cores meanwhile."""
    script = [sys.executable, "-c", KNOCKING, cluster.address, str(STRANGERS), str(keys / "theirs" / "worker")]

    def speed(seconds=1.0):
        rounds, began = cluster.round, time.monotonic()
        time.sleep(seconds)
        return (cluster.round - rounds) / (time.monotonic() - began)

    alone, besieged = [], []
    while len(alone) < 2 or (len(alone) < 10 and max(besieged) < HELD * max(alone)):
        alone.append(speed())
        strangers = subprocess.Popen(script, stdout=subprocess.PIPE)
        try:
            strangers.stdout.readline()
            besieged.append(speed())
        finally:
            end(strangers)
            strangers.stdout.close()
    return alone, besieged


# -- beyond this machine --------------------------------------------------------------------------------------------


def _serve(folder, *options):
    arguments = ["--listen", "0.0.0.0:0", "--workers", "2", "--k", "1", "--split", "iid", "--out", str(folder / "run")]
    return [*PACELINE, "serve", *arguments, *options]


def test_a_server_that_others_can_reach_does_not_start_without_tls(tmp_path):
    found = warm.run(_serve(tmp_path), capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert "can be reached from other machines, by anyone" in line
    assert "--insecure" in line
    assert not (tmp_path / "run" / "trace.jsonl").exists()


def test_a_server_that_others_can_reach_starts_without_tls_if_that_is_asked_for(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as sink:
        server = warm.Popen(_serve(tmp_path, "--insecure"), stdout=sink, stderr=sink)
    try:
        until(lambda: "server at 0.0.0.0:" in log.read_text(), "it starts", seconds=60)
        port = int(log.read_text().partition("server at 0.0.0.0:")[2].partition(":")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    finally:
        end(server)
