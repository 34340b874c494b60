"""A server on this machine that misbehaves on request."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.data.download import RemoteFile


@pytest.fixture(autouse=True)
def _no_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the machine's own data nor its proxy settings may change what a test sees."""
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@dataclass
class Server:
    """Bodies by path; `stall` names paths whose body stops half way until the test is over."""

    base: str = ""
    bodies: dict[str, bytes] = field(default_factory=dict)
    stall: set[str] = field(default_factory=set)
    drip: set[str] = field(default_factory=set)
    claimed_bytes: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def publish(self, name: str, body: bytes) -> RemoteFile:
        self.bodies[f"/{name}"] = body
        return RemoteFile(name=name, payload_bytes=len(body), md5=hashlib.md5(body).hexdigest())


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            body = state.bodies.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(state.claimed_bytes.get(self.path, len(body))))
            self.end_headers()
            try:
                self._send(body)
            except OSError:  # the client hung up, as some tests want
                self.close_connection = True

        def _send(self, body: bytes) -> None:
            if self.path in state.stall:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                state.over.wait(30)
            elif self.path in state.drip:
                for index in range(len(body)):
                    self.wfile.write(body[index : index + 1])
                    self.wfile.flush()
                    if state.over.wait(0.02):
                        return
            else:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    state.base = f"http://127.0.0.1:{listener.server_address[1]}/"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield state
    state.over.set()
    listener.shutdown()
    listener.server_close()
    thread.join(10)
