"""`paceline bench` as a user meets it."""

from __future__ import annotations

import json

import pytest

from paceline.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_without_a_name_it_lists_what_there_is(folder, capsys) -> None:
    assert main(["bench"]) == 0
    assert "paceline bench codecs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["codec"], "unknown command 'bench codec'; did you mean 'bench codecs'?"),
        (["codecs", "--size", "0"], "size must be between 1 and 1,073,741,824 (size=0)"),
        (["codecs", "--repeats", "0"], "repeats must be between 1 and 1000 (repeats=0)"),
        (["codecs", "--codecs", "one-bit,two-bit"], "unknown codec 'two-bit'; did you mean 'one-bit'? choose from ide"),
        (["codecs", "--codecs", "qsgd levels=0"], "levels must be between 1 and 32,767 (levels=0)"),
        (["codecs", "--sise", "5"], "unknown option --sise; did you mean --size?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, capsys, arguments, said) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"paceline: error: {said}")
    assert captured.err.count("\n") == 1
    assert not (folder / "runs").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(folder, capsys) -> None:
    (folder / "taken").write_text("a file")
    assert main(["bench", "codecs", "--size", "100", "--out", "taken/runs"]) == 2
    assert "cannot write to taken/runs" in capsys.readouterr().err


def test_tables_in_eighty_columns_and_a_page_that_asks_for_nothing(folder, capsys) -> None:
    arguments = ["--size", "3000", "--repeats", "1", "--codecs", "identity, qsgd norm=l2 lossless=elias, one-bit"]
    assert main(["bench", "codecs", *arguments]) == 0
    captured = capsys.readouterr()
    assert max(len(line.rstrip()) for line in captured.out.splitlines()) <= 80
    for words in (
        "b qsgd levels=7 l2 elias",
        "c one-bit",
        "no codec",
        "100 Gbit/s",
        "gradient of mlp on digits",
        "exact |",
    ):
        assert words in captured.out
    assert "runs/bench-codecs/report.html" in captured.err
    page = (folder / "runs/bench-codecs/report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert "chart-codecs" in page
    assert page.count("<table>") == 2


def test_one_document_and_nothing_else_on_stdout(folder, capsys) -> None:
    arguments = ["--size", "2000", "--repeats", "1", "--codecs", "identity,one-bit", "--json", "--out", "here"]
    assert main(["bench", "codecs", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((folder / "here/results.json").read_text(encoding="utf-8"))
    exact, sign = document["codecs"]
    assert (exact["codec"], exact["relative_error"], exact["payload_bytes"]) == ("identity", 0.0, 8016)
    assert sign["payload_bytes"] == 16 + 8 + 250
    assert set(document["shortest"]) == {"100 Mbit/s", "1 Gbit/s", "10 Gbit/s", "100 Gbit/s"}
