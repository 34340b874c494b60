"""The live page's server: HTTP for four paths, for readers on this machine, or for those who have the token.

    /               the page
    /events         server-sent events: the whole state at once, and again whenever it has changed
    /state.json     the state, once
    /metrics        the figures for Prometheus

Who may read: with the address of this machine alone (loopback, the default) everybody on it, but no web page of
somebody else's: a request whose Host is not a name of this machine is refused, so that no name that is made to point
here (DNS rebinding) reads anything. At any other address a token is needed for every path, as `?token=...` or as
`Authorization: Bearer ...`, and is compared in constant time. Only GET is answered; no part of a request ever names a
file. Everything else is bounded: the number of readers, the size of a request and the time that it may take, and what
is on its way to a reader: one state, and the next only when that one has been taken. A reader that takes nothing for
SEND_SECONDS is cut off. Whoever has not yet shown that it may read is counted apart from the readers (MOST_KNOCKING),
and the oldest of them gives way to the next, so strangers take no place of a reader's.

The run is read by a thread, a bounded part at a time, so that requests are answered and Ctrl-C is heard meanwhile.

Why h11 and not a framework: requests have no body and connections serve one request each, so what is left of HTTP is
to read a request strictly, which h11 does, and to close in time, which is asyncio's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import re
import secrets
import signal
import socket
import struct
import threading
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import h11

from paceline.errors import PacelineError
from paceline.live.folder import FollowedRun
from paceline.live.metrics import CONTENT_TYPE, metrics_text
from paceline.live.page import live_page

PORT = 8899
LOOK_SECONDS = 0.4
MOST_CONNECTIONS = 64  # of readers
MOST_KNOCKING = 64  # connections of those who have not yet shown that they may read
MOST_REQUEST_BYTES = 16_384
REQUEST_SECONDS = 2.0
SEND_SECONDS = 20.0
FIRST_SECONDS = 10.0  # for the first look at a run, which reads a bounded part of it
SIGN_OF_LIFE_SECONDS = 15.0
LARGE_EVENT_BYTES = 50_000
FEWEST_TOKEN_CHARACTERS = 16
LAST_SECONDS = 1.0  # for readers to take the last state
LAST_LOOK_SECONDS = 3.0  # to make it
TOKEN_VARIABLE = "PACELINE_LIVE_TOKEN"  # in the environment, which other users cannot read, as they can arguments
_TOKEN = re.compile(r"[A-Za-z0-9._~-]+")
_Result = TypeVar("_Result")


class LiveError(PacelineError, ValueError):
    """A live page that cannot be served as it was asked for.

    >>> raise LiveError("port 8899 of 127.0.0.1 is in use: give another --port, or --port 0 for any that is free")
    Traceback (most recent call last):
    paceline.live.server.LiveError: port 8899 of 127.0.0.1 is in use: give another --port, or --port 0 for any that ...
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAddress:
    """Where the page is served, and for whom. `port` is None for PORT, or any free one where that is taken.

    >>> LiveAddress().with_token().token, len(LiveAddress(host="0.0.0.0").with_token().token)
    ('', 32)
    >>> LiveAddress(token="short").with_token()
    Traceback (most recent call last):
    paceline.live.server.LiveError: the token has 5 characters; give 16 or more of A-Z, a-z, 0-9, '.', '_', '~' and '-'
    """

    host: str = "127.0.0.1"
    port: int | None = None
    token: str = ""

    def with_token(self) -> LiveAddress:
        """Return the address with a token, where it needs one and has none; LiveError for one that is no token."""
        if self.token and (len(self.token) < FEWEST_TOKEN_CHARACTERS or not _TOKEN.fullmatch(self.token)):
            allowed = f"give {FEWEST_TOKEN_CHARACTERS} or more of A-Z, a-z, 0-9, '.', '_', '~' and '-'"
            raise LiveError(f"the token has {len(self.token)} characters; {allowed}")
        if self.token or is_loopback(self.host):
            return self
        return LiveAddress(host=self.host, port=self.port, token=secrets.token_urlsafe(24))


def is_loopback(host: str) -> bool:
    """Return whether an address is of this machine alone; a name other than localhost is not.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.7", "")]
    [True, True, True, False, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_socket(address: LiveAddress) -> socket.socket:
    """Return a socket that listens at an address; LiveError says why there can be none, and what to do.

    >>> with listening_socket(LiveAddress(port=0)) as found:
    ...     found.getsockname()[0]
    '127.0.0.1'
    """
    host = "127.0.0.1" if address.host == "localhost" else address.host
    if address.port is None:
        with contextlib.suppress(LiveError):
            return _bound(host, PORT)
    return _bound(host, address.port or 0)


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65_535:
        raise LiveError(f"port {port} is none: give one between 1 and 65535, or 0 for any that is free")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError):
        raise LiveError(f"there is no address {host!r}: give --host 127.0.0.1, or one of this machine") from None
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**18)  # of each reader: it is inherited
        found.bind(place)
        found.listen(MOST_CONNECTIONS)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} of {host} is in use: give another --port, or --port 0 for any that is free"
        elif error.errno == errno.EADDRNOTAVAIL:
            text = f"{host} is no address of this machine: give --host 127.0.0.1, or 0.0.0.0 for all of them"
        else:
            text = f"cannot listen at {host}, port {port}: {error.strerror or error}; give another --port or --host"
        raise LiveError(text) from None
    return found


def page_address(host: str, port: int, token: str = "") -> str:
    """Return the address to open in a browser.

    >>> page_address("127.0.0.1", 8899), page_address("::1", 80, "secret")
    ('http://127.0.0.1:8899/', 'http://[::1]:80/?token=secret')
    """
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/{f'?token={token}' if token else ''}"


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    content_type: str
    body: bytes


class LiveServer:
    """Serves the page of one run on an open socket, until `stop` is set; then readers get the last state.

    `give_up_seconds` is how long to wait for a run where there is none yet; None is for ever.
    """

    def __init__(
        self, run: FollowedRun, listening: socket.socket, *, token: str = "", give_up_seconds: float | None = None
    ) -> None:
        self._run, self._listening, self._token = run, listening, token
        self._give_up_seconds = give_up_seconds
        self._check_host = is_loopback(listening.getsockname()[0])
        self._page, self._policy = live_page()
        self._state = self._metrics = b""
        self._number = 0
        self._changed = asyncio.Event()
        self._last = False
        self._working: asyncio.Future[Any] | None = None  # what the thread that reads the run is at
        self._readers = 0
        self._knocking: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, stop: asyncio.Event) -> None:
        """Follow the run and answer requests; LiveError if no run has come in time."""
        server = await asyncio.start_server(self._accept, sock=self._listening, limit=MOST_REQUEST_BYTES)
        try:
            await self._follow(stop)
        finally:
            server.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_LOOK_SECONDS):
                    await self._publish_last()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=LAST_SECONDS)
            for task in self._tasks:
                task.cancel()

    async def _follow(self, stop: asyncio.Event) -> None:
        loop, told_at = asyncio.get_running_loop(), 0.0
        began = loop.time()
        while not stop.is_set():
            looking = self._in_thread(self._run.look)
            if not await _done_before(looking, stop):
                return
            changed, now = looking.result(), loop.time()
            pause = 0.02 if self._run.behind else LOOK_SECONDS
            # A large state is sent less often; and one that only grows older, now and then.
            rest = 4 * LOOK_SECONDS if len(self._state) > LARGE_EVENT_BYTES or self._run.behind else LOOK_SECONDS
            if (changed and now - told_at >= rest) or now - told_at >= 5.0 or not self._number:
                told_at = now
                await self._publish()
            elif changed:
                told_at = min(told_at, now - 5.0 + rest)
            if not self._run.found and self._give_up_seconds is not None and now - began > self._give_up_seconds:
                waited = f"in {self._run.folder} for {self._give_up_seconds:g} s"
                raise LiveError(f"no run has begun {waited}: give the folder of one, or a longer --wait")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)

    async def _publish_last(self) -> None:
        if self._working is not None and not self._working.done():
            await self._working  # a run is read by one thread at a time
        await self._in_thread(self._run.look)
        self._last = True
        await self._publish()

    async def _publish(self) -> None:
        state, metrics = await self._in_thread(self._rendered)
        if state == self._state:
            return
        self._state, self._metrics = state, metrics
        self._number += 1
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def _rendered(self) -> tuple[bytes, bytes]:
        document = self._run.document() | {"last": self._last}
        state = json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")
        return state, metrics_text(document).encode()

    def _in_thread(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Return what will come of some work, done by a thread that nobody waits for when the page ends."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[_Result] = loop.create_future()

        def settle(result: _Result | None, error: BaseException | None) -> None:
            if found.done():  # nobody waits for it any more
                return
            if error is None:
                found.set_result(result)  # type: ignore[arg-type]
            else:
                found.set_exception(error)

        def run() -> None:
            result, problem = None, None
            try:
                result = work()
            except BaseException as error:
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, result, problem)

        threading.Thread(target=run, daemon=True, name="paceline-live").start()
        self._working = found
        return found

    # -- one connection

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        while len(self._knocking) >= MOST_KNOCKING:
            oldest = next(iter(self._knocking))
            del self._knocking[oldest]
            oldest.cancel()
        self._knocking[task] = None
        self._tasks.add(task)
        writer.transport.set_write_buffer_limits(high=65_536)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError, h11.ProtocolError):
            _cut_off(writer)
        finally:
            self._knocking.pop(task, None)
            self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_REQUEST_BYTES)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                request = await _read_request(connection, reader)
        except h11.RemoteProtocolError as error:
            if connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                raise
            response = _plain(error.error_status_hint, "this is no request")
        else:
            if request is None:  # nobody has asked anything
                writer.close()
                return
            path, query = _path_and_query(request.target)
            refusal = self._refusal(request, query)
            if refusal is None:
                with self._place_of_a_reader() as has_place:
                    if has_place:
                        await self._serve_reader(path, connection, reader, writer)
                        return
                refusal = _plain(503, f"there are {MOST_CONNECTIONS} readers: try again later")
            response = replace(refusal, body=b"") if request.method == b"HEAD" else refusal
        await self._send(response, connection, reader, writer)

    @contextlib.contextmanager
    def _place_of_a_reader(self) -> Iterator[bool]:
        """Count one who may read among the readers, and no more among those who knock; False if they are too many."""
        if self._readers >= MOST_CONNECTIONS:
            yield False
            return
        task = asyncio.current_task()
        assert task is not None
        self._knocking.pop(task, None)
        self._readers += 1
        try:
            yield True
        finally:
            self._readers -= 1

    async def _serve_reader(
        self, path: str, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/events":
            await self._send_events(connection, reader, writer)
            return
        if path != "/" and not self._number:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), FIRST_SECONDS)
        await self._send(self._found(path), connection, reader, writer)

    async def _send(
        self,
        response: _Response,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        headers = [*self._headers(response.content_type), ("Content-Length", str(len(response.body)))]
        writer.write(connection.send(h11.Response(status_code=response.status, headers=headers)) or b"")
        if response.body:
            writer.write(connection.send(h11.Data(data=response.body)) or b"")
        await self._close(reader, writer)

    def _found(self, path: str) -> _Response:
        if path == "/":
            return _Response(200, "text/html; charset=utf-8", self._page)
        if path in ("/state.json", "/metrics") and not self._number:
            return _plain(503, "the record of the run is still being read: try again later")
        if path == "/state.json":
            return _Response(200, "application/json", self._state)
        if path == "/metrics":
            return _Response(200, CONTENT_TYPE, self._metrics)
        return _plain(404, "there is /, /events, /state.json and /metrics")

    def _refusal(self, request: h11.Request, query: str) -> _Response | None:
        """Return why a request is not answered: first of all, who asks."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        if self._token and not self._has_token(query, headers):
            return _plain(403, "the token is missing or wrong: open the address that was printed")
        if self._check_host and not self._token and not is_loopback(_host_name(headers.get("host", ""))):
            return _plain(403, "this page is only for names of this machine, such as localhost")
        if request.method != b"GET":
            return _plain(405, "only GET is answered")
        return None

    def _has_token(self, query: str, headers: dict[str, str]) -> bool:
        given = [urllib.parse.unquote_plus(each[6:]) for each in query.split("&") if each.startswith("token=")]
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            given.append(bearer.strip())
        wanted = self._token.encode()
        return any(hmac.compare_digest(each.encode("utf-8", "replace"), wanted) for each in given)

    def _headers(self, content_type: str) -> list[tuple[str, str]]:
        return [
            ("Content-Type", content_type),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", self._policy),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
            ("Connection", "close"),
        ]

    async def _send_events(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send the state, and again when it has changed: a reader that comes back needs no memory of ours."""
        headers = self._headers("text/event-stream")
        writer.write(connection.send(h11.Response(status_code=200, headers=headers)) or b"")
        gone = asyncio.ensure_future(_end_of(reader))
        try:
            async for event in self._events(gone):
                writer.write(connection.send(h11.Data(data=event)) or b"")
                async with asyncio.timeout(SEND_SECONDS):
                    await writer.drain()
            writer.write(connection.send(h11.EndOfMessage()) or b"")
        finally:
            gone.cancel()
        await self._close(reader, writer)

    async def _events(self, gone: asyncio.Future[None]) -> AsyncIterator[bytes]:
        yield b"retry: 1000\n\n"
        sent = 0  # there is none before the first look at the run
        while not gone.done():
            changed = self._changed
            if self._number != sent:
                sent = self._number
                yield b"id: %d\ndata: %b\n\n" % (sent, self._state)
                if self._last:
                    return
                continue
            waiter = asyncio.ensure_future(changed.wait())
            either: set[asyncio.Future[Any]] = {waiter, gone}
            done, _ = await asyncio.wait(either, timeout=SIGN_OF_LIFE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            if not done:
                yield b": still here\n\n"

    async def _close(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Close when all is taken; what is unread of a request is read first, or the answer would be lost with it."""
        async with asyncio.timeout(SEND_SECONDS):
            await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await _end_of(reader)
        writer.close()


async def _done_before(work: asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Wait for work or for the stop, and return whether the work is done."""
    waiter = asyncio.ensure_future(stop.wait())
    either: set[asyncio.Future[Any]] = {work, waiter}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    return work.done()


def _cut_off(writer: asyncio.StreamWriter) -> None:
    """End a connection at once, with all that is still on its way: the kernel keeps nothing for a slow reader."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _read_request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event
        if event is not h11.NEED_DATA:
            return None
        connection.receive_data(await reader.read(4_096))


async def _end_of(reader: asyncio.StreamReader) -> None:
    """Read, and forget, until the other side is gone or has sent far too much."""
    left = 2**20
    while left > 0 and (data := await reader.read(4_096)):
        left -= len(data)


def _path_and_query(target: bytes) -> tuple[str, str]:
    """Return the two parts of what was asked for; of an address that is none, a path that there is not.

    >>> _path_and_query(b"/metrics?token=a&b"), _path_and_query(b"http://[")
    (('/metrics', 'token=a&b'), ('', ''))
    """
    try:
        found = urllib.parse.urlsplit(target.decode("latin-1"))
    except ValueError:
        return "", ""
    return found.path, found.query


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port, which an SSH tunnel changes.

    >>> _host_name("localhost:9000"), _host_name("[::1]:80"), _host_name("evil.example")
    ('localhost', '::1', 'evil.example')
    """
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0]


def _plain(status: int, text: str) -> _Response:
    return _Response(status, "text/plain; charset=utf-8", f"{text}\n".encode())


def stop_on_signals(stop: asyncio.Event) -> None:
    """Let Ctrl-C and SIGTERM end the page."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def serve_live(
    folder: Path,
    address: LiveAddress,
    *,
    on_open: Callable[[str], None],
    stopping: Callable[[asyncio.Event], None] = stop_on_signals,
    give_up_seconds: float | None = None,
) -> None:
    """Serve the page of a folder until it is stopped.

    Args:
        on_open: called with the page's address as soon as it can be opened.
        stopping: called in the event loop with the event that ends it, to say who sets it.
    """
    address = address.with_token()
    listening = listening_socket(address)

    async def serve() -> None:
        stop = asyncio.Event()
        stopping(stop)
        server = LiveServer(FollowedRun(folder), listening, token=address.token, give_up_seconds=give_up_seconds)
        host = "127.0.0.1" if address.host == "localhost" else address.host
        on_open(page_address(host, listening.getsockname()[1], address.token))
        await server.serve(stop)

    with contextlib.closing(listening), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
