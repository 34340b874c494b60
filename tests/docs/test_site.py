"""The site: it is built without a warning, every page is there, and nothing of it is loaded from elsewhere.

Where MkDocs is not installed (`make docs-tools`) all but the rewriting of links is skipped.
"""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SITE_FILES = PROJECT / "docs/site"
BUILD_SECONDS = 200.0
MISSING = [name for name in ("material", "mkdocstrings") if importlib.util.find_spec(name) is None]
IN_CI = bool(os.environ.get("CI"))  # there no test is skipped
needs_mkdocs = pytest.mark.skipif(
    bool(MISSING) and not IN_CI, reason=f"{', '.join(MISSING)} not installed: run `make docs-tools`"
)
NAV_PAGE = re.compile(r"^ +- .+: ([\w/-]+)\.md$|^  - [\w ]+: ([\w/-]+)\.md$", re.MULTILINE)
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b[^>]*?\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|@import\s+(?:url\()?["']?((?:https?:)?//[^"')\s;]+)|url\(\s*["']?((?:https?:)?//[^"')\s]+)""",
    re.IGNORECASE,
)
OFFLINE = ("--host-resolver-rules=MAP * ~NOTFOUND", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run")


def loaded_from_elsewhere(text: str) -> list[str]:
    return ["".join(found) for found in LOADED.findall(text)]


def build(project: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )


def module(name: str):
    spec = importlib.util.spec_from_file_location(f"site_{name}", SITE_FILES / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(PROJECT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_every_page_of_the_navigation_is_there_and_shows_no_comment(site):
    navigation = (PROJECT / "mkdocs.yml").read_text(encoding="utf-8")
    named = [first or second for first, second in NAV_PAGE.findall(navigation)]
    assert len(named) > 50
    assert [name for name in named if not (site / f"{name}.html").is_file()] == []
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert [name for name, text in pages.items() if "&lt;!--" in re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)] == []
    sources = [path.relative_to(site).as_posix() for path in site.rglob("*.py") if path.parent.name != "examples"]
    assert sources == [], "programs of docs/ are not published"


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_nothing_is_loaded_from_elsewhere(site):
    texts = {path: path.read_text(encoding="utf-8") for path in (*site.rglob("*.html"), *site.rglob("*.css"))}
    assert len(texts) > 50
    assert {str(path): found for path, text in texts.items() if (found := loaded_from_elsewhere(text))} == {}
    assert [str(path) for path, text in texts.items() if 'class="mermaid"' in text] == [], "the theme fetches Mermaid"


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_files_beside_docs_have_their_places(site):
    for path in (PROJECT / "examples").iterdir():
        if path.suffix in (".py", ".toml"):
            assert (site / "examples" / path.name).read_bytes() == path.read_bytes()
    listed = (site / "examples.html").read_text(encoding="utf-8")
    assert 'href="examples/skewed.toml"' in listed
    assert "One class per worker and stragglers that stay" in listed
    assert 'id="changelog"' in (site / "changelog.html").read_text(encoding="utf-8")


@needs_mkdocs
@pytest.mark.xdist_group("site")
def test_the_reference_has_signatures_texts_and_sessions(site):
    page = (site / "reference/api/optim.html").read_text(encoding="utf-8")
    assert 'id="paceline.optim.LARS"' in page
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert "trust_coefficient: float | None = 0.001" in text
    assert ">>> optimizer = LARS(model.parameters(), lr=2.0, weight_decay=5e-4)" in text
    assert "<blockquote>" not in page, "a session was taken for a quotation"
    assert "TIMEOUT_SECONDS" not in (site / "reference/api/averaging.html").read_text(encoding="utf-8")


@needs_mkdocs
@pytest.mark.browser
@pytest.mark.xdist_group("site")
def test_search_finds_pages_where_the_site_is_opened_as_a_file(site, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None and not IN_CI:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path: the site was not opened")
    assert browser is not None
    address = f"{(site / 'codecs.html').as_uri()}?q=pruning"
    options = [*OFFLINE, "--virtual-time-budget=20000", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([browser, *options, address], capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r"\d+ matching documents", done.stdout)
    assert re.search(r'href="[^"]*/pruning\.html[^"]*" class="md-search-result__link', done.stdout)


@needs_mkdocs
def test_a_link_that_leads_nowhere_is_refused(tmp_path):
    for folder in ("docs/site", "examples", "src"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(SITE_FILES / "hooks.py", tmp_path / "docs/site/hooks.py")
    (tmp_path / "examples/one.toml").write_text("# One recipe.\nrounds = 3\n", encoding="utf-8")
    (tmp_path / "src/one.txt").write_text("", encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\nSee [the first page](docs/index.md).\n", encoding="utf-8")
    checks = "exclude_docs: '*.py'\nvalidation:\n  unrecognized_links: warn\n  anchors: warn\n"
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: x\ntheme: mkdocs\nhooks: [docs/site/hooks.py]\nplugins: []\n{checks}",
        encoding="utf-8",
    )
    for links, fine in (
        ("[a](../examples/one.toml), [b](../CHANGELOG.md#changes)", True),
        ("[a](../src/one.txt)", False),
        ("[a](../examples/two.toml)", False),
        ("[a](../CHANGELOG.md#no-such-heading)", False),
    ):
        (tmp_path / "docs/index.md").write_text(f"# Title\n\n{links}\n", encoding="utf-8")
        done = build(tmp_path, tmp_path / "built")
        assert (done.returncode == 0) is fine, f"{links}\n{done.stdout}{done.stderr}"


def test_links_out_of_docs_lead_to_places_of_the_site():
    hooks = module("hooks")
    links = {
        ("[a](../CHANGELOG.md#unreleased)", "docs/recipes.md"): "[a](changelog.md#unreleased)",
        ("[a](../../examples/skewed.toml)", "docs/guides/predict.md"): "[a](../examples/skewed.toml)",
        ("[a](../../examples)", "docs/guides/predict.md"): "[a](../examples.md)",
        ("[a](../codecs.md#auto)", "docs/guides/predict.md"): "[a](../codecs.md#auto)",
        ("[a](docs/adding.md)", "CONTRIBUTING.md"): "[a](adding.md)",
        ("[a](LICENSE), [b](https://example.org/docs/x.md)", "CONTRIBUTING.md"): None,
        ("[a]: ../README.md", "docs/recipes.md"): "[a]: index.md",
        ("```\n[a](../CHANGELOG.md)\n```", "docs/recipes.md"): None,
        ("[a](#pipelines), [b](../src/paceline/events.py)", "docs/recipes.md"): None,
    }
    for (text, source), wanted in links.items():
        assert hooks.with_links(text, source) == (wanted or text)


def test_what_is_loaded_from_elsewhere_is_found():
    text = """<script src="https://a/x.js"></script><link rel="stylesheet" href="//b/x.css"><a href="https://c/">c</a>
    <img alt="" src='http://d/x.png'> @import "https://e/x.css"; p { background: url(https://f/x.png) }"""
    found = ["https://a/x.js", "//b/x.css", "http://d/x.png", "https://e/x.css", "https://f/x.png"]
    assert loaded_from_elsewhere(text) == found
    assert (
        loaded_from_elsewhere('<script src="assets/x.js"></script> p { background: url(data:image/png;base64,//x) }')
        == []
    )
