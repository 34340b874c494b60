"""Every command in the docs can be typed as it stands there: it is parsed, and its names are not those of before."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from paceline.cli.main import COMMANDS, command_named

PROJECT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```$|((?:^ {4}.*\n)+)", re.DOTALL | re.MULTILINE)
LINE = re.compile(r"^\s*(?:\$ |torchrun .* -m )?paceline ([a-z].*?)(?:\s+#.*|\s{3,}\S.*)?$", re.MULTILINE)
GIVEN = "..."


def commands() -> list[tuple[str, str]]:
    found = []
    for page in (PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))):
        for fenced, indented in BLOCK.findall(page.read_text(encoding="utf-8")):
            text = (fenced or indented).replace("\\\n", "")
            found += [(page.name, match[1]) for match in LINE.finditer(text) if GIVEN not in match[1]]
    return found


def test_every_command_in_the_docs_is_parsed_without_a_warning(capsys) -> None:
    typed = commands()
    assert len(typed) > 30
    for page, line in typed:
        name, arguments = command_named(shlex.split(line))
        COMMANDS[name].parse(arguments)
        assert capsys.readouterr().err == "", f"{page}: paceline {line}"
