"""Every link of the docs leads somewhere: to a file, to a heading, to an address; and every page can be found."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import DOCS, ROOT, Page, all_pages, read

PAGES = all_pages()
SITE = ROOT / "mkdocs.yml"


def broken(page: Page) -> list[str]:
    """Return the links of a page that lead nowhere."""
    return [f"{page.name}:{link.line}: {link.target}" for link in page.links if not _leads_somewhere(link.target, page)]


def _leads_somewhere(target: str, page: Page) -> bool:
    if re.match(r"\w+:", target):
        address = urlsplit(target)
        return address.scheme == "https" and "." in address.netloc and not re.search(r"[\s<>\"]", target)
    path, _, anchor = target.partition("#")
    if not path:
        return anchor in {heading.anchor for heading in page.headings}
    where = ((ROOT / page.name).parent / path).resolve()
    if not where.is_relative_to(ROOT) or not where.exists():
        return False
    return not anchor or (where.suffix == ".md" and anchor in {heading.anchor for heading in read(where).headings})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    assert broken(page) == []


def test_no_address_has_two_spellings():
    seen: dict[str, set[str]] = {}
    for page in PAGES:
        for link in page.links:
            if link.target.startswith("http"):
                address = urlsplit(link.target)
                plain = f"{address.netloc.removeprefix('www.')}{address.path.rstrip('/')}".lower()
                seen.setdefault(plain, set()).add(link.target.partition("#")[0])
    assert {plain: several for plain, several in seen.items() if len(several) > 1} == {}


@pytest.mark.skipif(not SITE.exists(), reason="there is no site yet")
def test_every_page_is_in_the_sites_navigation():
    listed = set(re.findall(r"[\w/.-]+\.md", SITE.read_text(encoding="utf-8")))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert there - listed == set(), "pages that the navigation leaves out"


def test_every_page_is_linked_from_another():
    linked = set()
    for page in PAGES:
        for link in page.links:
            path = link.target.partition("#")[0]
            if path.endswith(".md") and "://" not in path:
                found = ((ROOT / page.name).parent / path).resolve()
                linked |= {found} - {ROOT / page.name}
    assert [page.name for page in PAGES if page.name.startswith("docs/") and ROOT / page.name not in linked] == []


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("[a](rounds.md)", False),
        ("[a](rounds.md#server-or-ranks)", False),
        ("[a](#here)", False),
        ("[a](../examples/skewed.toml)", False),
        ("![a](images/plan.png)", False),
        ("[a](https://docs.pytorch.org/docs/stable/)", False),
        ("`[a](nowhere.md)`", False),
        ("[a](round.md)", True),
        ("[a](rounds.md#server-or-rank)", True),
        ("[a](#there)", True),
        ("[a](../../elsewhere.md)", True),
        ("![a](images/nothing.png)", True),
        ("[a](http://example.org/)", True),
        ("[a](https://localhost)", True),
        ("[![a](images/nothing.png)](rounds.md)", True),
        ("[a]: nowhere.md", True),
    ],
)
def test_a_link_to_nowhere_is_found(link, is_broken):
    assert bool(broken(Page("docs/page.md", f"# Here\n\nSee this:\n\n{link}\n"))) == is_broken
