"""docs/adding.md, followed to the letter in a copy of the project: what it adds is there, and keeps the laws."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import warm

PROJECT = Path(__file__).parents[2]
PAGE = (PROJECT / "docs/adding.md").read_text(encoding="utf-8")
BLOCK = r"```{language}\n(?P<block>.*?)^```$"
STEP = re.compile(
    r"^`(?P<path>[\w./]+)`, (?:(?P<new>a new file)|(?P<where>below|in place of) `(?P<line>[^\n]+)`):\n\n"
    + BLOCK.format(language="python"),
    re.DOTALL | re.MULTILINE,
)
COMMANDS = re.compile(BLOCK.format(language="sh"), re.DOTALL | re.MULTILINE)
# `python -m MODULE ...` where torch is loaded already, and the project is imported anew: it is the copy.
ANEW = """
import runpy, sys
for name in list(sys.modules):
    if name.partition(".")[0] in ("paceline", "tests", "experiments"):
        del sys.modules[name]
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Section:
    """One `##` part of the page: the edits that it asks for, and the commands that show that they work."""

    title: str
    text: str

    def edit(self, project: Path) -> None:
        for step in STEP.finditer(self.text):
            path = project / step["path"]
            if step["new"]:
                assert not path.exists(), f"{step['path']} is there already: the page has to find another name"
                path.write_text(step["block"], encoding="utf-8")
                continue
            lines = path.read_text(encoding="utf-8").split("\n")
            assert lines.count(step["line"]) == 1, f"{step['path']} has no such line, or several: {step['line']}"
            place = lines.index(step["line"])
            lines[place if step["where"] == "in place of" else place + 1 : place + 1] = step["block"].split("\n")[:-1]
            path.write_text("\n".join(lines), encoding="utf-8")

    @property
    def commands(self) -> list[list[str]]:
        return [shlex.split(line) for found in COMMANDS.finditer(self.text) for line in found["block"].splitlines()]


SECTIONS = [Section(*part.split("\n", 1)) for part in PAGE.split("\n## ")[1:]]


def copy_of_the_project(folder: Path) -> Path:
    """Return a copy with what was compiled of its sources: kernels in machine code take many seconds."""
    shutil.copytree(PROJECT / "src", folder / "src")
    ignored = shutil.ignore_patterns("__pycache__", "golden*", ".mypy_cache")
    for name in ("tests/contracts", "tests/data", "tests/long", "tests/parity", "tests/oracles", "experiments"):
        shutil.copytree(PROJECT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "conftest.py", "tests/__init__.py"):
        shutil.copy(PROJECT / name, folder / name)
    return folder


def test_the_page_has_a_section_for_each_kind_of_algorithm_and_no_block_is_passed_over():
    assert [section.title for section in SECTIONS] == ["A strategy", "A codec", "A pruning policy"]
    read = sum(len(STEP.findall(section.text)) + len(COMMANDS.findall(section.text)) for section in SECTIONS)
    assert read == PAGE.count("```") // 2
    assert all(section.commands for section in SECTIONS)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_who_follows_the_page_has_an_algorithm_that_keeps_the_laws(section, tmp_path):
    project = copy_of_the_project(tmp_path)
    section.edit(project)
    environment = os.environ | {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    for command in section.commands:
        assert command[:2] == ["python", "-m"]
        done = warm.run(
            [sys.executable, "-c", ANEW, *command[2:]],
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
            finalized=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{shlex.join(command)}\n{output}"
        if "pytest" in command:
            passed = re.search(r"(\d+) passed", output)
            assert passed, output
            assert int(passed[1]) >= 10, f"the laws were not tried:\n{output}"
