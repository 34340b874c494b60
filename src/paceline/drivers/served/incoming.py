"""The model as it comes to a worker: put together from frames, and added up where it comes in changes.

Model(since=None)   whole: the parameters themselves
Model(since=7)      what changed since version 7, which must be the one that came before
"""

from __future__ import annotations

import torch

from paceline.codecs import Codec
from paceline.codecs.naming import decoder_of, inner_of
from paceline.drivers.served.frames import Assembly, Sizes, memory_for
from paceline.drivers.served.messages import Model, ProtocolError
from paceline.training.outgoing import whole_codec_of
from paceline.workers.flat import FlatModel


class Incoming:
    """Holds what came last. One thread fills it; whoever loads it waits until it is whole.

    >>> from paceline.codecs import Identity
    >>> incoming = Incoming(Identity(), elements=1, buffers=0)
    >>> payload = Identity().encode(torch.ones(1))
    >>> incoming.begin(Model(version=0, since=None, more=0, payload_bytes=payload.numel(), buffer_bytes=0))
    >>> incoming.add(memoryview(payload.numpy()))
    True
    """

    def __init__(self, codec: Codec, *, elements: int, buffers: int) -> None:
        self._whole_codec = whole_codec_of(codec)
        most = max(codec.most_bytes(elements), self._whole_codec.most_bytes(elements))
        sizes = Sizes(most_payload_bytes=most, buffer_bytes=4 * buffers)
        self._assembly = Assembly(sizes, memory_for(sizes))
        comes_whole = inner_of(codec).suits_parameters
        self._held: torch.Tensor | None = None if comes_whole else torch.zeros(elements)
        self._buffers = torch.zeros(0)
        self._version: int | None = None
        self._message: Model | None = None

    def begin(self, message: Model) -> None:
        """A model whose body is to come."""
        if message.since is not None and (self._held is None or message.since != self._version):
            raise ProtocolError(f"a change since version {message.since} came, and version {self._version} is held")
        self._assembly.begin(message)
        self._message = message

    def add(self, body: memoryview) -> bool:
        """Take a part of the body; True once the model is whole."""
        return self._assembly.add(body)

    def take_in(self) -> Model:
        """The model is whole: add it up, if it is a change."""
        message = self._message
        if message is None:
            raise ProtocolError("a model is whole that never began")
        self._version = message.version
        if self._held is not None:
            try:
                if message.since is None:
                    self._whole_codec.decode(self._assembly.payload, out=self._held)
                else:
                    payload = self._assembly.payload
                    self._held += decoder_of(payload).decode(payload, expected_length=self._held.numel())
            except ValueError as error:
                raise ProtocolError(f"the server sent another model: {error}") from None
            self._buffers = self._assembly.buffers
        return message

    def load(self, model: FlatModel) -> None:
        """Put what came last into a model."""
        if self._held is not None:
            model.load(self._held, self._buffers)
            return
        try:
            self._whole_codec.decode(self._assembly.payload, out=model.parameters)
        except ValueError as error:
            raise ProtocolError(f"the server sent another model: {error}") from None
        model.load_buffers(self._assembly.buffers)
