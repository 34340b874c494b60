"""A file is replaced whole or not at all; folders are tried in tests/traces/test_checkpoints.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.files import replacing, write_file


def write_half(path):
    path.write_text("half")
    raise ZeroDivisionError


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write_file(tmp_path / "a.txt", "old")
    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        write_half(temporary)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_disk_that_refuses_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write_file(tmp_path / "a.txt", b"old")

    def refuse(old, new):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        write_file(path, "new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    target = write_file(tmp_path / "a.txt", "old")
    link = tmp_path / "link.txt"
    link.symlink_to(target)
    write_file(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_device_is_written_to_as_it_is():
    write_file(Path(os.devnull), "nothing is kept")
    assert not os.path.isfile(os.devnull)


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "none" / "a.txt", "new")
    assert not (tmp_path / "none").exists()
