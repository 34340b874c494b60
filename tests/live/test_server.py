"""Who may read the live page, what it answers, and that nobody can make it grow or wait."""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
from pathlib import Path

import pytest

from paceline.live import server
from paceline.live.metrics import metrics_text
from paceline.live.server import LiveAddress, LiveError
from tests.live.journals import append, began, joined, lines, step
from tests.live.serving import EventStream, ask, connected, served
from tests.waiting import until

TOKEN = "a-token-of-24-characters"
PATHS = (
    "/",
    "/events",
    "/state.json",
    "/metrics",
    "/nowhere",
    "/../../etc/passwd",
    "//etc/passwd",
    "http://[",
    "/%2e%2e/trace.jsonl",
)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "trace.jsonl").write_bytes(lines([began(), joined(0), step(0, 1.0, fresh=(0,))]))
    return tmp_path


def test_four_paths_are_answered_to_get_alone_and_none_reads_a_file(run):
    with served(run) as address:
        status, headers, page = ask(address, "/")
        assert status == 200
        assert b"<title>paceline live</title>" in page
        assert "'unsafe" not in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
        assert ask(address, "/state.json")[2].startswith(b'{"name":')
        assert ask(address, "/metrics")[1]["content-type"].startswith("text/plain; version=0.0.4")
        for path in PATHS[4:]:
            assert ask(address, path)[0] == 404
        for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert ask(address, "/state.json", method=method, headers={"Content-Length": "3"}, body=b"abc")[0] == 405


def test_without_the_token_every_path_is_refused(run):
    with served(run, LiveAddress(port=0, token=TOKEN)) as address:
        assert address.endswith(f"/?token={TOKEN}")
        for path in PATHS:
            for query in ("", "?token=", "?token=a-token-of-24-characterZ", f"?other={TOKEN}"):
                status, headers, body = ask(address, path + query)
                assert status == 403
                assert b"paceline" not in body
                assert TOKEN not in repr(headers)
        for method in ("POST", "HEAD"):
            assert ask(address, "/state.json", method=method)[0] == 403
        assert ask(address, "/metrics", headers={"Authorization": f"Bearer {TOKEN}x"})[0] == 403
        assert ask(address, "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200
        assert ask(address, f"/?token={TOKEN}")[0] == 200
        with EventStream(address, f"?token={TOKEN}") as events:
            assert events.next()["figures"]["round"] == 1


def test_a_name_that_is_made_to_point_here_reads_nothing(run):
    with served(run) as address:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
            assert ask(address, "/state.json", headers={"Host": host})[0] == 403
        for host in ("localhost", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:80"):  # an SSH tunnel has another port
            assert ask(address, "/state.json", headers={"Host": host})[0] == 200
    with served(run, LiveAddress(host="127.0.0.2", port=0)) as address:  # every address that is printed can be opened
        assert ask(address, "/state.json")[0] == 200
        assert ask(address, "/state.json", headers={"Host": "127.0.0.2.evil.example"})[0] == 403


def test_only_loopback_listens_unless_another_host_is_asked_for(run):
    def listening():
        """The addresses at which this process listens, as /proc has them."""
        mine = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists() or each.is_symlink()}
        rows = [
            line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]
        ]
        return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}

    before = listening()
    with served(run) as address:
        port = int(address.rstrip("/").rsplit(":", 1)[1])
        assert listening() - before == {f"0100007F:{port:04X}"}
    with served(run, LiveAddress(host="0.0.0.0", port=0)) as address:
        token = re.search(r":(\d+)/\?token=([\w-]{32})$", address)
        assert token, address
        assert listening() - before == {f"00000000:{int(token[1]):04X}"}
        here = f"http://127.0.0.1:{token[1]}/"
        assert ask(here, "/metrics")[0] == 403
        assert ask(here, f"/metrics?token={token[2]}", headers={"Host": "any.example"})[0] == 200
    assert listening() == before


def test_a_reader_that_comes_back_has_the_whole_state_at_once_and_then_what_is_new(run):
    with served(run) as address:
        with EventStream(address) as events:
            assert events.next()["figures"]["round"] == 1
        append(run / "trace.jsonl", step(1, 2.0, fresh=(0, 1)))
        with EventStream(address) as again:
            found = again.next()
            while found["figures"]["round"] < 2:
                found = again.next()
            assert [row["used"] for row in found["rows"]] == [2, 1]
            append(run / "trace.jsonl", step(2, 3.0, fresh=(0,)))
            while found["figures"]["round"] < 3:
                found = again.next()
            assert not found["last"]


def test_readers_have_the_last_state_when_the_page_ends(run):
    with served(run) as address:
        events = EventStream(address)
        assert not events.next()["last"]
        reading = threading.Thread(target=lambda: found.extend(events))
        found: list = []
        reading.start()
    reading.join(30)
    events.close()
    assert found[-1]["last"]


def test_requests_that_are_none_are_refused_and_too_many_readers_wait_for_nothing(run, monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.5)
    with served(run) as address:
        for nonsense in (b"\x16\x03\x01\x02\x00\x01\x00\x01\n\n", b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 30_000):
            with connected(address) as connection:
                connection.sendall(nonsense)
                answer = connection.recv(4_096)
                assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
        with connected(address) as idle:  # who asks nothing is cut off in time
            assert _ends(idle)
        readers = [EventStream(address) for _ in range(3)]
        assert [each.next()["figures"]["round"] for each in readers] == [1, 1, 1]
        assert ask(address, "/metrics")[0] == 503
        readers.pop().close()
        until(lambda: ask(address, "/metrics")[0] == 200, "the place of a reader who is gone", every_seconds=0.05)
        for each in readers:
            each.close()


def _ends(connection):
    """Whether the other side ends a connection, and says nothing."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_without_the_token_take_no_place_of_a_reader(run, monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(server, "MOST_KNOCKING", 4)
    monkeypatch.setattr(server, "REQUEST_SECONDS", 300.0)
    with served(run, LiveAddress(port=0, token=TOKEN)) as address, EventStream(address, f"?token={TOKEN}") as reader:
        assert reader.next()["figures"]["round"] == 1
        idle = [connected(address) for _ in range(12)]
        assert ask(address, f"/metrics?token={TOKEN}")[0] == 200
        assert all(_ends(each) for each in idle[:8])  # the oldest give way to those who come
        append(run / "trace.jsonl", step(1, 2.0, fresh=(0, 1)))  # and who reads goes on reading
        while reader.next()["figures"]["round"] < 2:
            pass
        for each in idle:
            each.close()


def test_the_page_is_there_and_can_be_stopped_while_a_long_record_is_read(run, monkeypatch):
    monkeypatch.setattr(server, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(server, "LAST_LOOK_SECONDS", 0.2)
    reading, go_on = threading.Event(), threading.Event()

    def slow_look(followed):
        reading.set()
        go_on.wait(120)

    monkeypatch.setattr(server.FollowedRun, "look", slow_look)
    try:
        with served(run) as address:
            assert reading.wait(30)
            assert ask(address, "/")[0] == 200
            assert ask(address, "/state.json")[0] == 503  # there is no state yet, and none is made up
        assert not go_on.is_set()  # the server has ended all the same
    finally:
        go_on.set()


def test_a_reader_that_takes_nothing_is_cut_off_and_holds_one_state_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "SEND_SECONDS", 0.5)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.01)
    journal = tmp_path / "trace.jsonl"
    journal.write_bytes(lines([began(workers=900), *map(joined, range(900))]))
    with served(tmp_path) as address:
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        stuck.connect(connected(address).getpeername())
        stuck.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        stuck.setblocking(False)
        versions = itertools.count()

        def is_reset():
            """Write another step; return whether the connection has been cut, without reading from it."""
            version = next(versions)
            append(journal, step(version, 1.0 + version, fresh=range(900)))
            with EventStream(address) as other:  # others are served meanwhile
                assert other.next()["kind"] == "server"
            return stuck.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0

        until(is_reset, "the reader who reads nothing is cut off", every_seconds=0.05)
        stuck.close()


def test_a_port_in_use_and_an_address_that_is_none_are_refused_with_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LiveError, match=rf"port {port} of 127\.0\.0\.1 is in use: give another --port"):
            server.listening_socket(LiveAddress(port=port))
    for host, words in (("192.0.2.1", "is no address of this machine"), ("no such host", "there is no address")):
        with pytest.raises(LiveError, match=words):
            server.listening_socket(LiveAddress(host=host, port=0))
    with pytest.raises(LiveError, match="port 70000 is none"):
        server.listening_socket(LiveAddress(port=70_000))


# -- Prometheus --------------------------------------------------------------------------------------------------------

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\\n]|\\[\\"n])*)"(,|$)')
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


def parsed(text):
    """Read the text format strictly: {(name, labels): value}, and the type of each family."""
    assert text.endswith("\n")
    kinds, helped, values, current, done = {}, set(), {}, None, set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            current = line.split(" ", 3)[2]
            assert current not in helped
            helped.add(current)
            done.add(current)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert (name, kind in ("gauge", "counter")) == (current, True)
            kinds[name] = kind
        else:
            found = SAMPLE.fullmatch(line)
            assert found, line
            assert found[1] == current  # the samples of a family stand together, after its type
            assert kinds[current]
            labels = {
                name: re.sub(r'\\[\\"n]', lambda m: ESCAPES[m[0]], value)
                for name, value, _ in LABEL.findall(found[2] or "")
            }
            key = (found[1], tuple(sorted(labels.items())))
            assert key not in values, f"{key} is there twice"
            values[key] = float(found[3])
    for name, kind in kinds.items():
        assert name.endswith("_total") == (kind == "counter"), name
    return kinds, values


def test_the_metrics_follow_the_rules_of_the_text_format(run):
    hostile = run / 'a "quoted" \\ name\nof two lines'
    hostile.mkdir()
    records = [
        began(workers=2),
        joined(0),
        joined(1),
        step(0, 1.0, fresh=(0,), late=()),
        step(1, 2.0, fresh=(0,), dropped=(1,)),
    ]
    (hostile / "trace.jsonl").write_bytes(lines(records))
    with served(hostile) as address:
        kinds, values = parsed(ask(address, "/metrics")[2].decode())
    assert values["paceline_run_info", (("kind", "server"), ("name", hostile.name), ("strategy", "fastest-k"))] == 1
    assert values["paceline_round", ()] == values["paceline_rounds_total", ()] == 2
    assert values["paceline_worker_gradients_total", (("outcome", "dropped"), ("worker", "1"))] == 1
    assert values["paceline_worker_alive", (("worker", "0"),)] == 1
    assert values["paceline_sent_bytes_total", ()] == 200
    assert ("paceline_loss", ()) not in values  # nobody has measured it, and 0 would be a lie
    assert kinds["paceline_k"] == "gauge"


def test_numbers_that_are_not_finite_are_written_as_prometheus_has_them():
    document = {"name": "", "kind": "", "strategy": "", "noun": "rank", "state": "running", "rows": []}
    text = metrics_text(document | {"figures": {"loss": float("inf"), "accuracy": float("nan"), "seconds": 1e-7}})
    assert "paceline_loss +Inf\n" in text
    assert "paceline_accuracy NaN\n" in text
    assert "paceline_seconds 1e-07\n" in text
    parsed(text)
