"""Ctrl-C ends a reproduction at once: the job under way is not waited for, and no other is begun."""

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
from paceline.reproduce.experiment import Experiment, ExperimentPlan, Findings, Job
from paceline.reproduce.running import run_experiment
from tests.reproduce.long_jobs import begin_and_wait

folder = sys.argv[1]
jobs = [Job(name=str(n), run=begin_and_wait, settings={"folder": folder, "number": n}) for n in range(4)]
none = Findings(tables=(), claims=())
experiment = Experiment(name="long", source="", question="", minutes=1, full_hours=1, jobs=lambda plan: jobs,
                        conclude=lambda plan, outcomes: none)
if __name__ == "__main__":
    run_experiment(experiment, ExperimentPlan(), Path(folder), processes=1)
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
