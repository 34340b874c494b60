"""Where a gradient that comes over a connection lies: a server of N workers needs the memory of N + 5 models."""

from __future__ import annotations

import asyncio

import pytest
import torch

import paceline
from paceline.codecs.naming import parse_codec
from paceline.drivers.served.messages import Gradient
from paceline.drivers.served.run import open_run
from paceline.drivers.served.settings import ServerSettings
from tests.drivers.served.test_messages import GRADIENT

ELEMENTS = 40 * 25 + 25 + 2 * 25  # of a linear layer and a normalisation
SPARE_BYTES = 1024  # for what is aligned


def opened(folder, codec):
    model = torch.nn.Sequential(torch.nn.Linear(40, 25), torch.nn.BatchNorm1d(25))
    settings = ServerSettings(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), schedule=None, strategy=paceline.Full(),
        rounds=1, workers=1, folder=folder / "run", codec=codec,
    )  # fmt: skip
    server = open_run(settings).server
    server._members[0] = None  # it keeps as many memories as it has workers
    return server


def received(server, vector, buffers):
    """A gradient as it arrives over a connection, and the memory that it came into."""
    payload, assembly = server.coordinator.codec.encode(vector), server.assembly()
    about = {name: getattr(GRADIENT, name) for name in ("version", "draw", "blocks_done", "blocks", "work_seconds")}
    message = Gradient(
        **about, held_seconds=0.0, samples=0, loss_mean=None, loss_variance=None, payload_bytes=payload.numel(),
        buffer_bytes=4 * buffers.numel(),
    )  # fmt: skip
    body = torch.cat([payload, buffers.view(torch.uint8)]).numpy().data
    assembly.begin(message)
    for start in range(0, len(body), 1000):
        part = body[start : start + 1000]
        assembly.place(len(part))[:] = part
        whole = assembly.added(len(part))
    assert whole
    return asyncio.run(server.decoded(0, message, assembly)), assembly, payload


@pytest.mark.parametrize("codec", ["identity", "bfloat16", "float16"])
def test_a_payload_of_floats_lies_at_the_end_of_its_room_and_is_decoded_in_place(codec, tmp_path):
    server, generator = opened(tmp_path, codec), torch.Generator().manual_seed(0)
    vector, buffers = torch.randn(ELEMENTS, generator=generator), torch.rand(server.sizes.buffer_bytes // 4)
    found, assembly, payload = received(server, vector, buffers)
    assert torch.equal(found.vector, parse_codec(codec).decode(payload, expected_length=ELEMENTS))
    assert torch.equal(found.buffer_changes, buffers)
    room = assembly.memory
    in_place = found.vector.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()
    assert in_place, "no second vector is made"
    assert room.numel() <= 4 * ELEMENTS + server.sizes.buffer_bytes + SPARE_BYTES, "room for one vector, and no more"
    end = assembly.payload.storage_offset() + assembly.payload.numel() + server.sizes.buffer_bytes
    assert room.numel() - SPARE_BYTES < end <= room.numel(), "so it is read before it is written over"
    found.release()
    assert server.assembly() is assembly, "and is used again"


def test_what_has_no_room_for_its_vector_is_decoded_into_one_that_is_used_again(tmp_path):
    server, vectors = opened(tmp_path, "qsgd"), set()
    for _ in range(3):
        found, assembly, _ = received(server, torch.ones(ELEMENTS), torch.zeros(server.sizes.buffer_bytes // 4))
        vectors.add(found.vector.data_ptr())
        assert assembly.memory.numel() < 4 * ELEMENTS
        found.release()
    assert len(vectors) == 1
