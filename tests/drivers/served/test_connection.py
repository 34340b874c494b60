"""The model as it comes to a worker: what the server holds is what the worker gets; all else is refused."""

import pytest
import torch
from torch import nn

from paceline.codecs.naming import parse_codec
from paceline.drivers.served.connection import IncomingModel
from paceline.drivers.served.messages import Model, ProtocolError
from paceline.training.outgoing import OutgoingModel
from paceline.workers.flat import FlatModel

ELEMENTS = 6


def receive(incoming, version, payload, since=None, buffers=b""):
    message = Model(version=version, since=since, more=0, payload_bytes=payload.numel(), buffer_bytes=len(buffers))
    incoming.begin(message)
    body = payload.numpy().tobytes() + buffers
    assert add(incoming, body[:5]) is None
    assert add(incoming, body[5:]) is message


def add(incoming, body):
    """Add a part of the body, as it comes from a socket."""
    incoming.place(len(body))[:] = body
    return incoming.added(len(body))


@pytest.mark.parametrize("name", ["identity", "bfloat16", "one-bit", "qsgd levels=7", "top-k fraction=0.5"])
def test_it_gets_what_the_server_holds_whole_and_by_changes(name):
    codec = parse_codec(name)
    parameters, model = torch.randn(ELEMENTS), FlatModel(nn.Linear(2, 2))
    outgoing = OutgoingModel(codec, parameters, model.shapes)
    incoming = IncomingModel(codec, elements=ELEMENTS, buffers=0)
    receive(incoming, 0, outgoing.whole())
    for version in range(1, 6):
        parameters += 0.1 * torch.randn(ELEMENTS)
        outgoing.advance(version)
        changes = outgoing.changes_since(version - 1)
        if changes:
            receive(incoming, version, changes[0][1], since=version - 1)
        else:
            receive(incoming, version, outgoing.whole())
        incoming.load(model)
        assert torch.equal(model.parameters, outgoing.held)


def test_changes_that_do_not_follow_are_refused():
    codec = parse_codec("one-bit")
    incoming, change = IncomingModel(codec, elements=ELEMENTS, buffers=0), codec.encode(torch.ones(ELEMENTS))
    with pytest.raises(ProtocolError, match="since version 0 came, and version None is held"):
        receive(incoming, 1, change, since=0)
    receive(incoming, 4, parse_codec("identity").encode(torch.zeros(ELEMENTS)))
    with pytest.raises(ProtocolError, match="since version 5 came, and version 4 is held"):
        receive(incoming, 6, change, since=5)
    with pytest.raises(ProtocolError, match="since version 3 came, and version None is held"):
        receive(IncomingModel(parse_codec("identity"), elements=ELEMENTS, buffers=0), 4, change, since=3)


def load(incoming, model, payload):
    receive(incoming, 0, payload)
    incoming.load(model)


@pytest.mark.parametrize("elements", [ELEMENTS - 1, ELEMENTS + 1])
@pytest.mark.parametrize("name", ["identity", "one-bit"])
def test_a_model_of_another_length_or_of_garbage_is_refused(name, elements):
    codec = parse_codec(name)
    incoming, model = IncomingModel(codec, elements=ELEMENTS, buffers=0), FlatModel(nn.Linear(2, 2))
    before = model.parameters.clone()
    for payload in (parse_codec("identity").encode(torch.zeros(elements)), torch.zeros(20, dtype=torch.uint8)):
        with pytest.raises(ProtocolError):
            load(incoming, model, payload)
    assert torch.equal(model.parameters, before)
