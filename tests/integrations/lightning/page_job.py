"""What each rank runs of a page of the docs: one block, after the first, in a folder of its own."""

from __future__ import annotations

import contextlib
import io
import os

from tests.docs.pages import blocks


def job(folder, number):
    os.chdir(folder)
    first, *others = blocks("lightning.md")
    names, printed = {"__name__": "__main__"}, io.StringIO()
    exec(compile(first, "lightning.md", "exec"), names)
    with contextlib.redirect_stdout(printed):
        exec(compile(others[number], "lightning.md", "exec"), names)
    return [names["trainer"].global_step, printed.getvalue()]
