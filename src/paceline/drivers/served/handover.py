"""Vectors handed over in shared memory, between a server and the workers on its own machine.

    model slots      2, for all such workers; only the server writes them
    gradient slots   2 for each such worker, which writes them: a late gradient and a fresh one

A message then says in which slot its body lies, and has none itself; `Taken` gives the slot back. Shared memory is an
option of a message: all else about a round is the same, and every body for which no slot is free, or whose worker is on
another machine, goes over the connection as ever.

A worker proves to be on this machine by asking for the slots at a socket that only this machine can reach (an abstract
Unix socket), as the same user, with a token that was in its Welcome: so TLS has let it in before. The memory has no
name in any file system. It is sealed: nobody can make it shorter under a reader, and workers cannot make the model's
memory writable.

A worker can change its gradient while the server reads it. That does no more harm than a bad gradient: what is read
from a slot is copied before anything depends on it, or is only ever added up, and then the sum is looked at.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
import struct
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from paceline.drivers.served.messages import Gradient, Model, ProtocolError, Sizes

SLOTS = 2
TOKEN_BYTES = 16
ANSWER_SECONDS = 5.0
MOST_ASKING = 16  # at once
BACKLOG = 1024  # of those who wait for their turn

_SEAL, _SHRINK, _GROW, _FUTURE_WRITE = 0x1, 0x2, 0x4, 0x10
_REMOVE = 9  # MADV_REMOVE: the pages are given back
_CREDENTIALS = struct.Struct("3i")


class SharedMemory:
    """Memory without a name that can be handed to another process; its size is sealed.

    `read_only`: others can map it to read, and nobody but this process can write it.

    >>> memory = SharedMemory(100, read_only=True)
    >>> memory.bytes.numel(), mapped(memory.file, 100, writable=False).numel()
    (100, 100)
    """

    def __init__(self, size: int, *, read_only: bool) -> None:
        self.file = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.file, size)
            self._map = mmap.mmap(self.file, size)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEAL | _SHRINK | _GROW | (_FUTURE_WRITE if read_only else 0))
        except BaseException:
            os.close(self.file)
            self.file = -1
            raise
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def give_back(self) -> None:
        """Give the pages back to the system; the memory is zeros then."""
        with suppress(OSError, ValueError):
            self._map.madvise(_REMOVE)

    def __del__(self) -> None:
        if getattr(self, "file", -1) >= 0:
            os.close(self.file)


def mapped(file: int, size: int, *, writable: bool) -> torch.Tensor:
    """Return the memory behind a file that another process handed over; OSError or ValueError if it is not safe to map.

    Memory that could be made shorter would end this process when it is read.
    """
    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SHRINK or os.fstat(file).st_size != size:
        raise ValueError("the memory that was handed over is not sealed, or of another size")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    found = mmap.mmap(file, size, prot=protection)
    if writable:
        return torch.frombuffer(found, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors; nobody here writes to it
        return torch.frombuffer(found, dtype=torch.uint8)


class Slot:
    """The body of one message in shared memory.

    >>> slot = Slot(torch.zeros(12, dtype=torch.uint8), Sizes(most_payload_bytes=8, buffer_bytes=4))
    >>> slot.fill(torch.ones(8, dtype=torch.uint8), torch.ones(1))
    >>> slot.begin(Model(version=0, since=None, more=0, payload_bytes=8, buffer_bytes=4, slot=0))
    >>> slot.payload.sum().item(), slot.buffers
    (8, tensor([1.]))
    """

    def __init__(self, memory: torch.Tensor, sizes: Sizes) -> None:
        self.memory, self._sizes = memory, sizes
        self._payload_bytes = 0

    def fill(self, payload: torch.Tensor, buffers: torch.Tensor) -> None:
        """Write a body; a payload that was made in the slot itself is there already."""
        place = self.memory[: payload.numel()]
        if place.data_ptr() != payload.data_ptr():
            place.copy_(payload)
        end = payload.numel() + 4 * buffers.numel()
        if buffers.numel():
            self.memory[payload.numel() : end].copy_(buffers.contiguous().view(torch.uint8))

    def begin(self, message: Model | Gradient) -> None:
        """Read a message's body; ProtocolError if its sizes are not the model's."""
        kind, most = type(message).__name__, self._sizes.most_payload_bytes
        if not 1 <= message.payload_bytes <= most or message.buffer_bytes != self._sizes.buffer_bytes:
            raise ProtocolError(
                f"the payload of a {kind} must be between 1 and {most} bytes and its buffers "
                f"{self._sizes.buffer_bytes} (payload_bytes={message.payload_bytes}, "
                f"buffer_bytes={message.buffer_bytes})"
            )
        self._payload_bytes = message.payload_bytes

    @property
    def payload(self) -> torch.Tensor:
        """The encoded vector, in shared memory."""
        return self.memory[: self._payload_bytes]

    @property
    def buffers(self) -> torch.Tensor:
        """A copy of the buffers."""
        end = self._payload_bytes + self._sizes.buffer_bytes
        return self.memory[self._payload_bytes : end].clone().view(torch.float32)


# -- the server's side -------------------------------------------------------------------------------------------------


class GradientSlots:
    """The gradient slots of one worker; which of them the server holds."""

    def __init__(self, sizes: Sizes) -> None:
        self._memories = [SharedMemory(sizes.most_bytes, read_only=False) for _ in range(SLOTS)]
        self._slots = [Slot(memory.bytes, sizes) for memory in self._memories]
        self._held: set[int] = set()

    @property
    def files(self) -> list[int]:
        """The files that the worker maps."""
        return [memory.file for memory in self._memories]

    def take(self, message: Gradient, number: int) -> Slot:
        """Return the slot that a gradient lies in, which is held from now on."""
        if number >= SLOTS or number in self._held:
            raise ProtocolError(
                f"slot {number} cannot hold a gradient: there are {SLOTS}, and those in use do not count"
            )
        self._slots[number].begin(message)
        self._held.add(number)
        return self._slots[number]

    def release(self, number: int) -> None:
        """Let the worker have a slot again. The second one is seldom needed: its memory goes back to the system."""
        self._held.discard(number)
        if number:
            self._memories[number].give_back()


class HandoverServer:
    """Gives the slots to workers that prove to be on this machine; `ended` is called with each task that has ended."""

    def __init__(self, gradient_sizes: Sizes, model_bytes: int, ended: Callable[[asyncio.Task[None]], None]) -> None:
        self._gradient_sizes = gradient_sizes
        self.models = [SharedMemory(model_bytes, read_only=True) for _ in range(SLOTS)]
        self._name = f"paceline-{secrets.token_hex(16)}"
        self._waiting: dict[bytes, asyncio.Future[GradientSlots]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listener.bind(f"\0{self._name}")
            self._listener.listen(BACKLOG)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise
        self._asking: set[asyncio.Task[None]] = set()
        self._ended = ended
        self._accepting = asyncio.create_task(self._accept())
        self._accepting.add_done_callback(self._ended)

    def invite(self) -> tuple[str, asyncio.Future[GradientSlots]]:
        """Return what a Welcome says, and the slots of the worker once it has asked for them."""
        token = secrets.token_hex(TOKEN_BYTES)
        asked: asyncio.Future[GradientSlots] = asyncio.get_running_loop().create_future()
        self._waiting[token.encode()] = asked
        asked.add_done_callback(lambda _: self._waiting.pop(token.encode(), None))
        return f"{self._name} {token}", asked

    def close(self) -> None:
        """Stop listening; slots that were given stay."""
        self._accepting.get_loop().remove_reader(self._listener)  # else who has just come is given to a cancelled task
        for task in (self._accepting, *self._asking):
            task.cancel()
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(0)  # they may come quicker than they are accepted: the others get their turn
            if len(self._asking) >= MOST_ASKING:
                connection.close()
                continue
            task = asyncio.create_task(self._answer(connection))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
            task.add_done_callback(self._ended)

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, suppress(OSError, TimeoutError):
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
                return
            connection.setblocking(False)
            token = b""
            async with asyncio.timeout(ANSWER_SECONDS):
                while len(token) < 2 * TOKEN_BYTES:
                    more = await loop.sock_recv(connection, 2 * TOKEN_BYTES - len(token))
                    if not more:
                        return
                    token += more
            asked = self._waiting.get(token)
            if asked is None or asked.done():
                return
            slots = GradientSlots(self._gradient_sizes)
            socket.send_fds(connection, [b"slots"], [memory.file for memory in self.models] + slots.files)
            asked.set_result(slots)


# -- the worker's side -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WorkerSlots:
    """The slots as a worker has them."""

    models: Sequence[Slot]
    gradients: Sequence[Slot]
    free: set[int]


def fetch_slots(invitation: str, *, models: Sizes, gradients: Sizes) -> WorkerSlots | None:
    """Ask the server for the slots, if it is on this machine; None if it is not, or if there are none.

    >>> nothing = Sizes(most_payload_bytes=1, buffer_bytes=0)
    >>> fetch_slots("", models=nothing, gradients=nothing) is None
    True
    """
    name, _, token = invitation.partition(" ")
    if not name.startswith("paceline-") or not hasattr(os, "memfd_create"):
        return None
    files: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(f"\0{name}")
            connection.sendall(token.encode())
            _, files, _, _ = socket.recv_fds(connection, 16, 2 * SLOTS)
        if len(files) != 2 * SLOTS:
            return None
        return WorkerSlots(
            [Slot(mapped(file, models.most_bytes, writable=False), models) for file in files[:SLOTS]],
            [Slot(mapped(file, gradients.most_bytes, writable=True), gradients) for file in files[SLOTS:]],
            set(range(SLOTS)),
        )
    except (OSError, ValueError):  # another machine, another user, another model: the connection does as well
        return None
    finally:
        for file in files:
            os.close(file)
