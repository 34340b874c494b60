"""Whether this job has begun the run in a folder: Slurm starts a job that it has put back into its queue from the top.

    #SBATCH --requeue              a node failed, or somebody with more right to the nodes came: the job waits again
    exec paceline train my.toml --on slurm --out runs/mine

The same command runs a second time, in the same job, with SLURM_RESTART_COUNT=1. The folder holds a run, which would be
refused; but `slurm-job` in it says that this very job began it, so it goes on. Another job has to say --resume.
"""

from __future__ import annotations

from pathlib import Path

from paceline.files import read_plain, write_file
from paceline.slurm.allocation import Allocation

JOB = "slurm-job"
MOST_JOB_BYTES = 100


def claim(folder: Path, job: Allocation) -> None:
    """Write into a run's folder which job has begun it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / JOB, f"{job.job}\n")


def began_here(folder: Path, job: Allocation) -> bool:
    """Tell whether this job, before Slurm started it again, has begun the run in a folder.

    >>> import tempfile
    >>> from dataclasses import replace
    >>> job = Allocation(job="17", nodes=("node1",), tasks=(2,), cpus_per_task=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     claim(Path(folder), job)
    ...     began_here(Path(folder), job), began_here(Path(folder), replace(job, restarts=1))
    (False, True)
    """
    try:
        text = read_plain(folder / JOB, most_bytes=MOST_JOB_BYTES).decode("ascii", errors="replace")
    except OSError:
        return False
    return job.restarts > 0 and text.strip() == job.job
