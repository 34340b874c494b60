"""The model on its way to the workers: whole, or as the change since the version before, what is sound and cheaper.

    parameters  ----->  change = parameters - what workers hold  ----->  codec  ----->  what workers hold += decoded

A codec that keeps the size of every element (identity, bfloat16) encodes the parameters themselves. The others would
ruin them, and encode changes. What a change lost on its way is in the next one, so nothing is lost for good: workers
follow the model, a little behind. How far behind matters: a gradient can be sent roughly, for errors average out over
workers and rounds, but all workers compute with the same model. So a codec must bring workers nearer by half at the
least. Where it does not (one-bit, a small share of the elements), the change is sent by `FINE`, at eight bits an
element; and if that does not, or would be larger, the parameters go whole, exactly.

With parameters, a worker that was away, late or new needs the newest model and nothing before it, so one model is all
that waits for it. Changes must come in order: a stream holds them as long as they are smaller than the model, and then
the model instead. So a slow worker costs the server no memory either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from paceline.codecs import Codec
from paceline.codecs.floats import Floats, Identity
from paceline.codecs.naming import inner_of
from paceline.codecs.payload import NotFiniteError
from paceline.codecs.qsgd import QSGD
from paceline.randomness import torch_generator

FINE = QSGD(levels=127)
NEARER = 0.5
BLOCK = 2**18  # elements


def whole_codec_of(codec: Codec) -> Floats:
    """Return the codec that carries the model whole: the codec itself, if it can carry parameters.

    >>> whole_codec_of(QSGD(levels=7))
    Identity()
    """
    inner = inner_of(codec)
    return inner if isinstance(inner, Floats) and inner.suits_parameters else Identity()


def warm_up(codec: Codec, shapes: Sequence[torch.Size]) -> None:
    """Load or compile all that gradients and models of these shapes need, before anybody waits for it.

    >>> warm_up(QSGD(levels=7), [torch.Size([3])])
    """
    if isinstance(codec, Floats) and codec.suits_parameters:
        return
    vector = torch.ones(sum(shape.numel() for shape in shapes), dtype=torch.float32)
    finer = () if inner_of(codec).suits_parameters else (FINE,)
    for each in (codec, *finer):
        own = each.fresh(shapes)
        own.decode(own.encode(vector))


def change_bytes(codec: Codec, shapes: Sequence[torch.Size]) -> int:
    """Return the size in bytes of a change of a model with these shapes, for changes that look like noise.

    >>> change_bytes(QSGD(levels=7), [torch.Size([4096])]), change_bytes(QSGD(levels=1), [torch.Size([4096])])
    (2096, 4144)
    """
    parameters = torch.zeros(sum(shape.numel() for shape in shapes), dtype=torch.float32)
    outgoing = OutgoingModel(codec, parameters, shapes)
    parameters.normal_(generator=torch_generator(0, "change"))
    outgoing.advance(version=1)
    changes = outgoing.changes_since(0)
    return changes[0][1].numel() if changes else outgoing.whole_bytes


def _length(vector: torch.Tensor, less: torch.Tensor | None = None) -> float:
    """Return the length of a vector, or of what is left of it: block by block, so that no copy of it is made.

    The sum is in float64: in float32 it would be infinite from 1e19 on.
    """
    total = 0.0
    for start in range(0, vector.numel(), BLOCK):
        part = vector[start : start + BLOCK]
        block = part if less is None else part - less[start : start + BLOCK]
        total += float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2.0
    return math.sqrt(total)


class OutgoingModel:
    """The model as workers hold it, version by version, and the payloads that take them to the next.

    >>> from paceline.codecs.one_bit import OneBit
    >>> parameters = torch.zeros(64)
    >>> outgoing = OutgoingModel(OneBit(), parameters, [parameters.shape])
    >>> _ = parameters.copy_(torch.tensor([1.0, 1.5] * 32))
    >>> outgoing.advance(version=1)
    >>> outgoing.held[:3]
    tensor([1.2500, 1.2500, 1.2500])
    """

    def __init__(self, codec: Codec, parameters: torch.Tensor, shapes: Sequence[torch.Size], *, seed: int = 0) -> None:
        self._codec = inner_of(codec).fresh(shapes)  # a change makes up for the errors before it: no second memory
        self._parameters, self._seed = parameters, seed
        self._changes: dict[int, torch.Tensor] = {}
        self.whole_codec = whole_codec_of(codec)
        self._held: torch.Tensor | None = None if self._codec.suits_parameters else parameters.clone()
        self._version = 0

    @property
    def held(self) -> torch.Tensor:
        """The parameters of a worker that has the newest version."""
        return self.whole_codec.decode(self.whole()) if self._held is None else self._held

    def whole(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the payload that holds all parameters, in `out` if that is given; they are finite."""
        return self.whole_codec.encode(self._parameters if self._held is None else self._held, out=out, checked=True)

    @property
    def whole_bytes(self) -> int:
        """The size of the payload that holds all parameters, at most."""
        return self.whole_codec.most_bytes(self._parameters.numel())

    def advance(self, version: int) -> None:
        """Take the parameters as they are now as this version."""
        self._version = version
        if self._held is None:
            return
        update = self._change(self._held)
        if update is None:
            self._changes = {}
            self._held.copy_(self._parameters)
        else:
            self._changes[version] = update
            self._forget()

    def changes_since(self, since: int) -> list[tuple[int, torch.Tensor]]:
        """Return the changes, by version, from version `since` to the newest; empty if the worker needs the whole.

        Changes are kept as long as they are together smaller than the whole.
        """
        versions = range(since + 1, self._version + 1)
        if any(version not in self._changes for version in versions):
            return []
        return [(version, self._changes[version]) for version in versions]

    def _change(self, held: torch.Tensor) -> torch.Tensor | None:
        """Add the change to `held` as a worker will decode it, and return its payload; None if the whole is better."""
        change = self._parameters - held
        far_off = _length(change)
        for codec in (self._codec, FINE):
            try:
                payload = codec.encode(change, torch_generator(self._seed, "down", self._version))
            except NotFiniteError:  # the difference of two finite numbers may be none
                return None
            decoded = codec.decode(payload)
            left = _length(change, less=decoded)
            if payload.numel() < self.whole_bytes and left <= NEARER * far_off:
                held.add_(decoded)
                return payload
        return None

    def _forget(self) -> None:
        """Drop the oldest updates once sending all of them would take more than sending the whole."""
        while sum(update.numel() for update in self._changes.values()) >= self.whole_bytes:
            del self._changes[min(self._changes)]

    def state_dict(self) -> dict[str, Any]:
        """Return what workers hold and the memory of the codec; nothing if that follows from the parameters."""
        return {} if self._held is None else {"held": self._held, "codec": self._codec.state_dict()}

    def load_state_dict(self, state: dict[str, Any], version: int) -> None:
        """Go on from a `state_dict`; workers that connect now get the whole."""
        self._version, self._changes = version, {}
        if self._held is not None:
            self._held.copy_(state["held"])
            self._codec.load_state_dict(state["codec"])
