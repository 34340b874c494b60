"""Processes on a job's nodes, started by one `srun`: a step of the job.

    srun --overlap --distribution=arbitrary --ntasks=4 --cpus-per-task=8 ... python -m paceline.slurm.worker
         │          │                                 └ since 22.05 srun no longer inherits it from the job
         │          └ SLURM_HOSTFILE names the node of each task, so that the server's task stays free
         └ the shell of `salloc` is a step too, and would keep the cores that this one waits for, for ever

What else was found on Slurm 22.05: a SIGTERM to srun kills its tasks at once, by SIGKILL (so workers are told to go by
their server before); what is written to srun's stdin reaches all tasks; srun takes dozens of options from variables
(SLURM_NTASKS_PER_NODE, SLURM_CPU_BIND, SLURM_EXPORT_ENV, ...), which are those of whoever calls it and not ours: all
but the few that say which job and which Slurm are taken out.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

from paceline.slurm.allocation import Allocation, SlurmError

log = logging.getLogger("paceline.served")

WORKERS_LOG = "workers.log"
KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_CLUSTERS", "SLURM_WORKING_CLUSTER", "SLURM_JWT", "SLURM_DEBUG")
THREADS = "OMP_NUM_THREADS"
END_SECONDS = 10.0
START_SECONDS = 120  # for Slurm to create the step
MOST_REASONS = 20
_TASK = re.compile(r"\s*(\d+): (.*)")
_ERROR = re.compile(r"paceline: (?:error: )?|srun: error: |srun: fatal: ")


def share_cores(job: Allocation) -> None:
    """Give this process, and what it starts, as many threads as a task has cores, unless somebody has chosen.

    Where Slurm binds no task to its cores, each would start a thread for every core of its node. It must be called
    before torch is loaded, which reads the variable then.
    """
    os.environ.setdefault(THREADS, str(job.cpus_per_task))


def srun_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for srun: all but Slurm's, of which only those stay that say which job it is.

    >>> srun_environment({"PATH": "/bin", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "5"})
    {'PATH': '/bin', 'SLURM_JOB_ID': '17'}
    """
    ours = ("SLURM", "SRUN", "SBATCH", "SALLOC", "PMI")
    return {name: value for name, value in environment.items() if name in KEPT or not name.startswith(ours)}


def srun_options(number: int, cpus_per_task: int, *, together: bool) -> list[str]:
    """Return srun with its options for so many tasks; `together`: where one fails, the others are ended.

    >>> srun_options(2, 8, together=False)[:4]
    ['srun', '--overlap', '--ntasks=2', '--cpus-per-task=8']
    """
    return [
        "srun",
        "--overlap",
        f"--ntasks={number}",
        f"--cpus-per-task={cpus_per_task}",
        "--distribution=arbitrary",
        "--export=ALL",
        "--mpi=none",
        "--no-kill",
        f"--kill-on-bad-exit={int(together)}",
        "--wait=0",
        f"--immediate={START_SECONDS}",
    ]


def run_on_first_node(words: Sequence[str], job: Allocation) -> NoReturn:
    """Become an srun that runs `python WORDS` on the job's first node: this process is on none of them."""
    terminal = ["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    options = ["--nodes=1", f"--nodelist={job.nodes[0]}", "--export=ALL", "--mpi=none", *terminal]
    command = ["srun", "--overlap", "--ntasks=1", f"--cpus-per-task={job.cpus_per_task}", *options]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe("srun", [*command, sys.executable, *words], srun_environment(os.environ))
    except FileNotFoundError:
        raise SlurmError("there is no srun here: Slurm's commands must be on the PATH") from None


class JobStep:
    """The tasks of one srun, each `python WORDS`, on the nodes that are named, in the order of the tasks.

    With `log_file` what tasks write goes to that file, each line with the number of its task; lines that say why one
    failed are logged as well, and kept for `reason`. Without it tasks write where this process does. With `together`
    all end when one fails, as ranks must, which would wait for it: for two minutes where they have not met yet.
    """

    def __init__(
        self,
        words: Sequence[str],
        places: Sequence[str],
        job: Allocation,
        *,
        log_file: Path | None = None,
        together: bool = False,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.places, self.ending = list(places), False
        self.reasons: list[str] = []
        hosts = os.memfd_create("paceline-hosts")  # srun wants a file, and nobody else needs one
        os.write(hosts, "".join(f"{node}\n" for node in places).encode())
        environment = srun_environment(os.environ) | {"SLURM_HOSTFILE": f"/proc/self/fd/{hosts}"} | dict(more or {})
        own = log_file is not None
        options = [*srun_options(len(places), job.cpus_per_task, together=together), *(["--label"] if own else [])]
        try:
            # In a session of its own: a Ctrl-C in the terminal is for the server, which then ends its workers.
            self.process = subprocess.Popen(
                [*options, sys.executable, *words],
                env=environment,
                stdin=subprocess.PIPE if own else subprocess.DEVNULL,
                stdout=subprocess.PIPE if own else None,
                stderr=subprocess.STDOUT if own else None,
                start_new_session=True,
                pass_fds=(hosts,),
            )
        except FileNotFoundError:
            raise SlurmError("there is no srun here: Slurm's commands must be on the PATH") from None
        finally:
            os.close(hosts)
        self._reader: threading.Thread | None = None
        if log_file is not None and self.process.stdout is not None:
            self._reader = threading.Thread(
                target=self._read, args=(self.process.stdout, log_file), name="paceline-srun", daemon=True
            )
            self._reader.start()

    def send(self, text: str) -> None:
        """Write a text to all tasks, and end their input."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.write(text.encode())
                self.process.stdin.close()

    @property
    def over(self) -> bool:
        """Whether all tasks have ended."""
        return self.process.poll() is not None

    @property
    def reason(self) -> str:
        """Why tasks failed, in their own words or srun's."""
        if self._reader is not None:
            self._reader.join(END_SECONDS)
        reasons = list(dict.fromkeys(self.reasons))
        of_tasks = [reason for reason in reasons if not reason.startswith("srun")]  # srun only says that it was so
        return "; ".join((of_tasks or reasons)[:3]) or f"srun ended with code {self.process.poll()}"

    def end(self, *, by_itself: bool, seconds: float = END_SECONDS) -> None:
        """Wait for tasks that end by themselves, and end those that do not."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        asks = ([] if by_itself else [self.process.terminate]) + [self.process.terminate, self.process.kill]
        try:
            if by_itself:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
                    return
            self.ending = True
            for ask in asks:
                ask()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
                    return
        finally:
            if self._reader is not None:
                self._reader.join(seconds)

    def _read(self, lines: IO[bytes], file: Path) -> None:
        """Keep what the tasks write, until all have ended."""
        with lines:
            for line in lines:
                if self.ending:  # srun tells at length how it ends its tasks, as it was asked to
                    continue
                with suppress(OSError), file.open("ab") as sink:  # opened anew: the run's folder may move
                    sink.write(line)
                text = line.decode("utf-8", errors="replace").strip()
                task = _TASK.fullmatch(text)
                message = task[2] if task else text
                error = _ERROR.match(message)
                if error is None:
                    continue
                node = self.places[int(task[1])] if task and int(task[1]) < len(self.places) else ""
                reason = f"{message[error.end() :]} (on {node})" if task else message
                if len(self.reasons) < MOST_REASONS:
                    self.reasons.append(reason)
                log.warning("%s", reason)
