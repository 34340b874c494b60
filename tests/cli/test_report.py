"""`paceline report`: every page again, to the byte, from what its folder holds."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pytest

from paceline.cli import main

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parents[1] / "golden"
DATA = "--data synthetic --data.samples 60 --data.size 4 --data.channels 1 --data.classes 3 --split iid --workers 2"
SMALL = [*DATA.split(), "--k", "1", "--batch-size", "4", "--blocks", "2", "--rounds", "4", "--evaluate-every", "2"]
PRUNED = ["--pruning", "fine-pruning", "--pruning.window", "4", "--pruning.starting-point", "1"]
COMMANDS = {
    "race": ["race", *SMALL, "--strategies", "full,lgc,hpsgd", "--network.latency-seconds", "1ms"],
    "timing": [
        "race",
        "--rounds",
        "5",
        "--strategies",
        "full,fastest-k",
        "--timing-only",
        "--optimizer.decay-at",
        "0.5",
    ],
    "diverged": ["simulate", *SMALL, "--lr", "1e6"],
    "pruned": ["simulate", *SMALL[:-4], "--rounds", "30", *PRUNED],
    "rates": ["inspect", "rates", *SMALL, "--steps", "3"],
    "rates of lars": ["inspect", "rates", *SMALL, "--optimizer", "lars", "--optimizer.clip", "--model", "lenet"],
    "pipeline": ["plan", "pipeline", *SMALL, "--stages", "2", "--microbatches", "2", "--repeats", "3"],
    "codecs": ["bench", "codecs", "--size", "500", "--codecs", "identity,one-bit", "--repeats", "1"],
}


def pages(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.html")}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS.keys())
def test_a_page_is_made_again_to_the_byte(arguments, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--out", "here"]) == 0
    if "--pruning" in arguments:
        assert main(["inspect", "pruning", "here"]) == 0
    before = pages(tmp_path / "here")
    for path in (tmp_path / "here").glob("*.html"):
        path.unlink()
    capsys.readouterr()
    assert main(["report", "here", "--json"]) == 0
    assert pages(tmp_path / "here") == before
    assert sorted(json.loads(capsys.readouterr().out)["pages"]) == sorted(f"here/{name}" for name in before)


def test_a_run_with_a_journal_gets_its_page_from_that_into_another_folder(tmp_path) -> None:
    assert main(["report", str(GOLDEN / "served"), "--out", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page/report.html").read_text(encoding="utf-8")
    assert "paceline: " in page
    assert not list((GOLDEN / "served").glob("*.html"))


MISSING = {
    "a folder that is not there": ("no/where", "is not there; give the folder of a run"),
    "an empty folder": ("empty", "it has none of trace.jsonl, traces.json.gz, results.json and pruning.safetensors"),
    "results of a release before": ("before", "no traces.json.gz (trace.jsonl, plan.json), as of a release before"),
    "ranks that are not done": ("ranks", "paceline train --resume ranks"),
    "traces that are cut off": ("cut", "cut/traces.json.gz: cut off"),
    "traces of nobody": ("strange", "strange/traces.json.gz: traces[0]: field 'strategy' is missing"),
    "a plan without its page's words": ("plan", "conditions must be a list, not None"),
    "a plan without its results": ("alone", "it has plan.json, but no results.json: plan again"),
    "a plan beside results of something else": ("mixed", "a results.json that is of no plan: plan again"),
    "codecs that were not measured": ("codecs", "codecs/results.json: field 'elements' is missing"),
}


@pytest.mark.parametrize(("folder", "said"), MISSING.values(), ids=MISSING.keys())
def test_what_is_missing_is_said_in_one_line(folder, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "before", "ranks", "cut", "strange", "plan", "alone", "mixed", "codecs"):
        Path(name).mkdir()
    shutil.copy(GOLDEN / "hpsgd/results.json", "before")
    shutil.copy(GOLDEN / "hpsgd/recipe.json", "ranks")
    Path("cut/traces.json.gz").write_bytes(gzip.compress(b'{"format":1,"traces":[]}')[:-9])
    Path("strange/traces.json.gz").write_bytes(gzip.compress(b'{"format":1,"traces":[{}]}'))
    for name in ("plan", "alone", "mixed"):
        shutil.copy(GOLDEN / "plan/plan.json", name)
    shutil.copy(GOLDEN / "hpsgd/results.json", "mixed")
    Path("plan/results.json").write_text('{"cuts": []}', encoding="utf-8")
    Path("codecs/results.json").write_text('{"codecs": []}', encoding="utf-8")
    assert main(["report", folder]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert not list(tmp_path.rglob("*.html"))
