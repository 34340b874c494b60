"""LightningCLI finds the strategies: by name once `paceline.lightning` is imported, by class in any script."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from paceline.drivers.averaging.averager import AVERAGERS
from tests.integrations.ranks import ROOT

SCRIPT = """
import json, sys
import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI


class Net(L.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(3, width)


def strategy(*typed):
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false", *typed]
    made = LightningCLI(Net, run=False, save_config_callback=None, args=options).trainer.strategy
    return [type(made).__module__, made.method, made._settings]


if sys.argv[1] == "class":
    found = [strategy("--trainer.strategy=paceline.lightning.Averaging", *sys.argv[2:])]
else:
    import paceline.lightning

    found = [strategy(f"--trainer.strategy=paceline-{name}") for name in sys.argv[2:]]
print(json.dumps(found))
"""


def answers(tmp_path, *arguments):
    """Return the module, method and settings of each strategy that a process of its own has made."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "script.py", *arguments], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_every_averaging_is_known_by_its_name(tmp_path):
    assert answers(tmp_path, "name", *AVERAGERS) == [["paceline.lightning.averaging", name, {}] for name in AVERAGERS]


def test_the_class_takes_settings_in_a_script_that_knows_nothing_of_paceline(tmp_path):
    settings = ["method=local-sgd", "period=4", "codec=qsgd"]
    found = answers(tmp_path, "class", *(f"--trainer.strategy.{setting}" for setting in settings))
    assert found == [["paceline.lightning.averaging", "local-sgd", {"period": 4}]]
