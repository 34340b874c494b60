"""The page on models: its examples run, and its table is the table."""

import doctest
import re
import sys
from pathlib import Path

import torch

from paceline.models import MODELS, build_model, count_parameters

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_examples_run(tmp_path, monkeypatch):
    text = PAGE.read_text()
    (own,) = re.findall(r"```python\n# my_models.py\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "my_models.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    try:
        result = doctest.DocTestRunner(optionflags=OPTIONS).run(examples)
    finally:
        sys.modules.pop("my_models", None)
    assert result.attempted >= 8
    assert result.failed == 0


def test_the_table_lists_every_network_as_it_is():
    rows = re.findall(r"^\| `(\S+)` \| ([\d,]+) \| ([^|]*)\|", PAGE.read_text(), flags=re.MULTILINE)
    listed = {name: (int(count.replace(",", "")), norms.strip()) for name, count, norms in rows}
    with torch.device("meta"):
        actual = {
            name: (
                count_parameters(build_model(name, input_shape=(3, 32, 32), classes=10)),
                ", ".join(entry.norms),
            )
            for name, entry in MODELS.items()
        }
    assert listed == actual
