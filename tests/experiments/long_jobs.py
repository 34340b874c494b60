"""A job that says that it has begun, and takes longer than anybody waits."""

from __future__ import annotations

import threading
from pathlib import Path


def begin_and_wait(settings):
    Path(settings["folder"], f"begun-{settings['number']}").touch()
    threading.Event().wait(600)
    return {}
