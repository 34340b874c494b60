"""A connection as bytes, for both sides: exact reads, writes that wait for the peer, and frames made of them.

    read(n)           so many bytes
    read_into(view)   straight from the socket into memory that is there already: no copy is made of a vector
    write(...)        returns when the system has taken all of it: a slow peer takes no memory of ours, and memory that
                      was written may be changed

`heard` is when the last bytes came. A large vector on a slow link takes minutes, and each byte is a sign of life.
"""

from __future__ import annotations

import asyncio
import ctypes
import resource
import socket
import ssl
import sys
import time
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Any

from paceline.drivers.served.messages import PREFIX_BYTES, Message, ProtocolError, parse_header, parse_prefix
from paceline.errors import PacelineError

STAGING_BYTES = 64 * 1024
SLICE_BYTES = 512 * 1024
BURST_BYTES = 512 * 1024  # on a quick connection the loop is woken once for so many
BURST_SECONDS = 0.02
MUCH_BYTES = 32 * 1024  # two packets of a slow link that come together are no quick connection

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LEAST_ROUND_TRIP_AT = 148  # tcpi_min_rtt in Linux's struct tcp_info, whose fields keep their places
_NO_ROUND_TRIP = 2**32 - 1


class WireClosed(PacelineError, ConnectionError):  # noqa: N818 - what happened, in the past tense
    """The connection has ended; the message says how, if that is known.

    >>> raise WireClosed("connection reset by peer")
    Traceback (most recent call last):
    paceline.drivers.served.transport.WireClosed: connection reset by peer
    """


class Wire(asyncio.BufferedProtocol):
    """A TCP connection, with TLS or without, in an event loop: one task reads, one writes."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        count: Callable[[int, int], None] = lambda sent, received: None,
    ) -> None:
        self._clock, self._count = clock, count
        self.heard = clock()
        self.received_bytes = self.sent_bytes = 0
        self._transport: Any = None
        self._closed: WireClosed | None = None
        self._staging = memoryview(bytearray(STAGING_BYTES))  # what came before anybody asked for it
        self._start = self._end = 0
        self._target: memoryview | None = None  # where the bytes go that somebody asked for
        self._socket: Any = None  # without TLS
        self._low_bytes = 1  # so many must be there before the loop is woken
        self._wanted = 0  # bytes in staging that somebody waits for
        self._reader: asyncio.Future[None] | None = None
        self._paused = self._over = False
        self._lost = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()

    # -- for the two tasks ---------------------------------------------------------------------------------------

    async def read(self, count: int) -> bytes:
        """Return the next bytes; WireClosed if fewer come."""
        if count > STAGING_BYTES:
            found = bytearray(count)
            await self.read_into(memoryview(found))
            return bytes(found)
        if self._end - self._start < count:
            if self._start + count > STAGING_BYTES:  # move what is there to the front
                held = bytes(self._staging[self._start : self._end])
                self._staging[: len(held)] = held
                self._start, self._end = 0, len(held)
            self._wanted = count
            await self._more()
        start, self._start = self._start, self._start + count
        found_bytes = bytes(self._staging[start : self._start])
        if self._start == self._end:
            self._start = self._end = 0
        return found_bytes

    async def read_into(self, view: memoryview) -> None:
        """Fill the memory with the next bytes; WireClosed if fewer come."""
        at_hand = min(len(view), self._end - self._start)
        if at_hand:
            view[:at_hand] = self._staging[self._start : self._start + at_hand]
            self._start += at_hand
            if self._start == self._end:
                self._start = self._end = 0
        if at_hand < len(view):
            self._target = view[at_hand:]
            await self._more()

    async def _more(self) -> None:
        if self._closed is not None:
            raise self._closed
        self._reader = asyncio.get_running_loop().create_future()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        try:
            await self._reader
        finally:
            self._reader, self._target, self._wanted = None, None, 0

    async def write(self, *parts: bytes | memoryview) -> None:
        """Write all parts, and return when the system has taken them; WireClosed if the peer is gone."""
        for part in parts:
            for start in range(0, len(part), SLICE_BYTES):
                if self._closed is not None:
                    raise self._closed
                if self._transport.is_closing():  # it would take everything, and complain in the log
                    raise WireClosed("the connection is being closed")
                piece = part[start : start + SLICE_BYTES]
                self._transport.write(piece)
                await self._writable.wait()
                self.sent_bytes += len(piece)
                self._count(len(piece), 0)
        # A transport that is about to close takes everything and says nothing: the loop must get its turn to tell.
        await asyncio.sleep(0)
        if self._closed is not None:
            raise self._closed

    def least_round_trip_seconds(self) -> float | None:
        """Return the least round trip that the system has seen on this connection; None where it does not tell."""
        connection = None if self._transport is None else self._transport.get_extra_info("socket")
        option = getattr(socket, "TCP_INFO", None)
        if connection is None or option is None:
            return None
        try:
            about = connection.getsockopt(socket.IPPROTO_TCP, option, _LEAST_ROUND_TRIP_AT + 4)
        except OSError:
            return None
        if len(about) < _LEAST_ROUND_TRIP_AT + 4:
            return None  # a system that is older than the field
        microseconds: int = int.from_bytes(about[_LEAST_ROUND_TRIP_AT:], sys.byteorder)
        return None if microseconds == _NO_ROUND_TRIP else microseconds / 1e6

    async def farewell(self, seconds: float) -> None:
        """End the connection when the peer does, or after so many seconds.

        What comes meanwhile is thrown away. To close with bytes unread would be a reset, which can overtake the last
        words that were written.
        """
        self._over = True
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        try:
            if self._writable.is_set() and self._transport.can_write_eof():
                self._transport.write_eof()
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        except (TimeoutError, OSError):
            pass
        finally:
            if not self._lost.is_set():  # a transport that has ended cannot always be ended again
                self._transport.abort()
                await asyncio.sleep(0)  # it closes its socket in the loop's next turn

    # -- for the event loop ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport; each `write` is to wait until its buffer is empty."""
        self._transport = transport
        # TLS counts otherwise: there a limit of 0 would stop for ever.
        secure = transport.get_extra_info("ssl_object") is not None
        self._transport.set_write_buffer_limits(high=1 if secure else 0, low=0)
        self._socket = None if secure else transport.get_extra_info("socket")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        if self._over:
            return self._staging
        return self._target if self._target is not None else self._staging[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of bytes that have come."""
        before, self.heard = self.heard, self._clock()
        self.received_bytes += nbytes
        self._count(0, nbytes)
        if self._over:
            return
        if self._target is not None:
            self._target = self._target[nbytes:]
            quick = nbytes >= MUCH_BYTES and self.heard - before < BURST_SECONDS
            self._wake_for(max(STAGING_BYTES, 2 * self._low_bytes) if quick else 1)
            if not len(self._target):
                self._target = None
                self._wake()
            return
        self._end += nbytes
        if self._wanted and self._end - self._start >= self._wanted:
            self._wake()
        if self._end == STAGING_BYTES and self._target is None:
            self._paused = True
            self._transport.pause_reading()

    def wake_for_any_byte(self) -> None:
        """Wake the loop for the bytes that are there, however few: the connection may be slow now."""
        self._wake_for(1)

    def _wake_for(self, count: int) -> None:
        """Let the system wake the loop for so many bytes at once, but for no more than are asked for.

        Bytes that come slowly are seen one by one: each is a sign of life.
        """
        left = 1 if self._target is None else len(self._target)
        count = max(1, min(count, BURST_BYTES, left))
        if count != self._low_bytes and self._socket is not None and hasattr(socket, "SO_RCVLOWAT"):
            self._low_bytes = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def eof_received(self) -> None:
        """Let the connection end: half a connection is of no use."""
        return

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell both tasks."""
        self._closed = WireClosed(_why(exc))
        self._closed.__cause__ = exc
        if self._reader is not None and not self._reader.done():
            self._reader.set_exception(self._closed)
        self._writable.set()
        self._lost.set()

    def pause_writing(self) -> None:
        """Let writers wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let writers go on."""
        self._writable.set()


def _why(error: Exception | None) -> str:
    if error is None:
        return "the other side closed the connection"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ssl.SSLError):
        return error.strerror.lower()
    return " ".join(str(error).split())[:300] or type(error).__name__


async def read_message(wire: Wire, kinds: Container[type[Message]]) -> tuple[Message, int]:
    """Return the next message, which must be of these kinds, and the size of the body that is still to be read."""
    kind, header_bytes, body_bytes = parse_prefix(await wire.read(PREFIX_BYTES))
    if kind not in kinds:  # before any of its header is kept
        raise ProtocolError(f"a {kind.__name__} is out of place here")
    header = await wire.read(header_bytes) if header_bytes else b""
    return parse_header(kind, header), body_bytes


# -- of a whole process: for paceline's own, never for that of a user's script ---------------------------------------


def tune_worker_process() -> None:
    """Let malloc keep the memory of messages for the next ones: a tenth of a worker's round of a large model."""
    _set_malloc({_M_MMAP_THRESHOLD: 2**30, _M_TRIM_THRESHOLD: 2**28})


def tune_server_process() -> None:
    """Let malloc give every large block back when it is freed, and take as many open files as the system allows.

    A server keeps what it wants to keep by itself, and a connection is a file.
    """
    _set_malloc({_M_MMAP_THRESHOLD: 2**20})
    _allow_many_files()


def _set_malloc(options: dict[int, int]) -> None:
    with suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        for option, value in options.items():
            libc.mallopt(option, value)


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 65536
    if soft < min(wanted, 65536):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, 65536), hard))
