"""Every example is short enough to read, begins with how it is run, and has a test that runs it."""

from __future__ import annotations

import ast

import pytest

from tests.examples.scripts import EXAMPLES, ROOT

MOST_LINES = 60
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
RUN_BY = [*(ROOT / "tests" / "examples").glob("test_*.py"), *(ROOT / "tests" / "integrations").rglob("*.py")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_short_and_says_how_it_is_run(name):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    header = ast.get_docstring(ast.parse(text))
    assert header
    assert f"examples/{name}" in header, "the header has the command that runs it"


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_run_by_a_test(name):
    assert any(f'"{name}"' in path.read_text(encoding="utf-8") for path in RUN_BY if path.name != "test_all.py")
