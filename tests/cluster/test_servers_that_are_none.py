"""A worker meets a server that is none, or means harm: it runs nothing, reads nothing, and says so in one line."""

from __future__ import annotations

import json
import os
import sys

import pytest

from paceline.drivers.served.messages import PROTOCOL, Goodbye, encode
from paceline.drivers.served.worker import Worker
from paceline.recipes import Recipe
from paceline.runs.cluster import WorkerOptions, trusted_recipe, work_for
from tests import warm
from tests.cluster.harness import PACELINE
from tests.cluster.peers import FakeServer, welcome


def test_a_server_that_speaks_another_protocol_is_told_of_in_one_line():
    with FakeServer(encode(welcome(protocol=2))) as server:
        found = _work(server.address, "--patience-seconds", "1")
    assert found.returncode != 0
    assert len(found.stderr.splitlines()) == 1, found.stderr
    assert f"speaks protocol 2, this one speaks {PROTOCOL}" in found.stderr


def test_a_server_that_refuses_is_told_of_in_one_line_and_not_asked_again():
    with FakeServer(encode(Goodbye(what="refused", reason="no room here"))) as server:
        with (
            pytest.raises(ConnectionRefusedError, match="refused this worker: no room here"),
            Worker(server.address, None),
        ):
            pass
        assert server.hellos == 1


def _work(address, *options, **environment):
    return warm.run(
        [*PACELINE, "work", address, *options],
        capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


def test_a_worker_imports_no_code_that_a_server_names(tmp_path):
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    recipe = Recipe().with_settings(model={"name": "trap:net"}).to_document()
    with FakeServer(encode(welcome(recipe=recipe))) as server:
        found = _work(server.address, PYTHONPATH=str(tmp_path))
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1, found.stderr
    assert "'trap:net', which is code" in found.stderr
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["os:getcwd", "os.path:join", "a b:c", ":", "os:", "../evil:net"])
def test_no_name_of_code_in_a_recipe_is_trusted(name):
    document = Recipe().to_document()
    document["model"]["name"] = name
    loaded = set(sys.modules)
    with pytest.raises(ValueError) as error:
        trusted_recipe(document, WorkerOptions())
    assert len(str(error.value).splitlines()) == 1
    assert not {module for module in set(sys.modules) - loaded if not module.startswith("paceline")}


@pytest.mark.parametrize(
    "section", [{"data": {"directory": "/etc"}}, {"delay": {"name": "recorded", "file": "/etc/passwd"}}], ids=str
)
def test_no_path_in_a_recipe_is_kept(section):
    recipe = trusted_recipe(Recipe().with_settings(**section).to_document(), WorkerOptions())
    assert "/etc" not in json.dumps(recipe.to_document())


def test_a_file_of_delays_that_a_server_names_is_not_read(tmp_path):
    trap = tmp_path / "times.csv"
    os.mkfifo(trap)  # whoever opens it waits for ever
    section = {"name": "recorded", "file": str(trap), "inject": True}
    recipe = Recipe().with_settings(delay=section).to_document()
    with FakeServer(encode(welcome(recipe=recipe))) as server, pytest.raises(ValueError, match="--delay-file"):
        work_for(server.address, WorkerOptions(patience_seconds=5))


@pytest.mark.parametrize(
    "recipe",
    [
        {"rounds": -1},
        {"model": 7},
        {"model": {"name": ["mlp"]}},
        {"unheard": {"of": 1}},
        {"data": {"name": "os:getcwd"}},
        {"strategy": {"name": "os:getcwd"}},
        {"codec": {"name": "../x"}},
        {"cluster": {"workers": 10**9}},
    ],
    ids=str,
)
def test_a_recipe_that_is_none_is_refused_in_one_line(recipe):
    with pytest.raises(ValueError) as error:
        trusted_recipe(recipe, WorkerOptions())
    assert len(str(error.value).splitlines()) == 1


def test_a_codec_that_a_server_names_is_one_of_the_table():
    with (
        FakeServer(encode(welcome(codec="os:getcwd"))) as server,
        pytest.raises(ValueError, match="unknown codec"),
        Worker(server.address, None, patience_seconds=5),
    ):
        pass
