"""Vectors cut into frames: they come together again to the last byte, and only in the sizes of the model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drivers.served import messages as cutting
from paceline.drivers.served.messages import (
    Assembly,
    Chunk,
    Gradient,
    Model,
    ProtocolError,
    Sizes,
    decode,
    frames,
)
from tests.drivers.served.test_messages import GRADIENT


def with_sizes(message, payload, buffers):
    return dataclasses.replace(message, payload_bytes=payload.numel(), buffer_bytes=4 * buffers.numel())


SIZES = Sizes(most_payload_bytes=40, buffer_bytes=8)


def model(payload_bytes=40, buffer_bytes=8):
    return Model(version=1, since=None, more=0, payload_bytes=payload_bytes, buffer_bytes=buffer_bytes)


def begun(sizes=SIZES, **changes):
    assembly = Assembly(sizes)
    assembly.begin(model(**changes))
    return assembly


def add(assembly, body):
    """Add a part of the body, as it comes from a socket; returns whether the body is whole."""
    assembly.place(len(body))[:] = body
    return assembly.added(len(body))


@settings(max_examples=60)
@given(elements=st.integers(1, 40), buffers=st.integers(0, 12), chunk=st.integers(1, 70), shorter=st.integers(0, 3))
def test_a_vector_and_its_buffers_come_together_again_to_the_last_byte(elements, buffers, chunk, shorter):
    whole = cutting.MOST_BODY_BYTES
    cutting.MOST_BODY_BYTES = chunk
    try:
        sizes = Sizes(most_payload_bytes=4 * (elements + shorter), buffer_bytes=4 * buffers)
        payload, tail = torch.randn(elements).view(torch.uint8), torch.randn(buffers)
        assembly = Assembly(sizes)
        sent = list(frames(with_sizes(GRADIENT, payload, tail), payload, tail))
        for number, (head, piece) in enumerate(sent):
            assert len(piece) <= chunk
            message, body = decode(head + piece)
            assert isinstance(message, Chunk if number else Gradient)
            if not number:
                assembly.begin(message)
            assert add(assembly, body) == (number == len(sent) - 1)
        assert torch.equal(assembly.payload, payload)
        assert torch.equal(assembly.buffers.view(torch.uint8), tail.view(torch.uint8))
    finally:
        cutting.MOST_BODY_BYTES = whole


@pytest.mark.parametrize("changes", [{"payload_bytes": 0}, {"payload_bytes": 41}, {"payload_bytes": 2**53}])
def test_a_payload_of_another_size_is_refused_before_its_first_byte(changes):
    with pytest.raises(ProtocolError, match="between 1 and 40 bytes"):
        begun(**changes)


@pytest.mark.parametrize("buffer_bytes", [0, 4, 12, 2**53])
def test_buffers_of_another_size_are_refused_before_their_first_byte(buffer_bytes):
    with pytest.raises(ProtocolError, match="buffers of a Model must be 8 bytes"):
        begun(buffer_bytes=buffer_bytes)


def test_a_body_that_goes_on_after_its_end_is_refused():
    assembly = begun()
    assert not add(assembly, bytes(40))
    with pytest.raises(ProtocolError, match="a body of 48 bytes got 49"):
        add(assembly, bytes(9))


def test_a_piece_without_a_body_or_of_nothing_is_refused():
    with pytest.raises(ProtocolError, match="no body had begun"):
        add(Assembly(SIZES), b"x")
    with pytest.raises(ProtocolError, match="got 0"):
        add(begun(), b"")


def test_a_body_may_not_begin_within_another():
    assembly = begun()
    add(assembly, b"x")
    with pytest.raises(ProtocolError, match="before the body of the one before was whole"):
        assembly.begin(model())


def test_a_body_after_a_whole_one_may_begin_and_leaves_nothing_of_the_one_before():
    assembly = begun()
    assert add(assembly, b"\xff" * 48)
    assembly.begin(model(payload_bytes=4))
    assert add(assembly, bytes(12))
    assert assembly.payload.tolist() == [0] * 4
    assert assembly.buffers.tolist() == [0.0, 0.0]


def test_buffers_are_a_copy_that_outlives_the_next_body():
    assembly = begun()
    add(assembly, bytes(48))
    kept = assembly.buffers
    assembly.begin(model())
    add(assembly, b"\x3f" * 48)
    assert kept.tolist() == [0.0, 0.0]


def test_sizes_are_said_as_they_are():
    said = with_sizes(GRADIENT, torch.zeros(12, dtype=torch.uint8), torch.zeros(3))
    assert (said.payload_bytes, said.buffer_bytes) == (12, 12)
    assert dataclasses.replace(said, payload_bytes=GRADIENT.payload_bytes, buffer_bytes=8) == GRADIENT
