"""A slow link to a server on this machine, without root: a TCP proxy that lets so many bytes a second through each way.

Its sockets hold little, as a slow link does, so that whoever sends too much waits in its own kernel's queue. All
connections share the link; a rate can be changed while bytes are on their way.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

HELD_BYTES = 8192
LONGEST_SLICE_SECONDS = 0.02


class SlowLink:
    """Listens at `address`, and passes what comes on to a server and back, both ways at `bytes_per_second`.

    >>> with SlowLink("127.0.0.1:9", bytes_per_second=1000.0) as link:
    ...     link.address.startswith("127.0.0.1:")
    True
    """

    def __init__(self, server: str, *, bytes_per_second: float) -> None:
        host, _, port = server.rpartition(":")
        self._server = host, int(port)
        self.bytes_per_second = bytes_per_second
        self.connections = 0
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        self._turns = threading.Lock(), threading.Lock()  # one for each way
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD_BYTES)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._begin(self._accept)

    def __enter__(self) -> SlowLink:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut the link, and every connection with it."""
        self._closed.set()
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _begin(self, work: object, *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with suppress(OSError):
            while not self._closed.is_set():
                near, _ = self._listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, HELD_BYTES)
                self._sockets += [near, far]
                self.connections += 1
                try:
                    far.connect(self._server)
                except OSError:
                    near.close()
                    continue
                for each in (near, far):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HELD_BYTES)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._begin(self._pass, near, far, self._turns[0])
                self._begin(self._pass, far, near, self._turns[1])

    def _pass(self, source: socket.socket, target: socket.socket, turn: threading.Lock) -> None:
        with suppress(OSError):
            while True:
                most = min(HELD_BYTES, max(1, int(self.bytes_per_second * LONGEST_SLICE_SECONDS)))
                data = source.recv(most)
                if not data:
                    break
                with turn:
                    time.sleep(len(data) / self.bytes_per_second)
                target.sendall(data)
        for each in (source, target):  # half a connection is of no use to either side
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
