"""Every fenced block of every page is of one kind, and its kind is checked: no code in the docs is run by nobody.

    kind            how it is written                                  what is checked
    whole example   ```python title="examples/NAME.py"                 it equals the file, which a test runs
    excerpt         mark: from examples/NAME.py                        its lines stand in the file, in this order
    doctest         ```python with >>>                                 pytest collects the page
    run             mark: run by tests/PATH.py::test_name              the test is there, and names the page
    cuda            mark: needs cuda                                   its code names cuda or nccl
    recipe          ```toml                                            it loads as a recipe
    commands        ```sh                                              tests/docs/test_commands.py parses them
    output          ```text, mark: output of COMMAND                   the command can be typed
    exact output    ```text, mark: exact output of COMMAND             the command is run, and prints these lines
    result          ```text below a heading that is a command          tests/docs/test_figures.py parses the command

Marks are explained in tests/docs/pages.py. Blocks that are indented, without a fence, are drawings.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from conftest import NEEDS_EXTRAS
from paceline import Recipe
from paceline.cli.main import main
from tests.docs.commands import problem_of
from tests.docs.pages import MARK, ROOT, Block, Page, all_pages
from tests.examples import scripts

PAGES = all_pages()
FENCE_AFTER_MARK = re.compile(r"^ *```")
OUTPUT, EXACT, FROM, RUN_BY, CUDA = "output of ", "exact output of ", "from ", "run by ", "needs cuda"


def kind_of(block: Block, page: Page) -> str:
    """Return a block's kind; ValueError where it has none, or two."""
    kinds = [
        name
        for name, holds in {
            "whole example": block.title.startswith("examples/"),
            "excerpt": block.mark.startswith(FROM),
            "run": block.mark.startswith(RUN_BY),
            "cuda": block.mark == CUDA,
            "exact output": block.mark.startswith(EXACT) and block.language == "text",
            "output": block.mark.startswith(OUTPUT) and block.language == "text",
            "doctest": block.language == "python" and ">>> " in block.code and not block.mark,
            "recipe": block.language == "toml" and not block.mark and not block.title.startswith("examples/"),
            "commands": block.language == "sh" and not block.mark,
            "result": block.language == "text" and not block.mark and _is_below_a_command(block, page),
        }.items()
        if holds
    ]
    if len(kinds) != 1:
        said = f" marked {block.mark!r}" if block.mark else ""
        raise ValueError(f"a block of {block.language or 'no language'}{said} is {' and '.join(kinds) or 'of no kind'}")
    return kinds[0]


def _is_below_a_command(block: Block, page: Page) -> bool:
    above = [heading for heading in page.headings if heading.line < block.line]
    return bool(above) and bool(re.fullmatch(r"`(?:make|python) .+`", above[-1].text))


def problem_with(block: Block, page: Page, root: Path = ROOT) -> str | None:
    """Return what is wrong with a block, or None; exact outputs are run elsewhere."""
    try:
        kind = kind_of(block, page)
        if kind in CHECKS:
            CHECKS[kind](block, root)
    except (AssertionError, ValueError, SyntaxError, OSError) as error:
        return f"{block}: {error}".split("\n")[0]
    return None


def check_whole(block: Block, root: Path) -> None:
    path = root / block.title
    assert path.is_file(), f"there is no {block.title}"
    text = path.read_text(encoding="utf-8")
    assert block.code.strip("\n") == text.strip("\n"), f"it is not {block.title} as it stands there"


def check_excerpt(block: Block, root: Path) -> None:
    name = block.mark.removeprefix(FROM)
    assert (root / name).is_file(), f"there is no {name}"
    lines = iter(_bare(line) for line in (root / name).read_text(encoding="utf-8").split("\n"))
    for line in block.code.split("\n"):
        assert not _bare(line) or _bare(line) in lines, f"{name} has no such line, or has it earlier: {line.strip()}"


def _bare(line: str) -> str:
    """Return a line of code without its indentation and its comment."""
    return re.sub(r"(^|\s+)#( .*)?$", "", line).strip()


def check_doctest(block: Block, root: Path) -> None:
    options = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    ignored = re.findall(r"--ignore=(\S+)", options["addopts"])
    ignored += [path.relative_to(ROOT).as_posix() for path in NEEDS_EXTRAS if path.suffix == ".md"]
    collected = block.page in options["testpaths"] or block.page.startswith("docs/")
    assert collected and block.page not in ignored, "pytest does not collect this page: say which test runs the block"  # noqa: PT018


def check_run(block: Block, root: Path) -> None:
    named = block.mark.removeprefix(RUN_BY)
    path, _, test = named.partition("::")
    assert (root / path).is_file(), f"there is no {path}"
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    tests = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert test.startswith("test_"), f"{named} names no test"
    assert test in tests, f"{path} has no {test}"
    page = block.page.removeprefix("docs/")
    texts = [module.read_text(encoding="utf-8") for module in _with_helpers(root / path, root)]
    name = re.compile(rf"(?<![\w-])(?<!guides/){re.escape(page)}\b")
    assert any(name.search(text) for text in texts), f"neither {path} nor what it imports names {page}"


def _with_helpers(path: Path, root: Path) -> list[Path]:
    """Return a module of the tests, what it names of the tests' modules, and what these name."""
    found = [path, *(place for place in [path.with_name("conftest.py")] if place.is_file())]
    for module in found:
        text = module.read_text(encoding="utf-8")
        names = re.findall(r"\btests(?:\.\w+)+", text)
        for package, several in re.findall(r"from (tests[\w.]*) import (\([^)]*\)|.+)", text):
            names += [f"{package}.{name}" for name in re.findall(r"\w+", several)]
        places = [root / name.replace(".", "/") for name in names]
        for helper in [place / "__init__.py" for place in places] + [place.with_suffix(".py") for place in places]:
            if helper.is_file() and helper not in found:
                found.append(helper)
    return found


IN_EPOCHS = re.compile(r"\bbatch_sampler=.*?^ *for \w+ in range\(", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_with_a_batch_sampler_in_a_loop_of_epochs_shows_the_line_that_changes(page):
    """A DDP script has loader.sampler.set_epoch(epoch), and torch's own sampler beside a batch sampler has none."""
    blocks = [block for block in page.blocks if block.language == "python" and IN_EPOCHS.search(block.code)]
    shown = "loader.batch_sampler.set_epoch(epoch)" in page.text
    assert shown or not blocks, f"{blocks[0]}: the page does not say loader.batch_sampler.set_epoch(epoch)"


def check_cuda(block: Block, root: Path) -> None:
    assert block.language == "python", "only Python can need CUDA"
    ast.parse(block.code)
    assert re.search(r"cuda|nccl", block.code), "it names neither cuda nor nccl: let a test run it"


def check_recipe(block: Block, root: Path) -> None:
    Recipe.from_document(tomllib.loads(block.code))


def check_output(block: Block, root: Path) -> None:
    wrong = problem_of(block.mark.removeprefix(OUTPUT), root)
    assert wrong is None, wrong


CHECKS = {
    "whole example": check_whole,
    "excerpt": check_excerpt,
    "doctest": check_doctest,
    "run": check_run,
    "cuda": check_cuda,
    "recipe": check_recipe,
    "output": check_output,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_of_one_kind_and_holds(page):
    assert [wrong for block in page.blocks if (wrong := problem_with(block, page))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_mark_stands_before_a_block(page):
    lines = page.text.split("\n")
    stray = [
        number for number, line in enumerate(lines, 1) if MARK.match(line) and not FENCE_AFTER_MARK.match(lines[number])
    ]
    assert stray == [], "lines of marks without a block"


EXACT_ONES = [(page, block) for page in PAGES for block in page.blocks if block.mark.startswith(EXACT)]


def files_of(page: Page) -> dict[str, str]:
    """Return the files that a page tells its reader to have: blocks with a title, or with a first line `# NAME`."""
    found = {}
    for block in page.blocks:
        first = re.match(r"# ([\w-]+\.(?:toml|py))\b", block.code)
        name = block.title or (first[1] if first else "")
        if name and "/" not in name:
            found[name] = block.code
    return found


def printed(command: str) -> str:
    """Return what `paceline ...` or `python examples/NAME.py ...` prints, stderr included."""
    program, *arguments = shlex.split(command)
    if program == "python" and arguments[0].startswith("examples/"):
        return "".join(scripts.run(arguments[0].removeprefix("examples/"), *arguments[1:], folder=Path.cwd()))
    assert program == "paceline", f"only commands of paceline and examples have an exact output, not {command!r}"
    heard = io.StringIO()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        main(arguments)
    return heard.getvalue()


def stands_in(block: str, output: str) -> bool:
    """Whether the lines of a block follow each other in an output; a line `...` stands for any number of lines."""
    lines = [re.escape(line.rstrip()) for line in block.strip("\n").split("\n")]
    pattern = "\n".join(lines).replace(r"\.\.\.", r"(?:.*\n)*?.*")
    text = "\n".join(line.rstrip() for line in output.split("\n"))
    return re.search(rf"^{pattern}$", text, re.MULTILINE) is not None


@pytest.mark.parametrize(
    ("page", "block"), EXACT_ONES, ids=lambda value: str(value) if isinstance(value, Block) else ""
)
def test_an_exact_output_is_what_the_command_prints(page, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    output = "".join(printed(command) for command in block.mark.removeprefix(EXACT).split("; "))
    assert stands_in(block.code, output), f"{block.mark}: prints\n{output}"


def bad(text: str, name: str = "docs/strategies.md") -> list[str]:
    page = Page(name, text)
    return [wrong for block in page.blocks if (wrong := problem_with(block, page))]


EXAMPLE = "examples/skewed.toml"


@pytest.mark.parametrize(
    ("text", "says"),
    {
        "python that nobody runs": ("```python\nx = 1\n```", "of no kind"),
        "no language": ("```\npaceline race\n```", "no language"),
        "text without its command": ("```text\nidentical\n```", "of no kind"),
        "a mark of no kind": ("<!-- block: trust me -->\n```python\nx = 1\n```", "'trust me' is of no kind"),
        "two kinds": (f'<!-- block: needs cuda -->\n```python title="{EXAMPLE}"\ncuda\n```', "whole example and cuda"),
        "an example that differs": (f'```toml title="{EXAMPLE}"\nrounds = 1\n```', "not examples/skewed.toml"),
        "an example that is not there": ('```python title="examples/nothing.py"\n```', "no examples/nothing.py"),
        "an excerpt that differs": (f"<!-- block: from {EXAMPLE} -->\n```toml\nnothing = 1\n```", "no such line"),
        "an excerpt of nothing": ("<!-- block: from examples/no.py -->\n```python\nx\n```", "no examples/no.py"),
        "a test that is not there": (
            "<!-- block: run by tests/docs/test_blocks.py::test_no -->\n```python\nx\n```",
            "no test_no",
        ),
        "no test": ("<!-- block: run by tests/docs/test_blocks.py::bad -->\n```python\nx\n```", "names no test"),
        "a test of another page": (
            "<!-- block: run by tests/models/test_models_docs.py::test_examples_run -->\n```python\nx\n```",
            "names strategies.md",
        ),
        "no GPU needed": ("<!-- block: needs cuda -->\n```python\nx = 1\n```", "neither cuda nor nccl"),
        "a recipe that cannot be": ("```toml\n[strategy]\nkk = 3\n```", "kk"),
        "an output of no command": ("<!-- block: output of pacelin race -->\n```text\nx\n```", "mistyped"),
    }.values(),
)  # fmt: skip
def test_a_bad_block_is_found(text, says):
    found = bad(text)
    assert len(found) == 1
    assert says in found[0]


def test_doctests_where_pytest_does_not_look_are_found():
    text = "```python\n>>> 1 + 1\n2\n\n```"
    assert bad(text) == []
    for name in ("docs/models.md", "docs/ray.md", "CONTRIBUTING.md"):
        assert "does not collect" in bad(text, name)[0]


def test_good_blocks_are_let_pass():
    whole = (ROOT / EXAMPLE).read_text(encoding="utf-8")
    lines = [line for line in whole.split("\n") if line.strip() and not line.startswith("#")]
    assert bad(f'```toml title="{EXAMPLE}"\n{whole}```') == []
    assert bad(f"<!-- block: from {EXAMPLE} -->\n```toml\n{lines[0]}  # why\n\n    {lines[-1]}\n```") == []
    assert bad(f"<!-- block: from {EXAMPLE} -->\n```toml\n{lines[-1]}\n{lines[0]}\n```") != []
    assert bad("<!-- block: needs cuda -->\n```python\ntorch.cuda.synchronize()\n```") == []
    assert bad("- item\n\n    ```toml\n    rounds = 3\n    ```") == []
    assert bad('## `make bench ARGS="claims"`\n\n```text\n1\n```') == []


def test_an_exact_output_that_differs_is_found():
    lines = "a\nb  \nc\nd\n"
    assert stands_in("b\nc\n", lines)
    assert stands_in("a\n...\nd\n", lines)
    assert not stands_in("a\nc\n", lines)
    assert not stands_in("a\n...\ne\n", lines)
    output = printed("paceline plan pruning --epochs 100")
    assert stands_in(output, output)
    assert not stands_in(output.replace("100", "200"), output)
