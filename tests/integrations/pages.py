"""The code of a page of the docs, block by block, so that tests run what users copy."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page, language="python"):
    """Return the blocks of one language on a page, such as "lightning.md", in their order."""
    return [code for kind, code in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")) if kind == language]
