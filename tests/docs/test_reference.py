"""The reference is whole: options and keys as the tables have them, and every public name."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import paceline
from paceline.cli.main import COMMANDS
from paceline.cli.options import recipe_options
from tests.test_surface import PACKAGES

PROJECT = Path(__file__).parents[2]
REFERENCE = PROJECT / "docs/reference"
SHOWN = re.compile(r"^::: paceline\.(\S+)$", re.MULTILINE)
FRAMEWORKS = ("huggingface", "lightning", "ray")  # extras: what they have is read from their sources


def maker():
    """Import docs/reference/make.py, which is a program and no module of a package."""
    spec = importlib.util.spec_from_file_location("reference_make", REFERENCE / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_of(package: str) -> set[str]:
    """Return the public names of a sub-package, by its `__all__`, without an import of what it needs."""
    text = (PROJECT / "src/paceline" / package / "__init__.py").read_text(encoding="utf-8")
    return set(re.findall(r'"(\w+)"', re.search(r"^__all__ = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)[1]))


def shown_on(page: str) -> list[str]:
    return SHOWN.findall((REFERENCE / "api" / f"{page}.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", ["command-line.md", "recipe-keys.md"])
def test_a_page_is_what_its_program_writes(page):
    written = maker().PAGES[page]()
    assert (REFERENCE / page).read_text(encoding="utf-8") == written, "run python docs/reference/make.py"


def test_the_pages_name_every_option_and_key():
    pages = {page: (REFERENCE / page).read_text(encoding="utf-8") for page in maker().PAGES}
    for name, command in COMMANDS.items():
        section = pages["command-line.md"].split(f"\n## paceline {name}\n")[1].split("\n## ")[0]
        own = [option for option in command.table if not option.of_recipe]
        named = [option.metavar.strip("[]") for option in own if option.spelling.positional]
        named += [flag for option in own if not option.spelling.positional for flag in option.flags]
        assert [each for each in named if not re.search(rf"`{re.escape(each)}[ `]", section)] == [], name
    for option in recipe_options():
        section = pages["recipe-keys.md"].split(f"\n## `[{option.path[0]}]`\n" if len(option.path) > 1 else "\n## ")[1]
        assert f"\n| `{option.path[-1]}`" in section.split("\n## ")[0], option.name


@pytest.mark.parametrize("package", [*PACKAGES, *FRAMEWORKS])
def test_every_public_name_of_a_package_is_on_its_page(package):
    names = names_of(package) if package in FRAMEWORKS else set(getattr(paceline, package).__all__)
    shown = [name.partition(".")[2] for name in shown_on(package) if name.startswith(f"{package}.")]
    assert len(shown) == len(set(shown))
    assert {name for name in shown if "." not in name} == names


def test_every_name_of_paceline_itself_is_shown_or_leads_to_its_page():
    text = (REFERENCE / "api/paceline.md").read_text(encoding="utf-8")
    linked = re.findall(r"\[`(\w+)`\]\[paceline\.(\w+)\.(\w+)\]", text)
    assert all(name == target and f"{package}.{name}" in shown_on(package) for name, package, target in linked)
    assert {*shown_on("paceline"), *(name for name, *_ in linked)} == set(paceline.__all__)
