"""What an average consists of, and how it is sent: added up on its way, or gathered where payloads cannot be added up.

    identity      one all-reduce                          [ changes | buffers | every rank's words ]
    other codecs  one gather, where all payloads have     [ words | buffers | payload ] of every rank
                  one size
                  else two: words and sizes first,        [ words, size ] of every rank, then
                  then what they are the sizes of         [ buffers | payload ] of every rank

Payloads cannot be added up on their way: every rank decodes all of them in the order of the ranks and adds them up, so
that all come to the same bits. The second gather starts when this rank looks at the flight; no other collective of the
group is under way then, so all ranks start the same ones in the same order.

A rank that has nothing to bring sends no payload, and its codec is not touched. One that cannot bring what it has, for
it is not finite, says so in its words: nobody merges anything then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.codecs import Codec, NotFiniteError
from paceline.codecs.payload import refuse_not_finite
from paceline.distributed.collectives import ALIGNED_BYTES, PendingCollective, start_gather
from paceline.distributed.payloads import Trouble
from paceline.drivers.collective.flights import Flight, MessageError
from paceline.drivers.collective.headers import NUMBERS, Said
from paceline.events import Window
from paceline.randomness import torch_generator

WORDS = NUMBERS + 1  # a rank's words, and its payload's size
WORDS_BYTES = 8 * WORDS


class Carrier(Protocol):
    """Sends one average after the other."""

    room: torch.Tensor
    sent_bytes: int
    cause: Exception | None

    def depart(self, number: int, window: Window) -> Flight:
        """Send what is in `room`."""

    def state_dict(self) -> dict[str, Any]:
        """What its codec remembers."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""

    def leave(self) -> None:
        """Let go of the group: nothing is sent any more."""


def warm_up(codec: Codec, shapes: Sequence[torch.Size], device: torch.device) -> None:
    """Let a codec's kernels be loaded or compiled now: in the first average everybody would wait for it.

    >>> from paceline.codecs import OneBit
    >>> warm_up(OneBit(), [torch.Size([3])], torch.device("cpu"))
    """
    warm = codec.fresh(shapes)
    warm.decode(warm.encode(torch.ones(sum(shape.numel() for shape in shapes), device=device)))


def trouble_of(change: torch.Tensor, buffers: torch.Tensor) -> Exception | None:
    """What keeps a rank from bringing this: a change must be finite; a buffer may be infinite (a mask), not NaN.

    >>> trouble_of(torch.ones(2), torch.tensor([float("nan")]))
    NotFiniteError('a buffer is NaN')
    """
    try:
        refuse_not_finite(change)
    except NotFiniteError as error:
        return error
    return NotFiniteError("a buffer is NaN") if bool(buffers.isnan().any()) else None


class Summed:
    """Messages that are added up on their way.

    `room` is what a message is written into, and where the sum is found.
    """

    def __init__(self, size: int, changes: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup):
        self._vector = torch.empty(size + NUMBERS * group.size(), dtype=dtype, device=device)
        self.room, self._words = self._vector[:size], self._vector[size:].view(group.size(), NUMBERS)
        self._changes, self._place = changes, group.rank()
        self._group: dist.ProcessGroup | None = group
        self.sent_bytes = 0
        self.cause: Exception | None = None

    def depart(self, number: int, window: Window) -> Flight:
        """One all-reduce."""
        if self._group is None:
            raise RuntimeError("averaging has ended: nothing is sent any more")
        self.cause = trouble_of(self.room[: self._changes], self.room[self._changes :])
        if self.cause:
            self.room.zero_()
        said = Said(number=number, window=window, trouble=Trouble.NOT_FINITE if self.cause else 0)
        self._words.zero_()
        self._words[self._place] = torch.tensor(said.numbers(), dtype=self._vector.dtype)
        self.sent_bytes += self._vector.numel() * self._vector.element_size()
        work = dist.all_reduce(self._vector, group=self._group, async_op=True)
        return _SumFlight(PendingCollective(work, self._vector.device), self.room, self._words)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: sums have no memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Let go of the group."""
        self._group = None


class _SumFlight(Flight):
    def __init__(self, pending: PendingCollective, room: torch.Tensor, words: torch.Tensor) -> None:
        super().__init__(pending)
        self._room, self._words = room, words

    def land(self) -> tuple[list[Said], torch.Tensor]:
        self._pending.check()
        return [Said.read(numbers) for numbers in self._words.tolist()], self._room


class Gathered:
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
        self.codec = codec.fresh(shapes)
        self._group: dist.ProcessGroup | None = group
        self._ranks, self._seed, self._device = dist.get_process_group_ranks(group), seed, device
        changes = sum(shape.numel() for shape in shapes)
        self.room = torch.empty(size, dtype=torch.float32, device=device)
        self.change, self.buffers = self.room[:changes], self.room[changes:]
        self.scratch = torch.empty_like(self.change)
        self.most_bytes = self.codec.most_bytes(changes)
        self.sent_bytes = 0
        self.cause: Exception | None = None

    def depart(self, number: int, window: Window) -> Flight:
        """One gather or two."""
        payload = self._payload(number, window)
        trouble = 0
        if self.cause:
            trouble = Trouble.NOT_FINITE if isinstance(self.cause, NotFiniteError) else Trouble.OTHER
        said = Said(number=number, window=window, trouble=trouble)
        words = torch.tensor([*said.numbers(), payload.numel()], device=self._device)
        body = torch.cat([_padded(self.buffers.view(torch.uint8)), payload])
        if self.codec.fixed_size:
            missing = body.new_zeros(self.most_bytes - payload.numel())
            return _GatherFlight(self, self._send(torch.cat([words.view(torch.uint8), body, missing])))
        return _SizesFlight(self, self._send(words), body)

    def _payload(self, number: int, window: Window) -> torch.Tensor:
        none = torch.empty(0, dtype=torch.uint8, device=self._device)
        self.cause = trouble_of(self.change, self.buffers)
        if self.cause or not window.brought:
            return none
        try:
            payload = self.codec.encode(self.change, torch_generator(self._seed, "average", dist.get_rank(), number))
            if payload.numel() > self.most_bytes or (self.codec.fixed_size and payload.numel() < self.most_bytes):
                raise ValueError(f"{self.codec!r} promises {self.most_bytes:,} bytes, and has made {payload.numel():,}")
        except Exception as error:  # the others wait for a payload: whatever it is, they must hear of it
            self.cause = error
            return none
        return payload

    def _send(self, ours: torch.Tensor, slot: int | None = None) -> tuple[torch.Tensor, PendingCollective]:
        self.sent_bytes += ours.numel() * ours.element_size()
        if self._group is None:
            raise RuntimeError("averaging has ended: nothing is sent any more")
        gathered, work = start_gather(ours, slot or ours.numel(), self._group)
        return gathered.view(len(self._ranks), -1), PendingCollective(work, self._device)

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """Refuse sizes that no payload has, before there is room made for them."""
        for rank, size in zip(self._ranks, sizes, strict=True):
            if not 0 <= size <= self.most_bytes:
                raise MessageError(
                    f"rank {rank} says that its payload has {size:,} bytes, and {self.codec!r} makes at most "
                    f"{self.most_bytes:,} of this model"
                )

    @property
    def buffers_bytes(self) -> int:
        """What the buffers take on their way."""
        return -(-4 * self.buffers.numel() // ALIGNED_BYTES) * ALIGNED_BYTES

    def add_up(self, rows: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """The sum of what all ranks sent, in the order of the ranks; a row is [buffers | payload]."""
        self.room.zero_()
        for row, size in zip(rows, sizes, strict=True):
            self.buffers.add_(row[: 4 * self.buffers.numel()].view(torch.float32))
            if size:
                payload = row[self.buffers_bytes :][:size]
                self.change.add_(self.codec.decode(payload, out=self.scratch))
        return self.room

    def state_dict(self) -> dict[str, Any]:
        """What the codec remembers."""
        return self.codec.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.codec.load_state_dict(state)

    def leave(self) -> None:
        """Let go of the group."""
        self._group = None


def _padded(raw: torch.Tensor) -> torch.Tensor:
    return torch.cat([raw, raw.new_zeros(-raw.numel() % ALIGNED_BYTES)])


class _GatherFlight(Flight):
    """[ words | buffers | payload ] of every rank."""

    def __init__(self, carrier: Gathered, sent: tuple[torch.Tensor, PendingCollective]) -> None:
        self._carrier, (self._rows, pending) = carrier, sent
        super().__init__(pending)

    def land(self) -> tuple[list[Said], torch.Tensor]:
        self._pending.check()
        words = [row[:WORDS_BYTES].clone().view(torch.int64).tolist() for row in self._rows]
        said = [Said.read(numbers[:NUMBERS]) for numbers in words]
        if any(each.trouble for each in said):
            return said, self._carrier.room
        sizes = [numbers[NUMBERS] for numbers in words]
        self._carrier.check_sizes(sizes)
        return said, self._carrier.add_up([row[WORDS_BYTES:] for row in self._rows], sizes)


class _SizesFlight(Flight):
    """[ words, size ] of every rank, and when they are known [ buffers | payload ]."""

    def __init__(self, carrier: Gathered, sent: tuple[torch.Tensor, PendingCollective], body: torch.Tensor) -> None:
        self._carrier, (self._words, pending), self._body = carrier, sent, body
        super().__init__(pending)
        self._rows: torch.Tensor | None = None
        self._said: list[Said] = []
        self._sizes: list[int] = []

    def poll(self) -> bool:
        if not self._pending.done() or self._rows is not None or self._said:
            return self._pending.done()
        self._pending.check()
        words = self._words.tolist()
        self._said, self._sizes = [Said.read(each[:NUMBERS]) for each in words], [each[NUMBERS] for each in words]
        self._carrier.check_sizes(self._sizes)
        longest = self._carrier.buffers_bytes + max(self._sizes)
        numbers = {each.number for each in self._said}
        if any(each.trouble for each in self._said) or len(numbers) > 1 or not longest:
            return True  # all ranks read the same words: nobody sends
        self._rows, self._pending = self._carrier._send(self._body, longest)
        return False

    def land(self) -> tuple[list[Said], torch.Tensor]:
        self._pending.check()
        if self._rows is None:
            return self._said, self._carrier.room.zero_()
        return self._said, self._carrier.add_up(list(self._rows), self._sizes)
