"""Thirty things that a new user types: each works, or answers in one line that leads on and leaves nothing behind."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import paceline
from paceline.cli import main
from paceline.traces.run_folder import RESULTS
from paceline.traces.trace_files import TRACES

PARTS = """
import torch
from torch import nn

def load():
    inputs = torch.linspace(-1, 1, 240).reshape(60, 4)
    return (inputs, (inputs.sum(1) > 0).long()), (inputs, (inputs.sum(1) > 0).long())

def net():
    return nn.Linear(4, 2)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)
"""
OWN = "--data new_parts:load --model new_parts:net --loss new_parts:loss"
SMALL = "--rounds 3 --workers 3 --batch-size 4"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

TYPED = {
    # what is typed: (exit code, what its output or its one line must say)
    "": (0, r"paceline race"),
    "--version": (0, r"^paceline \d"),
    "help train": (0, r"--resume .*--model, --data, --loss, --data-directory and\s+--delay-file again"),
    "plan": (0, r"paceline plan pipeline .*paceline plan pruning "),
    "inspect": (0, r"paceline inspect rates .*paceline inspect pruning "),
    "bench": (0, r"paceline bench codecs "),
    "race --timing-only --workers 4": (0, r"lgc .*report: runs/race"),
    "race --timing-only --strategies full,lgc --latency 5ms": (2, r"did you mean --network\.latency-seconds\?$"),
    "race lgc full": (2, r"for strategies give --strategies lgc,full$"),
    "race lgc": (2, r"give --strategies lgc$"),
    "race --strategy lgc": (2, r"race takes --strategies"),
    "train --on slrum": (2, r"did you mean 'slurm'\? choose from server, ranks, ray, slurm$"),
    "train --log tensorbord": (2, r"unknown log 'tensorbord'; give tensorboard, or a function of your own"),
    "train --ray-address 10.0.0.7:6379": (2, r"--ray-address is for --on ray"),
    "train lgc full": (2, r"give one: --strategy lgc$"),
    f"race {SMALL} {OWN} --strategies full,lgc": (0, r"loss\s+new_parts:loss.*report: runs/race"),
    f"simulate {SMALL} {OWN}": (0, r"lgc .*report: runs/simulate"),
    "simulate --learning-rate 0.1": (2, r"did you mean --lr\?$"),
    "simulate --iterations 3": (2, r"did you mean --rounds\? \(a round is a step of the model\)$"),
    "simulate --epochs 1": (0, r"lgc .*report: runs/simulate"),
    "simulate --momentum 0.9": (2, r"did you mean --optimizer\.momentum\?$"),
    "train --device cuda": (2, r"recipes run on the CPU; in a script of your own, any device does$"),
    "train --gpu": (2, r"recipes run on the CPU"),
    "simulate --delay.path times.csv": (2, r"did you mean --delay\.file\?$"),
    "simulate --delay.factor 3": (2, r"did you mean --delay\.slow-factor\?$"),
    "simulate --cluster.size 3": (2, r"unknown option --cluster\.size; choose from --cluster\.workers, "),
    "simulate --delay slow-worker --workers 1 --rounds 1": (0, r"lgc .*warning: every worker is a slow one "),
    "race --strategies ddp": (2, r"unknown strategy 'ddp'; for synchronous training .* give 'ssgd'; choose from"),
    "train --strategy DDP": (2, r"unknown strategy 'DDP'; for synchronous training .* give 'ssgd'; choose from"),
    "serve --port 29400": (2, r"did you mean --listen\?$"),
    "simulate --evaluate 5": (2, r"did you mean --evaluate-every\?$"),
    "train --resume simulated --workers 5": (2, r"leave out --workers;"),
    "train --frobnicate 3": (2, r"unknown option --frobnicate; --help-all lists all$"),
    "simulate --data digit": (2, r"error: --data: unknown data 'digit'; did you mean 'digits'\?"),
    "simulate --data.name digit": (2, r"error: --data\.name: unknown data"),
    "simulate --data new_parts.py:load": (2, r"without \.py: 'new_parts:load'$"),
    "simulate --data new_parts:lod": (2, r"did you mean 'load'\?"),
    "simulate top.toml": (2, r"top\.toml:1: 'k' is no key in a recipe: write it below \[strategy\]$"),
    "simulate deep.toml": (2, r"deep\.toml:2: 'rounds' is no key in \[strategy\]: write it above all sections$"),
    "replay simulated": (2, r"simulated is simulated and needs no replay"),
    "train --resume nowhere": (2, r"nowhere is not there; give the folder of a run"),
    "torchrun train --strategy lgc --out under": (2, r"has a server.*run it without torchrun"),
    "trian": (2, r"did you mean 'train'\?"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "new_parts.py").write_text(PARTS)
    (tmp_path / "top.toml").write_text("k = 3\n")
    (tmp_path / "deep.toml").write_text("[strategy]\nrounds = 3\n")
    (tmp_path / "simulated").mkdir()
    for name in (RESULTS, TRACES):
        (tmp_path / "simulated" / name).write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "new_parts", raising=False)
    return tmp_path


@pytest.mark.parametrize("typed", TYPED)
def test_a_new_user_is_answered(typed, folder, monkeypatch, capsys):
    before, (code, said) = sorted(folder.rglob("*")), TYPED[typed]
    words = typed.split()
    if words[:1] == ["torchrun"]:
        words = words[1:]
        for name, value in TORCHRUN.items():
            monkeypatch.setenv(name, value)
    assert main(words) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert re.search(said, (out + err).strip(), re.DOTALL), out + err
    if code:
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("paceline: error: ")
        assert sorted(folder.rglob("*")) == before


SCRIPTS = {
    "Recipe(workers=4)": (TypeError, r"use Recipe\(\)\.with_settings\(cluster=\{'workers': 4\}\)$"),
    "Recipe().with_settings(workers=3)": (ValueError, r"use with_settings\(cluster=\{'workers': 3\}\)$"),
    "Race(Recipe(rounds=3), 'ful')": (ValueError, r"did you mean 'full'\?"),
    "train('lgc')": (TypeError, r"Recipe\.load reads one from a file$"),
    "train(Recipe(), out='simulated')": (ValueError, r"simulated holds results"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_answered_in_one_line(script, folder):
    before, (kind, said) = sorted(folder.rglob("*")), SCRIPTS[script]
    names = {name: getattr(paceline, name) for name in ("Race", "Recipe", "simulate", "train")}
    with pytest.raises(kind, match=said) as told:
        eval(script, names)  # noqa: S307 - the table above
    assert "\n" not in str(told.value)
    assert sorted(folder.rglob("*")) == before


def test_a_result_is_shown_in_one_line(folder):
    race = paceline.Race(paceline.Recipe(rounds=3), ["full"], timing_only=True)
    assert [*race]
    (result,) = race.results
    assert re.fullmatch(r"Result\(strategy='full', rounds=3, .*\)", repr(result))
    assert len(repr(result)) < 120


def test_code_of_ones_own_is_asked_for_at_once_and_then_enough(folder, capsys):
    assert main(f"train {SMALL} {OWN} --strategy hpsgd --workers 2 --out run".split()) == 0
    capsys.readouterr()
    assert main(["replay", "run"]) == 2
    err = capsys.readouterr().err
    asked = re.search(r"give (--model .*)\n$", err)
    assert asked
    assert err.count("\n") == 1
    assert main(["replay", "run", *asked[1].split()]) == 0
    assert capsys.readouterr().out.startswith("identical: ")


def test_a_current_folder_that_was_deleted_is_said(tmp_path):
    (tmp_path / "gone").mkdir()
    command = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec {sys.executable} -m paceline --version"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr == "paceline: error: the current folder was deleted: change to one that is there (cd)\n"
