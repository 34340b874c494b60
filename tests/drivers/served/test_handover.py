"""Shared memory between a server and the workers on its machine: equal to the connection, sealed, and only for them."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import gc
import mmap
import os
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import paceline
from paceline.drivers.served import handover
from paceline.drivers.served.coordinator import ReceivedGradient
from paceline.drivers.served.handover import (
    GradientSlots,
    HandoverServer,
    SharedMemory,
    Slot,
    fetch_slots,
    mapped,
)
from paceline.drivers.served.messages import ProtocolError, Sizes
from paceline.events import Share, Step
from paceline.traces.journal import StepRecord
from paceline.traces.journal_files import read_journal
from paceline.training import TrainState
from tests.drivers.served.test_messages import GRADIENT
from tests.waiting import until

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is Linux's")

SIZES = Sizes(most_payload_bytes=40, buffer_bytes=8)
WHOLE = dataclasses.replace(GRADIENT, payload_bytes=40, buffer_bytes=8)


# -- the memory ----------------------------------------------------------------------------------------------------


def test_a_models_memory_cannot_be_written_by_anybody_else_whatever_they_try():
    memory = SharedMemory(4096, read_only=True)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.file, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.pwrite(memory.file, b"x", 0)
    again = os.open(f"/proc/self/fd/{memory.file}", os.O_RDWR)  # the same user may open it anew
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(again)
    view = mapped(memory.file, 4096, writable=False)
    memory.bytes.fill_(7)  # its owner can
    assert view.sum() == 7 * 4096


@pytest.mark.parametrize("read_only", [True, False])
def test_memory_can_be_made_neither_shorter_nor_longer_nor_unsealed(read_only):
    memory = SharedMemory(4096, read_only=read_only)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.file, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory.file, fcntl.F_ADD_SEALS, 0x8)


def test_a_worker_maps_nothing_that_could_be_made_shorter_and_nothing_of_another_size(tmp_path):
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    plain = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(plain, 4096)
    sealed = SharedMemory(4096, read_only=False)
    for file, size in ((unsealed, 4096), (plain, 4096), (sealed.file, 4095), (sealed.file, 2**40)):
        with pytest.raises((ValueError, OSError)):
            mapped(file, size, writable=False)
    os.close(unsealed)
    os.close(plain)


@given(
    payload=st.binary(min_size=1, max_size=40),
    buffers=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=2),
)
@settings(max_examples=30)
def test_a_body_is_read_as_it_was_written(payload, buffers):
    slot = Slot(torch.zeros(48, dtype=torch.uint8), SIZES)
    vector = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    slot.fill(vector, torch.tensor(buffers))
    slot.begin(dataclasses.replace(WHOLE, payload_bytes=len(payload)))
    assert torch.equal(slot.payload, vector)
    assert slot.buffers.tolist() == buffers


@pytest.mark.parametrize(
    "changes", [{"payload_bytes": 0}, {"payload_bytes": 41}, {"buffer_bytes": 4}, {"buffer_bytes": 2**50}]
)
def test_a_body_of_sizes_that_are_not_the_models_is_refused(changes):
    slots = GradientSlots(SIZES)
    with pytest.raises(ProtocolError, match="between 1 and 40 bytes"):
        slots.take(dataclasses.replace(WHOLE, **changes), 0)


def test_a_slot_holds_one_gradient_at_a_time():
    slots = GradientSlots(SIZES)
    slots.take(WHOLE, 1)
    for number in (1, 2, 15):
        with pytest.raises(ProtocolError, match=f"slot {number} cannot hold"):
            slots.take(WHOLE, number)
    slots.release(1)
    slots.take(WHOLE, 1)


def test_the_second_slots_memory_goes_back_to_the_system():
    slots = GradientSlots(Sizes(most_payload_bytes=2**20, buffer_bytes=0))
    message = dataclasses.replace(WHOLE, payload_bytes=2**20, buffer_bytes=0)
    for number in range(2):
        slots.take(message, number).memory.fill_(1)
        slots.release(number)
    allocated = [os.fstat(file).st_blocks * 512 for file in slots.files]
    assert allocated[0] >= 2**20
    assert allocated[1] == 0


# -- who gets it ---------------------------------------------------------------------------------------------------


def asked(ask):
    """What comes of `ask(invitation)` in a thread while a server of slots listens; whether slots were given."""

    async def run():
        server = HandoverServer(SIZES, 48, lambda task: None)
        try:
            invitation, given_slots = server.invite()
            found = await asyncio.to_thread(ask, invitation)
            await asyncio.sleep(0.05)
            return found, given_slots.done()
        finally:
            server.close()

    return asyncio.run(run())


def fetch(invitation):
    return fetch_slots(invitation, models=Sizes(most_payload_bytes=40, buffer_bytes=8), gradients=SIZES)


def test_a_worker_with_the_token_gets_the_slots_and_only_once():
    def twice(invitation):
        return fetch(invitation), fetch(invitation)

    (first, second), given_slots = asked(twice)
    assert given_slots
    assert first is not None
    assert len(first.models) == len(first.gradients) == 2
    assert second is None


@pytest.mark.parametrize("token", ["", "0" * 32, "x" * 5, "f" * 1000])
def test_whoever_does_not_know_the_token_gets_nothing(monkeypatch, token):
    monkeypatch.setattr(handover, "ANSWER_SECONDS", 0.3)
    found, given_slots = asked(lambda invitation: fetch(f"{invitation.split()[0]} {token}"))
    assert (found, given_slots) == (None, False)


def test_another_user_gets_nothing(monkeypatch):
    monkeypatch.setattr(handover.os, "geteuid", lambda: os.getuid() + 1)
    assert asked(fetch) == (None, False)


def test_silent_peers_at_the_socket_keep_nobody_out_for_long(monkeypatch):
    monkeypatch.setattr(handover, "ANSWER_SECONDS", 0.3)

    def ask(invitation):
        name = f"\0{invitation.split()[0]}"
        silent = [socket.socket(socket.AF_UNIX) for _ in range(handover.MOST_ASKING)]
        for each in silent:
            each.connect(name)
        found = until(lambda: fetch(invitation), "the shared memory")
        for each in silent:
            each.close()
        return found

    _, given_slots = asked(ask)
    assert given_slots


@pytest.mark.parametrize("invitation", ["", "elsewhere token", "paceline-nobody " + "0" * 32, "paceline-x"])
def test_a_worker_elsewhere_goes_without(invitation):
    assert fetch(invitation) is None


# -- whole runs ----------------------------------------------------------------------------------------------------


def trained(folder, *, local, codec, rounds=6, workers=3, spoil=lambda worker, draw: None):
    """The weights, fingerprints and bytes of a run whose workers are threads; `full`, so that its order is its own."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 1))
    errors = []

    def work(port, number):
        generator = torch.Generator().manual_seed(number)
        mine = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 1))
        try:
            with paceline.Worker(f"127.0.0.1:{port}", mine, wish=number, local=local) as worker:
                while worker.running():
                    batch = torch.randn(8, 40, generator=generator)
                    for part in worker.blocks(batch):
                        (mine(part) ** 2).mean().backward()
                    spoil(worker, worker.draw)
                    worker.send()
        except Exception as error:
            errors.append(error)

    threads = []

    def opened(port):
        for number in range(workers):
            threads.append(threading.Thread(target=work, args=(port, number), daemon=True))
            threads[-1].start()

    outcome = paceline.serve(
        model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), workers=workers, rounds=rounds,
        listen="127.0.0.1:0", codec=codec, out=folder, blocks=2, on_open=opened,
    )  # fmt: skip
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    steps = [r for r in read_journal(folder / "trace.jsonl").records if isinstance(r, StepRecord)]
    traffic = [sum(getattr(step, name) for step in steps) for name in ("sent_bytes", "received_bytes")]
    return outcome, errors, [step.fingerprint for step in steps], traffic


@pytest.mark.parametrize("codec", ["identity", "bfloat16", "qsgd levels=7", "one-bit"])
def test_shared_memory_and_the_connection_give_the_same_bits(tmp_path, codec):
    found, counted = {}, {}
    for local in (True, False):
        outcome, errors, found[local], counted[local] = trained(tmp_path / str(local), local=local, codec=codec)
        assert outcome.finished
        assert not errors
    assert found[True] == found[False]
    assert len(found[True]) == 6
    for shared, travelled in zip(counted[True], counted[False], strict=True):
        assert abs(shared - travelled) < 0.3 * travelled  # headers and beats differ, bodies count alike


def test_a_local_gradient_that_is_not_finite_is_refused_and_its_slot_is_used_again(tmp_path):
    def spoil(worker, draw):
        if draw == 2 and worker.number == 1:
            worker._held().gradient[0] = float("nan")

    outcome, errors, fingerprints, _ = trained(tmp_path / "run", local=True, codec="identity", spoil=spoil)
    assert outcome.finished
    assert not errors
    assert len(fingerprints) == 6


def test_a_gradient_that_is_changed_after_it_was_looked_at_never_comes_near_the_model():
    """Its worker can still write there: so what counts is the sum that was made of it."""
    model = nn.Linear(3, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = state.model.parameters.clone()
    memory = SharedMemory(16, read_only=False)
    vector = memory.bytes.view(torch.float32)
    received = ReceivedGradient(worker=0, message=WHOLE, vector=vector)
    assert received.finite
    mapped(memory.file, 16, writable=True).view(torch.float32)[2] = float("nan")
    assert received.finite  # nobody looks twice
    step = Step(version=0, fresh=(Share(worker=0, version=0, weight=1.0),))
    assert not state.take(step, lambda share: received.vector, [])
    assert torch.equal(state.model.parameters, before)


def memory_files():
    """The files without a name that this process holds, open or mapped."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:paceline")
        except OSError:
            continue
    return found


def test_workers_that_come_and_go_leave_no_memory_behind(tmp_path):
    """Without the garbage collector's help: an end's traceback kept the slots of its stream."""
    gc.collect()
    gc.disable()
    try:
        model, most = nn.Linear(50, 1), []

        def come_and_go(port):
            for _ in range(12):
                mine = nn.Linear(50, 1)
                with paceline.Worker(f"127.0.0.1:{port}", mine, wish=1) as worker:
                    worker.running()
                most.append(memory_files())
            with paceline.Worker(f"127.0.0.1:{port}", nn.Linear(50, 1), wish=0) as worker:
                while worker.running():
                    for part in worker.blocks(torch.ones(4, 50)):
                        (worker._held().module(part) ** 2).mean().backward()
                    worker.send()

        threads = []

        def opened(port):
            threads.append(threading.Thread(target=come_and_go, args=(port,), daemon=True))
            threads[0].start()

        paceline.serve(
            model, torch.optim.SGD(model.parameters(), lr=0.01), workers=1, rounds=3, listen="127.0.0.1:0",
            out=tmp_path / "run", on_open=opened,
        )  # fmt: skip
        threads[0].join(30)
        assert len(most) == 12
        assert most[-1] <= most[2] + 8  # two of each slot of the last ones that left
    finally:
        gc.enable()
