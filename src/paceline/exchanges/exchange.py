"""One vector's exchange among all ranks, again and again: a protocol for each plan, and what a rank remembers.

What is conserved where there is error feedback, in units of the sum, within float32 rounding:

    sum g + sum r + sum R   =   result + sum r' + sum R'        r: what each rank holds back of its own vector
                                                                R: what the owner of a shard holds back of its sum

In the two-step plan a codec sees one shard at a time: the largest elements of top-k, the norms and the means of one-bit
are those of a shard. Shards are cut at multiples of 512 elements, so buckets of qsgd are the same in all plans.

A rank that has nothing to bring takes part all the same, and its codec is not touched. One that cannot bring what it
has (it is not finite) says so in place of a payload: all ranks raise a `TroubleError` that names it, and nobody uses
anything of this exchange. Then `take_back` keeps what was to be sent, for the next time.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar

import torch

from paceline.codecs import Codec, ErrorFeedback, NotFiniteError
from paceline.codecs.naming import inner_of
from paceline.codecs.payload import PayloadError, flat_vector, refuse_not_finite
from paceline.codecs.requests import AllGather, AllToAll, Request
from paceline.errors import PacelineError
from paceline.exchanges.plans import (
    ALL_REDUCE,
    AUTO,
    GATHER,
    TWO_STEP,
    check_plan,
    choose_plan,
    exchange_seconds,
    shard_edges,
)

ExchangeProtocol = Generator[Request, torch.Tensor, torch.Tensor]

ALIGNED_BYTES = 16  # where a payload begins, so that its words can be read in place
RESIDUAL, OWNED = "residual", "owned"  # in a memory: r, and R
_PAYLOAD_BEGINS = ord("p")
_NOTHING = 0


class Trouble(IntEnum):
    """Why a rank brings no payload, as a number in its place.

    >>> Trouble(1).name
    'NOT_FINITE'
    """

    NOT_FINITE = 1
    OTHER = 2


class TroubleError(PacelineError, RuntimeError):
    """Some ranks could not bring what they had, and all know it: `troubles` by place in the group.

    `cause` is why, where it is this rank's own; `summed` says that it is a sum that is in trouble, and not a vector.

    >>> raise TroubleError({1: Trouble.NOT_FINITE}, None)
    Traceback (most recent call last):
    paceline.exchanges.exchange.TroubleError: NOT_FINITE at place 1
    """

    def __init__(self, troubles: Mapping[int, Trouble], cause: Exception | None, *, summed: bool = False) -> None:
        super().__init__(", ".join(f"{trouble.name} at place {place}" for place, trouble in troubles.items()))
        self.troubles, self.cause, self.summed = dict(troubles), cause, summed


class PayloadSizeError(PayloadError):
    """The rank at a place says a size that no payload of this codec has; no memory was taken for it.

    >>> from paceline.codecs import make_codec
    >>> raise PayloadSizeError(1, 2**40, make_codec("one-bit"), 46)
    Traceback (most recent call last):
    paceline.exchanges.exchange.PayloadSizeError: place 1 says 1,099,511,627,776 bytes, and OneBit() makes at most 46
    """

    def __init__(self, place: int, size: int, codec: Codec, most: int) -> None:
        super().__init__(f"place {place} says {size:,} bytes, and {codec!r} makes at most {most:,}")
        self.place, self.size, self.most = place, size, most


class VectorExchange(ABC):
    """One vector, of tensors of these shapes, exchanged among `world` ranks, by the rank at `place`.

    `made_bytes` is the size of the payloads that this rank has made in the last run, each counted once; `seconds` is
    how long a run is expected to take, on the link that the choice of a plan assumes.
    """

    plan: ClassVar[str]

    def __init__(self, codec: Codec, shapes: Sequence[torch.Size], place: int, world: int) -> None:
        self.codec, self.place, self.world = codec.fresh(shapes), place, world
        self._shapes = list(shapes)
        self.elements = sum(math.prod(shape) for shape in shapes)
        self.seconds = exchange_seconds(self.plan, self.codec, self.elements, world)
        self.sized = bool(getattr(self.codec, "fixed_size", False))
        self.made_bytes = 0
        self._begun = False  # the codec's memory has moved on in the last run
        self._scratch: torch.Tensor | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.codec!r}, {self.elements:,} elements, place {self.place} of {self.world})"

    @abstractmethod
    def run(
        self, vector: torch.Tensor | None, generator: torch.Generator | None = None, out: torch.Tensor | None = None
    ) -> ExchangeProtocol:
        """Exchange a vector, or None where this rank has nothing to bring; return the sum, in `out` if that is given.

        The vector must stay as it is until the end; `out` may be the same memory, for it is written to at the end.
        """

    def take_back(self) -> None:
        """Undo the last run, whose result is not used: what was to be sent is yet to be sent."""
        if self._begun and isinstance(self.codec, ErrorFeedback):
            self.codec.take_back()
        self._begun = False

    # -- what is remembered ----------------------------------------------------------------------------------------

    def held(self) -> torch.Tensor | None:
        """Return all that this rank holds back, element by element of the vector; None where it holds nothing."""
        residual: torch.Tensor | None = self.codec.state_dict().get(RESIDUAL)
        return residual

    def hold(self, residual: torch.Tensor) -> None:
        """Hold back so much more: what an exchange that is no more has held back of these elements."""
        state = self.codec.state_dict()
        before = state.get(RESIDUAL)
        self.codec.load_state_dict({**state, RESIDUAL: residual if before is None else before + residual})

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's memory: tensors by name."""
        return self.codec.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same plan, place and ranks; one that does not fit changes nothing."""
        _check_length(state.get(RESIDUAL), self.elements, "vector")
        self.codec.load_state_dict(state)

    def load_state_of(self, plan: str, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of another plan, or of this one.

        What was held back is held back. What else a codec remembers is of use to its own plan only, and begins anew.
        """
        if plan == self.plan:
            self.load_state_dict(state)
            return
        before, anew = (
            make_exchange(self.codec, self._shapes, self.place, self.world, each) for each in (plan, self.plan)
        )
        before.load_state_dict(state)
        self.load_state_dict(anew.state_dict())
        held = before.held()
        if held is not None:
            self.hold(held)

    # -- for the plans ---------------------------------------------------------------------------------------------

    def _output(self, out: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        return torch.empty(self.elements, dtype=torch.float32, device=device) if out is None else out

    def _memory(self, elements: int, device: torch.device) -> torch.Tensor:
        """Return memory to work in, which is kept: new memory costs more than what is done in it."""
        if self._scratch is None or self._scratch.numel() < elements or self._scratch.device != device:
            self._scratch = torch.empty(elements, dtype=torch.float32, device=device)
        return self._scratch[:elements]

    def _check_payload(self, codec: Codec, payload: torch.Tensor, elements: int) -> None:
        most = codec.most_bytes(elements)
        if payload.numel() and int(payload[0]) != _PAYLOAD_BEGINS:
            raise ValueError(f"a payload begins with b'pl' ({codec!r} has made one that begins with {int(payload[0])})")
        if payload.numel() > most or (payload.numel() < most and self.sized):
            raise ValueError(f"{codec!r} promises {most:,} bytes, and has made {payload.numel():,}")

    def _refuse_sizes(self, sizes: Sequence[int], elements: int) -> None:
        """Refuse sizes that no payload has, before memory is taken for them; all ranks have the same sizes here."""
        most = self.codec.most_bytes(elements)
        for place, size in enumerate(sizes):
            if not 0 <= size <= most:
                raise PayloadSizeError(place, size, self.codec, most)


# -- gather ------------------------------------------------------------------------------------------------------------


class GatheredExchange(VectorExchange):
    """Every rank's payload goes to every rank; all decode them in the order of the ranks, and add up."""

    plan = GATHER

    def run(
        self, vector: torch.Tensor | None, generator: torch.Generator | None = None, out: torch.Tensor | None = None
    ) -> ExchangeProtocol:
        device = _device_of(vector, out)
        payload, mark, cause = self._encoded(vector, generator, device)
        self.made_bytes, most = payload.numel(), self.codec.most_bytes(self.elements)
        if self.sized:
            rows = yield AllGather(_filled(payload, mark, most))
            marks, payloads = rows[:, 0].tolist(), [row[:most] for row in rows]
        else:
            marks = (yield AllGather(_size(payload, mark, device))).flatten().tolist()
            marks = [-mark for mark in marks]
        _raise_troubles(marks, cause)
        if self.sized:
            _refuse_marks(marks)
        else:
            sizes = [-mark for mark in marks]
            self._refuse_sizes(sizes, self.elements)
            rows = yield AllGather(_filled(payload, mark, max(sizes)))
            payloads = [row[:size] for row, size in zip(rows, sizes, strict=True)]
        brought = [payload for payload, mark in zip(payloads, marks, strict=True) if mark != _NOTHING]
        return _added(self.codec, brought, self._output(out, device), self._memory)

    def _encoded(
        self, vector: torch.Tensor | None, generator: torch.Generator | None, device: torch.device
    ) -> tuple[torch.Tensor, int, Exception | None]:
        """Return the payload and its first byte; if there is none, a number in its place, and why."""
        self._begun, none = False, torch.empty(0, dtype=torch.uint8, device=device)
        if vector is None:
            return none, _NOTHING, None
        try:
            payload = self.codec.encode(vector, generator)
            self._begun = True
            self._check_payload(self.codec, payload, self.elements)
        except Exception as error:  # the others wait for a payload: whatever it is, they must hear of it
            return none, _trouble_of(error), error
        return payload, _PAYLOAD_BEGINS, None


# -- two-step ----------------------------------------------------------------------------------------------------------


class TwoStepExchange(VectorExchange):
    """Shard p of every rank's vector goes to the rank at place p, which adds up, encodes the sum and sends it to all.

    With error feedback a rank holds back r of its own vector, and as the owner of its shard R of the sum.
    """

    plan = TWO_STEP

    def __init__(self, codec: Codec, shapes: Sequence[torch.Size], place: int, world: int) -> None:
        super().__init__(codec, shapes, place, world)
        self._inner = inner_of(self.codec)
        edges = shard_edges(self.elements, world)
        self._shards = [slice(*pair) for pair in itertools.pairwise(edges)]
        self._lengths = [after - before for before, after in itertools.pairwise(edges)]
        self._ours = self._shards[place]
        self._owner = self.codec.fresh([torch.Size([self._lengths[place]])])
        self._owned_before: torch.Tensor | None = None
        self._owner_begun = False
        self._total: torch.Tensor | None = None

    def run(
        self, vector: torch.Tensor | None, generator: torch.Generator | None = None, out: torch.Tensor | None = None
    ) -> ExchangeProtocol:
        device = _device_of(vector, out)
        second = _offspring(generator)  # drawn now: by the time that the sum is encoded, others may have drawn
        payloads, mark, cause = self._encoded(vector, generator, device)
        self.made_bytes = sum(payload.numel() for payload in payloads)
        most = [self._inner.most_bytes(length) for length in self._lengths]
        ours = most[self.place]
        if self.sized:
            sends, receives = tuple(map(_slot, most)), (_slot(ours),) * self.world
        else:
            sizes = torch.tensor([[-mark if mark != _PAYLOAD_BEGINS else payload.numel() for payload in payloads]])
            table = (yield AllGather(sizes.view(-1).to(device))).tolist()
            _raise_troubles([-min(row) for row in table], cause)
            sends, receives = (
                tuple(map(_slot, map(int, table[self.place]))),
                tuple(_slot(row[self.place]) for row in table),
            )
            for place, length in enumerate(self._lengths):
                self._refuse_sizes([row[place] for row in table], length)
        arrived = torch.split((yield AllToAll(_joined(payloads, mark, sends), sends, receives)), list(receives))
        if self.sized:
            marks = [int(part[0]) for part in arrived]
            _raise_troubles(marks, cause)
            _refuse_marks(marks)
            parts = [part[:ours] for part, mark in zip(arrived, marks, strict=True) if mark != _NOTHING]
        else:
            parts = [part[: row[self.place]] for part, row in zip(arrived, table, strict=True) if row[self.place]]
        result = self._output(out, device)
        if not parts:  # nobody brings anything, and all know it
            return result.zero_()
        payload, mark, cause = self._encoded_sum(parts, second, device)
        self.made_bytes += payload.numel()
        if self.sized:
            rows = yield AllGather(_filled(payload, mark, max(most)))
            marks, sizes_of = rows[:, 0].tolist(), most
            _raise_troubles(marks, cause, summed=True)
            _refuse_marks(marks)
        else:
            marks = (yield AllGather(_size(payload, mark, device))).flatten().tolist()
            _raise_troubles([-mark for mark in marks], cause, summed=True)
            sizes_of = [int(mark) for mark in marks]
            self._refuse_sizes(sizes_of, max(self._lengths))
            rows = yield AllGather(_filled(payload, mark, max(sizes_of)))
        for row, size, shard in zip(rows, sizes_of, self._shards, strict=True):
            self._inner.decode(row[:size], out=result[shard])
        return result

    def _encoded(
        self, vector: torch.Tensor | None, generator: torch.Generator | None, device: torch.device
    ) -> tuple[list[torch.Tensor], int, Exception | None]:
        """Return the payloads of all shards; if there are none, a number in their place, and why."""
        self._begun = self._owner_begun = False
        none = [torch.empty(0, dtype=torch.uint8, device=device)] * self.world
        if vector is None:
            return none, _NOTHING, None
        try:
            flat = flat_vector(vector)
            target, sent = flat, None
            if isinstance(self.codec, ErrorFeedback):
                target, sent = self.codec.begin(flat)
            try:
                payloads = [self._inner.encode(target[shard], generator) for shard in self._shards]
            except NotFiniteError:
                refuse_not_finite(flat)  # which says the place in the vector, and not in the shard
                raise
            for payload, length in zip(payloads, self._lengths, strict=True):
                self._check_payload(self._inner, payload, length)
            if isinstance(self.codec, ErrorFeedback) and sent is not None:
                self._begun = True
                for payload, shard in zip(payloads, self._shards, strict=True):
                    self._inner.decode(payload, out=sent[shard])
                self.codec.end(sent)
        except Exception as error:  # the others wait for a payload: whatever it is, they must hear of it
            return none, _trouble_of(error), error
        return payloads, _PAYLOAD_BEGINS, None

    def _encoded_sum(
        self, parts: Sequence[torch.Tensor], generator: torch.Generator | None, device: torch.device
    ) -> tuple[torch.Tensor, int, Exception | None]:
        """Add up what has come of this rank's shard, and encode it; if it cannot be, a number in its place, and why."""
        if isinstance(self._owner, ErrorFeedback):
            self._owned_before = self._owner.residual
        try:
            if self._total is None or self._total.device != device:
                self._total = torch.empty(self._lengths[self.place], dtype=torch.float32, device=device)
            _added(self._inner, parts, self._total, self._memory)
            payload = self._owner.encode(self._total, generator)
            self._owner_begun = True
            self._check_payload(self._inner, payload, self._total.numel())
        except Exception as error:  # all wait for the sum: whatever it is, they must hear of it
            return torch.empty(0, dtype=torch.uint8, device=device), _trouble_of(error), error
        return payload, _PAYLOAD_BEGINS, None

    def take_back(self) -> None:
        super().take_back()
        if self._owner_begun and isinstance(self._owner, ErrorFeedback):
            # The sum is with those who brought it, again: only what this rank held back of sums before is its own.
            self._owner.load_state_dict({} if self._owned_before is None else {RESIDUAL: self._owned_before})
        self._owner_begun = False

    def held(self) -> torch.Tensor | None:
        residual, owned = super().held(), self._owner.state_dict().get(RESIDUAL)
        if owned is not None:
            residual = owned.new_zeros(self.elements) if residual is None else residual.clone()
            residual[self._ours] += owned
        return residual

    def state_dict(self) -> dict[str, Any]:
        owned = self._owner.state_dict().get(RESIDUAL)
        return self.codec.state_dict() | ({} if owned is None else {OWNED: owned})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        owned = state.get(OWNED)
        _check_length(state.get(RESIDUAL), self.elements, "vector")
        _check_length(owned, self._lengths[self.place], "shard")
        theirs = self.codec.fresh()
        theirs.load_state_dict({} if owned is None else {RESIDUAL: owned})
        self.codec.load_state_dict({name: value for name, value in state.items() if name != OWNED})
        self._owner = theirs


# -- all-reduce --------------------------------------------------------------------------------------------------------


class AddedExchange(VectorExchange):
    """What travels is added up on its way: by the codec's own `add_up`, in one all-reduce or more."""

    plan = ALL_REDUCE

    def run(
        self, vector: torch.Tensor | None, generator: torch.Generator | None = None, out: torch.Tensor | None = None
    ) -> ExchangeProtocol:
        mark, cause = _NOTHING, None
        self._begun = False
        result = self._output(out, _device_of(vector, out))
        codec: Any = self.codec
        if vector is not None:
            try:
                adding = codec.add_up(vector, self.world, generator, out=result)
                request = next(adding)
                self._begun = True
            except Exception as error:  # the others wait for what is to be added: they must hear of it
                mark, cause = _trouble_of(error), error
        if not self._begun:
            # Zeros are added, and what the codec holds back stays there.
            zeros = torch.zeros(self.elements, dtype=torch.float32, device=result.device)
            adding = inner_of(codec).add_up(zeros, self.world, generator, out=result)  # type: ignore[attr-defined]
            request = next(adding)
        request.tensor[-self.world :][self.place] = mark
        self.made_bytes = request.tensor.nbytes
        answer = yield request
        _raise_troubles(answer[-self.world :].tolist(), cause)
        while True:
            try:
                request = adding.send(answer)
            except StopIteration:
                return result
            self.made_bytes += request.tensor.nbytes
            answer = yield request


# -- making one --------------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[VectorExchange]] = {
    kind.plan: kind for kind in (AddedExchange, GatheredExchange, TwoStepExchange)
}


def make_exchange(
    codec: Codec, shapes: Sequence[torch.Size], place: int, world: int, plan: str = AUTO
) -> VectorExchange:
    """Return an exchange by a plan, or by the one that is the quickest.

    >>> from paceline.codecs import make_codec
    >>> make_exchange(make_codec("one-bit"), [torch.Size([1000, 1000])], place=0, world=8).plan
    'two-step'
    """
    check_plan(plan, codec)
    check_ranks = getattr(inner_of(codec), "check_ranks", None)
    if check_ranks is not None:
        check_ranks(world)
    if plan == AUTO:
        plan = choose_plan(codec.fresh(shapes), sum(math.prod(shape) for shape in shapes), world)
    return _KINDS[plan](codec, shapes, place, world)


def _check_length(held: Any, elements: int, what: str) -> None:
    if held is not None and (not isinstance(held, torch.Tensor) or held.numel() != elements):
        found = f"{held.numel():,}" if isinstance(held, torch.Tensor) else type(held).__name__
        raise ValueError(f"this {what} has {elements:,} elements, and what was held back of it {found}")


# -- payloads ----------------------------------------------------------------------------------------------------------


def _device_of(vector: torch.Tensor | None, out: torch.Tensor | None) -> torch.device:
    return next((each.device for each in (vector, out) if each is not None), torch.device("cpu"))


def _offspring(generator: torch.Generator | None) -> torch.Generator | None:
    if generator is None:
        return None
    return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator, device="cpu")))


def _trouble_of(error: Exception) -> Trouble:
    return Trouble.NOT_FINITE if isinstance(error, NotFiniteError) else Trouble.OTHER


def _raise_troubles(marks: Sequence[float], cause: Exception | None, *, summed: bool = False) -> None:
    """Raise if one of these numbers is a trouble's; payloads begin with "p", and sizes come here negated."""
    kinds = {int(trouble) for trouble in Trouble}
    troubles = {place: Trouble(int(mark)) for place, mark in enumerate(marks) if int(mark) in kinds}
    if troubles:
        raise TroubleError(troubles, cause, summed=summed)


def _refuse_marks(marks: Sequence[int]) -> None:
    """Refuse first bytes that neither begin a payload nor stand in place of one."""
    for place, mark in enumerate(marks):
        if mark not in (_PAYLOAD_BEGINS, _NOTHING):
            raise PayloadError(f"a payload begins with b'pl' (that of place {place} with {mark})")


def _slot(size: int) -> int:
    return -(-max(0, size) // ALIGNED_BYTES) * ALIGNED_BYTES


def _size(payload: torch.Tensor, mark: int, device: torch.device) -> torch.Tensor:
    """Return the payload's size, or, negated, what is in its place."""
    return torch.tensor([payload.numel() if mark == _PAYLOAD_BEGINS else -mark], dtype=torch.int64, device=device)


def _filled(payload: torch.Tensor, mark: int, size: int) -> torch.Tensor:
    """Return a payload in a slot for so many bytes; if there is none, what is in its place."""
    slot = _slot(size)
    if payload.numel() == slot:
        return payload
    filled = payload.new_empty(slot)
    filled[: payload.numel()] = payload
    filled[payload.numel() :] = 0
    if mark != _PAYLOAD_BEGINS and slot:
        filled[0] = mark
    return filled


def _joined(payloads: Sequence[torch.Tensor], mark: int, slots: Sequence[int]) -> torch.Tensor:
    """Return payloads one after the other, each in its slot."""
    joined = payloads[0].new_zeros(sum(slots))
    for payload, part in zip(payloads, torch.split(joined, list(slots)), strict=True):
        part[: payload.numel()] = payload
        if mark != _PAYLOAD_BEGINS and part.numel():
            part[0] = mark
    return joined


def _added(codec: Codec, payloads: Sequence[torch.Tensor], total: torch.Tensor, memory: Any) -> torch.Tensor:
    """Decode in the order of the ranks, and add up in float32."""
    if not payloads:
        return total.zero_()
    codec.decode(payloads[0], out=total)
    if len(payloads) > 1:
        decoded = memory(total.numel(), total.device)
        for payload in payloads[1:]:
            total.add_(codec.decode(payload, out=decoded))
    return total
