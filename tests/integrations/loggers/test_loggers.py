"""TensorBoard, Weights & Biases and MLflow take figures as they are, in their offline modes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline.traces.run_status import RunStatus, WorkerStatus, status_figures
from tests import warm
from tests.docs.pages import blocks
from tests.integrations.loggers.jobs import STEPS, read_events
from tests.integrations.ranks import launch

JOBS = "tests.integrations.loggers.jobs"
PAGE = (Path(__file__).parents[3] / "docs" / "loggers.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("part", "logger"), [("averaging", "wandb"), ("rounds", "mlflow"), ("hook", "tensorboard"), ("hook", "wandb")]
)
def test_what_a_part_counts_is_what_the_logger_has(part, logger, tmp_path):
    first, second = launch(JOBS, {"part": part, "logger": logger, "folder": str(tmp_path)})
    logged = first["logged"]
    assert logged["last"]["paceline/sent_bytes"] == pytest.approx(first["figures"]["sent_bytes"])
    assert set(logged["last"]) == {f"paceline/{name}" for name in first["figures"]}
    assert logged["steps"] == STEPS
    assert first["figures"]["sent_bytes"] == second["figures"]["sent_bytes"] > 0
    assert any(tmp_path.iterdir())
    assert [name for name in first["figures"] if f"`{name}`" not in PAGE] == []


@pytest.mark.parametrize("strategy", [["--strategy", "lgc"], ["--strategy", "hpsgd", "--split", "iid"]])
def test_a_command_writes_for_tensorboard_into_its_run(strategy, tmp_path):
    command = [sys.executable, "-m", "paceline", "train", *strategy, "--workers", "2", "--rounds", "12"]
    command += ["--log", "tensorboard", "--out", str(tmp_path / "run")]
    warm.run(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=120, check=True)
    logged = read_events(tmp_path / "run" / "tensorboard")
    assert logged["steps"] == 12
    assert {"paceline/loss", "paceline/sent_bytes", "paceline/wait_seconds"} <= set(logged["last"])


def test_the_page_names_every_figure_of_a_run():
    status = RunStatus(
        round=1, rounds=2, seconds=1.0, loss=1.0, accuracy=1.0, begun=True, workers=(WorkerStatus(worker=0),)
    )
    assert [name for name in status_figures(status) if f"`{name}`" not in PAGE] == []


def test_the_page_s_scripts_run(tmp_path):
    """Each block is a script of its own, run with two ranks as torchrun would."""
    for number, code in enumerate(blocks("loggers.md")):
        (tmp_path / f"block_{number}.py").write_text(code)
        launch("tests.integrations.scripts", {"script": str(tmp_path / f"block_{number}.py"), "folder": str(tmp_path)})
