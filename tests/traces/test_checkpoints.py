"""Checkpoints: bit for bit or refused; the one before stays until the new one is whole; torn, killed, full disks."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from paceline import files
from paceline.traces.checkpoints import (
    Checkpoint,
    CheckpointError,
    CheckpointWriteError,
    Snapshot,
    read_checkpoint,
    read_newest,
    write_checkpoint,
)
from tests import warm

# Where fsync costs nothing, if there is such a place: a killed process loses nothing that it has written.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
FILES = ("tensors.safetensors", "state.json", "manifest.json")
quick = settings(deadline=None, max_examples=25, derandomize=True)


def made(version, *, numbers=8):
    """A checkpoint whose every part tells its version."""
    return Checkpoint(version=version, tensors={"w": torch.full((numbers,), float(version))}, state={"at": version})


def newest_version(folder):
    """The version of the newest checkpoint, which must be whole and of a piece; none may be refused."""
    newest, refused = read_newest(folder)
    assert refused == []
    if newest is None:
        return None
    assert newest.state == {"at": newest.version}
    assert newest.tensors["w"].unique().tolist() == [newest.version]
    return newest.version


@pytest.fixture
def in_memory():
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


def names(folder):
    return sorted(os.listdir(folder))


def bits(tensor):
    packed = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return tensor.shape, tensor.dtype, bytes(packed.flatten().view(torch.uint8).tolist())


# -- round trips ------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    """Any bits (NaNs of every kind) in any layout: whole, transposed, every other one, repeated without memory."""
    dtype, shape = draw(st.sampled_from(DTYPES)), torch.Size(draw(st.lists(st.integers(0, 3), max_size=3)))
    source = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    raw = torch.randint(256, (2 * 27 * dtype.itemsize,), dtype=torch.uint8, generator=source)
    flat = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    every = draw(st.sampled_from([1, 2]))
    tensor = flat[: every * shape.numel() : every].view(shape)
    layout = draw(st.sampled_from(["plain", "transposed", "expanded"]))
    if layout == "expanded":
        return tensor.expand(2, *shape)
    return tensor.movedim(0, -1) if layout == "transposed" and shape else tensor


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
states = st.dictionaries(st.text(), st.recursive(plain, lambda v: st.lists(v) | st.dictionaries(st.text(), v)))


def exactly(value):
    """A value with its types, the bits of its floats and the order of its keys: 1 is not 1.0, nor 0.0 -0.0."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, dict):
        return [(key, exactly(inner)) for key, inner in value.items()]
    return [exactly(inner) for inner in value] if isinstance(value, list) else (type(value), value)


@quick
@given(held=st.dictionaries(st.text(st.characters(codec="utf-8")), tensors(), max_size=4), state=states)
@example(held={}, state={"smallest": 5e-324, "zero": -0.0, "third": 1 / 3, "large": 2**80, "text": "\ud800"})
def test_what_is_written_is_read_back_bit_for_bit(held, state):
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:  # hypothesis takes no fixture of one test for many
        path = write_checkpoint(Path(folder), Checkpoint(version=3, tensors=held, state=state))
        found = read_checkpoint(path)
    assert found.version == 3
    assert exactly(found.state) == exactly(state)
    assert [(name, bits(t)) for name, t in found.tensors.items()] == [(name, bits(t)) for name, t in held.items()]


def test_views_of_one_memory_are_each_stored_whole(tmp_path):
    grid = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    held = {"z": grid, "same": grid, "row": grid[1], "column": grid[:, 2], "turned": grid.T, "one": grid[0, 0]}
    found = read_checkpoint(write_checkpoint(tmp_path, Checkpoint(version=0, tensors=held, state={}))).tensors
    assert {name: bits(t) for name, t in found.items()} == {name: bits(t.detach()) for name, t in held.items()}
    assert list(found) == list(held)  # safetensors alone would sort them
    found["z"].zero_()
    assert found["row"].tolist() == [4, 5, 6, 7]


NOT_STORED = {
    "state\\['lrs'\\]\\[1\\] is nan": {"state": {"lrs": [0.1, float("nan")]}},
    "state\\['pair'\\] is a tuple": {"state": {"pair": (1, 2)}},
    "has the key 3": {"state": {"rounds": {3: 1}}},
    "state cannot be stored": {"state": {"large": 10**5000}},
    "tensors\\['w'\\] is a list": {"tensors": {"w": [1.0]}},
    "tensors\\['__metadata__'\\]": {"tensors": {"__metadata__": torch.zeros(1)}},
    "tensors\\['w'\\].*sparse": {"tensors": {"w": torch.eye(2).to_sparse()}},
    "tensors\\['w'\\].*complex128": {"tensors": {"w": torch.zeros(2, dtype=torch.complex128)}},
    "version .* not -1": {"version": -1},
}


@pytest.mark.parametrize("why", NOT_STORED)
def test_what_would_not_come_back_the_same_is_refused_before_anything_is_written(tmp_path, why):
    with pytest.raises(CheckpointError, match=why):
        write_checkpoint(tmp_path, Checkpoint(**({"version": 1, "tensors": {}, "state": {}} | NOT_STORED[why])))
    assert names(tmp_path) == []


# -- which stay -------------------------------------------------------------------------------------------------------


def test_the_newest_stay_and_newer_ones_than_the_one_written_are_left_alone(tmp_path):
    for version in (100, 120, 140, 160):
        write_checkpoint(tmp_path, made(version), keep=3)
    assert names(tmp_path) == [f"checkpoint-00000{version}" for version in (120, 140, 160)]
    write_checkpoint(tmp_path, made(150), keep=1)
    assert names(tmp_path) == [f"checkpoint-00000{version}" for version in (150, 160)]
    assert newest_version(tmp_path) == 160
    with pytest.raises(ValueError, match="keep is 0"):
        write_checkpoint(tmp_path, made(200), keep=0)


def test_the_same_version_again_replaces_the_one_there_even_a_torn_one(tmp_path):
    path = write_checkpoint(tmp_path, Checkpoint(version=7, tensors={}, state={"first": True}))
    (path / "manifest.json").unlink()
    assert write_checkpoint(tmp_path, made(7)) == path
    assert newest_version(tmp_path) == 7
    assert names(tmp_path) == [path.name]


def test_no_folder_is_no_checkpoint_and_a_file_for_a_folder_is_an_error(tmp_path):
    assert read_newest(tmp_path / "none") == (None, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot look for checkpoints in .*file: Not a directory"):
        read_newest(tmp_path / "file")
    for folder in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(
            CheckpointWriteError, match=r"cannot write checkpoint 3 to .*: Not a directory; there is none"
        ):
            write_checkpoint(folder, made(3))


# -- torn and altered -------------------------------------------------------------------------------------------------


@pytest.fixture
def two(in_memory):
    """The folder of checkpoints 100 and 120."""
    write_checkpoint(in_memory, made(100))
    write_checkpoint(in_memory, made(120))
    return in_memory


def assert_120_is_refused(folder, because):
    newest, (line,) = read_newest(folder)
    assert newest.version == 100
    assert line.startswith("checkpoint 00000120 is refused: ")
    assert because in line


def test_an_altered_checkpoint_is_told_with_its_path_when_it_is_asked_for(two):
    path = two / "checkpoint-00000120"
    (path / "state.json").write_text('{"at":121}')
    assert_120_is_refused(two, "state.json was altered (sha256 differs)")
    with pytest.raises(CheckpointError) as refused:
        read_checkpoint(path)
    assert str(refused.value) == f"{path} is refused: state.json was altered (sha256 differs)"


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_anywhere_or_gone_or_longer_is_told_by_its_name(two, name):
    path = two / "checkpoint-00000120" / name
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert_120_is_refused(two, name)
    path.write_bytes(whole + b"\n")
    assert_120_is_refused(two, name)
    path.unlink()
    assert_120_is_refused(two, f"{name} is missing")
    path.write_bytes(whole)
    assert newest_version(two) == 120


@pytest.mark.parametrize("name", FILES)
def test_one_other_byte_anywhere_is_told_by_its_files_name(two, name):
    path, rng = two / "checkpoint-00000120" / name, random.Random(0)
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        for other in {byte ^ 0x20, rng.choice(b" 0e\t")} - {byte}:  # another case, and what JSON might not mind
            path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            assert_120_is_refused(two, name)


def forged(path, **changes):
    """Another manifest with a seal that is right."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    (path / "manifest.json").write_bytes(files._sealed(manifest | changes))


SUMS = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"about": {"version": 121, "tensors": ["w"]}}, "manifest.json says version 121, not 120"),
        ({"about": {"version": 120, "tensors": []}}, "tensors.safetensors holds ['w']"),
        ({"about": {"version": 120, "tensors": ["w", "v"]}}, "tensors.safetensors is not what manifest.json says"),
        ({"about": {"version": 120}}, "tensors.safetensors is not what manifest.json says"),
        ({"about": 3}, "manifest.json lacks its parts"),
        ({"format": 2}, "manifest.json is not of format 1"),
        ({"files": {"../checkpoint-00000100/state.json": SUMS}}, "manifest.json names ['../checkpoint"),
        ({"files": {"tensors.safetensors": SUMS, "state.json": SUMS, "/etc/passwd": SUMS}}, "manifest.json names"),
        ({"files": {"tensors.safetensors": SUMS, "state.json": {"size": 1.0}}}, "gives 'state.json' no size"),
        ({"files": {"tensors.safetensors": SUMS, "state.json": SUMS}}, "tensors.safetensors has"),
    ],
)
def test_a_forged_manifest_is_refused(two, changes, because):
    forged(two / "checkpoint-00000120", **changes)
    assert_120_is_refused(two, because)


@pytest.mark.parametrize("name", FILES)
def test_links_pipes_and_folders_are_refused_for_files(two, name):
    path = two / "checkpoint-00000120" / name
    path.rename(two / name)
    for put in (lambda: path.symlink_to(two / name), lambda: os.mkfifo(path), path.mkdir):
        put()
        assert_120_is_refused(two, f"{name} is not a plain file")
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_linked_checkpoint_and_one_of_another_name_are_refused(two):
    aside = two / "elsewhere" / "checkpoint-00000120"
    aside.parent.mkdir()
    (two / "checkpoint-00000120").rename(aside)
    (two / "checkpoint-00000120").symlink_to(aside)
    assert_120_is_refused(two, "checkpoint-00000120 is a link")
    with pytest.raises(CheckpointError, match="no checkpoint: those are named like"):
        read_checkpoint(two)
    write_checkpoint(two, made(120))
    assert newest_version(two) == 120
    assert read_checkpoint(aside).version == 120  # replaced, not followed


def test_too_large_a_file_is_not_read(two, monkeypatch):
    os.truncate(two / "checkpoint-00000120" / "manifest.json", 2**40)  # sparse: it takes no room
    assert_120_is_refused(two, "manifest.json has 1099511627776 bytes; at most")
    monkeypatch.setattr("paceline.traces.checkpoints.MOST_STATE_BYTES", 5)
    with pytest.raises(CheckpointError, match=r"state.json would have 10 bytes; at most 5"):
        write_checkpoint(two, made(140))


# -- killed -----------------------------------------------------------------------------------------------------------

# One process imports torch and has children that write; "dead" comes after all that a child has said.
WRITERS = """
import os, signal, sys
from pathlib import Path
import torch
from paceline.traces.checkpoints import Checkpoint, write_checkpoint

def say(word):
    os.write(1, f"{word}\\n".encode())  # in one piece: print may be killed between a word and the end of its line

def write(folder, version):
    numbers = torch.full((20_000,), float(version))
    write_checkpoint(folder, Checkpoint(version=version, tensors={"w": numbers}, state={"at": version}), keep=1)
    say(version)

def kill_before(number):
    left = number
    def count(event, arguments):
        nonlocal left
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)

def child(work):
    if (pid := os.fork()) == 0:
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1]
"""
AT_EVERY_STAGE = """
def steps(number):
    kill_before(number)
    for version in (1, 2, 2, 3):
        write(Path(sys.argv[1]) / f"{number}", version)

write(Path(sys.argv[1]) / "before", 0)  # what is imported at first use is no deed of a write
say("dead")
number = 0
while child(lambda: steps(number)) == signal.SIGKILL:
    say("dead")
    number += 1
"""
FOR_EVER = """
def steps(first):
    say(os.getpid())
    for version in range(2 * first, 10**8):
        write(Path(sys.argv[1]), version // 2)  # each twice: the second replaces the first

for line in sys.stdin:
    child(lambda: steps(int(line)))
    say("dead")
"""


@contextmanager
def writers(script, folder):
    """The process, in a group of its own with a minute to live: nothing waits for ever for a child's words."""
    command = [sys.executable, "-c", WRITERS + script, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with warm.Popen(command, start_new_session=True, **pipes) as process:
        deadline = threading.Timer(60, os.killpg, (process.pid, signal.SIGKILL))
        deadline.start()
        try:
            yield process
        finally:
            deadline.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def test_killed_before_any_of_its_deeds_it_leaves_a_whole_checkpoint_and_the_next_write_clears_up(in_memory):
    with writers(AT_EVERY_STAGE, in_memory) as process:
        _, *lives = process.stdout.read().split("dead\n")
        assert process.wait() == 0
    assert len(lives) > 40  # each is one deed further: open, mkdir, rename, remove
    for number, said in enumerate(lives):
        folder, finished = in_memory / f"{number}", [int(version) for version in said.split()]
        found = newest_version(folder)
        assert all(read_checkpoint(path) for path in folder.glob("checkpoint-*"))  # not only the newest
        assert (found or 0) in (max(finished, default=0), max(finished, default=0) + 1), f"killed before deed {number}"
        write_checkpoint(folder, made(9), keep=2)
        assert names(folder) == [f"checkpoint-{version:08d}" for version in (found, 9) if version]


def test_killed_from_outside_at_any_moment_it_leaves_one_no_older_than_the_last_it_told(in_memory):
    rng, last = random.Random(0), 0
    with writers(FOR_EVER, in_memory) as process:
        for _ in range(25):
            print(last + 1, file=process.stdin, flush=True)
            pid = int(process.stdout.readline())
            told = [int(process.stdout.readline()) for _ in range(rng.randint(0, 3))]
            moment = time.monotonic() + rng.uniform(0, 0.002)  # about one write; whatever the moment, the law holds
            while time.monotonic() < moment:
                pass
            os.kill(pid, signal.SIGKILL)
            told += [int(line) for line in takewhile(lambda line: line != "dead\n", process.stdout)]
            found = newest_version(in_memory)
            assert (found or 0) >= max(told, default=last)
            last = found or 0
    assert last > 0


def test_every_file_is_on_the_disk_before_the_rename_and_the_rename_before_anything_is_removed(two, monkeypatch):
    deeds, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (fsync(fd), deeds.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    )
    monkeypatch.setattr(os, "rename", lambda old, new: (rename(old, new), deeds.append((old.name, new.name))))
    for version in (120, 140):
        write_checkpoint(two, made(version), keep=1)
        final, writing = f"checkpoint-00000{version}", f".writing-checkpoint-00000{version}-{os.getpid()}"
        aside = f".replaced-{final}"
        synced, replaced = [*FILES, writing], [(final, aside)] if version == 120 else []
        removed = [(aside, f".writing-{aside}")] if version == 120 else []
        old = f"checkpoint-00000{version - 20}"
        assert deeds == [*synced, *replaced, (writing, final), two.name, *removed, (old, f".writing-{old}")]
        deeds.clear()


# -- disks ------------------------------------------------------------------------------------------------------------


@contextmanager
def mounted(folder, options):
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("a disk of its own needs root to mount it")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(path, pages):
    """A file of so many pages, or as many as the disk has room for."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        for _ in range(pages):
            file.write(bytes(4096))


def test_on_a_full_disk_the_one_before_stays_however_little_is_missing(tmp_path):
    with mounted(tmp_path / "disk", "size=256k") as disk:
        folder, pages = disk / "run", 64
        write_checkpoint(folder, made(100))
        larger = made(120, numbers=9000)  # ten pages, and three folders and files
        text = f"cannot write checkpoint 120 to {folder}: No space left on device; the one before (100) stays"
        while pages > 40:
            fill(disk / "ballast", pages)
            try:
                write_checkpoint(folder, larger)
                break
            except CheckpointWriteError as error:
                told = str(error)
            assert told == text
            assert newest_version(folder) == 100
            assert names(folder) == ["checkpoint-00000100"]
            pages -= 1
        assert 40 < pages < 55  # it failed for want of a page at each of its parts, then found room
        assert newest_version(folder) == 120


def test_what_a_crash_left_on_a_full_disk_makes_room_for_the_next(tmp_path):
    with mounted(tmp_path / "disk", "size=256k") as disk:
        write_checkpoint(disk, made(100))
        (disk / ".writing-checkpoint-00000120-4711").mkdir()
        fill(disk / ".writing-checkpoint-00000120-4711" / "tensors.safetensors", pages=64)
        write_checkpoint(disk, made(120))
        assert newest_version(disk) == 120


def test_a_read_only_folder_is_told_and_can_be_read(tmp_path):
    with mounted(tmp_path / "disk", "size=256k") as disk:
        write_checkpoint(disk, made(100))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(CheckpointWriteError, match=r"Read-only file system; the one before \(100\) stays"):
            write_checkpoint(disk, made(120))
        assert newest_version(disk) == 100


# -- tensors that are in use while they are written ------------------------------------------------------------------


@pytest.mark.parametrize("read_before", [0, 1, 3, 100])
def test_a_snapshot_holds_the_tensors_as_they_were_however_far_it_was_read_when_they_changed(tmp_path, read_before):
    held = {"a": torch.arange(3_000_000, dtype=torch.float32), "b": torch.ones(7), "c": torch.zeros(2, 0)}
    before = {name: tensor.clone() for name, tensor in held.items()}
    snapshot = Snapshot(held)
    pieces = snapshot.pieces()
    begin = [piece for _, piece in zip(range(read_before), pieces, strict=False)]
    snapshot.settle(0.0)
    for tensor in held.values():
        tensor.fill_(-1.0)
    found = load(b"".join([*begin, *pieces]))
    assert snapshot.read.is_set()
    assert {name: torch.equal(found[name], before[name]) for name in before} == dict.fromkeys(before, True)


def test_a_snapshot_that_is_read_in_time_copies_nothing():
    held = {"a": torch.ones(1000)}
    snapshot = Snapshot(held)
    reader = threading.Timer(0.05, lambda: list(snapshot.pieces()))
    reader.start()
    snapshot.settle(30.0)
    assert snapshot.read.is_set()
    reader.join()
