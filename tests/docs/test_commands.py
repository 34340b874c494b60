"""Every command in the docs can be typed as it stands there: it is parsed, and its names are not those of before."""

from __future__ import annotations

import re

import pytest

from tests.docs.commands import GIVEN, commands_of, problem_of
from tests.docs.pages import Page, all_pages

PAGES = all_pages()
# Drawings have commands too, followed by what they do; in a block of `bash`, a script, others start our commands.
IN_A_DRAWING = re.compile(
    r"^ +(?:\$ )?((?:paceline|torchrun|python -m) [a-z-].*?)(?:\s+#.*|\s{3,}\S.*)?$", re.MULTILINE
)
IN_A_SCRIPT = re.compile(r"\b((?:torchrun|paceline) [a-z-].*)$", re.MULTILINE)


def commands_on(page: Page) -> list[str]:
    found = []
    for block in page.blocks:
        if block.language == "sh":
            found += commands_of(block.code)
        elif block.language == "bash":
            found += IN_A_SCRIPT.findall(block.code.replace("\\\n", ""))
    for drawing in page.drawings:
        found += IN_A_DRAWING.findall(drawing)
    return [command for command in found if GIVEN not in command]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_can_be_typed(page):
    assert [wrong for command in commands_on(page) if (wrong := problem_of(command))] == []


def test_the_commands_are_found():
    assert sum(len(commands_on(page)) for page in PAGES) > 60


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("paceline race --stratgies full", "--stratgies"),
        ("paceline plan my.toml --stages 2", "plan pipeline"),  # a name of before, which still works
        ("pacelin race", "mistyped"),
        ("paceline train my.toml | sbatchh --nodes=5", "mistyped"),
        ("torchrun --nproc-per-node 2 examples/nothing.py", "there is no examples/nothing.py"),
        ("torchrun --nproc-per-nod 2 train.py", "nproc-per-nod"),
        ("torchrun --nproc-per-node 4 -m paceline train my.toml --ot runs/mine", "--ot"),
        ("python docs/images/make.py look PAGE OUT.png --widht 390", "has no --widht"),
        ("python -m experiments nothing", "unknown experiment 'nothing'"),
        ('make bench ARGS="claims --sedes 3"', "--sedes"),
        ("make reace", "the Makefile has no reace"),
        ("pip install 'paceline[huggingfaces]'", "no extra 'huggingfaces'"),
    ],
)
def test_a_command_that_cannot_be_is_found(command, says):
    assert says in (problem_of(command) or "")


@pytest.mark.parametrize(
    "command",
    [
        "paceline train my.toml --on slurm --out runs/mine   | sbatch --nodes=5 --time=04:00:00  # a job",
        "OMP_NUM_THREADS=1 torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint host:29500 train.py --anything 3",
        "python docs/images/make.py look PAGE OUT.png --width 390 --dark",
        "python my_script.py --anything",
        "paceline keys keys --hosts ps.example.org && paceline serve my.toml --tls keys/server &",
        ". .venv/bin/activate",
        "pip install 'paceline[huggingface,ray]'",
    ],
)
def test_a_command_that_can_be_is_let_pass(command):
    assert problem_of(command) is None
