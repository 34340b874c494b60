"""The page in a real browser, beside a real run: who joins, who is killed, and that the run itself was killed."""

from __future__ import annotations

import os
import random
import re
import signal

import pytest

from paceline.quantities import size_text
from paceline.traces.journal import Evaluated, Refused, RunEnded, WorkerLeft
from tests.cluster.harness import Cluster
from tests.live.browser import browser_page
from tests.live.journals import began, joined, lines, step
from tests.live.serving import served
from tests.live.test_state import timed

pytestmark = pytest.mark.browser
STATE = "document.getElementById('state').textContent"


def row(number):
    return f"""document.querySelector("#people-rows tr[data-number='{number}']")"""


def live_address(cluster):
    served = re.compile(r"live page: (http://127\.0\.0\.1:\d+/)")
    return cluster.until(lambda: served.search(cluster.log), "the page is served")[1]


def test_who_joins_and_who_is_killed_appears_on_the_page_of_a_run(tmp_path):
    with (
        Cluster(tmp_path, workers=3, k=2, serve=["--live", "0"]) as cluster,
        browser_page(tmp_path, live_address(cluster)) as page,
    ):
        page.until(f"{STATE} == 'running' && document.querySelectorAll('#people-rows tr').length == 3")
        page.until("document.querySelectorAll('.plot[data-chart=pace] path').length == 1")
        cluster.kill_worker(2)
        page.until(f"{row(2)}.dataset.state == 'gone'")
        page.until("document.getElementById('log-rows').innerText.includes('worker 2 left: ')")
        joins = page.value("document.getElementById('log-rows').innerText.split('joined from').length")
        cluster.add_workers([2])
        page.until(f"document.getElementById('log-rows').innerText.split('joined from').length > {joins}")
        page.until(f"{row(2)}.dataset.state != 'gone'")
        assert page.errors() == []
        os.kill(cluster.server.pid, signal.SIGKILL)
        page.until(f"{STATE} == 'killed'")
        page.until("document.getElementById('link').textContent.includes('served no more')")
        assert page.errors() == []
        assert page.fits()


HOSTILE = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=1</script>"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_finished_run_is_drawn_and_what_others_wrote_stays_text(tmp_path, width, dark):
    folder = tmp_path / f"a run & {HOSTILE.replace('/', '')}"
    folder.mkdir()
    records = [began(workers=3), *(joined(worker, host=HOSTILE) for worker in range(3))]
    for version in range(40):
        dropped = (2,) if version else ()
        records.append(step(version, 1.0 + version / 3, fresh=(0, 1), dropped=dropped))
        measured = {"loss": 2.0 / (1 + version), "accuracy": version / 40, "test_loss": 2.5 / (1 + version)}
        records.append(Evaluated(at_seconds=1.0 + version / 3, round=version + 1, **measured))
    records.append(Refused(at_seconds=16.0, worker=None, peer=HOSTILE, reason=HOSTILE))
    records.append(WorkerLeft(at_seconds=17.0, worker=1, reason=f"{HOSTILE} {'x' * 300}"))
    records.append(RunEnded(at_seconds=18.0, reason="all rounds are done", rounds_done=40, diverged=False))
    (folder / "trace.jsonl").write_bytes(lines(records))
    for rank in range(2):
        timed(folder, rank, steps=9)
    with served(folder) as address, browser_page(tmp_path, address, width=width, dark=dark) as page:
        page.until(f"{STATE} == 'ended'")
        assert page.value("[...document.querySelectorAll('.plot')].map((plot) => plot.dataset.chart)") == [
            "loss", "accuracy", "test_loss", "pace", "k",
        ]  # fmt: skip
        assert page.value("document.querySelectorAll('#people-rows img, #log-rows img, script').length") == 1
        assert page.value("'hacked' in window") is False
        assert "worker 2 is mostly dropped" in page.value("document.getElementById('warnings').innerText")
        assert page.value(f"{row(1)}.lastElementChild.textContent").startswith("<img src=x")
        # Each chart can be read as a table, and by a keyboard.
        page.value("document.querySelectorAll('.charts details').forEach((each) => { each.open = true; })")
        page.until("document.querySelectorAll('.charts tbody tr').length > 20")
        assert page.value("[...document.querySelectorAll('.scroller')].every((each) => each.tabIndex == 0)")
        paper = page.value("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(16, 20, 26)" if dark else "rgb(246, 247, 249)")
        assert page.fits()
        assert page.errors() == []


def test_the_page_writes_numbers_in_the_units_that_python_does(tmp_path):
    """999,960 bytes are 1.0 MB, and 999.96 ms a second: no number is a whole of the next unit."""
    (tmp_path / "trace.jsonl").write_bytes(lines([began(workers=1)]))
    below = [10**power - difference for power in range(1, 15) for difference in (1, 39, 49, 51, 10 ** (power // 2) + 1)]
    sizes = [0, *(each | 1 for each in below if each > 0)]  # odd ones: no half, which Python rounds to the even digit
    sizes += [random.Random(power).randrange(2**power) | 1 for power in range(1, 49) for _ in range(9)]
    seconds = [
        10**power * share for power in range(-7, 7) for share in (0.5, 0.9994, 0.99951, 0.99996, 1.0, 1.1999, 7.2)
    ]
    with served(tmp_path) as address, browser_page(tmp_path, address) as page:
        assert page.value(f"{sizes}.map(bytes)") == [size_text(each) for each in sizes]
        written = page.value(f"{seconds}.map(seconds)")
        assert page.errors() == []
    limits = {"us": (1e-6, 1000), "ms": (1e-3, 1000), "s": (1, 120), "min": (60, 120), "h": (3600, float("inf"))}
    for value, text in zip(seconds, written, strict=True):
        number, unit = text.split()
        size, limit = limits[unit]
        assert float(number) < limit, text
        assert abs(float(number) * size - value) <= max(0.05 * value, 0.51e-6), (value, text)


def test_the_page_of_a_watched_script_shows_where_each_rank_spends_its_time(tmp_path):
    with served(tmp_path / "later") as address, browser_page(tmp_path, address, width=390) as page:
        page.until(f"{STATE} == 'waiting'")
        for rank in range(2):
            timed(tmp_path / "later", rank, steps=30)
        page.until(f"{STATE} == 'running' && document.querySelectorAll('#people-rows tr').length == 2")
        assert page.value(f"{row(0)}.innerText.includes('20.0 %')")  # of its time it waits
        assert page.value("document.querySelectorAll('#people-rows rect.phase-wait').length") == 2
        assert page.value("[...document.querySelectorAll('.plot')].map((plot) => plot.dataset.chart)") == [
            "step_seconds"
        ]
        assert page.fits()
        assert page.errors() == []
