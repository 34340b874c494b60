"""Texts name files that are there: in docs, docstrings and comments."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).parents[2]
PLACES = ("src", "tests", "experiments", "docs", "examples")
NAMED = re.compile(r"`([\w./]+\.py)`|((?:\w+/)+\w+\.py)\b")
IN_EXAMPLES = {
    "docs/adding.md",
    *(f"tests/docs/{name}.py" for name in ("pages", "test_blocks", "test_commands", "test_file_names")),
}  # they make files


def files() -> list[str]:
    return [path.relative_to(PROJECT).as_posix() for place in PLACES for path in (PROJECT / place).rglob("*.*")]


def missing(text: str, known: list[str]) -> list[str]:
    """Return the Python files that a text names, by their whole path or the end of it, and that are not there."""
    named = [whole or part for whole, part in NAMED.findall(text)]
    named = [name for name in named if not Path(name).stem.isupper()]  # examples/NAME.py is any of them
    return [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in known)]


def test_no_text_names_a_file_that_is_not_there():
    known = [*files(), "conftest.py"]
    texts = [name for name in (*files(), "README.md", "CONTRIBUTING.md") if name.endswith((".py", ".md"))]
    wrong = {name: missing((PROJECT / name).read_text(encoding="utf-8"), known) for name in texts}
    assert {name: found for name, found in wrong.items() if found and name not in IN_EXAMPLES} == {}


def test_a_file_that_is_not_there_is_found():
    known = ["src/paceline/events.py"]
    assert missing("see `events.py`, `paceline/events.py` and `vents.py`", known) == ["vents.py"]
    assert missing("see examples/NAME.py", known) == []
    assert missing("see drivers/collective/roll.py", known) == ["drivers/collective/roll.py"]
