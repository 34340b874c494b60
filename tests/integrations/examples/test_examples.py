"""The examples inside Trainer and Lightning, on two ranks: they learn, and send fewer bytes than DDP would.

The example on Ray is run by tests/integrations/ray, on the cluster there.
"""

from __future__ import annotations

import re

from tests.examples.scripts import run

PARAMETERS = 64 * 256 + 256 + 256 * 10 + 10  # of the module in lightning_module.py
STEPS = 2 * 45  # of a rank in two epochs: 1,440 digits, 2 ranks, batches of 16


def numbers(text, pattern):
    found = re.findall(pattern, text)
    assert found, f"no line like {pattern!r}:\n{text[-3000:]}"
    return [float(each) for each in found]


def test_hf_trainer_learns_and_sends_fewer_bytes_than_its_gradients_have():
    first, second = run("hf_trainer.py", "--steps", "60", ranks=2)
    losses = numbers(re.search(r"loss on new sentences: (.*)", first)[1], r"[\d.]+")
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert losses[-1] < 1.5  # that of whoever knows nothing is log 64, 4.16, and of whoever knows the language 0.56
    (averages,), (sent,) = numbers(first, r"(\d+) averages"), numbers(first, r"sent ([\d.]+) MB")
    (raw,) = numbers(first, r"gradients have ([\d.]+) MB")
    assert averages >= 4  # each evaluation comes after one at least
    assert 0 < sent < raw / 4
    assert "loss on new sentences" not in second, "rank 0 alone prints"


def test_hf_trainer_runs_as_trainers_own_ddp():
    first, _ = run("hf_trainer.py", "--steps", "8", "--plain", ranks=2)
    assert len(numbers(re.search(r"loss on new sentences: (.*)", first)[1], r"[\d.]+")) == 4
    assert "averages" not in first


def test_lightning_module_learns_by_averaging():
    first, second = run("lightning_module.py", "--epochs", "2", ranks=2)
    assert numbers(first, r"test accuracy ([\d.]+)")[-1] > 0.8
    assert numbers(first, r"rank 0: (\d+) steps") == [STEPS]
    assert numbers(first, r"([\d.]+) MB sent")[0] > 0
    assert "accuracy" not in second, "rank 0 alone prints"


def test_lightning_module_learns_with_encoded_gradients():
    first, _ = run("lightning_module.py", "--part", "compress", "--epochs", "2", ranks=2)
    assert numbers(first, r"test accuracy ([\d.]+)")[-1] > 0.8
    assert numbers(first, r"rank 0: (\d+) steps") == [STEPS]
    assert 0 < numbers(first, r"([\d.]+) MB sent")[0] < 4 * PARAMETERS * STEPS / 1e6 / 4


def test_lightning_module_runs_as_lightnings_own_ddp():
    first, _ = run("lightning_module.py", "--part", "none", "--epochs", "1", ranks=2)
    assert numbers(first, r"test accuracy ([\d.]+)")[-1] > 0.5
    assert "MB sent" not in first
