"""Downloads: whole and right, or refused with nothing left behind and nothing harmed."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.data import DatasetError
from paceline.data.download import Patience, download

BODY = bytes(range(256)) * 40


def test_a_good_file_arrives_whole_and_leaves_no_part(server, tmp_path):
    file = server.publish("a.gz", BODY)
    path = download(file, base=server.base, folder=tmp_path / "new" / "folder")
    assert path.read_bytes() == BODY
    assert [found.name for found in path.parent.iterdir()] == ["a.gz"]


def test_progress_goes_to_stderr_and_stdout_stays_empty(server, tmp_path, capfd):
    download(server.publish("a.gz", BODY), base=server.base, folder=tmp_path)
    assert capfd.readouterr().out == ""


def refused(server, folder: Path, file, **patience: float) -> str:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DatasetError) as caught:
        download(file, base=server.base, folder=folder, patience=Patience(**patience))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_wrong_sum_names_both_and_keeps_what_was_there(server, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"older")
    file = server.publish("a.gz", BODY)
    message = refused(server, tmp_path, replace(file, md5="0" * 32))
    assert file.md5 in message
    assert "0" * 32 in message


def test_a_body_cut_short_is_refused(server, tmp_path):
    file = server.publish("a.gz", BODY)
    server.bodies["/a.gz"] = BODY[:100]
    assert f"100 of {len(BODY)} bytes" in refused(server, tmp_path, file)


def test_a_connection_that_breaks_half_way_is_refused(server, tmp_path):
    file = server.publish("a.gz", BODY)
    server.bodies["/a.gz"] = BODY[:100]
    server.claimed_bytes["/a.gz"] = len(BODY)
    refused(server, tmp_path, file)


def test_a_body_without_end_is_cut_off(server, tmp_path):
    file = server.publish("a.gz", BODY)
    server.bodies["/a.gz"] = BODY * 100
    assert f"longer than the {len(BODY)} bytes" in refused(server, tmp_path, file)


def test_a_server_that_falls_silent_is_given_up(server, tmp_path):
    file = server.publish("a.gz", BODY)
    server.stall.add("/a.gz")
    assert "no answer in time" in refused(server, tmp_path, file, stall_seconds=0.2)


def test_a_server_that_drips_is_held_to_the_total_time(server, tmp_path):
    """Every byte comes in time for the stall limit, so only the total can end it."""
    file = server.publish("a.gz", BODY)
    server.drip.add("/a.gz")
    assert "took longer than 0.1 s" in refused(server, tmp_path, file, stall_seconds=10, total_seconds=0.1)


def test_not_found_says_so(server, tmp_path):
    file = server.publish("a.gz", BODY)
    del server.bodies["/a.gz"]
    assert "404" in refused(server, tmp_path, file)


def test_nobody_listening_says_so(server, tmp_path):
    with socket.socket() as unused:  # bound, and so free of others, but not listening
        unused.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        with pytest.raises(DatasetError, match="refused"):
            download(server.publish("a.gz", BODY), base=base, folder=tmp_path)


@pytest.mark.parametrize("base", ["file:///etc", "ftp://127.0.0.1", "", "http://", "http://[::1"])
def test_an_address_that_is_not_on_the_web_is_refused(server, tmp_path, base):
    with pytest.raises(DatasetError):
        download(server.publish("passwd", BODY), base=base, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_says_so(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatasetError):
        download(server.publish("a.gz", BODY), base=server.base, folder=tmp_path / "file" / "folder")
