"""A run on loopback belongs to its user: who cannot read its key neither joins it nor reads its model."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.drivers.served import admission
from paceline.drivers.served.admission import KEY, Credential, Guard, links_of_user, token
from paceline.drivers.served.connection import WorkerRefused
from paceline.drivers.served.messages import PROTOCOL, Hello
from paceline.drivers.served.security import AddressError
from paceline.processes import Processes, in_new_thread
from paceline.runs.cluster import ServerEndpoint
from tests.drivers.served.test_worker import serving

STRANGER = 65534
LAW = "this run is its user's alone"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")


def network():
    torch.manual_seed(3)
    return nn.Linear(3, 1)


def work(address, *, scale=1.0, most=10_000, **given):
    """Work for a server to the end, with gradients of so large a scale."""
    model = network()
    with paceline.Worker(address, model, patience_seconds=5.0, **given) as worker:
        while worker.running() and most:
            most -= 1
            for inputs in worker.blocks(torch.ones(4, 3)):
                (scale * (model(inputs) - 1).square().mean()).backward()
            worker.send()


class Another:
    """Another user of this machine, in a process that is forked before a server is there: it tries to join, once."""

    JOINED, REFUSED, OTHER = 0, 1, 2

    def __init__(self, run=None):
        self._process = Processes()
        reading, self._writing = os.pipe()
        self._process.fork(lambda: in_new_thread(lambda: self._try(os.read(reading, 100).decode(), run)))
        os.close(reading)

    def _try(self, address, run):
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        logging.disable()
        try:
            work(address, scale=1e4, most=3, run=run)
        except WorkerRefused as error:
            return self.REFUSED if LAW in str(error) else self.OTHER
        except OSError:
            return self.OTHER
        return self.JOINED

    def join(self, address):
        """Let it try, and return what became of it."""
        os.write(self._writing, address.encode())
        os.close(self._writing)
        (code,) = self._process.wait(60)
        self._process.end()
        return code


def trained(tmp_path, *, beside=lambda address: None, **options):
    """The weights of a run of one worker, with something done beside it once it is open."""
    served = network()
    with serving(served, tmp_path, rounds=30, strategy=paceline.Full(), **options) as (address, ended):
        beside(address)
        work(address)
    assert ended[0].finished
    return torch.cat([parameter.detach().flatten() for parameter in served.parameters()])


@as_root
def test_another_user_is_refused_and_the_run_comes_to_what_it_comes_to_without_him(tmp_path, caplog):
    stranger, told = Another(), []
    without = trained(tmp_path / "without")
    beside = trained(tmp_path / "beside", beside=lambda address: told.append(stranger.join(address)))
    assert told == [Another.REFUSED]
    assert torch.equal(without, beside)
    line = next(record.getMessage() for record in caplog.records if "refused 127.0.0.1" in record.getMessage())
    assert LAW in line
    assert "--open" in line
    assert "--run FOLDER" in line


@as_root
def test_he_is_let_in_where_the_server_is_open_and_where_he_is_given_the_key(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as his:
        os.chmod(his, 0o755)
        guest, friend, told = Another(), Another(his), []

        def hand_over(address):
            (key,) = tmp_path.glob(f"given/**/{KEY}")
            shutil.copy(key, his)
            os.chown(Path(his, KEY), STRANGER, STRANGER)
            told.append(friend.join(address))

        trained(tmp_path / "open", open=True, beside=lambda address: told.append(guest.join(address)))
        trained(tmp_path / "given", beside=hand_over)
    assert told == [Another.JOINED, Another.JOINED]


def test_the_key_is_its_users_alone_while_the_run_lasts_and_stands_nowhere_else(tmp_path, caplog):
    seen = {}

    def look(address):
        (path,) = tmp_path.glob(f"**/{KEY}")
        seen.update(mode=path.stat().st_mode, key=path.read_text().split()[0], folder=path.parent)
        link = links_of_user() / address
        assert link.readlink() == path
        assert stat.S_IMODE(links_of_user().lstat().st_mode) == 0o700
        seen["shown"] = Credential(address, None).find()[1]
        seen["words"] = Path("/proc/self/cmdline").read_text() + json.dumps(dict(os.environ))

    caplog.set_level(logging.DEBUG)
    trained(tmp_path, beside=look)
    assert stat.S_IMODE(seen["mode"]) == 0o600
    assert re.fullmatch("[0-9a-f]{64}", seen["key"])
    assert not list(tmp_path.glob(f"**/{KEY}"))
    written = b"".join(path.read_bytes() for path in seen["folder"].rglob("*") if path.is_file()).decode(
        errors="replace"
    )
    for secret in (seen["key"], seen["shown"].split()[1]):
        assert secret not in written + caplog.text + seen["words"]
    hello = Hello(protocol=PROTOCOL, wish=None, threads=1, host="a", token=seen["shown"])
    assert seen["shown"] not in repr(hello)


def test_a_token_is_of_one_worker_and_no_other_key_makes_it(tmp_path):
    guard = Guard(tmp_path)
    key = bytes.fromhex((tmp_path / KEY).read_text().split()[0])
    good = token(key, "7f")
    assert guard.admits(good)
    assert guard.admits(Credential("127.0.0.1:1", tmp_path).find()[1])
    assert Credential("127.0.0.1:1", tmp_path).find() != Credential("127.0.0.1:1", tmp_path).find()
    for bad in (
        "",
        " ",
        "7f",
        good[:-1],
        good + "0",
        good.replace("7f ", "7e "),
        token(b"", "7f"),
        "ü" + good,
        "\ud800 x",
    ):
        assert not guard.admits(bad), bad
    again = Guard(tmp_path)
    assert not again.admits(good)  # a server that begins again has a key of its own
    again.close()
    assert not (tmp_path / KEY).exists()


def test_a_token_has_one_seat_at_a_time_and_nobody_takes_anothers(tmp_path):
    with serving(network(), tmp_path, rounds=1, most_workers=3) as (address, _):
        one, two, thief = (paceline.Worker(address, network(), wish=0, patience_seconds=20.0) for _ in range(3))
        thief._shown._name = one._shown._name
        with one, two:
            assert (one.number, two.number) == (0, 1)  # the same wish, of the same process
            with thief:  # for all that the server knows, it is the first one that has come back
                assert thief.number == 0
                one.leave()
        work(address)


def test_localhost_is_where_the_server_of_the_key_is(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "LINKS", tmp_path)
    guard = Guard(tmp_path)
    guard.link([("127.0.0.1", 29400)])
    address, shown = Credential("localhost:29400", None).find()
    assert address == "127.0.0.1:29400"  # another user may listen at [::1]
    assert guard.admits(shown)
    assert Credential("[::1]:29400", None).find() == ("[::1]:29400", "")
    assert Credential("10.0.0.7:29400", None).find() == ("10.0.0.7:29400", "")
    for run, meant in (("localhost:29400", "127.0.0.1:29400"), ("localhost:7", "127.0.0.1:7"), ("10.0.0.7:7",) * 2):
        assert Credential(run, tmp_path).find()[0] == meant  # the folder says where its server listens
    guard.close()
    assert Credential("localhost:29400", None).find() == ("localhost:29400", "")
    guard.write()
    assert not (tmp_path / KEY).exists()  # of a server that is over


def test_a_link_of_which_nothing_can_be_known_keeps_no_worker_out(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "LINKS", tmp_path)
    guard, exists = Guard(tmp_path), Path.exists

    def unknowable(path, **given):
        if path.name == "127.0.0.1:1":
            raise PermissionError(path)
        return exists(path, **given)

    guard.link([("127.0.0.1", 1)])
    monkeypatch.setattr(Path, "exists", unknowable)
    guard.link([("127.0.0.1", 2)])
    assert guard.admits(Credential("127.0.0.1:2", None).find()[1])


def test_a_key_that_is_none_is_named_with_what_to_do(tmp_path):
    (tmp_path / KEY).write_text("no key")
    with pytest.raises(AddressError, match=r"workers\.key is no key that this user can read .*--open"):
        Credential("127.0.0.1:1", tmp_path).find()


def test_a_folder_that_others_made_or_can_read_leads_nobody_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(admission, "LINKS", tmp_path)
    folder = tmp_path / f"paceline-{os.geteuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="not a folder of this user alone"):
        links_of_user()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        Guard(tmp_path).link([("127.0.0.1", 1)])
    assert Credential("127.0.0.1:1", None).find()[1] == ""


def test_a_file_system_without_modes_is_refused_with_what_to_do(tmp_path, monkeypatch):
    class Found:
        st_mode = 0o100777

    monkeypatch.setattr(admission.os, "fstat", lambda file: Found)
    with pytest.raises(AddressError, match="--open if they may"):
        Guard(tmp_path)
    assert not list(tmp_path.iterdir())


def test_keys_and_open_contradict_each_other():
    with pytest.raises(AddressError, match="leave --open out"):
        ServerEndpoint(listen="127.0.0.1:0", tls="keys/server", open=True)
    with pytest.raises(ValueError, match="run is empty"):
        paceline.Worker("127.0.0.1:1", network(), run="")


def test_a_run_that_cannot_keep_its_key_private_has_not_begun(tmp_path, monkeypatch):
    def refuse(guard):
        raise AddressError("keeps no file private")

    monkeypatch.setattr(Guard, "write", refuse)
    with serving(network(), tmp_path) as (_, ended):
        pass
    assert isinstance(ended[0], AddressError)
    assert not (tmp_path / "run").exists() or not any((tmp_path / "run").iterdir())


def test_a_run_that_an_error_ends_lets_go_of_its_port_and_its_key(tmp_path):
    """As one that is cancelled in a notebook, whose process lives on."""
    ports = []

    def fail(port):
        ports.append(port)
        raise ZeroDivisionError

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError):
        paceline.serve(model, optimizer, rounds=1, workers=1, out=tmp_path / "run", on_open=fail)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", ports[0]), 5)
    assert not list(tmp_path.glob(f"**/{KEY}"))
    assert not (links_of_user() / f"127.0.0.1:{ports[0]}").is_symlink()
