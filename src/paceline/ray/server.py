"""The parameter server of a run, as an actor of Ray's: the run goes on in a thread, the actor's calls ask for it.

    actor                      thread
    place()                                                        where the certificate must be for
    serve(job, keys) ────────> serve_recipe(...)                   in a private folder of this node
    meet(worker)     <──────── the address, for workers
    poll(stop)       <───────> address, status, log; whether to stop
    listing, read    <──────── trace and checkpoints, as files     (mirror.py copies them to the caller)
    result()         <──────── outcome and result, or the error that it ended with

The folder is removed when the run is over. One whose process was killed is removed by the next server on that node.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from paceline import __version__
from paceline.drivers.served.keys import SideKeys
from paceline.drivers.served.transport import tune_server_process
from paceline.ray.mirror import FolderListing, listing_of, read_piece, receive_files
from paceline.recipes.assembly import Given
from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import ServerEndpoint, Trained, serve_recipe
from paceline.traces.run_status import RunStatus

PREFIX = "paceline-ray-"
LOCK = "lock"
MOST_LINES = 1000


@dataclass(frozen=True, kw_only=True)
class ServerNode:
    """Where a server's actor is, and which paceline it has."""

    address: str
    node: str
    paceline: str


@dataclass(frozen=True, kw_only=True)
class ServerJob:
    """What a server is to do: a recipe, from its beginning or from the files of a run that goes on."""

    recipe: Recipe
    host: str
    threads: int
    resume: bool = False
    extension: Extension | None = None
    files: dict[str, list[Any]] = field(default_factory=dict, repr=False)  # {name: references to its pieces}


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """What the server tells the caller: where it listens, how the run stands, what it logged, whether it is over."""

    address: str | None
    status: RunStatus | None
    lines: tuple[tuple[int, str], ...]
    started: dict[int, str]
    ended: bool


class ServerActor:
    """A run that is served on a node of the cluster."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=MOST_LINES)
        self._started: dict[int, str] = {}
        self._address: str | None = None
        self._status: RunStatus | None = None
        self._stop: str | None = None
        self._ended = threading.Event()
        self._trained: Trained | None = None
        self._error: BaseException | None = None
        self._private = _private_folder()
        self._folder = self._private / "run"
        log = logging.getLogger("paceline")
        log.addHandler(_Collecting(self._lines))
        log.setLevel(logging.INFO)
        log.propagate = False

    def place(self) -> ServerNode:
        context = ray.get_runtime_context()
        return ServerNode(address=ray.util.get_node_ip_address(), node=context.get_node_id(), paceline=__version__)

    def serve(self, job: ServerJob, keys: SideKeys, given: Given) -> None:
        """Begin the run."""
        threading.Thread(target=self._serve, args=(job, keys, given), name="paceline-server", daemon=True).start()

    def _serve(self, job: ServerJob, keys: SideKeys, given: Given) -> None:
        import torch

        torch.set_num_threads(job.threads)
        tune_server_process()
        try:
            receive_files(self._folder, job.files, ray.get)
            self._trained = serve_recipe(
                job.recipe,
                ServerEndpoint(listen=_listen(job.host), tls=keys.context()),
                self._folder,
                resume=job.resume,
                extension=job.extension,
                given=given,
                on_open=self._opened,
                on_standing=self._stands,
                reason_to_stop=lambda status: self._stop,
            )
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _stands(self, status: RunStatus) -> None:
        self._status = status

    def _opened(self, address: str) -> None:
        self._address = address

    def meet(self, attempt: int, node: str) -> str | None:
        """Note that a worker's task runs on the node of this address; return the server's, None if it has none yet.

        It is "" once the run is over: there is nothing left to work for.
        """
        self._started[attempt] = node
        return "" if self._ended.is_set() else self._address

    def poll(self, stop: str | None) -> ServerReport:
        """Say how the run stands; where a reason to stop is given, end it with a checkpoint."""
        self._stop = self._stop or stop
        ended = self._ended.is_set()  # before the lines are taken: none is left behind
        lines = tuple(self._lines.popleft() for _ in range(len(self._lines)))
        return ServerReport(
            address=self._address, status=self._status, lines=lines, started=dict(self._started), ended=ended
        )

    def listing(self) -> FolderListing:
        return listing_of(self._folder)

    def read(self, name: str, start: int, length: int) -> bytes | None:
        return read_piece(self._folder, name, start, length)

    def result(self) -> Trained:
        """Return what the run came to, once it has ended; raise what it ended with."""
        if self._error is not None:
            raise self._error
        if self._trained is None:
            raise RuntimeError("the run has not ended")
        return self._trained

    def discard(self) -> None:
        """Remove the folder on this node: the caller has all of it."""
        shutil.rmtree(self._private, ignore_errors=True)


class _Collecting(logging.Handler):
    def __init__(self, lines: deque[tuple[int, str]]) -> None:
        super().__init__(logging.INFO)
        self._lines_of = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines_of.append((record.levelno, record.getMessage()))


def _listen(host: str) -> str:
    return f"[{host}]:0" if ":" in host else f"{host}:0"


def _private_folder() -> Path:
    """Make a folder of this process on its node, locked while it lives, and remove those of processes that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid() and not _is_locked(folder / LOCK):
                shutil.rmtree(folder, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT, 0o600)  # it stays open, and locked, until the process ends
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made


def _is_locked(path: Path) -> bool:
    """Return whether a living process holds a lock; a folder that has none yet is being made."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
