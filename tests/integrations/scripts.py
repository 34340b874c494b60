"""A user's script as a rank: run as it stands in the docs, in a folder of its own."""

from __future__ import annotations

import os
import runpy


def job(script, folder):
    os.chdir(folder)
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    runpy.run_path(script, run_name="__main__")
    return True
