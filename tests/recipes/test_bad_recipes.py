"""Bad recipes: each is refused in one line that names it, its place and what is allowed, with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main

IN_FILES = {
    "unknown key at the top": ("ronds = 3", ["bad.toml:1", "'ronds'", "did you mean 'rounds'"]),
    "unknown key in a section": ("[strategy]\nkk = 3", ["bad.toml:2", "'kk'", "[strategy]", "warmup_rounds"]),
    "unknown section": ("[strategies]\nk = 3", ["bad.toml:1", "strategies", "strategy"]),
    "a section that is a value": ("strategy = 3", ["bad.toml:1", "'strategy' is a section"]),
    "a section in a section": ("[strategy.deep]\nk = 3", ["bad.toml", "'deep'"]),
    "a list of tables": ("[[strategy]]\nk = 3", ["bad.toml", "'strategy' is a section"]),
    "rounds as text": ('rounds = "many"', ["bad.toml:1", "a whole number", "'many'"]),
    "rounds as a fraction": ("rounds = 1.5", ["bad.toml:1", "a whole number", "1.5"]),
    "rounds as truth": ("rounds = true", ["bad.toml:1", "a whole number", "True"]),
    "rounds as a list": ("rounds = [1]", ["bad.toml:1", "a whole number", "[1]"]),
    "no rounds": ("rounds = 0", ["bad.toml:1", "rounds must be between 1 and", "rounds=0"]),
    "negative rounds": ("rounds = -3", ["bad.toml:1", "rounds=-3"]),
    "too many rounds": ("rounds = 100000000000", ["bad.toml:1", "rounds=100000000000"]),
    "k zero": ("[strategy]\nk = 0", ["bad.toml:2", "k must be between 1 and 10,000,000", "k=0"]),
    "k negative": ("[strategy]\nk = -7", ["bad.toml:2", "k=-7"]),
    "k more than workers": ("[cluster]\nworkers = 4\n[strategy]\nk = 5", ["bad.toml:4", "k=5, workers=4"]),
    "more slow workers than workers": (
        '[delay]\nname = "slow-worker"\nslow_workers = 11',
        ["bad.toml:3", "slow_workers=11, workers=10"],
    ),
    "k as a word": ('[strategy]\nk = "most"', ["bad.toml:2", "'auto'", "'most'"]),
    "k as a fraction": ("[strategy]\nk = 0.5", ["bad.toml:2", "a whole number or 'auto'", "0.5"]),
    "unknown strategy": ('[strategy]\nname = "lgd"', ["bad.toml:2", "'lgd'", "did you mean 'lgc'", "fastest-k"]),
    "negative warm-up": ("[strategy]\nwarmup_rounds = -1", ["bad.toml:2", "warmup_rounds=-1"]),
    "truth as text": ('[strategy]\nscale_partial = "perhaps"', ["bad.toml:2", "true or false", "'perhaps'"]),
    "unknown place": ('[strategy]\non = "rank"', ["bad.toml:2", "'server' or 'ranks'", "'rank'"]),
    "async on ranks": (
        '[strategy]\nname = "async"\non = "ranks"',
        ["bad.toml:3", "async has no rounds", "on=ranks", "full, fastest-k or lgc"],
    ),
    "no workers": ("[cluster]\nworkers = 0", ["bad.toml:2", "workers=0"]),
    "unknown late work": ('[cluster]\nlate_work = "half"', ["bad.toml:2", "'complete' or 'partial'", "'half'"]),
    "unknown delay": ('[delay]\nname = "gamma"', ["bad.toml:2", "'gamma'", "pareto", "recorded"]),
    "negative delay": ("[delay]\nshift_seconds = -0.1", ["bad.toml:2", "shift_seconds=-0.1"]),
    "delay not a number": ("[delay]\nmean_seconds = nan", ["bad.toml:2", "mean_seconds=nan"]),
    "infinite delay": ("[delay]\nmean_seconds = inf", ["bad.toml:2", "mean_seconds=inf"]),
    "no time at all": ("[delay]\nshift_seconds = 0\nmean_seconds = 0", ["bad.toml:2", "must not both be 0"]),
    "no persistence": ("[delay]\npersistence = 0", ["bad.toml:2", "persistence=0"]),
    "pareto without a mean": ("[delay]\nshape = 1.0", ["bad.toml:2", "shape must be more than 1"]),
    "recorded without a file": ('[delay]\nname = "recorded"', ["bad.toml", "file"]),
    "recorded, file missing": (
        '[delay]\nname = "recorded"\nfile = "no/such.csv"',
        ["no/such.csv", "No such file"],
    ),
    "negative latency": ("[network]\nlatency_seconds = -1", ["bad.toml:2", "latency_seconds=-1"]),
    "no bandwidth": ("[network]\nworker_bits_per_second = 0", ["bad.toml:2", "more than 0"]),
    "unknown data": ('[data]\nname = "cifar"', ["bad.toml:2", "'cifar'", "did you mean 'cifar10'"]),
    "unknown split": ('[data]\nsplit = "odd"', ["bad.toml:2", "'odd'", "dirichlet"]),
    "no classes": ("[data]\nclasses_per_worker = 0", ["bad.toml:2", "classes_per_worker=0"]),
    "more classes than there are": (
        "[data]\nclasses_per_worker = 11",
        ["bad.toml:2", "classes_per_worker=11, classes=10"],
    ),
    "alpha zero": ('[data]\nsplit = "dirichlet"\nalpha = 0.0', ["bad.toml:3", "alpha must be more than 0"]),
    "files missing": (
        '[data]\nname = "mnist"\ndownload = false\ndirectory = "nowhere"',
        ["mnist", "nowhere", "train-images"],
    ),
    "more workers than samples": (
        '[cluster]\nworkers = 2000\n[data]\nsplit = "iid"',
        ["2000", "1500"],
    ),
    "unknown model": ('[model]\nname = "resnet20"', ["bad.toml:2", "'resnet20'", "resnet18"]),
    "a model that is not there": ('[model]\nname = "nosuchmodule:build"', ["nosuchmodule"]),
    "a norm the model has not": ('[model]\nname = "mlp"\nnorm = "batch"', ["bad.toml:3", "norm", "mlp"]),
    "a norm nobody has": ('[model]\nname = "vgg11"\nnorm = "layer"', ["bad.toml:3", "'layer'", "group"]),
    "unknown optimiser": ('[optimizer]\nname = "sdg"', ["bad.toml:2", "'sdg'", "did you mean 'sgd'"]),
    "no learning rate": ("[optimizer]\nlr = 0", ["bad.toml:2", "lr must be more than 0"]),
    "negative decay": ("[optimizer]\nweight_decay = -1.0", ["bad.toml:2", "weight_decay=-1"]),
    "decay after the end": ("[optimizer]\ndecay_at = [0.5, 2.0]", ["bad.toml:2", "decay_at", "2"]),
    "nesterov without momentum": ("[optimizer]\nnesterov = true\nmomentum = 0", ["bad.toml:2", "nesterov"]),
    "no samples in a batch": ("[worker]\nbatch_size = 0", ["bad.toml:2", "batch_size=0"]),
    "blocks that do not divide": ("[worker]\nblocks = 5", ["bad.toml:2", "blocks=5, batch_size=32"]),
    "negative seed": ("seed = -1", ["bad.toml:1", "seed=-1"]),
    "a target of nothing": ("target_loss = 0", ["bad.toml:1", "target_loss must be more than 0"]),
    "a number too large": (f"target_loss = {'9' * 400}", ["bad.toml:1", "a number"]),
    "not TOML": ("rounds 3", ["bad.toml", "not valid TOML", "line 1"]),
    "the same key twice": ("rounds = 3\nrounds = 4", ["bad.toml", "not valid TOML"]),
}


@pytest.mark.parametrize(("text", "expected"), IN_FILES.values(), ids=IN_FILES.keys())
def test_a_bad_recipe_is_refused_in_one_line(text, expected, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text(text, encoding="utf-8")
    check_refused(["simulate", "bad.toml"], expected, capsys)


def check_refused(arguments, expected, capsys) -> None:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert lines[0].startswith("paceline: error: ")
    for part in expected:
        assert part in lines[0]


def test_a_file_that_is_not_text(tmp_path, capsys) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(b"rounds = 3 # \xff\xfe")
    check_refused(["simulate", str(file)], ["bad.toml", "not UTF-8", "byte 13"], capsys)


def test_a_file_of_a_hundred_megabytes_is_not_read(tmp_path, capsys) -> None:
    file = tmp_path / "bad.toml"
    with file.open("wb") as out:
        out.truncate(100_000_000)
    check_refused(["simulate", str(file)], ["bad.toml", "100,000,000"], capsys)


def test_a_file_that_is_not_there(tmp_path, capsys) -> None:
    check_refused(["simulate", str(tmp_path / "no.toml")], ["no.toml", "No such file"], capsys)


def test_a_folder_is_not_a_recipe(tmp_path, capsys) -> None:
    check_refused(["race", str(tmp_path)], [str(tmp_path)], capsys)


def test_a_recipe_nested_too_deeply(tmp_path, capsys) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("rounds = " + "[" * 30_000 + "]" * 30_000, encoding="utf-8")
    check_refused(["simulate", str(file)], ["bad.toml", "not valid TOML"], capsys)


ON_THE_COMMAND_LINE = {
    "unknown option": (["--rouds", "3"], ["--rouds", "--rounds"]),
    "no value": (["--rounds"], ["--rounds"]),
    "not a number": (["--rounds", "x"], ["--rounds", "a whole number", "'x'"]),
    "k too large": (["--strategy.k", "11"], ["--strategy.k", "k=11, workers=10"]),
    "by its short name": (["--k", "0"], ["k=0"]),
    "negative persistence": (["--persistence", "-1"], ["persistence=-1"]),
    "two files": (["a.toml", "b.toml"], ["b.toml"]),
    "unknown strategy": (["--strategies", "full,lgd"], ["'lgd'", "choose from full"]),
    "a strategy twice": (["--strategies", "full,full"], ["'full'", "twice"]),
    "no strategy": (["--strategies", ","], ["choose from full"]),
    "no seeds": (["--seeds", "0"], ["seeds=0"]),
}


@pytest.mark.parametrize(("arguments", "expected"), ON_THE_COMMAND_LINE.values(), ids=ON_THE_COMMAND_LINE.keys())
def test_bad_options_are_refused_in_one_line(arguments, expected, capsys) -> None:
    check_refused(["race", *arguments], expected, capsys)
