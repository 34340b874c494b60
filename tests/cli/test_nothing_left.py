"""A command that refuses what it is given leaves nothing behind: no folder, no empty file."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

import paceline
from paceline.cli.main import main

GOLDEN = Path(__file__).parents[1] / "golden"
QUICK = ("--rounds", "3", "--workers", "3", "--k", "2", "--classes-per-worker", "4")
COMMANDS = {
    "race": ("race", *QUICK),
    "simulate": ("simulate", *QUICK),
    "train": ("train", *QUICK),
    "ranks": ("train", *QUICK, "--on", "ranks"),
    "averaging": ("train", *QUICK, "--strategy", "hpsgd"),
    "pipeline": ("train", *QUICK, "--stages", "2", "--workers", "1"),
    "serve": ("serve", *QUICK, "--listen", "127.0.0.1:0"),
    "inspect": ("inspect", "rates", "--steps", "1"),
    "plan": ("plan", "pipeline", "--stages", "2", "--repeats", "3"),
}
REFUSED = {
    "a number out of its range": ("--rounds", "0"),
    "no such model": ("--model", "mpl"),
    "code that is not there": ("--model", "no_such_module:net"),
    "data that is not there": ("--data", "mnist", "--data-directory", "nowhere"),
    "no such recipe": ("nothing.toml",),
    "no such option": ("--wrokers", "3"),
    "a codec's setting": ("--codec", "qsgd", "--codec.levels", "0"),
    "more classes than there are": ("--split", "non-iid", "--classes-per-worker", "11"),
    "too many workers": ("--workers", "100000"),
}


MAY_BE = {("serve", "too many workers"), ("plan", "too many workers")}  # they may come; and it has none


@pytest.mark.parametrize(
    ("command", "what"), [(command, what) for command in COMMANDS for what in REFUSED if (command, what) not in MAY_BE]
)
def test_a_refused_run_leaves_nothing(command, what, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*COMMANDS[command], *REFUSED[what]]) != 0, capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("command", ["serve", "train"])
def test_nor_does_a_server_whose_port_is_taken(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main([command, *QUICK, "--listen", address]) != 0
    assert f"cannot listen on {address}: is the port in use?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nor_do_scripts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match="cannot listen"):
            paceline.serve(module, optimizer, workers=1, listen=address)
    with pytest.raises(ValueError, match="no_such_module"):
        paceline.train(paceline.Recipe().with_settings(model={"name": "no_such_module:net"}))
    assert list(tmp_path.iterdir()) == []


OTHERS = {
    "inspect pruning, no run": ("inspect", "pruning", "nowhere", "--out", "new"),
    "inspect pruning, a run that pruned nothing": ("inspect", "pruning", str(GOLDEN / "served"), "--out", "new/here"),
    "inspect pruning, no such data": ("inspect", "pruning", str(GOLDEN / "hpsgd"), "--data", "nope:f", "--out", "new"),
    "report of nothing": ("report", "nowhere", "--out", "new"),
    "bench, no such codec": ("bench", "codecs", "--codecs", "nope"),
    "bench, no elements": ("bench", "codecs", "--size", "0", "--out", "new"),
    "keys, no workers": ("keys", "new", "--workers", "0"),
    "keys, no days": ("keys", "new", "--days", "0"),
    "keys, no such host": ("keys", "new", "--hosts", "a b"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_nor_do_the_other_commands(what, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*OTHERS[what]]) == 2, capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_that_was_there_stays_though_it_is_empty(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    assert main([*COMMANDS["race"], "--model", "no_such_module:net", "--out", str(tmp_path / "mine")]) != 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
