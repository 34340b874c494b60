"""What an average consists of, and how it is sent: added up on its way, or gathered where payloads cannot be added up.

    identity      one all-reduce                          [ changes | buffers | every rank's header ]
    other codecs  one gather, where all payloads have     [ header | buffers | payload ] of every rank
                  one size
                  else two: headers and sizes first,      [ header, size ] of every rank, then
                  then what they are the sizes of         [ buffers | payload ] of every rank

Payloads cannot be added up on their way: every rank decodes all of them in the order of the ranks and adds them up, so
that all come to the same bits. The second gather starts when this rank polls the pending average; no other collective
of the group is under way then, so all ranks start the same ones in the same order.

A rank that has nothing to bring sends no payload, and its codec is not touched. One that cannot bring what it has, for
it is not finite, says so in its header: nobody merges anything then.

Headers survive being added up: each rank writes into a place of its own, and zeros into the others'. Their numbers
travel as floats, which hold whole numbers up to 2**24: larger ones are cut into digits of 20 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.codecs import Codec, NotFiniteError
from paceline.codecs.payload import refuse_not_finite
from paceline.distributed.collectives import ALIGNED_BYTES, PendingCollective, start_gather
from paceline.errors import PacelineError
from paceline.events import Standing, Window
from paceline.exchanges import Trouble
from paceline.randomness import torch_generator

DIGIT = 2**20
HEADER_NUMBERS = 7
SIZED_HEADER_BYTES = 8 * (HEADER_NUMBERS + 1)  # a rank's header, and its payload's size


class AveragingError(PacelineError, RuntimeError):
    """An averaging cannot go on: it has ended, or the ranks do not fit together. Nothing is averaged any more.

    >>> raise AveragingError("rank 1 says that its payload has -4 bytes")
    Traceback (most recent call last):
    paceline.drivers.averaging.transport.AveragingError: rank 1 says that its payload has -4 bytes
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageHeader:
    """What one rank says of itself in one average. `trouble` is why it brings nothing, 0 if there is none.

    >>> header = AverageHeader(number=3, window=Window(steps=2**21 + 5, merged_after=1))
    >>> header.to_numbers()
    [3, 5, 2, 1, 0, 0, 0]
    >>> AverageHeader.from_numbers(header.to_numbers()) == header
    True
    """

    number: int
    window: Window
    trouble: int = 0

    def to_numbers(self) -> list[int]:
        """Return whole numbers below 2**20; the average's own number is taken modulo that."""
        steps, merged_after = self.window.steps, self.window.merged_after
        digits = [self.number % DIGIT, steps % DIGIT, steps // DIGIT, merged_after % DIGIT, merged_after // DIGIT]
        return [*digits, int(self.window.standing), self.trouble]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> AverageHeader:
        number, low, high, merged_low, merged_high, standing, trouble = (round(each) for each in numbers)
        window = Window(
            steps=low + DIGIT * high, merged_after=merged_low + DIGIT * merged_high, standing=Standing(standing)
        )
        return cls(number=number, window=window, trouble=trouble)


Finished = tuple[list[AverageHeader], torch.Tensor]  # every rank's header, and the sum of what they brought


class PendingAverage:
    """One average under way: begun at a step boundary, polled in passing, finished when it is done.

    `collective` is the one that is under way, or was the last; `read` reads what it has brought.
    """

    def __init__(self, collective: PendingCollective, read: Callable[[], Finished]) -> None:
        self.collective, self._read = collective, read

    def poll(self) -> bool:
        """Whether it can be finished; may start the next collective. RuntimeError where a connection is lost."""
        return self.collective.done()

    def finish(self) -> Finished:
        """Return every rank's header, and the sum of what they brought (of no use if one of them is in trouble)."""
        self.collective.check()
        return self._read()


class Transport(ABC):
    """Sends one average after the other: what is in `message`, where the sum is found later.

    `failure` is why this rank could not bring what it had to the last average.
    """

    def __init__(self, message: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.message, self.sent_bytes = message, 0
        self._group: dist.ProcessGroup | None = group
        self.failure: Exception | None = None

    @abstractmethod
    def send(self, number: int, window: Window) -> PendingAverage:
        """Start average `number` with the message of this window."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what the codec remembers."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""

    def close(self) -> None:
        """Let go of the group: nothing is sent any more."""
        self._group = None

    def _group_for(self, ours: torch.Tensor) -> dist.ProcessGroup:
        """Return the group, and count what is about to be sent through it."""
        if self._group is None:
            raise AveragingError("averaging has ended: nothing is sent any more")
        self.sent_bytes += ours.numel() * ours.element_size()
        return self._group


def find_not_finite(change: torch.Tensor, buffers: torch.Tensor) -> Exception | None:
    """Return why this cannot be averaged: a change must be finite; a buffer may be infinite (a mask), not NaN.

    >>> find_not_finite(torch.ones(2), torch.tensor([float("nan")]))
    NotFiniteError('a buffer is NaN')
    """
    try:
        refuse_not_finite(change)
    except NotFiniteError as error:
        return error
    return NotFiniteError("a buffer is NaN") if bool(buffers.isnan().any()) else None


# -- added up on the way -----------------------------------------------------------------------------------------------


class SummedTransport(Transport):
    """Messages that are added up on their way, by one all-reduce; the first `changes` elements are changes."""

    def __init__(self, size: int, changes: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup):
        self._vector = torch.empty(size + HEADER_NUMBERS * group.size(), dtype=dtype, device=device)
        super().__init__(self._vector[:size], group)
        self._headers = self._vector[size:].view(group.size(), HEADER_NUMBERS)
        self._changes, self._place = changes, group.rank()

    def send(self, number: int, window: Window) -> PendingAverage:
        self.failure = find_not_finite(self.message[: self._changes], self.message[self._changes :])
        if self.failure:
            self.message.zero_()
        header = AverageHeader(number=number, window=window, trouble=Trouble.NOT_FINITE if self.failure else 0)
        self._headers.zero_()
        self._headers[self._place] = torch.tensor(header.to_numbers(), dtype=self._vector.dtype)
        work = dist.all_reduce(self._vector, group=self._group_for(self._vector), async_op=True)
        return PendingAverage(PendingCollective(work, self._vector.device), self._read)

    def _read(self) -> Finished:
        return [AverageHeader.from_numbers(numbers) for numbers in self._headers.tolist()], self.message

    def state_dict(self) -> dict[str, Any]:
        return {}  # sums have no memory

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


# -- gathered ----------------------------------------------------------------------------------------------------------


class GatheredTransport(Transport):
    """Messages whose changes travel encoded; buffers as they are."""

    def __init__(
        self,
        codec: Codec,
        shapes: Sequence[torch.Size],
        size: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        seed: int,
    ) -> None:
        super().__init__(torch.empty(size, dtype=torch.float32, device=device), group)
        self.codec, self._seed, self._device = codec.fresh(shapes), seed, device
        self._ranks = dist.get_process_group_ranks(group)
        changes = sum(shape.numel() for shape in shapes)
        self._change, self._buffers = self.message[:changes], self.message[changes:]
        self._decoded = torch.empty_like(self._change)
        self._most_bytes = self.codec.most_bytes(changes)
        self.buffers_bytes = -(-4 * self._buffers.numel() // ALIGNED_BYTES) * ALIGNED_BYTES  # on their way

    def send(self, number: int, window: Window) -> PendingAverage:
        payload = self._encoded(number, window)
        trouble = 0
        if self.failure:
            trouble = Trouble.NOT_FINITE if isinstance(self.failure, NotFiniteError) else Trouble.OTHER
        header = AverageHeader(number=number, window=window, trouble=trouble)
        sized_header = torch.tensor([*header.to_numbers(), payload.numel()], device=self._device)
        buffers = self._buffers.view(torch.uint8)
        body = torch.cat([buffers, buffers.new_zeros(self.buffers_bytes - buffers.numel()), payload])
        if self.codec.fixed_size:
            missing = body.new_zeros(self._most_bytes - payload.numel())
            rows, pending = self._send(torch.cat([sized_header.view(torch.uint8), body, missing]))
            return PendingAverage(pending, partial(self._read, rows))
        return _PendingSizes(self, *self._send(sized_header), body)

    def _encoded(self, number: int, window: Window) -> torch.Tensor:
        none = torch.empty(0, dtype=torch.uint8, device=self._device)
        self.failure = find_not_finite(self._change, self._buffers)
        if self.failure or not window.brought:
            return none
        try:
            payload = self.codec.encode(self._change, torch_generator(self._seed, "average", dist.get_rank(), number))
            most = self._most_bytes
            if payload.numel() > most or (self.codec.fixed_size and payload.numel() < most):
                raise ValueError(f"{self.codec!r} promises {most:,} bytes, and has made {payload.numel():,}")
        except Exception as error:  # the others wait for a payload: whatever it is, they must hear of it
            self.failure = error
            return none
        return payload

    def _send(self, ours: torch.Tensor, slot: int | None = None) -> tuple[torch.Tensor, PendingCollective]:
        gathered, work = start_gather(ours, slot or ours.numel(), self._group_for(ours))
        return gathered.view(len(self._ranks), -1), PendingCollective(work, self._device)

    def _read(self, rows: torch.Tensor) -> Finished:
        """Read [ header, size | buffers | payload ] of every rank."""
        numbers = [row[:SIZED_HEADER_BYTES].clone().view(torch.int64).tolist() for row in rows]
        headers = [AverageHeader.from_numbers(each[:HEADER_NUMBERS]) for each in numbers]
        if any(header.trouble for header in headers):
            return headers, self.message
        sizes = [each[HEADER_NUMBERS] for each in numbers]
        self.check_sizes(sizes)
        return headers, self.add_up([row[SIZED_HEADER_BYTES:] for row in rows], sizes)

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """Refuse sizes that no payload has, before memory is taken for them."""
        for rank, size in zip(self._ranks, sizes, strict=True):
            if not 0 <= size <= self._most_bytes:
                raise AveragingError(
                    f"rank {rank} says that its payload has {size:,} bytes, and {self.codec!r} makes at most "
                    f"{self._most_bytes:,} of this model"
                )

    def add_up(self, rows: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """Return the sum of what all ranks sent, in the order of the ranks; a row is [buffers | payload]."""
        self.message.zero_()
        for row, size in zip(rows, sizes, strict=True):
            self._buffers.add_(row[: 4 * self._buffers.numel()].view(torch.float32))
            if size:
                payload = row[self.buffers_bytes :][:size]
                self._change.add_(self.codec.decode(payload, out=self._decoded))
        return self.message

    def state_dict(self) -> dict[str, Any]:
        return self.codec.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.codec.load_state_dict(state)


class _PendingSizes(PendingAverage):
    """[ header, size ] of every rank, and when they are known [ buffers | payload ]."""

    def __init__(
        self, transport: GatheredTransport, numbers: torch.Tensor, collective: PendingCollective, body: torch.Tensor
    ) -> None:
        super().__init__(collective, self._add_up)
        self._transport, self._numbers, self._body = transport, numbers, body
        self._rows: torch.Tensor | None = None
        self._headers: list[AverageHeader] = []
        self._sizes: list[int] = []

    def poll(self) -> bool:
        if not self.collective.done() or self._headers:
            return self.collective.done()
        self.collective.check()
        numbers = self._numbers.tolist()
        self._headers = [AverageHeader.from_numbers(each[:HEADER_NUMBERS]) for each in numbers]
        self._sizes = [each[HEADER_NUMBERS] for each in numbers]
        self._transport.check_sizes(self._sizes)
        longest = self._transport.buffers_bytes + max(self._sizes)
        averages = {header.number for header in self._headers}
        if any(header.trouble for header in self._headers) or len(averages) > 1 or not longest:
            return True  # all ranks read the same headers: nobody sends
        self._rows, self.collective = self._transport._send(self._body, longest)
        return False

    def _add_up(self) -> Finished:
        if self._rows is None:
            return self._headers, self._transport.message.zero_()
        return self._headers, self._transport.add_up(list(self._rows), self._sizes)
