"""The live page of a run that is just being started: a child process, so that the page takes nothing from the run.

    paceline train --live ──── stdin: a pipe that stays open while the run lives ───> python -m paceline.live.beside
                          <─── stdout: one line, the page's address or an error ───── follows, serves

The pipe closes when the run is over, and also when its process is killed: then the child shows the last state to those
who are looking, and ends. Processes that the run has forked may hold the pipe open for longer, so the child looks at
who its parent is as well. The child runs with the least priority that a user can give away. It looks for no modules in
the folder where the run is started (`python -P`): a select.py or json.py there is the user's, and not Python's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from paceline.live.server import TOKEN_VARIABLE, LiveAddress, LiveError, serve_live

START_SECONDS = 30.0
END_SECONDS = 5.0
_PARENT_SECONDS = 0.5
_NICE = 10


class PageBeside:
    """The page of a folder, served by a child while the `with` lasts; `address` is what to open in a browser.

    Raises:
        LiveError: the page cannot be served; the port is in use, say.
    """

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        place = "any" if port is None else str(port)
        command = [sys.executable, *_path_options(), "-m", "paceline.live.beside", str(folder), place]
        # A session of its own: Ctrl-C ends the run, which then closes the pipe, and the last state is still shown.
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            self.address = self._first_line()
        except BaseException:
            self.close()
            raise

    def _first_line(self) -> str:
        assert self._child.stdout is not None
        ready, _, _ = select.select([self._child.stdout], [], [], START_SECONDS)
        line = self._child.stdout.readline() if ready else b""
        if not line:
            why = "its process has ended" if ready else f"it has not started within {START_SECONDS:g} s"
            raise LiveError(f"the live page cannot be served: {why}; leave out --live, and try `paceline live` later")
        found = json.loads(line)
        if "error" in found:
            raise LiveError(str(found["error"]).replace("--port 0", "--live 0").replace("--port", "port after --live"))
        return str(found["address"])

    def close(self) -> None:
        """Let the child show the last state, and wait for its end."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def __enter__(self) -> PageBeside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _path_options() -> list[str]:
    """Return what keeps the current folder off the child's path; nothing where paceline itself is found there alone."""
    return [] if Path(__file__).resolve().parents[2] == Path.cwd() else ["-P"]


def main(folder: str, port: str) -> None:
    """Be the child: tell the address, and serve the page until the parent is gone."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        os.nice(_NICE)

    def tell(found: dict[str, str]) -> None:
        print(json.dumps(found), flush=True)

    async def until_parent_is_gone(stop: asyncio.Event) -> None:
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(0, end.set)  # nothing is ever sent: what can be read is the end
        while not end.is_set() and os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _PARENT_SECONDS)
        loop.remove_reader(0)
        stop.set()

    watching: list[asyncio.Task[None]] = []

    def stopping(stop: asyncio.Event) -> None:
        watching.append(asyncio.get_running_loop().create_task(until_parent_is_gone(stop)))

    address = LiveAddress(port=None if port == "any" else int(port), token=os.environ.get(TOKEN_VARIABLE, ""))
    try:
        serve_live(Path(folder), address, on_open=lambda found: tell({"address": found}), stopping=stopping)
    except LiveError as error:
        tell({"error": str(error)})


if __name__ == "__main__":
    main(*sys.argv[1:3])
