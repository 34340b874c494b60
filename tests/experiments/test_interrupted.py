"""Ctrl-C ends an experiment at once: the job under way is not waited for, and no other is begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from experiments.core.running import run_experiment
from experiments.core.story import Experiment, Job, Size
from tests.experiments.long_jobs import begin_and_wait

folder = sys.argv[1]

def story(size):
    yield {n: Job(begin_and_wait, {"folder": folder, "number": n}) for n in range(4)}

if __name__ == "__main__":
    experiment = Experiment(name="long", question="", minutes=1, story=story)
    run_experiment(experiment, Size(), Path(folder), processes=1)
"""


def test_ctrl_c_waits_for_no_job_and_begins_no_other(tmp_path):
    root = Path(__file__).parents[2]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    paths = os.pathsep.join([str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")])
    running = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 100
        while not list(tmp_path.glob("begun-*")) and time.monotonic() < deadline:
            assert running.poll() is None
            time.sleep(0.05)
        first = [each.name for each in tmp_path.glob("begun-*")]
        assert len(first) == 1
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(60) != 0
        assert [each.name for each in tmp_path.glob("begun-*")] == first
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait(10)
