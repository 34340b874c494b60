"""Lines through the store: what comes out is what went in, and a reader that sleeps holds up nobody."""

from __future__ import annotations

import threading

import torch.distributed as dist

from paceline.drivers.watching import relay
from paceline.traces.step_times import BucketsMade, times_line, times_path
from tests.waiting import until


def lines(count):
    return [times_line(BucketsMade(step=step, bytes=(step,))) for step in range(count)]


def test_lines_arrive_in_order_and_what_is_no_line_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "SECONDS", 0.01)
    monkeypatch.setattr(relay, "CHUNK_BYTES", 500)
    store = dist.HashStore()
    (tmp_path / "times").mkdir()
    receiver = relay.LineReceiver(store, [1, 2], tmp_path)
    senders = {rank: relay.LineSender(store, rank) for rank in (1, 2)}
    sent = lines(1000)
    for line in sent:
        for sender in senders.values():
            sender.send(line)
    senders[2].send(b'{"kind":"forged","crc":"00000000"}\n')
    for sender in senders.values():
        sender.close()
    receiver.close()
    for rank in senders:
        assert times_path(tmp_path, "rank", rank).read_bytes() == b"".join(sent)
    assert store.num_keys() == 0


def test_without_a_reader_the_store_and_the_sender_hold_a_bounded_part_and_closing_ends(monkeypatch):
    monkeypatch.setattr(relay, "SECONDS", 0.01)
    monkeypatch.setattr(relay, "CHUNK_BYTES", 200)
    monkeypatch.setattr(relay, "HELD_BYTES", 10_000)
    monkeypatch.setattr(relay, "CLOSE_SECONDS", 0.2)
    store = dist.HashStore()
    sender = relay.LineSender(store, 1)
    for line in lines(5000):
        sender.send(line)
    until(lambda: store.num_keys() >= relay.CHUNKS, "the store is full")
    sender.close()
    assert store.num_keys() <= relay.CHUNKS + 1  # and the end
    assert sender.lost > 1000
    assert "paceline-watch-relay" not in [thread.name for thread in threading.enumerate()]


def test_rank_0_does_not_wait_for_a_rank_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "SECONDS", 0.01)
    monkeypatch.setattr(relay, "CLOSE_SECONDS", 0.2)
    (tmp_path / "times").mkdir()
    store = dist.HashStore()
    store.set("1/0", lines(1)[0])
    receiver = relay.LineReceiver(store, [1], tmp_path)
    receiver.close()
    assert times_path(tmp_path, "rank", 1).read_bytes() == lines(1)[0]
    assert not receiver._thread.is_alive()


def test_half_a_line_in_a_relayed_file_is_cut_off_before_the_next_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(relay, "SECONDS", 0.01)
    monkeypatch.setattr(relay, "CLOSE_SECONDS", 0.2)
    path = times_path(tmp_path, "rank", 1)
    path.parent.mkdir()
    first, second, third = lines(3)
    path.write_bytes(first + second[:9])  # rank 0 was killed, and is there again
    store = dist.HashStore()
    store.set("1/0", third)
    relay.LineReceiver(store, [1], tmp_path).close()
    assert path.read_bytes() == first + third
