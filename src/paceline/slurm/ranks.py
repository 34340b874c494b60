"""Ranks of a job of Slurm: each is a task of srun, and takes its rank from the task's number.

                                     SLURM_PROCID     SLURM_STEP_NUM_TASKS    first of SLURM_STEP_NODELIST
    torchrun's variables             RANK             WORLD_SIZE              MASTER_ADDR, and MASTER_PORT

`paceline train --on slurm` in a batch script keeps the store at which the ranks meet itself, as torchrun's own process
does, at a port that is free, and starts the ranks by srun. Where somebody types srun, nobody is there before the ranks:
rank 0 keeps the store, and all of them take the same port from the numbers of job and step.

A job that Slurm starts again is the same launch: its store says so. So its ranks go on from the newest checkpoint that
all of them have, and begin anew where it died while they wrote their first, as torchrun's do after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from paceline.errors import PacelineError
from paceline.slurm.allocation import Allocation, SlurmError, address_of, node_names
from paceline.slurm.steps import JobStep

STARTED = "PACELINE_ON_SLURM"  # who started a rank: LAUNCHER, or SRUN where a user typed it
LAUNCHER, SRUN = "launcher", "srun"
STORE_SECONDS = 120.0
FIRST_PORT, PORTS = 15_000, 15_000  # below the ports that Linux gives to whoever connects


class RanksEndedError(PacelineError, ChildProcessError):
    """A rank of a job has failed, and with it the run.

    >>> raise RanksEndedError("srun ended with code 1")
    Traceback (most recent call last):
    paceline.slurm.ranks.RanksEndedError: srun ended with code 1
    """


def is_rank(environment: Mapping[str, str]) -> bool:
    """Tell whether this process is one of several tasks of srun, or was started to be a rank.

    A shell of `srun --pty bash` is a single task, and no rank.

    >>> is_rank({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}), is_rank({"SLURM_NTASKS": "4"})
    (True, False)
    """
    if "SLURM_STEP_ID" not in environment:
        return False
    return STARTED in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def take_place(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of a task; where rank 0 is, if nobody has said so.

    >>> task = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    >>> task |= {"SLURM_JOB_ID": "17", "MASTER_ADDR": "10.0.0.7"}
    >>> take_place(task)
    >>> task["RANK"], task["WORLD_SIZE"], task["LOCAL_RANK"], task["MASTER_PORT"]
    ('3', '4', '1', '15527')
    """
    if "RANK" in environment:
        raise SlurmError("RANK is set, as torchrun sets it: under torchrun leave out --on slurm")
    try:
        rank, world = environment["SLURM_PROCID"], environment["SLURM_STEP_NUM_TASKS"]
        job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    except (KeyError, ValueError) as error:
        raise SlurmError(
            f"SLURM_PROCID, SLURM_STEP_NUM_TASKS and the like must be as srun sets them ({error})"
        ) from None
    environment.setdefault(STARTED, SRUN)
    environment.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=environment.get("SLURM_LOCALID", "0"))
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = node_names(environment.get("SLURM_STEP_NODELIST", ""))[0]
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + (job * 31 + step) % PORTS))


def launch_in(folder: Path, world: int) -> str:
    """Return the launch whose ranks have begun to train in a folder; "" if none have.

    >>> import tempfile
    >>> launch_in(Path(tempfile.mkdtemp()), 4)
    ''
    """
    from paceline.drivers.ranks.checkpoints import RankCheckpoints

    found = (RankCheckpoints(folder, rank).launch for rank in range(world))
    return next((launch for launch in found if launch), "")


def launch_ranks(words: Sequence[str], world: int, job: Allocation, *, launch: str = "") -> None:
    """Start `paceline WORDS` as so many ranks on the job's nodes, and wait for them; RanksEndedError if one failed.

    `launch` is the launch that they go on with; without it they are of a new one.
    """
    from paceline.drivers.ranks.rendezvous import keep_store

    places = job.places(world, beside_server=False)
    store = keep_store(STORE_SECONDS, launch=launch)
    meeting = {
        STARTED: LAUNCHER,
        "MASTER_ADDR": address_of(job.here),
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process keeps the store, as torchrun's does
    }
    step = JobStep(["-m", "paceline", *words], places, job, together=True, more=meeting)
    try:
        code = step.process.wait()
    finally:
        step.end(by_itself=False)
        del store
    if code:
        raise RanksEndedError(f"the ranks have ended, srun with code {code}: what they wrote stands above")
