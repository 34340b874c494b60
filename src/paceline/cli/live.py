"""`paceline live`: a page in the browser that follows a run's folder, and `--live` of the commands that train."""

from __future__ import annotations

import json
import os
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.cli.options import UsageError, argument, debug_option, option
from paceline.cli.output import note

WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class LiveOptions:
    """Follow a run in the browser, and by Prometheus.

    A small page of its own: loss, pace, who is on time, late, dropped or gone. The run does not notice.
    """

    run: str = argument("RUN", "the folder of a run; it may be finished, and it may still be made")
    port: int | None = option(None, "where the page is served; 0 is any port that is free", shown="8899, or a free one")
    host: str = option("127.0.0.1", "address to serve at; other than this machine's own, a token is needed to read")
    token: str = option(
        "",
        "16 or more characters that readers must have; other users of this machine can see the arguments of a command, "
        "so give it as PACELINE_LIVE_TOKEN in the environment where they are not to read the page",
        shown="PACELINE_LIVE_TOKEN, or one is made where it is needed",
    )
    open: bool = option(False, "open the page in the browser")
    wait_seconds: float = option(
        WAIT_SECONDS, "how long to wait for a run where there is none yet", metavar="SECONDS", also=("wait",)
    )
    json: bool = option(False, "print the state as one JSON document to stdout, and serve nothing")
    debug: bool = debug_option()


def live(options: LiveOptions, overrides: dict[str, str]) -> None:
    from paceline.live.folder import FollowedRun
    from paceline.live.server import TOKEN_VARIABLE, LiveAddress, serve_live

    folder, notes = Path(options.run), Console(stderr=True)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the folder of a run")
    if not 0 <= options.wait_seconds < 1e9:
        raise UsageError(f"--wait is a number of seconds of 0 or more, not {options.wait_seconds:g}")
    if options.json:
        run = FollowedRun(folder)
        run.look()
        while run.behind:
            run.look()
        if not run.found:
            raise UsageError(f"{folder} holds no run: {'; '.join(run.problems) or 'there is no record in it'}")
        print(json.dumps(run.document(), indent=2, allow_nan=False))
        return

    def opened(address: str) -> None:
        note(notes, f"live page of {folder}: {address}")
        note(notes, "Ctrl-C ends the page, and does nothing to the run")
        if options.open and not webbrowser.open(address):
            note(notes, "there is no browser to open here: open the address yourself")

    token = options.token or os.environ.get(TOKEN_VARIABLE, "")
    address = LiveAddress(host=options.host, port=options.port, token=token)
    serve_live(folder, address, on_open=opened, give_up_seconds=options.wait_seconds)


# -- beside a run that is started --------------------------------------------------------------------------------------


def live_option() -> Any:
    """Declare the `--live` of a command that trains."""
    return option(
        None,
        "serve a page on this machine that follows the run, at this port or at any that is free",
        metavar="[PORT]",
        shown="no page",
        alone="any",
    )


@contextmanager
def live_page(live: str | None, folder: Path, notes: Console) -> Iterator[None]:
    """Serve the page of a run beside it, if that was asked for; the page ends with the run."""
    if live is None:
        yield
        return
    from paceline.live.beside import PageBeside

    with PageBeside(folder, port=live_port(live)) as page:
        note(notes, f"live page: {page.address}")
        try:
            yield
        finally:
            note(notes, f"the live page ends with the run; `paceline live {folder}` shows it again")


def live_port(text: str) -> int | None:
    """Return the port of `--live`, None where any will do.

    >>> live_port("8899"), live_port("any")
    (8899, None)
    """
    if text == "any":
        return None
    if not text.isdecimal() or int(text) > 65_535:
        raise UsageError(f"--live: expected a port between 0 and 65535, or nothing, got {text!r:.60}")
    return int(text)
