"""What the site needs beyond docs/, as hooks of MkDocs (mkdocs.yml names this file).

Pages link to files of the repository as GitHub wants it, relative to themselves: `../CHANGELOG.md`,
`../../examples/skewed.toml`. On the site these files have places of their own, and links to them are rewritten:

    README.md                                     the first page, index.md
    CHANGELOG.md, CONTRIBUTING.md, SECURITY.md    pages
    experiments/                                  its pages: what there is, the log, and what came out
    CITATION.cff                                  as it is
    examples/                                     a page that lists the scripts and recipes; each is copied as it is

A link to any other file outside of docs/ is left as it is, and `mkdocs build --strict` refuses it. `exclude_docs` of
mkdocs.yml names programs by their folders: a plain `*.py` would leave out the examples too.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

PROJECT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "experiments/README.md": "experiments.md",
    "experiments/LOG.md": "log.md",
    "experiments/results/papers.md": "results/papers.md",
    "experiments/results/benchmarks.md": "results/benchmarks.md",
}
PLACES = {**PAGES, "examples": "examples.md", "CITATION.cff": "CITATION.cff"}
"""A file of the repository -> its page on the site."""

FENCED = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<before>\]\(|^\[[^]\n]+\]:\s+)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?", re.MULTILINE)
DOCUMENTED = re.compile(r"^(::: \S+)\n(?: {4}options:\n)?", re.MULTILINE)
SESSION = re.compile(r"^```python\n(?=>>> )", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that the site shows, and that are not in docs/."""
    from mkdocs.structure.files import File

    for name, place in PAGES.items():
        if (PROJECT / name).is_file():
            text = (PROJECT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, place, content=with_links(text, name)))
    if (PROJECT / "CITATION.cff").is_file():
        files.append(File.generated(config, "CITATION.cff", abs_src_path=str(PROJECT / "CITATION.cff")))
    for path in example_files():
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs/ lead to their places on the site, nest documented names, and mark Python sessions."""
    if page.file.generated_by is None:
        markdown = with_links(markdown, f"docs/{page.file.src_uri}")
    if page.file.src_uri.startswith("reference/api/"):
        markdown = below_headings(markdown)
    return SESSION.sub("```pycon\n", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Name the pages of the reference as such, for the style of their tables."""
    return f'<div class="reference">{html}</div>' if page.file.src_uri.startswith("reference/") else html


def below_headings(text: str) -> str:
    """Return a page of the reference whose documented names are one level below its headings, if it has any.

    >>> print(below_headings("## Data\\n\\n::: paceline.data.Dataset\\n"))
    ## Data
    <BLANKLINE>
    ::: paceline.data.Dataset
        options:
          heading_level: 3
    <BLANKLINE>
    """
    nested = re.search(r"^## ", text, re.MULTILINE)
    return DOCUMENTED.sub(r"\1\n    options:\n      heading_level: 3\n", text) if nested else text


def with_links(text: str, source: str) -> str:
    """Return a page with the links of `source`, a file of the repository, as its place on the site needs them."""
    here = posixpath.dirname(place_of(source) or source)

    def changed(link: re.Match[str]) -> str:
        target = link["target"]
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = None if ":" in target or target.startswith("/") else place_of(whole)
        if place is None:
            return link[0]
        return f"{link['before']}{posixpath.relpath(place, here or '.')}{link['anchor'] or ''}"

    parts, end = [], 0
    for fence in FENCED.finditer(text):
        parts += [LINK.sub(changed, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(changed, text[end:])])


def place_of(name: str) -> str | None:
    """Return where a file of the repository is on the site; None where it is not.

    >>> place_of("docs/guides/predict.md"), place_of("CHANGELOG.md"), place_of("LICENSE")
    ('guides/predict.md', 'changelog.md', None)
    """
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if name.startswith("examples/"):
        return name
    return PLACES.get(name)


def example_files() -> list[Path]:
    """Return the scripts and recipes of examples/, in the order of their names."""
    return sorted(path for path in (PROJECT / "examples").iterdir() if path.suffix in (".py", ".toml"))


def examples_page() -> str:
    """Return a page that lists the examples, each with the first sentence of its header."""
    rows = [f"| [{path.name}](examples/{path.name}) | {first_sentence(path)} |" for path in example_files()]
    about = "Every file is complete: copy it, or run it from the root of the repository with the command in its header."
    return "\n".join(["# All examples", "", about, "", "| file | what it shows |", "|---|---|", *rows, ""])


def first_sentence(path: Path) -> str:
    """Return the first sentence of a script's docstring, or of the comment that a recipe begins with."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        header = ast.get_docstring(ast.parse(text)) or ""
    else:
        header = re.sub(r"^# ?", "", "\n".join(re.findall(r"\A(?:#.*\n)+", text)), flags=re.MULTILINE)
    paragraph = " ".join(header.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0].replace("|", "\\|")
