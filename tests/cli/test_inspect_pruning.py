"""`paceline inspect pruning` as a user meets it, on simulated and real runs; and the same for a script."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.analysis.pruning import images_of, predictions, record_of, record_of_folder
from paceline.cli import main
from paceline.drivers.averaging.job import AveragingRecorder
from paceline.drivers.ranks.checkpoints import RankCheckpoints
from paceline.drivers.replayed.averaged_run import replay_averages
from paceline.events import Window
from paceline.recipes import Recipe
from paceline.recipes.assembly import load_data, make_member, make_training
from paceline.runs.ranks import write_recipe
from paceline.traces.label_errors import find_label_errors
from paceline.traces.pruning_record import PRUNING, empty_record, read_pruning

SMALL = ["--data", "synthetic", "--data.samples", "80", "--data.size", "4", "--data.channels", "1", "--data.split",
         "iid", "--workers", "2", "--k", "2", "--worker.batch-size", "8", "--rounds", "20"]  # fmt: skip
FINE = ["--pruning", "fine-pruning", "--pruning.window", "4", "--pruning.starting-point", "1", "--pruning.block", "1",
        "--pruning.count", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """A simulated run, made once."""
    folder = tmp_path_factory.mktemp("simulated")
    assert main(["simulate", *SMALL, *FINE, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def run(simulated, tmp_path, monkeypatch):
    """A copy of it, to be inspected."""
    monkeypatch.setenv("COLUMNS", "80")
    return shutil.copytree(simulated, tmp_path / "run")


def test_a_table_and_a_page_with_images(run, capsys) -> None:
    assert main(["inspect", "pruning", str(run)]) == 0
    told = capsys.readouterr()
    assert max(len(line.rstrip()) for line in told.out.splitlines()) <= 80
    assert "of the prunings" in told.out
    assert "fine-pruning: window 4, starting point 1" in told.out
    assert "Classes" in told.out
    assert f"page: {run / 'pruning.html'}" in told.err
    page = (run / "pruning.html").read_text(encoding="utf-8")
    assert page.count("<img") > 20
    assert len(page) < 2_000_000


def test_the_document_adds_up_to_what_the_record_holds(run, capsys) -> None:
    assert main(["inspect", "pruning", str(run), "--json", "--most", "2", "--out", str(run / "here")]) == 0
    found, record = json.loads(capsys.readouterr().out), read_pruning(run)
    assert record.prunings > 0
    assert found["prunings"] == record.prunings == sum(each["prunings"] for each in found["classes"])
    assert found["samples"] == record.samples == sum(each["samples"] for each in found["times_pruned"])
    assert [each["sample"] for each in found["suspects"]] == find_label_errors(record).tolist()
    assert found["settings"] == record.settings
    assert not (run / "pruning.html").exists()
    assert (run / "here/pruning.html").read_text(encoding="utf-8").count("<figure") <= 10 * 2 * 2 + 4


def test_a_page_may_be_named_as_a_file_for_one_more_release(run, capsys) -> None:
    assert main(["inspect", "pruning", str(run), "--json", "--out", str(run / "here.html")]) == 0
    assert "--out is now a folder" in capsys.readouterr().err
    assert (run / "here.html").is_file()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"data": 5}, "'data' is a section"),
        ({"data": {"name": "synthetic", "samples": 1_000_000}}, "the record has 1 samples, and its recipe 1,000,000"),
        ({"data": {"name": "mnist", "directory": "/dev/null", "download": True}}, "give --data-directory /dev/null"),
        ({"seed": 3}, "digits as it is found here has other labels than the run had"),
    ],
)
def test_a_source_that_cannot_be_gives_no_images_and_says_why(source, said) -> None:
    images, note = images_of(dataclasses.replace(empty_record(), source=source), [0])
    assert images == {}
    assert note.startswith("Without images: ")
    assert said in note


def test_images_of_data_of_ones_own_are_shown_if_the_data_are_given(run, tmp_path, monkeypatch, capsys) -> None:
    code = (
        "from paceline.recipes.assembly import load_data\nfrom paceline.recipes import Recipe\n"
        "def load():\n    about = dict(name='synthetic', samples=80, size=4, channels=1)\n"
        "    train = load_data(Recipe().with_settings(data=about)).train\n"
        "    return (train.inputs, train.targets), (train.inputs, train.targets)\n"
    )
    (tmp_path / "images_of_mine.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    record = read_pruning(run)
    source = {**record.source, "data": {**record.source["data"], "name": "images_of_mine:load"}}
    dataclasses.replace(record, source=source).write(run)
    assert main(["inspect", "pruning", str(run)]) == 0
    assert (
        "no record may name code: `paceline inspect pruning RUN --data images_of_mine:load` shows"
        in capsys.readouterr().err
    )
    assert "images_of_mine" not in sys.modules
    assert main(["inspect", "pruning", str(run), "--data", "images_of_mine:load"]) == 0
    assert "Without images" not in capsys.readouterr().err
    assert (run / "pruning.html").read_text(encoding="utf-8").count("<img") > 20


def test_without_its_data_set_or_with_another_the_tables_stay(run, capsys) -> None:
    record = read_pruning(run)
    source = {**record.source, "data": {**record.source["data"], "name": "mnist", "directory": str(run)}}
    dataclasses.replace(record, source=source).write(run)
    assert main(["inspect", "pruning", str(run)]) == 0
    assert "Without images: " in capsys.readouterr().err
    dataclasses.replace(record, label=np.roll(record.label, 1)).write(run)
    assert main(["inspect", "pruning", str(run)]) == 0
    assert "synthetic as it is found here has other labels than the run had" in capsys.readouterr().err
    assert "<img" not in (run / "pruning.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere is not there; give the folder of a run"),
        (["empty"], f"empty has no {PRUNING}, and no trace.jsonl to make it from"),
        (["damaged"], f"damaged/{PRUNING} is refused: it is no safetensors file"),
        (["empty", "--most", "0"], "--most must be between 1 and 200 images in a row (it is 0)"),
        (["empty", "--out", "no/where.html"], "cannot write the page to no/where.html"),
        (["empty", "--mots", "3"], "unknown option --mots; did you mean --most?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, monkeypatch, capsys, arguments, said) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / PRUNING).write_bytes(b"\x00" * 20)
    assert main(["inspect", "pruning", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("paceline: error: ")
    assert said in told.err
    assert told.err.count("\n") == 1


def test_a_run_without_pruning_leaves_no_record(tmp_path, capsys) -> None:
    assert main(["simulate", *SMALL[:-1], "2", "--out", str(tmp_path)]) == 0
    assert "inspect pruning" not in capsys.readouterr().err
    assert not (tmp_path / PRUNING).exists()


def test_that_no_record_can_be_kept_does_not_undo_the_run(tmp_path, monkeypatch, capsys) -> None:
    def diverged(recipe, run):
        raise ValueError("the model's outputs are not finite")

    monkeypatch.setattr("paceline.analysis.pruning.record_of_run", diverged)
    assert main(["simulate", *SMALL[:-1], "2", *FINE, "--out", str(tmp_path)]) == 0
    assert f"cannot keep a record of the pruning in {tmp_path}: the model's outputs" in " ".join(
        capsys.readouterr().err.split()
    )
    assert (tmp_path / "report.html").exists()


def test_workers_that_average_leave_a_record_too(tmp_path) -> None:
    averaging = ["--strategy", "hpsgd", "--pruning.name", "info-batch"]
    at = SMALL.index("--k")
    assert main(["simulate", *SMALL[:at], *SMALL[at + 2 :], *averaging, "--out", str(tmp_path)]) == 0
    record = read_pruning(tmp_path)
    assert record.policy == "info-batch"
    assert record.prunings > 0
    assert record.source["strategy"]["name"] == "hpsgd"


def of_ranks(folder, *, apart=0.0, **settings) -> None:
    """A folder as two ranks leave it that have averaged twelve times."""
    windows = [(Window(steps=2), Window(steps=2))] * 12
    recipe = Recipe().with_settings(
        data={"name": "synthetic", "samples": 80, "size": 4, "channels": 1, "split": "iid"},
        strategy={"name": "local-sgd", "period": 2}, cluster={"workers": 2}, worker={"batch_size": 8}, **settings,
    )  # fmt: skip
    team = replay_averages(windows, make_training(recipe, load_data(recipe)), make_member(recipe))
    shared = team.parameters * (1 + apart)
    write_recipe(recipe, folder)
    story = AveragingRecorder(2).state_dict(0.0) | {"windows": torch.tensor([[[2, 0, 0]] * 2] * 12)}
    state = {"recipe": recipe.to_document(), "story": story, "sync": {"replica": {"shared": shared}}}
    RankCheckpoints(folder, rank=0).keep(24, state)


def test_a_real_run_is_replayed_once_and_its_record_kept(tmp_path) -> None:
    of_ranks(tmp_path, pruning={"name": "info-batch", "delta": 1.0})
    steps = []
    record = record_of_folder(tmp_path, on_step=lambda step, of: steps.append((step, of)))
    assert steps[-1] == (12, 12)
    assert record.epochs >= record.times_pruned.max() > 0
    assert record.samples == len(images_of(record, range(record.samples))[0])
    again = record_of_folder(tmp_path, on_step=lambda step, of: pytest.fail("replayed again"))
    assert np.array_equal(again.times_pruned, record.times_pruned)


@pytest.mark.parametrize(
    ("apart", "settings", "said"),
    [
        (0.0, {}, "pruned nothing: its recipe has no pruning.name"),
        (0.5, {"pruning": {"name": "info-batch"}}, "is not the run: the final weights differ"),
    ],
)
def test_a_replay_that_tells_nothing_of_the_run_leaves_no_record(tmp_path, capsys, apart, settings, said) -> None:
    of_ranks(tmp_path, apart=apart, **settings)
    assert main(["inspect", "pruning", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / PRUNING).exists()


# -- a script's own loop ----------------------------------------------------------------------------------------------


def two_blobs(samples=120, wrong=(5, 40, 77)):
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(samples) % 2
    inputs = torch.randn(samples, 1, 4, 4, generator=generator) * 0.5 + (2.0 * truth - 1).reshape(-1, 1, 1, 1)
    labels = truth.clone()
    labels[list(wrong)] = 1 - labels[list(wrong)]
    return TensorDataset(inputs, labels)


def trained(pruning, dataset, epochs):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(dataset, batch_sampler=pruning)
    for _ in range(epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            pruning.observe(torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("policy", ["fine-pruning", "info-batch"])
def test_labels_changed_on_purpose_are_found_and_are_the_hardest(tmp_path, policy) -> None:
    dataset, wrong = two_blobs(), {5, 40, 77}
    if policy == "fine-pruning":
        pruning = paceline.FinePruning(120, batch_size=20, window=20, starting_point=2, prune=0.05, count=4)
    else:
        pruning = paceline.InfoBatch(120, batch_size=20, epochs=14)
    model = trained(pruning, dataset, 14)
    model.train()
    record = record_of(pruning, dataset, model=model, classes=["left", "right"])
    assert set(find_label_errors(record).tolist()) == wrong
    theirs = sorted(wrong)
    assert record.difficulty[theirs].min() >= np.quantile(record.difficulty, 0.9)
    if policy == "fine-pruning":
        assert record.times_pruned[theirs].min() >= np.quantile(record.times_pruned, 0.8) > 0
    else:
        assert record.times_pruned[theirs].max() < np.median(record.times_pruned)
    classes = ["left", "right"]
    path = paceline.pruning_page(pruning, dataset, tmp_path / "page.html", model=model, classes=classes)
    with pytest.raises(ValueError, match="give a file in a folder that is there"):
        paceline.pruning_page(pruning, dataset, tmp_path / "new" / "page.html", model=model, classes=classes)
    page = path.read_text(encoding="utf-8")
    assert "; 3 labels look wrong</h1>" in page
    assert "<td>left</td><td>right</td>" in page
    assert model.training


def test_predictions_are_those_of_eval_mode_and_every_part_keeps_its_mode() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(3))
    module[2].eval()
    inputs, labels = torch.randn(10, 4), torch.arange(10) % 3
    parts = [(inputs[:7], labels[:7]), (inputs[7:], labels[7:])]
    found, whole = predictions(module, parts), predictions(module, [(inputs, labels)])
    assert [part.training for part in module] == [True, True, False]
    for name, values in found.items():
        assert values == pytest.approx(whole[name]), name
    loss = torch.nn.functional.cross_entropy(module.eval()(inputs), labels, reduction="none")
    assert found["loss"] == pytest.approx(loss.detach().numpy(), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "inputs", "labels", "said"),
    [
        (torch.nn.Flatten(), torch.full((4, 2), np.nan), [0] * 4, "the model's outputs are not finite"),
        (torch.nn.Flatten(), torch.zeros(4, 2), [2] * 4, r"labels must be between 0 and 1.*\(found 2 to 2\)"),
        (torch.nn.Flatten(0), torch.zeros(4, 2), [0] * 4, "the model must give a score for each class"),
        (torch.nn.Flatten(), torch.zeros(3, 2), [0] * 3, "the data set has 3 samples, and the sampler is over 4"),
    ],
)
def test_what_no_page_can_be_made_of_is_refused(model, inputs, labels, said) -> None:
    pruning = paceline.InfoBatch(4, batch_size=2, epochs=2)
    with pytest.raises(ValueError, match=said):
        record_of(pruning, TensorDataset(inputs, torch.tensor(labels)), model=model)
