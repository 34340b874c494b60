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
from dataclasses import dataclass
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
Outcome = torch.Tensor | Exception  # the sum, or why there is none

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


class Workspace:
    """Memory to decode into, which is kept: new memory costs more than what is done in it.

    Exchanges that never decode at the same time may share one: those of one thread.

    >>> workspace = Workspace()
    >>> workspace.floats(10, torch.device("cpu")).data_ptr() == workspace.floats(7, torch.device("cpu")).data_ptr()
    True
    """

    def __init__(self) -> None:
        self._floats: torch.Tensor | None = None

    def floats(self, elements: int, device: torch.device) -> torch.Tensor:
        """Return so many floats, which hold what was last written there."""
        if self._floats is None or self._floats.numel() < elements or self._floats.device != device:
            self._floats = torch.empty(elements, dtype=torch.float32, device=device)
        return self._floats[:elements]


class VectorExchange(ABC):
    """One vector, of tensors of these shapes, exchanged among `world` ranks, by the rank at `place`.

    `made_bytes` is the size of the payloads that this rank has made in the last run, each counted once; `seconds` is
    how long a run is expected to take, on the link that the choice of a plan assumes.
    """

    plan: ClassVar[str]

    def __init__(
        self,
        codec: Codec,
        shapes: Sequence[torch.Size],
        place: int,
        world: int,
        workspace: Workspace | None = None,
    ) -> None:
        self.codec, self.place, self.world = codec.fresh(shapes), place, world
        self._shapes = list(shapes)
        self.elements = sum(math.prod(shape) for shape in shapes)
        self.seconds = exchange_seconds(self.plan, self.codec, self.elements, world)
        self.sized = bool(getattr(self.codec, "fixed_size", False))
        self.made_bytes = 0
        self._begun = False  # the codec's memory has moved on in the last run
        self._workspace = workspace or Workspace()

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

    def _check_payload(self, codec: Codec, payload: torch.Tensor, elements: int) -> None:
        most = codec.most_bytes(elements)
        if payload.numel() and int(payload[0]) != _PAYLOAD_BEGINS:
            raise ValueError(f"a payload begins with b'pl' ({codec!r} has made one that begins with {int(payload[0])})")
        if payload.numel() > most or (payload.numel() < most and self.sized):
            raise ValueError(f"{codec!r} promises {most:,} bytes, and has made {payload.numel():,}")

    def _refuse_sizes(self, sizes: Sequence[int], most: Sequence[int]) -> None:
        """Refuse sizes that no payload has, before memory is taken for them; all ranks have the same sizes here."""
        for place, (size, limit) in enumerate(zip(sizes, most, strict=True)):
            if not 0 <= size <= limit:
                raise PayloadSizeError(place, size, self.codec, limit)

    def _gather(
        self, ours: _Encoded, most: Sequence[int], *, summed: bool = False
    ) -> Generator[Request, torch.Tensor, list[torch.Tensor | None]]:
        """Bring every rank's payload to all; return them by place, and None for a rank that brings nothing.

        `most` are the bytes that a payload has at each place, or has at the most: then sizes go before.
        """
        if self.sized:
            rows = yield AllGather(_filled(ours, max(most)))
            marks, sizes = rows[:, 0].tolist(), most
            _raise_troubles(marks, ours.cause, summed=summed)
            _refuse_marks(marks)
        else:
            sizes = list(map(int, (yield AllGather(_size(ours))).flatten().tolist()))
            marks = [-size for size in sizes]
            _raise_troubles(marks, ours.cause, summed=summed)
            self._refuse_sizes(sizes, most)
            rows = yield AllGather(_filled(ours, max(sizes)))
        return [None if mark == _NOTHING else row[:size] for mark, row, size in zip(marks, rows, sizes, strict=True)]


# -- gather ------------------------------------------------------------------------------------------------------------


class GatheredExchange(VectorExchange):
    """Every rank's payload goes to every rank; all decode them in the order of the ranks, and add up."""

    plan = GATHER

    def run(
        self, vector: torch.Tensor | None, generator: torch.Generator | None = None, out: torch.Tensor | None = None
    ) -> ExchangeProtocol:
        device = _device_of(vector, out)
        ours = self._encoded(vector, generator, device)
        self.made_bytes = ours.payload.numel()
        payloads = yield from self._gather(ours, [self.codec.most_bytes(self.elements)] * self.world)
        brought = [payload for payload in payloads if payload is not None]
        return _added(self.codec, brought, self._output(out, device), self._workspace)

    def _encoded(
        self, vector: torch.Tensor | None, generator: torch.Generator | None, device: torch.device
    ) -> _Encoded:
        self._begun = False
        if vector is None:
            return _nothing(device)
        try:
            payload = self.codec.encode(vector, generator)
            self._begun = True
            self._check_payload(self.codec, payload, self.elements)
        except Exception as error:  # the others wait for a payload: whatever it is, they must hear of it
            return _nothing(device, error)
        return _Encoded(payload)


# -- two-step ----------------------------------------------------------------------------------------------------------


class TwoStepExchange(VectorExchange):
    """Shard p of every rank's vector goes to the rank at place p, which adds up, encodes the sum and sends it to all.

    With error feedback a rank holds back r of its own vector, and as the owner of its shard R of the sum.
    """

    plan = TWO_STEP

    def __init__(
        self,
        codec: Codec,
        shapes: Sequence[torch.Size],
        place: int,
        world: int,
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__(codec, shapes, place, world, workspace)
        self._inner = inner_of(self.codec)
        edges = shard_edges(self.elements, world)
        self._shards = [slice(*pair) for pair in itertools.pairwise(edges)]
        self._lengths = [after - before for before, after in itertools.pairwise(edges)]
        self._most = [self._inner.most_bytes(length) for length in self._lengths]
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
        ours = self._encoded(vector, generator, device)
        self.made_bytes = sum(each.payload.numel() for each in ours)
        parts = yield from self._scatter(ours)
        result = self._output(out, device)
        if not parts:  # nobody brings anything, and all know it
            return result.zero_()
        of_sum = self._encoded_sum(parts, second, device)
        self.made_bytes += of_sum.payload.numel()
        for payload, shard in zip(
            (yield from self._gather(of_sum, self._most, summed=True)), self._shards, strict=True
        ):
            if payload is None:
                raise PayloadError(f"the sum of shard {self._shards.index(shard)} is missing")
            self._inner.decode(payload, out=result[shard])
        return result

    def _scatter(self, ours: Sequence[_Encoded]) -> Generator[Request, torch.Tensor, list[torch.Tensor]]:
        """Bring the payload of each shard to its owner; return those of this rank's shard, in the ranks' order."""
        cause, size = ours[0].cause, self._most[self.place]
        if self.sized:
            sends, receives = tuple(map(_slot, self._most)), (_slot(size),) * self.world
            arrived = torch.split((yield AllToAll(_joined(ours, sends), sends, receives)), list(receives))
            marks = [int(part[0]) for part in arrived]
            _raise_troubles(marks, cause)
            _refuse_marks(marks)
            return [part[:size] for part, mark in zip(arrived, marks, strict=True) if mark != _NOTHING]
        table = (yield AllGather(torch.cat([_size(each) for each in ours]))).tolist()
        _raise_troubles([-min(row) for row in table], cause)
        for shard, most in enumerate(self._most):
            self._refuse_sizes([row[shard] for row in table], [most] * self.world)
        sends, receives = tuple(map(_slot, table[self.place])), tuple(_slot(row[self.place]) for row in table)
        total = sum(_slot(size) for place, row in enumerate(table) for to, size in enumerate(row) if to != place)
        arrived = torch.split((yield AllToAll(_joined(ours, sends), sends, receives, total)), list(receives))
        return [part[: row[self.place]] for part, row in zip(arrived, table, strict=True) if row[self.place]]

    def _encoded(
        self, vector: torch.Tensor | None, generator: torch.Generator | None, device: torch.device
    ) -> list[_Encoded]:
        """Return the payloads of all shards."""
        self._begun = self._owner_begun = False
        if vector is None:
            return [_nothing(device)] * self.world
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
            return [_nothing(device, error)] * self.world
        return [_Encoded(payload) for payload in payloads]

    def _encoded_sum(
        self, parts: Sequence[torch.Tensor], generator: torch.Generator | None, device: torch.device
    ) -> _Encoded:
        """Add up what has come of this rank's shard, and encode it."""
        if isinstance(self._owner, ErrorFeedback):
            self._owned_before = self._owner.residual
        try:
            if self._total is None or self._total.device != device:
                self._total = torch.empty(self._lengths[self.place], dtype=torch.float32, device=device)
            _added(self._inner, parts, self._total, self._workspace)
            payload = self._owner.encode(self._total, generator)
            self._owner_begun = True
            self._check_payload(self._inner, payload, self._total.numel())
        except Exception as error:  # all wait for the sum: whatever it is, they must hear of it
            return _nothing(device, error)
        return _Encoded(payload)

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
            zeros = torch.zeros(self.elements, dtype=result.dtype, device=result.device)
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
    codec: Codec,
    shapes: Sequence[torch.Size],
    place: int,
    world: int,
    plan: str = AUTO,
    workspace: Workspace | None = None,
    *,
    of_elements: int | None = None,
) -> VectorExchange:
    """Return an exchange by a plan, or by the one that is the quickest for a vector that is a part of so many elements.

    >>> from paceline.codecs import make_codec
    >>> make_exchange(make_codec("one-bit"), [torch.Size([1000, 1000])], place=0, world=8).plan
    'two-step'
    """
    check_plan(plan, codec)
    check_ranks = getattr(inner_of(codec), "check_ranks", None)
    if check_ranks is not None:
        check_ranks(world)
    if plan == AUTO:
        elements = sum(math.prod(shape) for shape in shapes)
        plan = choose_plan(codec.fresh(shapes), elements, world, of_elements=of_elements)
    return _KINDS[plan](codec, shapes, place, world, workspace)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Encoded:
    """A payload, and its first byte; where there is none, a number in its place, and why."""

    payload: torch.Tensor
    mark: int = _PAYLOAD_BEGINS
    cause: Exception | None = None


def _nothing(device: torch.device, cause: Exception | None = None) -> _Encoded:
    """Return what stands for a payload that there is not: since this rank brings nothing, or for a cause."""
    none = torch.empty(0, dtype=torch.uint8, device=device)
    return _Encoded(none, _NOTHING if cause is None else _trouble_of(cause), cause)


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


def _size(encoded: _Encoded) -> torch.Tensor:
    """Return the payload's size, or, negated, what is in its place."""
    size = encoded.payload.numel() if encoded.mark == _PAYLOAD_BEGINS else -encoded.mark
    return torch.tensor([size], dtype=torch.int64, device=encoded.payload.device)


def _filled(encoded: _Encoded, size: int) -> torch.Tensor:
    """Return a payload in a slot for so many bytes; if there is none, what is in its place."""
    slot = _slot(size)
    return encoded.payload if encoded.payload.numel() == slot else _joined([encoded], [slot])


def _joined(encoded: Sequence[_Encoded], slots: Sequence[int]) -> torch.Tensor:
    """Return payloads one after the other, each in its slot."""
    joined = encoded[0].payload.new_empty(sum(slots))
    for each, part in zip(encoded, torch.split(joined, list(slots)), strict=True):
        part[: each.payload.numel()] = each.payload
        part[each.payload.numel() :] = 0
        if each.mark != _PAYLOAD_BEGINS and part.numel():
            part[0] = each.mark
    return joined


def _added(codec: Codec, payloads: Sequence[torch.Tensor], total: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Decode in the order of the ranks, and add up in float32."""
    if not payloads:
        return total.zero_()
    codec.decode(payloads[0], out=total)
    if len(payloads) > 1:
        decoded = workspace.floats(total.numel(), total.device)
        for payload in payloads[1:]:
            total.add_(codec.decode(payload, out=decoded))
    return total
