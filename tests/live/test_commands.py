"""`paceline live`, and `--live` of the commands that train."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.cluster import TrainOptions
from paceline.cli.main import main
from paceline.cli.options import parse
from paceline.live import folder as live_folder
from paceline.live.beside import PageBeside
from paceline.live.server import LiveError
from paceline.traces.journal import RunEnded
from tests.launches import place
from tests.live.journals import began, joined, lines, step
from tests.live.serving import EventStream, ask
from tests.waiting import until

TOKEN = "a-token-of-24-characters"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "trace.jsonl").write_bytes(lines([began(), joined(0), step(0, 1.0, fresh=(0,))]))
    return tmp_path


def test_live_may_stand_alone_and_takes_a_number_but_no_recipe():
    for words, expected in (
        (["--live"], ("any", "")),
        (["--live", "mine.toml"], ("any", "mine.toml")),
        (["--live", "8899", "mine.toml"], ("8899", "mine.toml")),
        (["mine.toml", "--live=0"], ("0", "mine.toml")),
        (["--live", "--rounds", "3"], ("any", "")),
        ([], (None, "")),
    ):
        options, _ = parse(TrainOptions, words)
        assert (options.live, options.recipe_file) == expected


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["train", "--live", "70000"], "--live: expected a port between 0 and 65535, or nothing, got '70000'"),
        (["serve", "--live=x"], "--live: expected a port between 0 and 65535, or nothing, got 'x'"),
        (["train", "--on", "slurm", "--live"], "--live is for runs of this machine: leave it out, and"),
        (
            ["live", "nowhere", "--port", "0", "--wait", "0.1"],
            "no run has begun in nowhere for 0.1 s: give the folder of one, or",
        ),
        (["live", "nowhere", "--json"], "nowhere holds no run: there is no record in it"),
        (["live", __file__], "is no folder; give the folder of a run"),
        (["live", ".", "--token", "short"], "the token has 5 characters; give 16 or more of"),
        (["live", ".", "--wait", "-1"], "--wait is a number of seconds of 0 or more, not -1"),
        (["live", ".", "--host", "192.0.2.1"], "192.0.2.1 is no address of this machine: give --host 127.0.0.1"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(words, error, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert error in printed
    assert list(tmp_path.iterdir()) == []


def test_the_state_is_printed_once_as_json_and_is_that_of_the_whole_record(run, capsys, monkeypatch):
    assert main(["live", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["round"] == 1
    end = RunEnded(at_seconds=99.0, reason="all rounds are done", rounds_done=50, diverged=False)
    rounds = [step(version, 1.0 + version, fresh=(0,)) for version in range(50)]
    (run / "trace.jsonl").write_bytes(lines([began(), *rounds, end]))
    size = (run / "trace.jsonl").stat().st_size
    for parts in (1.5, 7.0):
        monkeypatch.setattr(live_folder, "LOOK_BYTES", round(size / parts))
        assert main(["live", str(run), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["text"] == "ended after round 50 of 50: all rounds are done"
        assert document["read"] == 1.0


def test_the_command_serves_until_it_is_stopped_and_ends_well(run):
    command = [sys.executable, "-m", "paceline", "live", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = process.stderr.readline().split(": ", 1)[1].strip()
            assert ask(address, "/state.json")[0] == 200
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()


def test_the_page_beside_a_run_ends_with_it_and_gives_its_readers_the_last_state(run):
    with PageBeside(run, port=0) as page:
        events = EventStream(page.address)
        assert not events.next()["last"]
    states = list(events)
    events.close()
    assert states[-1]["last"]
    with pytest.raises(OSError):
        ask(page.address, "/state.json")


def test_modules_of_the_folder_where_a_run_is_started_are_not_the_pages(run, tmp_path_factory, monkeypatch):
    mine = tmp_path_factory.mktemp("mine")
    for name in ("select", "json", "asyncio", "h11"):
        (mine / f"{name}.py").write_text("raise SystemExit('the module of a user')")
    monkeypatch.chdir(mine)
    with PageBeside(run, port=0) as page:
        assert ask(page.address, "/state.json")[0] == 200


def test_a_token_comes_by_the_environment_which_other_users_cannot_read(run, monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_LIVE_TOKEN", TOKEN)
    with PageBeside(run, port=0) as page:
        assert page.address.endswith(f"/?token={TOKEN}")
        assert ask(page.address, "/state.json")[0] == 403
        assert ask(page.address, f"/state.json?token={TOKEN}")[0] == 200
        assert TOKEN not in Path("/proc", str(page._child.pid), "cmdline").read_text()
    monkeypatch.setenv("PACELINE_LIVE_TOKEN", "short")
    assert main(["live", str(run), "--port", "0"]) == 2
    assert "the token has 5 characters" in capsys.readouterr().err
    with pytest.raises(LiveError, match="the token has 5 characters"):
        PageBeside(run, port=0)


def test_a_page_whose_starter_is_killed_ends(run):
    code = (
        "import sys, time; from pathlib import Path; from paceline.live.beside import PageBeside\n"
        f"page = PageBeside(Path({str(run)!r}), port=0); print(page.address, flush=True); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        try:
            address = starter.stdout.readline().strip()
            assert ask(address, "/state.json")[0] == 200
        finally:
            starter.kill()

    def unreachable():
        try:
            ask(address, "/state.json")
        except (OSError, IndexError):
            return True
        return False

    until(unreachable, "the page ends with the process that started it")


def test_a_run_whose_port_is_in_use_does_not_begin(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LiveError, match=f"port {port} of 127.0.0.1 is in use: give another port after --live"):
            PageBeside(tmp_path, port=port)
        assert main(["train", "--workers", "2", "--rounds", "2", "--live", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 is in use" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_rank_of_a_launch_that_keeps_no_folder_has_no_page(monkeypatch, capsys):
    for name, value in place(0, 2, 29_500).items():
        monkeypatch.setenv(name, value)
    assert main(["train", "--strategy", "hpsgd", "--workers", "2", "--live"]) == 2
    assert "--live follows a folder: give --out FOLDER as well" in capsys.readouterr().err
