"""The live page: one document with its style and its script, which asks nobody but the address that it came from.

The page is the same for every run: whatever is shown comes by events, and the script writes it as text, never as HTML.
Its content security policy allows the one style sheet and the one script by their hashes, and requests to its own
address alone.
"""

from __future__ import annotations

from importlib.resources import files

from paceline.reports.chart import PAGE_COLOURS
from paceline.reports.page import asset, colour_variables, content_hash


def live_page() -> tuple[bytes, str]:
    """Return the page, and the content security policy that it is sent with.

    >>> page, policy = live_page()
    >>> b"<title>" in page, policy.startswith("default-src 'none'; connect-src 'self'"), "unsafe" in policy
    (True, True, False)
    """
    style = colour_variables(PAGE_COLOURS) + asset("page.css") + _own("live.css")
    script = _own("live.js")
    page = _own("live.html").replace("{{ style }}", style).replace("{{ script }}", script)
    policy = (
        f"default-src 'none'; connect-src 'self'; style-src {content_hash(style)}; script-src {content_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page.encode(), policy


def _own(name: str) -> str:
    return (files("paceline.live") / "assets" / name).read_text(encoding="utf-8")
