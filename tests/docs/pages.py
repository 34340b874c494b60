"""The pages that users read, as blocks, headings, links and paragraphs; so that tests run and check what they say.

A fenced block may have a mark, a comment on the line before its fence:

    <!-- block: from examples/NAME.py -->            an excerpt: its lines stand in that file, in this order
    <!-- block: output of COMMAND -->                what that command printed, once, on some machine
    <!-- block: exact output of COMMAND -->          what it prints everywhere: a test runs it and compares
    <!-- block: run by tests/PATH.py::test_name -->  that test runs the block
    <!-- block: needs cuda -->                       nobody runs it: there is no GPU here

`<!-- blocks: run by ... -->` anywhere on a page holds for all of its code that has no mark of its own. On the line
before a paragraph, a list or a table, `<!-- figures: COMMAND -->` names the command that its figures come from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS, EXPERIMENTS = ROOT / "docs", ROOT / "experiments"
READ_AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)(?P<rest>[^`]*)$")
MARK = re.compile(r"^\s*<!-- block: (?P<mark>.+?) -->\s*$")
MARK_OF_ALL = re.compile(r"^<!-- blocks: (?P<mark>.+?) -->\s*$", re.MULTILINE)
FIGURES_FROM = re.compile(r"^\s*<!-- figures: (?P<command>.+?) -->\s*$")
TITLE = re.compile(r'\btitle="([^"]+)"')
HEADING = re.compile(r"^(#{1,6}) +(.+?)(?: +#+)?$")
LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>(?:[^\[\]`]|`[^`]*`|!?\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^()\s]+(?:\([^()]*\))?)\)"
)
NAMED_LINK = re.compile(r"^\[[^\]]+\]: *(\S+)", re.MULTILINE)
CODE_SPAN = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands between the fences, and all that is said about it."""

    page: str
    line: int
    language: str
    title: str
    mark: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Heading:
    """A heading, with the anchor that GitHub gives it."""

    line: int
    level: int
    text: str
    anchor: str


@dataclass(frozen=True)
class Link:
    """A link or an image: where it leads."""

    line: int
    target: str
    image: bool


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, list item or table row, as one line; `anchor` is the heading above it, `made_by` a command."""

    line: int
    text: str
    anchor: str
    made_by: str


@dataclass(frozen=True)
class Page:
    """A page of Markdown; `name` is its path from the repository's root, such as "docs/guides/predict.md"."""

    name: str
    text: str

    @cached_property
    def _lines(self) -> list[tuple[int, str, bool]]:
        """Return number, text, and whether it is prose: not in a block, nor a fence, nor a comment."""
        lines, fence = [], None
        for number, line in enumerate(self.text.split("\n"), 1):
            found = FENCE.match(line)
            if fence is None and found:
                fence = found["ticks"]
                lines.append((number, line, False))
            elif fence is not None:
                lines.append((number, line, False))
                fence = None if line.strip() == fence else fence
            else:
                lines.append((number, line, not line.lstrip().startswith("<!--")))
        if fence is not None:
            raise ValueError(f"{self.name}: a fence is never closed")
        return lines

    @cached_property
    def blocks(self) -> list[Block]:
        of_all = MARK_OF_ALL.search(self.text)
        found, lines = [], self.text.split("\n")
        number = 0
        while number < len(lines):
            fence = FENCE.match(lines[number])
            if fence is None:
                number += 1
                continue
            end = next(later for later in range(number + 1, len(lines)) if lines[later].strip() == fence["ticks"])
            mark = MARK.match(lines[number - 1]) if number else None
            title = TITLE.search(fence["rest"])
            language = fence["language"]
            is_code = language in ("python", "bash", "yaml") and not title
            said = mark["mark"] if mark else of_all["mark"] if of_all and is_code else ""
            inside = re.compile(rf"^ {{0,{len(fence['indent'])}}}")
            code = "".join(inside.sub("", line) + "\n" for line in lines[number + 1 : end])
            found.append(Block(self.name, number + 1, language, title[1] if title else "", said, code))
            number = end + 1
        return found

    @cached_property
    def marks(self) -> int:
        """Return how many marks of single blocks there are, wherever they stand."""
        return sum(1 for line in self.text.split("\n") if MARK.match(line))

    @cached_property
    def drawings(self) -> list[str]:
        """Return the indented blocks: drawings and lists of commands, no code."""
        found: list[list[str]] = [[]]
        for _, line, is_prose in self._lines:
            if is_prose and line.startswith("    "):
                found[-1].append(line)
            elif found[-1]:
                found.append([])
        return ["\n".join(lines) + "\n" for lines in found if lines]

    @cached_property
    def headings(self) -> list[Heading]:
        found: list[Heading] = []
        taken: dict[str, int] = {}
        for number, line, is_prose in self._lines:
            heading = HEADING.match(line) if is_prose else None
            if heading:
                anchor = slug(heading[2])
                taken[anchor] = taken.get(anchor, -1) + 1
                unique = f"{anchor}-{taken[anchor]}" if taken[anchor] else anchor
                found.append(Heading(number, len(heading[1]), heading[2], unique))
        return found

    @cached_property
    def links(self) -> list[Link]:
        found, prose = [], self._prose()
        for link in LINK.finditer(prose):
            line = prose.count("\n", 0, link.start()) + 1
            found.append(Link(line, link["target"], bool(link["image"])))
            inner = LINK.search(link["text"])  # an image that is a link
            found += [Link(line, inner["target"], True)] if inner else []
        for link in NAMED_LINK.finditer(prose):
            found.append(Link(prose.count("\n", 0, link.start()) + 1, link[1], False))
        return found

    def _prose(self) -> str:
        """Return the text with blocks, drawings and spans of code blanked out, so that lines keep their numbers."""
        lines = [line if is_prose and not line.startswith("    ") else "" for _, line, is_prose in self._lines]
        return CODE_SPAN.sub(lambda found: "`" + "." * (len(found[0]) - 2) + "`", "\n".join(lines))

    @cached_property
    def paragraphs(self) -> list[Paragraph]:
        """Return paragraphs, items of lists and rows of tables, each with its lines joined."""
        found: list[Paragraph] = []
        anchor, made_by, first, lines = "", "", 0, []

        def end() -> None:
            if lines:
                found.append(Paragraph(first, " ".join(lines), anchor, made_by))
                lines.clear()

        anchors = {heading.line: heading.anchor for heading in self.headings}
        for number, line, is_prose in self._lines:
            if number in anchors or not is_prose or not line.strip():
                end()
                anchor = anchors.get(number, anchor)
                mark = FIGURES_FROM.match(line)
                made_by = mark["command"] if mark else ""
                continue
            if line.startswith("    ") and not lines:
                continue  # a drawing
            if line.startswith(("|", "- ", "* ")) or re.match(r"\s*(?:[-*]|\d+\.) ", line):
                end()
            first = first if lines else number
            lines.append(line.strip())
        end()
        return found

    def section(self, anchor: str) -> str:
        """Return the text below a heading, up to the next of its level or a higher one."""
        place = next(place for place, heading in enumerate(self.headings) if heading.anchor == anchor)
        heading, rest = self.headings[place], self.headings[place + 1 :]
        end = next((later.line - 1 for later in rest if later.level <= heading.level), None)
        return "\n".join(self.text.split("\n")[heading.line - 1 : end])


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading.

    >>> slug("Server or ranks?"), slug('`make bench ARGS="claims"`'), slug("[A link](page.md), and *more*")
    ('server-or-ranks', 'make-bench-argsclaims', 'a-link-and-more')
    """
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def read(path: Path) -> Page:
    return Page(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def all_pages() -> list[Page]:
    """Return every page that users read: those at the top of the repository, and all below docs/ and experiments/."""
    top = [ROOT / name for name in READ_AT_THE_TOP if (ROOT / name).is_file()]
    return [read(path) for path in (*top, *sorted(DOCS.rglob("*.md")), *sorted(EXPERIMENTS.rglob("*.md")))]


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the code of one language on a page of docs/, such as "lightning.md", in its order."""
    return [block.code for block in read(DOCS / page).blocks if block.language == language]


def blocks_run_by(page: str, test: str) -> list[str]:
    """Return the code on a page of docs/ whose marks name a test, in its order; of a diff, the code after it."""
    found = [block for block in read(DOCS / page).blocks if block.mark == f"run by {test}"]
    return [after(block.code) if block.language == "diff" else block.code for block in found]


def after(diff: str) -> str:
    """Return what a diff leaves.

    >>> after(" model = network\\n-train(model)\\n+train(model, quickly=True)\\n")
    'model = network\\ntrain(model, quickly=True)\\n'
    """
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))
