"""Figures of the docs have a source: a reader finds each one, verbatim, where it was measured.

Whoever writes a figure has one rule to keep, in README.md and in every page of docs/:

    A measured figure (a number with %, times, points, s, ms, MB and the like, or with a decimal point) stands in a
    paragraph, list item or table row that links to its source, and the source has that number:
      - a section of benchmarks.md (`benchmarks.md#links`), which counts with what experiments/results/benchmarks.md has
        below `make bench ...`;
      - a section of another page (`../codecs.md#which-one`), which keeps this rule itself;
      - a block of the same page: the command, the script, the recipe or the output that the page shows;
      - or, where the page has no room for the output, a command that makes it: `<!-- figures: COMMAND -->` on the line
        before the paragraph, the list or the table.
    A link holds for the table or the list that follows its paragraph, too. What is a setting and no result stands in
    backticks (`15 s`), where nobody looks for figures.

So 9.43 may not be rounded to 9.4 unless the source says so too, and a figure that nobody measured is found.

The pages of the parts (docs/*.md beside those in STRICT) explain more than they measure: there, only paragraphs that
link to benchmarks.md are held to it, and they may round what it says (9.4 for 9.43, 2.9 million for 2,886,912).
"""

from __future__ import annotations

import re
import runpy

import pytest

from tests.docs.commands import problem_of
from tests.docs.pages import CODE_SPAN, DOCS, EXPERIMENTS, LINK, ROOT, Page, Paragraph, all_pages, read

PAGES = all_pages()
STRICT = [page for page in PAGES if page.name in ("README.md", "docs/which-part.md") or "/guides/" in page.name]
BENCHMARKS, RESULTS = read(DOCS / "benchmarks.md"), read(EXPERIMENTS / "results" / "benchmarks.md")
OTHERS = [page for page in PAGES if page not in (*STRICT, BENCHMARKS, RESULTS)]
COMPUTED = {("docs/codecs.md", "which-one")}  # a table of quotients, which a test here computes again
UNITS = (
    r"%|times|points?|x|s|ms|seconds|minutes|hours|kB|MB|GB|kilobytes|(?:samples|steps|rounds|images)(?:/s| a second)"
)
NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
FIGURE = re.compile(
    rf"(?<![\w.,/-])({NUMBER})(?:(?: (?:to|and|or) | ?- ?)({NUMBER}))? ?(?:{UNITS})(?![\w/])"
    r"|(?<![\w.,/-])(\d+\.\d+)(?![\w.])"
)
PROGRAMS = "Python|torch|PyTorch|version|release|paceline|TLS|Lightning|Slurm"
VERSION = re.compile(rf"\b(?:{PROGRAMS})\s+(?:{NUMBER})(?:(?: to | and |, )(?:{NUMBER}))*")
RESULT = re.compile(
    r"^`((?:make bench ARGS=\"|python -m tests\.long\.|make test-long ARGS=\"tests/long/test_)([\w-]+).*)`$"
)


def figures_in(text: str) -> list[str]:
    """Return the measured figures of a paragraph, without the commas of thousands.

    >>> figures_in("`k=3` of 4 ranks: 9.43 times as fast, 1.6 to 2 % and 1,024 MB at 200 Mbit/s, with Python 3.11")
    ['9.43', '1.6', '2', '1024']
    """
    text = re.sub(LINK, lambda link: link["text"], text)
    text = VERSION.sub("", CODE_SPAN.sub("`", text))
    found = [number for figure in FIGURE.finditer(text) for number in figure.groups() if number]
    return [number.replace(",", "") for number in found]


def numbers_in(text: str) -> set[str]:
    return {number.replace(",", "") for number in re.findall(rf"(?<![\d.])(?:{NUMBER})", text)}


def sources_of(paragraph: Paragraph, page: Page) -> tuple[set[str], bool]:
    """Return the numbers of all sections that a paragraph links to, and whether one of them is of benchmarks.md."""
    numbers, measured = set(), False
    for link in LINK.finditer(paragraph.text):
        path, _, anchor = link["target"].partition("#")
        where = (ROOT / page.name).parent / path if path else ROOT / page.name
        if link["target"].startswith("http") or where.suffix != ".md" or not where.is_file():
            continue
        linked = read(where.resolve())
        if linked.name == BENCHMARKS.name:
            measured = True
            numbers |= numbers_in(_benchmark(anchor)) if anchor else set()
        elif anchor in {heading.anchor for heading in linked.headings}:
            numbers |= numbers_in(linked.section(anchor))
    return numbers, measured


def _benchmark(anchor: str) -> str:
    """Return a section of benchmarks.md with the results of its benchmarks."""
    if anchor not in {heading.anchor for heading in BENCHMARKS.headings}:
        return ""
    text = BENCHMARKS.section(anchor)
    for heading in RESULTS.headings:
        found = RESULT.match(heading.text)
        if found and found[2].startswith(anchor.removesuffix("s")):
            text += RESULTS.section(heading.anchor)
    return text


def untraced(page: Page, *, strict: bool) -> list[str]:
    """Return the figures of a page that no source has."""
    shown = set().union(*(numbers_in(f"{block.mark}\n{block.code}") for block in page.blocks)) if page.blocks else set()
    above: tuple[set[str], bool] = (set(), False)
    found = []
    for paragraph in page.paragraphs:
        linked, measured = sources_of(paragraph, page)
        if paragraph.text.startswith(("|", "- ", "* ")):
            linked, measured = linked | above[0], measured or above[1]
        else:
            above = (linked, measured)
        if paragraph.made_by:
            found += [f"{page.name}:{paragraph.line}: {wrong}" for wrong in [problem_of(paragraph.made_by)] if wrong]
        elif (strict or measured) and (page.name, paragraph.anchor) not in COMPUTED:
            found += [
                f"{page.name}:{paragraph.line}: {figure}"
                for figure in figures_in(paragraph.text)
                if figure not in linked | shown and (strict or not _is_rounded(figure, linked))
            ]
    return found


def _is_rounded(figure: str, numbers: set[str]) -> bool:
    """Whether a figure is one of the numbers with fewer digits, or in millions.

    >>> _is_rounded("9.4", {"9.43"}), _is_rounded("2.9", {"2886912"}), _is_rounded("9.5", {"9.43"})
    (True, True, False)
    """
    places = len(figure.partition(".")[2])
    return any(f"{float(number) / unit:.{places}f}" == figure for number in numbers for unit in (1, 10**6))


@pytest.mark.parametrize("page", STRICT, ids=lambda page: page.name)
def test_every_figure_has_a_source(page):
    assert untraced(page, strict=True) == []


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.name)
def test_figures_beside_a_link_to_the_benchmarks_are_those_of_the_benchmarks(page):
    assert untraced(page, strict=False) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is 9.43 times as fast ([links](benchmarks.md#links)).", []),
        ("It is 9.44 times as fast ([links](benchmarks.md#links)).", ["9.44"]),
        ("It is 9.43 times as fast ([pruning](benchmarks.md#pruning)).", ["9.43"]),
        ("It is 9.43 times as fast ([benchmarks](benchmarks.md)).", ["9.43"]),
        ("It is 9.43 times as fast.", ["9.43"]),
        ("[links](benchmarks.md#links):\n\n- 9.43 times\n- 9.44 times", ["9.44"]),
        ("[links](benchmarks.md#links):\n\n| a |\n|---|\n| 9.43 times |\n\nAnd 1.91 times.", ["1.91"]),
        ("It ends at 3.52 s.\n\n<!-- block: output of paceline race -->\n```text\nlgc 3.52\n```", []),
        ("<!-- figures: paceline race -->\n| a |\n|---|\n| 9.43 times |\n\nAnd 1.91 times.", ["1.91"]),
        ("<!-- figures: pacelin race -->\nIt is 9.43 times.", ["'pacelin' is no program that the docs use; mistyped?"]),
        ("A worker is gone after `15 s`; 4 ranks on Python 3.11, at 200 Mbit/s.", []),
    ],
)
def test_a_figure_without_its_source_is_found(text, found):
    problems = untraced(Page("docs/page.md", f"# Page\n\n{text}\n"), strict=True)
    assert [problem.rpartition(": ")[2] for problem in problems] == found


def test_every_result_names_a_benchmark_and_options_that_there_are():
    commands = [found[1] for heading in RESULTS.headings if (found := RESULT.match(heading.text))]
    assert len(commands) > 20
    assert len(commands) == RESULTS.text.count("\n## "), "a heading that is no command"
    assert [wrong for command in commands if (wrong := problem_of(command))] == []


def test_every_picture_is_one_that_a_script_makes():
    pictures = runpy.run_path(str(DOCS / "images" / "make.py"), run_name="pictures")["PICTURES"]
    made = {f"{name}.png" for name in pictures} | {"large-batch.png"}
    assert "large-batch" in (DOCS / "images" / "make.py").read_text(encoding="utf-8")
    used = {link.target.rpartition("/")[2] for page in PAGES for link in page.links if link.image}
    there = {path.name for path in (DOCS / "images").glob("*.png")}
    assert used
    assert used - made == set(), "pictures that nothing makes"
    assert there - used == set(), "pictures that no page shows"


TIMES = re.compile(
    r"^ (?P<codec>\S.*?)  +(?P<link>[\d,]+) +(?P<plans>(?:[\d,]+ +|- +){3})(?P<choice>[a-z-]+) ", re.MULTILINE
)
PLANS = ("all-reduce", "gather", "two-step")


def step_times() -> dict[tuple[str, int, int], float]:
    """Return the ms of a step by codec, ranks and Mbit/s: as chosen in `plans`, and at 200 Mbit/s in `links`."""
    found = {}
    plans, links = (RESULTS.section(f"make-bench-args{name}") for name in ("plans", "links"))
    for part in re.split(r"(?=, \d ranks\n)", plans)[1:]:
        for row in TIMES.finditer(part):
            ms = dict(zip(PLANS, row["plans"].split(), strict=True))[row["choice"]]
            found[row["codec"], int(part[2]), int(row["link"].replace(",", ""))] = float(ms.replace(",", ""))
    for part in re.split(r"(?=, \d ranks, 200 Mbit/s)", links)[1:]:
        for codec, ms in re.findall(r"^ (?:ours: |torch: )(.+?)  +([\d,]+) ", part, re.MULTILINE):
            found[codec.replace("no hook", "identity"), int(part[2]), 200] = float(ms.replace(",", ""))
    return found


def test_the_quotients_on_the_page_of_codecs_are_those_of_the_benchmarks():
    times, compared = step_times(), 0
    rows = re.findall(
        r"^\| (`.+?) \| ((?:[\d./ ]+ \| ){3})", read(DOCS / "codecs.md").section("which-one"), re.MULTILINE
    )
    for codecs, cells in rows:
        codec = codecs.split(", `")[0].replace("`", "")
        for link, cell in zip((50, 200, 1000), cells.split("|"), strict=False):
            for ranks, quotient in zip((2, 4, 8), cell.split("/"), strict=True):
                quicker = times["identity", ranks, link] / times[codec, ranks, link]
                assert abs(quicker - float(quotient)) <= 0.05 * quicker + 0.05, (codec, link, ranks, quicker)
                compared += 1
    assert compared == 6 * 9
