"""A page in headless Chromium, driven over the browser's own pipe: what the page shows while a run goes on.

with browser_page(folder, address, width=390, dark=True) as page:
    page.until("document.title.includes('ended')")
    page.errors()
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

from tests.reports.test_report_browser import chromium

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
RECORDER = """
window.errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => errors.push("blocked " + event.blockedURI));
"""
PLACED = """
import os, sys
for place, given in enumerate(sys.argv[1:3]):  # out of the way first
    os.dup2(int(given), 100 + place)
for place in range(2):  # the browser reads from descriptor 3 and writes to 4
    os.dup2(100 + place, 3 + place)
os.execv(sys.argv[3], sys.argv[3:])
"""
SECONDS = 60.0


class BrowserPage:
    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._number, self._held, self._session = read, write, 0, b"", None

    def call(self, method: str, **values):
        """Call a method of the browser's protocol and return its result; everything else that it says is left."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            while b"\0" in self._held:
                text, _, self._held = self._held.partition(b"\0")
                answer = json.loads(text)
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer
                    return answer["result"]
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser has not answered {method}"
            data = os.read(self._read, 1 << 20)
            assert data, f"the browser has ended before it answered {method}"
            self._held += data

    def begin(self, *, width: int, dark: bool) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=RECORDER)
        size = {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("location.href != 'about:blank' && document.readyState == 'complete'")

    def value(self, expression: str):
        """Return what an expression of the page comes to."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = SECONDS):
        """Wait until an expression is true, and return it; the page's text is in the failure."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(expression)):
            text = "document.body ? document.body.innerText.slice(0, 1500) : ''"
            assert time.monotonic() < deadline, f"{expression} stayed {found!r}:\n{self.value(text)}"
            time.sleep(0.1)
        return found

    def errors(self) -> list[str]:
        return self.value("window.errors")

    def fits(self) -> bool:
        """Whether nothing makes the page wider than the screen."""
        return self.value("document.documentElement.scrollWidth <= innerWidth")

    def picture(self, path) -> None:
        """Write what the page looks like to a file."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser_page(folder, address: str, *, width: int = 1280, dark: bool = False):
    """Open an address in a browser of its own, which ends with the block."""
    command = [chromium(), *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    from_us, ours = os.pipe()
    theirs, to_us = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", PLACED, str(from_us), str(to_us), *command],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        os.close(from_us)
        os.close(to_us)
        page = BrowserPage(theirs, ours)
        page.begin(width=width, dark=dark)
        page.open(address)
        yield page
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the browser has processes of its own, in its session
        process.wait(20)
        for descriptor in (ours, theirs):
            with contextlib.suppress(OSError):
                os.close(descriptor)
