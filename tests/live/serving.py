"""A live page in a thread of the test, and plain requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import threading
import urllib.parse

from paceline.live.server import LiveAddress, serve_live

SECONDS = 30.0


@contextlib.contextmanager
def served(folder, address=None):
    """Serve the page of a folder while the block lasts; gives its address."""
    opened: queue.Queue = queue.Queue()
    ending = []

    def stopping(stop):
        ending.append((asyncio.get_running_loop(), stop))

    def serve():
        try:
            where = address or LiveAddress(port=0)
            serve_live(folder, where, on_open=opened.put, stopping=stopping)
        except Exception as error:
            opened.put(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    found = opened.get(timeout=SECONDS)
    if isinstance(found, Exception):
        raise found
    try:
        yield found
    finally:
        for loop, stop in ending:
            loop.call_soon_threadsafe(stop.set)
        thread.join(SECONDS)
        assert not thread.is_alive()


def connected(address):
    place = urllib.parse.urlsplit(address)
    return socket.create_connection((place.hostname, place.port), timeout=SECONDS)


def ask(address, target, *, method="GET", headers=(), body=b""):
    """Send one request as it is, and return (status, headers, body) of the answer."""
    place = urllib.parse.urlsplit(address)
    given = {"Host": place.netloc, **dict(headers)}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    with connected(address) as connection:
        connection.sendall(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)
        answer = b""
        while data := connection.recv(65_536):
            answer += data
    top, _, rest = answer.partition(b"\r\n\r\n")
    lines = top.decode("latin-1").split("\r\n")
    return int(lines[0].split()[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])}, rest


class EventStream:
    """The server-sent events of a page."""

    def __init__(self, address, query=""):
        self._connection = connected(address)
        host = urllib.parse.urlsplit(address).netloc
        self._connection.sendall(f"GET /events{query} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        self._lines = self._connection.makefile("rb")

    def next(self):
        """Return the next state."""
        while line := self._lines.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        raise EOFError("the server has ended the stream")

    def __iter__(self):
        """Give all states until the server ends the stream."""
        try:
            while True:
                yield self.next()
        except (EOFError, OSError):
            return

    def close(self):
        self._lines.close()
        self._connection.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
