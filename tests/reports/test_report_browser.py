"""The page in a real browser: every chart drawn, no script error, nothing wider than the screen."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import STRATEGIES, Race, Recipe
from paceline.reports import report_html
from paceline.reports.chart import PAGE_COLOURS
from tests.reports.race_traces import race, synchronous
from tests.reports.test_pages import PAGES
from tests.reports.test_real_runs import QUICK, SLOW, away, real
from tests.reports.test_report_page import EDGES, HOSTILE

pytestmark = pytest.mark.browser

WIDTHS = {"laptop": 1280, "phone": 390}
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=10000",
    "--window-size=1400,1000",
    "--dump-dom",
)

# Put first into a copy of the page: collects what goes wrong, measures when all is drawn, tells the wrapper.
RECORDER = """<script>
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => errors.push("blocked " + event.blockedURI));
console.error = console.warn = (...words) => errors.push(words.join(" "));
// A media query whose answer can be turned round, as when evening comes.
const ask = window.matchMedia.bind(window);
const scheme = Object.assign(new EventTarget(), { matches: ask("(prefers-color-scheme: dark)").matches });
window.matchMedia = (query) => (query === "(prefers-color-scheme: dark)" ? scheme : ask(query));
function measure() {
  const charts = {};
  document.querySelectorAll(".chart").forEach((chart) => {
    const box = chart.getBoundingClientRect();
    charts[chart.id] = {
      svgs: chart.querySelectorAll(".main-svg").length,
      traces: chart.querySelectorAll(".trace").length,
      expected: chart.data ? chart.data.length : -1,
      paper: chart.layout ? chart.layout.paper_bgcolor : "",
      fits: chart.scrollWidth <= chart.clientWidth && box.right <= innerWidth,
    };
  });
  const found = { charts, errors, hacked: "hacked" in window, hover: "", hiddenLines: 0 };
  found.scrollWidth = document.documentElement.scrollWidth;
  // What lies outside its card, but for what scrolls there.
  found.sticksOut = [...document.querySelectorAll(".card *, .tile *, header *")]
    .filter((part) => !part.closest(".scroller, .chart, pre"))
    .filter((part) => {
      const frame = part.closest(".card, .tile, header").getBoundingClientRect();
      return part.getBoundingClientRect().right > frame.right + 1;
    })
    .map((part) => `${part.tagName} ${part.className} ${part.textContent.slice(0, 40)}`);
  found.innerWidth = innerWidth;
  if (document.getElementById("chart-timeline")) {
    Plotly.Fx.hover("chart-timeline", [{ curveNumber: 0, pointNumber: 0 }], ["xy"]);
    const label = document.querySelector("#chart-timeline .hovertext");
    found.hover = label ? label.textContent : "";
  }
  const key = document.querySelector("button.key");
  if (key) {
    key.click();
    const first = document.querySelector(".chart");
    found.hiddenLines = first.data.filter((line) => line.visible === false).length;
  }
  scheme.matches = !scheme.matches;
  scheme.dispatchEvent(new Event("change"));
  found.turned = [...document.querySelectorAll(".chart")].map((chart) => chart.layout.paper_bgcolor);
  return found;
}
// Figures are unpacked first: a page is measured once all of them are drawn, or after a while as it is.
function tell(tries) {
  const drawn = [...document.querySelectorAll(".chart")].every((chart) => chart.querySelector(".main-svg"));
  if (!drawn && tries > 0) return setTimeout(tell, 100, tries - 1);
  setTimeout(() => parent.postMessage({ name: location.hash.slice(1), found: measure() }, "*"), 300);
}
addEventListener("load", () => tell(60));
</script>"""

WRAPPER = """<!doctype html><body><script>
const all = {};
addEventListener("message", (event) => {
  all[event.data.name] = event.data.found;
  document.documentElement.dataset.found = JSON.stringify(all);
});
</script>"""


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    if os.environ.get("CI"):
        pytest.fail("no Chromium, and where changes are checked no test is skipped")
    pytest.skip("no chromium, chromium-browser or google-chrome on the path: the page was not opened")


def opened(folder: Path, pages: dict[str, tuple[str, int]], *more: str) -> dict[str, Any]:
    """Open pages in frames of given widths (a headless window cannot be as narrow as a phone)."""
    wrapper = WRAPPER
    for name, (page, width) in pages.items():
        (folder / f"{name}.html").write_text(page.replace("<head>", f"<head>{RECORDER}", 1), encoding="utf-8")
        wrapper += f'<iframe src="{name}.html#{name}" style="width:{width}px;height:900px;border:0"></iframe>'
    (folder / "wrapper.html").write_text(wrapper, encoding="utf-8")
    command = [chromium(), *FLAGS, *more, f"--user-data-dir={folder / 'profile'}", (folder / "wrapper.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, f"the page told nothing: {done.stderr[-2000:]}"
    results: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    assert set(results) == set(pages)
    return results


def check(found: dict[str, Any], *, scrolls: bool = False) -> None:
    """Check that all is drawn and nothing sticks out; of some pages a chart scrolls inside its card."""
    assert found["errors"] == []
    assert found["scrollWidth"] <= found["innerWidth"]
    for name, chart in found["charts"].items():
        assert chart["svgs"] >= 1, name
        assert chart["expected"] > 0, name
        assert chart["traces"] == chart["expected"], name
        assert chart["fits"] or scrolls, name
    assert found["sticksOut"] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_race_is_drawn_on_laptop_and_phone(tmp_path: Path, scheme: str) -> None:
    page = report_html(race(seeds=2))
    prefers = f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"
    results = opened(tmp_path, {name: (page, width) for name, width in WIDTHS.items()}, prefers)
    for name, found in results.items():
        assert found["innerWidth"] == WIDTHS[name]
        check(found)
        assert len(found["charts"]) == 6
        assert {chart["paper"] for chart in found["charts"].values()} == {PAGE_COLOURS[scheme]["card"]}  # type: ignore[index]
        assert set(found["turned"]) == {PAGE_COLOURS["light" if scheme == "dark" else "dark"]["card"]}
        assert found["hover"].startswith("worker 0")
        assert found["hiddenLines"] == 3  # full: two seeds and their mean


def test_a_script_that_came_by_a_name_would_not_be_run(tmp_path: Path) -> None:
    """Text is escaped; where it were not, the policy allows two scripts alone."""
    page = report_html(race(rounds=6)).replace("<main>", "<main><script>hacked = 1</script><p onclick='1'></p>", 1)
    found = opened(tmp_path, {"page": (page, WIDTHS["laptop"])})["page"]
    assert not found["hacked"]
    assert found["errors"]
    assert set(found["errors"]) == {"blocked inline"}
    assert found["charts"]
    assert all(chart["traces"] == chart["expected"] for chart in found["charts"].values())


def test_odd_traces_and_hostile_names_are_drawn_on_a_phone(tmp_path: Path) -> None:
    hostile = replace(synchronous("full", rounds=6), strategy=HOSTILE)
    pages = {name.replace(" ", "-"): report_html(EDGES[name]) for name in ("diverged", "1000 workers", "one worker")}
    pages["nothing"] = report_html(EDGES["nothing but counts"])
    pages["hostile"] = report_html([hostile], title=HOSTILE)
    absences = (away(0, 0.0, None, HOSTILE), away(12, 0.1, 0.3, HOSTILE))
    pages["real"] = report_html([real(absences=absences, by_worker=(QUICK, SLOW))])
    pages |= {f"all-{name}": PAGES[name](HOSTILE, large=False) for name in PAGES if name != "run"}
    results = opened(tmp_path, {name: (page, WIDTHS["phone"]) for name, page in pages.items()})
    for name, found in results.items():
        check(found, scrolls=name in ("all-codecs", "all-pipeline"))
        assert not found["hacked"]


def test_a_race_that_was_really_run_is_drawn(tmp_path: Path) -> None:
    contest = Race(Recipe(rounds=12), strategies=list(STRATEGIES))
    for _ in contest:
        pass
    page = report_html([result.trace for result in contest.results])
    results = opened(tmp_path, {name: (page, width) for name, width in WIDTHS.items()})
    for found in results.values():
        check(found)
        assert len(found["charts"]) == 7
