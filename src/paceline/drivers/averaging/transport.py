"""What an average consists of, and how it is sent: added up on its way as it is, or exchanged by a plan of its codec.

    identity      one all-reduce                        [ changes | buffers | every rank's header ]
    other codecs  one gather, and at the same time      [ header | buffers ] of every rank
                  the exchange of the encoded changes   all-reduce, gather or two-step (`paceline.exchanges`)

An exchange may ask more than once: its next request starts when this rank polls the pending average. No other
collective of the group is under way then, so all ranks start the same ones in the same order, and all come to the same
bits.

A rank that has nothing to bring says so, and its codec is not touched. One that cannot bring what it has, for it is not
finite, says so in its header: nobody merges anything then.

Headers survive being added up: each rank writes into a place of its own, and zeros into the others'. Their numbers
travel as floats, which hold whole numbers up to 2**24: larger ones are cut into digits of 20 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from paceline.codecs import NotFiniteError
from paceline.codecs.naming import unsendable
from paceline.codecs.payload import refuse_not_finite
from paceline.codecs.requests import AllGather, AllReduce, Request
from paceline.distributed import name_ranks
from paceline.distributed.collectives import PendingCollective
from paceline.drivers.ranks.exchanging import given_bytes, start
from paceline.errors import PacelineError
from paceline.events import Standing, Window
from paceline.exchanges import ExchangeProtocol, PayloadSizeError, Trouble, TroubleError, VectorExchange
from paceline.exchanges.plans import ALL_REDUCE
from paceline.randomness import torch_generator

DIGIT = 2**20
HEADER_NUMBERS = 7


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


class PendingAverage(ABC):
    """One average under way: begun at a step boundary, polled in passing, finished when it is done."""

    @property
    @abstractmethod
    def collective(self) -> PendingCollective:
        """The collective that is waited for, or was the last."""

    @abstractmethod
    def poll(self) -> bool:
        """Whether it can be finished; may start the next collective. RuntimeError where a connection is lost."""

    @abstractmethod
    def finish(self) -> Finished:
        """Return every rank's header, and the sum of what they brought (of no use if one of them is in trouble)."""


class Transport(ABC):
    """Sends one average after the other: what is in `message`, where the sum is found later.

    `failure` is why this rank could not bring what it had to the last average.
    """

    unsendable = "not finite"  # a vector that no rank can bring

    def __init__(self, message: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.message, self.sent_bytes = message, 0
        self._group: dist.ProcessGroup | None = group
        self.failure: Exception | None = None

    @abstractmethod
    def send(self, number: int, window: Window) -> PendingAverage:
        """Start average `number` with the message of this window."""

    @property
    @abstractmethod
    def plan(self) -> str:
        """How ranks come to the sum."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what the codec remembers, and what this rank holds back of sums."""

    @abstractmethod
    def load_state_dict(self, plan: str, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`, of a transport by this or another plan."""

    def close(self) -> None:
        """Let go of the group: nothing is sent any more."""
        self._group = None

    def start(self, request: Request) -> tuple[torch.Tensor, PendingCollective]:
        """Start what is asked for, and count its bytes; return where the answer will be."""
        if self._group is None:
            raise AveragingError("averaging has ended: nothing is sent any more")
        self.sent_bytes += given_bytes(request, self._group)
        answer, work = start(request, self._group)
        return answer, PendingCollective(work, request.tensor.device)


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
        _, collective = self.start(AllReduce(self._vector))
        return _PendingSum(collective, self._read)

    def _read(self) -> Finished:
        return [AverageHeader.from_numbers(numbers) for numbers in self._headers.tolist()], self.message

    @property
    def plan(self) -> str:
        return ALL_REDUCE

    def state_dict(self) -> dict[str, Any]:
        return {}  # sums have no memory

    def load_state_dict(self, plan: str, state: dict[str, Any]) -> None:
        pass


class _PendingSum(PendingAverage):
    """One all-reduce; `read` reads what it has brought."""

    def __init__(self, collective: PendingCollective, read: Callable[[], Finished]) -> None:
        self._collective, self._read = collective, read

    @property
    def collective(self) -> PendingCollective:
        return self._collective

    def poll(self) -> bool:
        return self._collective.done()

    def finish(self) -> Finished:
        self._collective.check()
        return self._read()


# -- exchanged by a plan -----------------------------------------------------------------------------------------------


class ExchangedTransport(Transport):
    """Messages whose changes travel encoded; buffers as they are."""

    def __init__(
        self, exchange: VectorExchange, size: int, device: torch.device, group: dist.ProcessGroup, *, seed: int
    ) -> None:
        super().__init__(torch.empty(size, dtype=torch.float32, device=device), group)
        self.exchange, self._seed, self.unsendable = exchange, seed, unsendable(exchange.codec)
        self.ranks = dist.get_process_group_ranks(group)
        self._change, self._buffers = self.message[: exchange.elements], self.message[exchange.elements :]

    def send(self, number: int, window: Window) -> PendingAverage:
        self.failure = find_not_finite(self._change, self._buffers)
        header = AverageHeader(number=number, window=window, trouble=Trouble.NOT_FINITE if self.failure else 0)
        numbers = torch.tensor(header.to_numbers(), device=self.message.device)
        words = torch.cat([numbers.view(torch.uint8), self._buffers.view(torch.uint8)])
        brings = window.brought and not self.failure
        generator = torch_generator(self._seed, "average", dist.get_rank(), number)
        protocol = self.exchange.run(self._change if brings else None, generator, out=self._change)
        first = next(protocol)  # encodes; the change stays in the message until the sum takes its place
        return _PendingExchange(self, protocol, self.start(AllGather(words)), self.start(first))

    def read_words(self, rows: torch.Tensor) -> list[AverageHeader]:
        """Return every rank's header; the message has the sum of their buffers then, in the order of the ranks."""
        header_bytes = 8 * HEADER_NUMBERS
        self._buffers.zero_()
        for row in rows:
            self._buffers.add_(row[header_bytes:].view(torch.float32))
        numbers = rows[:, :header_bytes].contiguous().view(torch.int64).tolist()
        return [AverageHeader.from_numbers(each) for each in numbers]

    @property
    def plan(self) -> str:
        return self.exchange.plan

    def state_dict(self) -> dict[str, Any]:
        return self.exchange.state_dict()

    def load_state_dict(self, plan: str, state: dict[str, Any]) -> None:
        self.exchange.load_state_of(plan, state)


class _PendingExchange(PendingAverage):
    """[ header | buffers ] of every rank, and the exchange of their changes, request by request."""

    def __init__(
        self,
        transport: ExchangedTransport,
        protocol: ExchangeProtocol,
        words: tuple[torch.Tensor, PendingCollective],
        first: tuple[torch.Tensor, PendingCollective],
    ) -> None:
        self._transport, self._protocol, self._ended = transport, protocol, False
        (self._words, before), (self._answer, collective) = words, first
        self._collectives = [before, collective]
        self._headers: list[AverageHeader] = []

    @property
    def collective(self) -> PendingCollective:
        return next((each for each in self._collectives if not each.done()), self._collectives[-1])

    def poll(self) -> bool:
        while not self._ended and self.collective.done():
            for each in self._collectives:
                each.check()
            self._advance()
        return self._ended

    def finish(self) -> Finished:
        return self._headers, self._transport.message

    def _advance(self) -> None:
        """Take the protocol to its next request, or to its end."""
        if not self._headers:
            self._headers = self._transport.read_words(self._words)
            averages = {header.number for header in self._headers}
            if len(averages) > 1 or any(header.trouble for header in self._headers):
                self._ended = True  # all ranks read the same headers: nobody goes on
                return
        try:
            request = self._protocol.send(self._answer)
        except StopIteration:
            self._ended = True
        except TroubleError as error:
            self._ended = True
            self._headers = self._troubled(error)
        except PayloadSizeError as error:
            raise AveragingError(
                f"rank {self._transport.ranks[error.place]} says that its payload has {error.size:,} bytes, and "
                f"{self._transport.exchange.codec!r} makes at most {error.most:,} of this model"
            ) from error
        else:
            self._answer, collective = self._transport.start(request)
            self._collectives = [collective]

    def _troubled(self, error: TroubleError) -> list[AverageHeader]:
        """Return the headers, with the troubles that the exchange has found."""
        self._transport.failure = error.cause
        if error.summed and Trouble.NOT_FINITE in error.troubles.values():
            raise NotFiniteError(
                "the sum of what all ranks brought is beyond float32; nothing of it was merged. "
                "Lower the learning rate or clip"
            ) from error
        if error.summed:
            who = name_ranks(self._transport.ranks[place] for place in error.troubles)
            raise AveragingError(
                f"{who}: what all ranks brought could not be added up; the reason is with {who}"
            ) from error.cause
        return [replace(header, trouble=error.troubles.get(place, 0)) for place, header in enumerate(self._headers)]
