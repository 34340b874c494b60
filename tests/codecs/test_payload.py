"""What a payload says of itself: read back as it was written, and refused in one line where it cannot be so."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.codecs.payload import (  # fmt: skip
    HEADER_BYTES,
    MOST_CLAIMED,
    MOST_ELEMENTS,
    Header,
    PayloadError,
    check_claim,
    open_payload,
    output_vector,
    read_header,
)

numbers = st.integers(0, 2**32 - 1)


@given(codec=st.integers(0, 255), elements=numbers, first=numbers, second=numbers, body_bytes=st.integers(0, 40))
def test_a_header_is_read_as_it_was_written(codec, elements, first, second, body_bytes):
    header = Header(codec=codec, elements=elements, first=first, second=second)
    payload = header.payload(body_bytes)
    assert payload.numel() == HEADER_BYTES + body_bytes
    assert read_header(payload) == header
    found, body = open_payload(payload, codec, elements)
    assert found == header
    assert body.numel() == body_bytes


def test_the_header_is_little_endian_wherever_it_is_written():
    header = Header(codec=4, elements=0x01020304, first=0x05060708, second=0x090A0B0C).payload(0)
    assert bytes(header.tolist()) == b"pl\x01\x04\x04\x03\x02\x01\x08\x07\x06\x05\x0c\x0b\x0a\x09"


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (torch.zeros(0, dtype=torch.uint8), "a payload has at least 16 bytes (this one has 0)"),
        (torch.zeros(15, dtype=torch.uint8), "a payload has at least 16 bytes (this one has 15)"),
        (torch.zeros(16, dtype=torch.uint8), r"a payload begins with b'pl' (this one with b'\x00\x00')"),
        (torch.tensor([*b"pl\x02", *range(13)], dtype=torch.uint8), "of version 2, and this paceline reads version 1"),
        (torch.tensor([*b"pl\x01\x09", *range(12)], dtype=torch.uint8), "codec number 9, and this codec has number 1"),
        (torch.zeros(16), "a payload is a flat uint8 tensor (this one is torch.float32, 1-dimensional)"),
        (torch.zeros(4, 4, dtype=torch.uint8), "a payload is a flat uint8 tensor (this one is torch.uint8, 2-dim"),
    ],
)
def test_what_is_no_payload_is_refused_with_what_it_is(payload, told):
    with pytest.raises(PayloadError, match=re.escape(told)):
        open_payload(payload, codec=1, expected_length=None)


def test_a_vector_with_more_elements_than_the_header_can_say_is_refused_before_memory_is_asked_for():
    with pytest.raises(ValueError, match=re.escape("at most 4,294,967,295 elements (this vector has 4,294,967,296)")):
        Header(codec=1, elements=MOST_ELEMENTS + 1).payload(2**60)


@given(offset=st.integers(0, 24), shift=st.integers(0, 8))
def test_words_can_be_read_from_a_body_wherever_the_payload_lies(offset, shift):
    original = Header(codec=1, elements=2).payload(16)
    original[HEADER_BYTES:] = torch.arange(16)
    memory = torch.frombuffer(bytearray(80), dtype=torch.uint8, offset=shift)
    _, body = open_payload(memory[offset : offset + 32].copy_(original), 1, 2)
    assert body.view(torch.float64).view(torch.uint8).tolist() == list(range(16))


def test_long_vectors_out_of_few_bytes_must_be_expected():
    check_claim(MOST_CLAIMED, None)
    check_claim(MOST_ELEMENTS, MOST_ELEMENTS)
    with pytest.raises(PayloadError, match="give expected_length to allow it"):
        check_claim(MOST_CLAIMED + 1, None)


def test_a_vector_goes_where_it_is_told_to_if_it_fits():
    out = torch.zeros(3)
    assert output_vector(3, out, out.device) is out
    assert output_vector(3, None, out.device).shape == (3,)
    with pytest.raises(PayloadError, match=re.escape("a vector of 3 elements was expected (this one has 4)")):
        output_vector(4, out, out.device)
    for unfit in (torch.zeros(3, dtype=torch.float64), torch.zeros(1, 3), torch.zeros(6)[::2]):
        with pytest.raises(ValueError, match="out must be a flat float32 tensor"):
            output_vector(3, unfit, out.device)
