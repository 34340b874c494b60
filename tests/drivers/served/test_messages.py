"""Messages: what is said comes back as it was said, and of anything else only ProtocolError comes out."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.drivers.served.messages import (
    KINDS,
    MOST_BODY_BYTES,
    MOST_HEADER_BYTES,
    PREFIX_BYTES,
    PROTOCOL,
    Beat,
    Chunk,
    Goodbye,
    Gradient,
    Hello,
    Leave,
    Model,
    ProtocolError,
    Ready,
    Taken,
    Welcome,
    decode,
    encode,
    parse_prefix,
)

GRADIENT = Gradient(
    version=3, draw=7, blocks_done=2, blocks=4, work_seconds=0.5, held_seconds=0.6, samples=16, loss_mean=0.7,
    loss_variance=0.2, payload_bytes=400, buffer_bytes=8,
)  # fmt: skip
EXAMPLES = [
    Hello(protocol=PROTOCOL, wish=None, threads=4, host="Küche pid 7"),
    Welcome(
        protocol=PROTOCOL, worker=3, shard=1, first_draw=9, blocks=4, codec="identity", seed=0, signature="s",
        silence_seconds=15.0, recipe={"rounds": 3, "data": {"name": "digits"}},
    ),
    Welcome(
        protocol=PROTOCOL, worker=3, shard=1, first_draw=9, blocks=4, codec="identity", seed=0, signature="s",
        silence_seconds=15.0, tensors=("parameter weight (3, 2) float32",), recipe={},
    ),
    Ready(signature="1a2b"),
    Model(version=0, since=None, more=0, payload_bytes=400, buffer_bytes=8),
    Model(version=7, since=6, more=2, payload_bytes=40, buffer_bytes=8),
    GRADIENT,
    Chunk(),
    Beat(progress=2**53),
    Leave(reason=""),
    Goodbye(what="over", reason="all rounds are done"),
    Taken(slot=1),
    Model(version=7, since=None, more=0, payload_bytes=400, buffer_bytes=8, slot=1),
    Ready(signature="1a2b", handover=True),
    dataclasses.replace(GRADIENT, slot=0),
]  # fmt: skip
many = settings(max_examples=300)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from([2**53 + 1, -1, 1e308])
)
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def frame(kind, header, body=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<BII", kind, len(header), len(body)) + header + body


def refused(data):
    """Why a frame is refused, or None; anything but ProtocolError is a fault."""
    try:
        decode(data)
    except ProtocolError as error:
        return str(error)
    return None


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_said_comes_back_as_it_was_said(message):
    said = b"body" if isinstance(message, Model | Gradient | Chunk) else b""
    found, body = decode(encode(message, said))
    assert found == message
    assert bytes(body) == said


def test_every_kind_has_an_example_here():
    assert {type(message) for message in EXAMPLES} == set(KINDS.values())


@many
@given(st.binary(max_size=300))
@example(b"")
@example(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
@example(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
def test_of_random_bytes_only_a_protocol_error_comes_out(data):
    refused(data)


@many
@given(kind=st.sampled_from(sorted(KINDS)), header=st.binary(max_size=200), claim=st.integers(0, 2**32 - 1))
def test_of_a_kind_with_a_random_header_only_a_protocol_error_comes_out(kind, header, claim):
    refused(frame(kind, header))
    refused(struct.pack("<BII", kind, claim, 0) + header)
    refused(struct.pack("<BII", kind, len(header), claim) + header)


@many
@given(kind=st.sampled_from(sorted(KINDS)), document=documents)
def test_of_a_kind_with_random_json_only_a_protocol_error_comes_out(kind, document):
    refused(frame(kind, document))


@many
@given(data=st.data())
def test_of_a_message_with_one_value_replaced_comes_out_a_message_of_the_right_types_or_a_protocol_error(data):
    message = data.draw(st.sampled_from([each for each in EXAMPLES if dataclasses.fields(each)]))
    values = {each.name: getattr(message, each.name) for each in dataclasses.fields(message)}
    name = data.draw(st.sampled_from(sorted(values)))
    values[name] = data.draw(documents)
    reason = refused(frame(message.KIND, values))
    if reason is None:
        found, _ = decode(frame(message.KIND, values))
        assert decode(encode(found))[0] == found
    else:
        assert reason.isprintable()


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (GRADIENT, {"version": -1}),
        (GRADIENT, {"version": 2**53 + 1}),
        (GRADIENT, {"version": 3.0}),
        (GRADIENT, {"version": True}),
        (GRADIENT, {"version": "3"}),
        (GRADIENT, {"draw": -1}),
        (GRADIENT, {"blocks": 0}),
        (GRADIENT, {"blocks_done": 0}),
        (GRADIENT, {"blocks": 10**7}),
        (GRADIENT, {"work_seconds": -1.0}),
        (GRADIENT, {"work_seconds": 1e300}),
        (GRADIENT, {"held_seconds": -1e-9}),
        (GRADIENT, {"held_seconds": 10**400}),
        (GRADIENT, {"loss_mean": 1e300}),
        (GRADIENT, {"loss_variance": -1.0}),
        (GRADIENT, {"samples": None}),
        (GRADIENT, {"payload_bytes": -4}),
        (EXAMPLES[0], {"wish": -1}),
        (EXAMPLES[0], {"threads": 0}),
        (EXAMPLES[0], {"host": "x" * 5000}),
        (EXAMPLES[0], {"host": "a\nrefused nobody: a line that the server never wrote"}),
        (EXAMPLES[0], {"host": "\x1b[2J"}),
        (EXAMPLES[0], {"host": "\ud800"}),
        (EXAMPLES[1], {"silence_seconds": 0.0}),
        (EXAMPLES[1], {"silence_seconds": 1e300}),
        (EXAMPLES[1], {"recipe": []}),
        (EXAMPLES[9], {"what": "elsewhere"}),
        (EXAMPLES[10], {"slot": -1}),
        (EXAMPLES[10], {"slot": 16}),
        (EXAMPLES[11], {"slot": 2**31}),
        (EXAMPLES[13], {"slot": True}),
    ],
    ids=str,
)
def test_a_value_out_of_range_or_of_another_type_is_refused_and_named(message, changes):
    values = {each.name: getattr(message, each.name) for each in dataclasses.fields(message)} | changes
    reason = refused(frame(message.KIND, values))
    assert reason is not None
    assert next(iter(changes)) in reason
    assert reason.isprintable()
    assert len(reason) < 300


@pytest.mark.parametrize("text", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
def test_a_number_that_is_not_finite_is_refused_in_a_header(text):
    header = encode(GRADIENT)[PREFIX_BYTES:].replace(b'"work_seconds":0.5', b'"work_seconds":' + text)
    assert text in header
    assert refused(frame(Gradient.KIND, header))


@pytest.mark.parametrize("protocol", [0, 1, 2, 10**30, "3", None, [3], "a\nb"])
def test_another_protocol_is_told_in_one_line_whatever_else_has_changed_in_it(protocol):
    reason = refused(frame(Hello.KIND, {"protocol": protocol, "unheard": "of"}))
    assert "speaks protocol" in reason
    assert f"this one speaks {PROTOCOL}" in reason
    assert reason.isprintable()


def test_names_that_a_message_does_not_have_are_told_in_one_line():
    assert refused(frame(Beat.KIND, {"a\nb\ud800": 1})).isprintable()


@pytest.mark.parametrize("depth", [10, 400, 900, 990, 1000, 5000, 30_000])
def test_json_within_json_within_json_is_refused_however_deep(depth):
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        nested = opening * depth + b"1" + closing * depth
        if len(nested) < MOST_HEADER_BYTES:
            assert refused(frame(Beat.KIND, b'{"progress":' + nested + b"}"))
            assert refused(frame(Hello.KIND, b'{"protocol":' + nested + b"}"))


def test_a_header_or_a_body_may_not_be_longer_than_its_frame_or_than_any():
    assert refused(struct.pack("<BII", Beat.KIND, 2**32 - 1, 0) + b"{}")
    assert refused(frame(Beat.KIND, b" " * MOST_HEADER_BYTES + b"{}"))
    assert "at most" in refused(struct.pack("<BII", Chunk.KIND, 0, MOST_BODY_BYTES + 1))
    assert "says 10 bytes (it has 9)" in refused(struct.pack("<BII", Chunk.KIND, 0, 1))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_only_what_carries_a_vector_has_a_body(message):
    reason = refused(encode(message, b"body"))
    assert (reason is None) == isinstance(message, Model | Gradient | Chunk)
    assert reason is None or "has no body" in reason


@pytest.mark.parametrize("size", range(PREFIX_BYTES))
def test_less_than_a_prefix_is_refused(size):
    assert refused(encode(Beat(progress=0))[:size]) == f"a message has at least 9 bytes (this one has {size})"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "it speaks gRPC, as paceline did before: install the same paceline on both",
        ),
        (
            b"\x00\x00\x18\x04\x00\x00\x00\x00\x00\x00\x04\x00@\x00\x00",  # how a server answers
            "it speaks gRPC, as paceline did before: install the same paceline on both",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "it speaks TLS, and this side has no keys"),
        (b"GET / HTTP/1.1\r\n\r\n", "it does not speak paceline"),
    ],
)
def test_whoever_speaks_another_protocol_is_told_which(said, reason):
    with pytest.raises(ProtocolError, match=re.escape(reason)):
        parse_prefix(said[:PREFIX_BYTES])


def test_a_number_with_very_many_digits_is_refused_and_not_told_in_full():
    for digits in (400, 4000, 60_000):
        assert len(refused(frame(Beat.KIND, b'{"progress":' + b"9" * digits + b"}"))) < 300


def test_decoding_costs_no_more_memory_than_a_few_headers_whatever_a_frame_says():
    worst = [
        struct.pack("<BII", kind, *sizes) + bytes(1000)
        for kind in KINDS
        for claim in (2**32 - 1, 2**31, 64 * 1024, 900)
        for sizes in ((claim, 0), (0, claim), (claim, claim))
    ]
    worst += [frame(Beat.KIND, b"[" * 60_000), frame(Beat.KIND, b"[" + b"{}," * 20_000 + b"{}]")]
    worst += [frame(Chunk.KIND, b"", bytes(2**24))]
    tracemalloc.start()
    try:
        for data in worst:
            refused(data)
        assert tracemalloc.get_traced_memory()[1] < 64 * MOST_HEADER_BYTES
    finally:
        tracemalloc.stop()
