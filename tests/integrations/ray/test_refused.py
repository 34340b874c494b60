"""What `--on ray` refuses before a process is started, and the parts of a run that need no cluster."""

from __future__ import annotations

import os
import queue
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import paceline.ray
from paceline.drivers.served.keys import RunAuthority
from paceline.drivers.served.security import KeyFileError, read_side
from paceline.ray.mirror import CopyError, FolderCopy, FolderListing, listing_of, read_piece
from paceline.ray.run import Demands
from paceline.recipes import Recipe
from paceline.traces.journal import TRACE
from tests.integrations.ranks import ROOT
from tests.integrations.ray import cluster

WITHOUT_RAY = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "ray" else find(name, *more)
from paceline.cli import main
sys.exit(main(["train", "--on", "ray"]))
"""


def paceline_command(*arguments, folder):
    command = [sys.executable, "-m", "paceline", *arguments]
    return _run(command, folder)


def _run(command, folder):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strategy", "hpsgd"], "TorchTrainer"),
        (["--listen", "0.0.0.0:29400"], "--listen is for a server on this machine"),
        (["--data", "mnist", "--data-directory", "data"], "give a whole path"),
        (["--ray-cpus-per-worker", "-1"], "cpus_per_worker must be a number of at least 0"),
    ],
)
def test_the_command_refuses_before_it_connects(arguments, words, tmp_path):
    found = paceline_command("train", "--on", "ray", *arguments, folder=tmp_path)
    assert found.returncode == 2
    assert words in found.stderr
    assert "ray.init" not in found.stderr
    assert not list(tmp_path.iterdir())


def test_options_of_ray_without_ray_are_refused(tmp_path):
    found = paceline_command("train", "--ray-address", "10.0.0.7:6379", folder=tmp_path)
    assert found.returncode == 2
    assert "--ray-address is for --on ray" in found.stderr


def test_without_ray_the_command_says_how_to_install_it(tmp_path):
    found = _run([sys.executable, "-c", WITHOUT_RAY], tmp_path)
    assert found.returncode == 2
    assert "pip install 'paceline[ray]'" in found.stderr


def test_without_ray_a_script_is_told_as_for_every_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'paceline\[ray\]', and the same on every node") as told:
        paceline.ray.train(Recipe())
    assert isinstance(told.value, paceline.ray.RayMissingError)
    assert told.value.name == "ray"


def test_scripts_are_refused_as_commands_are():
    with pytest.raises(ValueError, match="TorchTrainer"):
        paceline.ray.train(Recipe().with_strategy("hpsgd"))
    with pytest.raises(TypeError, match="takes a Recipe"):
        paceline.ray.train("my.toml")
    with pytest.raises(ValueError, match="CPU is none: cpus_per_worker is for it"):
        Demands(resources_per_worker={"CPU": 1})


def test_ray_client_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="ray job submit"):
        paceline.ray.train(Recipe(), address="ray://10.0.0.7:10001")
    assert not list(tmp_path.iterdir())


def test_keys_of_a_run_are_for_their_host_and_side_and_touch_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    authority = RunAuthority()
    first, again, worker = authority.server_keys("10.0.0.7"), authority.server_keys("10.0.0.8"), authority.worker_keys()
    assert first.files["ca.crt"] == again.files["ca.crt"] == worker.files["ca.crt"]
    assert first.files["server.crt"] != again.files["server.crt"]
    assert not any(name == "ca.key" for keys in (first, again, worker) for name in keys.files)
    assert first.context().get_ca_certs() == worker.context().get_ca_certs()
    with pytest.raises(KeyFileError, match=r"worker\.key is not the key of worker\.crt"):
        replace(
            worker, files={**worker.files, "worker.key": RunAuthority().worker_keys().files["worker.key"]}
        ).context()
    for name, content in worker.files.items():
        Path(tmp_path, name).write_text(content)
    with pytest.raises(KeyFileError, match="not a certificate for a server"):
        read_side(tmp_path / "worker", role="server")


class Node:
    """A run's folder on another node, and reads that can fail."""

    def __init__(self, folder):
        self.folder, self.gone = folder, set()

    def listing(self):
        return listing_of(self.folder)

    def read(self, name, start, length):
        return None if name in self.gone else read_piece(self.folder, name, start, length)


def write_checkpoint(folder, number):
    (folder / f"checkpoint-{number:08d}").mkdir(parents=True)
    for name in ("tensors.safetensors", "state.json", "manifest.json"):
        (folder / f"checkpoint-{number:08d}" / name).write_text(f"{name} of {number}")


def test_a_copy_follows_a_folder_and_can_always_be_resumed(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    write_checkpoint(there, 0)
    (there / TRACE).write_bytes(b"began\nstep")
    node, copy = Node(there), FolderCopy(here)
    assert not copy.resumable
    copy.follow(node.listing, node.read)
    assert (here / TRACE).read_bytes() == b"began\n"
    assert copy.checkpoints == ["checkpoint-00000000"]

    with (there / TRACE).open("ab") as trace:
        trace.write(b" one\nstep two\n")
    write_checkpoint(there, 1)
    write_checkpoint(there, 2)
    (there / "checkpoint-00000000" / "state.json").unlink()
    node.gone = {"checkpoint-00000001/state.json"}  # it is removed while it is copied
    copy.follow(node.listing, node.read)
    assert (here / TRACE).read_bytes() == (there / TRACE).read_bytes()
    assert copy.resumable
    assert "checkpoint-00000002" in copy.checkpoints
    assert "checkpoint-00000001" not in copy.checkpoints
    assert not list(here.glob(".writing-*"))
    sent = {}
    for name, piece in copy.pieces():
        sent[name] = sent.get(name, b"") + piece
    assert sent[TRACE] == (there / TRACE).read_bytes()
    assert sent["checkpoint-00000002/state.json"] == b"state.json of 2"
    with pytest.raises(CopyError, match="another process writes"):
        FolderCopy(here)
    copy.close()


def test_what_a_killed_caller_left_half_copied_goes_when_another_takes_the_folder(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    write_checkpoint(there, 3)
    (there / TRACE).write_bytes(b"began\n")
    node, copy = Node(there), FolderCopy(here)
    copy.follow(node.listing, node.read)
    copy.close()
    left = here / ".writing-checkpoint-00000006-4711"  # of a process that is gone
    left.mkdir()
    (left / "state.json").write_bytes(b"half")
    copy = FolderCopy(here)
    assert not left.exists()
    assert copy.checkpoints == ["checkpoint-00000003"]
    copy.close()


def test_a_checkpoint_is_not_there_before_its_trace_is(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    write_checkpoint(there, 5)
    (there / TRACE).write_bytes(b"began\n")
    node, copy = Node(there), FolderCopy(here)

    def no_trace(name, start, length):
        if name == TRACE:
            raise OSError("the node is gone")
        return node.read(name, start, length)

    with pytest.raises(OSError, match="the node is gone"):
        copy.follow(node.listing, no_trace)
    assert copy.checkpoints == []
    copy.follow(node.listing, node.read)
    assert copy.checkpoints == ["checkpoint-00000005"]
    copy.close()


def test_a_run_that_begins_again_leaves_nothing_of_the_first_server_in_the_copy(tmp_path):
    first, second, here = tmp_path / "first", tmp_path / "second", tmp_path / "here"
    for folder, rounds in ((first, 3), (second, 5)):
        folder.mkdir()
        (folder / TRACE).write_text("".join(f"{folder.name} {number}\n" for number in range(rounds)))
    node, copy = Node(first), FolderCopy(here)
    copy.follow(node.listing, node.read)  # then the node is lost, with its checkpoint 0
    assert copy.trace_bytes
    assert not copy.resumable
    copy.empty()
    write_checkpoint(second, 0)
    node = Node(second)
    copy.follow(node.listing, node.read)
    assert (here / TRACE).read_text() == (second / TRACE).read_text()
    assert copy.resumable
    copy.close()


def test_a_listing_that_names_other_files_is_refused(tmp_path):
    copy = FolderCopy(tmp_path / "here")
    evil = FolderListing(trace_bytes=0, checkpoints={"checkpoint-00000001": {"../../evil": 1}})
    with pytest.raises(CopyError, match="evil"):
        copy.follow(lambda: evil, lambda name, start, length: b"x")
    assert not (tmp_path / "evil").exists()
    assert stat.S_ISDIR(tmp_path.stat().st_mode)


def test_a_cluster_of_these_tests_that_does_not_come_up_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cluster, "HOST", "input()")  # it never answers
    monkeypatch.setattr(cluster, "START_SECONDS", 0.1)
    starting = cluster.RayCluster({"head": 1})
    with pytest.raises(queue.Empty):
        starting.__enter__()
    assert list(tmp_path.iterdir()) == []
    assert not Path("/run/netns", starting._network.name).exists()
