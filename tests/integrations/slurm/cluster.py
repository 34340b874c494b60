"""A real Slurm of five nodes on this machine: its own daemons, in namespaces of their own.

    setpriv --pdeathsig KILL unshare --mount --pid --net --uts ...      ends with the tester, whatever happens to that
        bash ── munged, slurmctld, slurmd node1 ... slurmd node5        all ports are its own: runs do not collide
    nsenter ... sbatch job.sh                                           a command of a user, in the same namespaces

When the first process of the namespace ends, the kernel ends all others: daemons, steps and jobs. Each node has an
address of its own, so that a certificate for another node does not do. (Slurm finds no address to listen at where there
are only those of 127.0.0.0/8: it asks the resolver with AI_ADDRCONFIG.)
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tests.waiting import until

ROOT = Path(__file__).parents[3]
NODES = 5
UP_SECONDS, COMMAND_SECONDS = 60.0, 60.0
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "setpriv", "ip")
CONFIGURATION = """
ClusterName=one
SlurmctldHost=one(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={place}/run/munge.socket
SlurmctldPort=16817
SlurmctldPidFile={place}/run/slurmctld.pid
SlurmdPidFile={place}/run/slurmd.%n.pid
SlurmdSpoolDir={place}/spool/%n
StateSaveLocation={place}/state
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdLogFile={place}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SlurmdParameters=config_overrides
NodeName=node[1-{nodes}] NodeHostname=one NodeAddr=10.99.0.[1-{nodes}] Port=[16821-1682{nodes}] CPUs=16 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
START = """
set -e
cd {place}
ip link set lo up
for number in {numbers}; do ip address add 10.99.0.$number/32 dev lo; done
hostname one
mount --bind {place}/hosts /etc/hosts
munged --force --key-file={place}/munge.key --socket={place}/run/munge.socket --pid-file={place}/run/munged.pid \
    --log-file={place}/log/munged.log --seed-file={place}/run/munged.seed
slurmctld -D -c -f {place}/slurm.conf > log/slurmctld.out 2>&1 &
for number in {numbers}; do
    mkdir -p spool/node$number
    slurmd -D -f {place}/slurm.conf -N node$number > log/node$number.out 2>&1 &
done
echo $BASHPID > run/began
wait
"""


class SlurmCluster:
    """Daemons of Slurm, and a folder in which jobs run."""

    def __enter__(self):
        if os.geteuid() or (missing := [name for name in NEEDED if not shutil.which(name)]):
            lacking = "root" if os.geteuid() else ", ".join(missing)
            pytest.skip(f"a real Slurm: needs root, and slurm-wlm, munge and util-linux installed (no {lacking})")
        self.place = Path(tempfile.mkdtemp(prefix="pslurm-", dir="/tmp"))  # short: a socket's path has 107 letters
        self.place.chmod(0o755)
        for name in ("run", "log", "spool", "state", "bin", "jobs", "tmp"):
            (self.place / name).mkdir()
        self.jobs = self.place / "jobs"
        numbers = range(1, NODES + 1)
        (self.place / "slurm.conf").write_text(CONFIGURATION.format(place=self.place, nodes=NODES))
        # This machine has the addresses of all nodes: torchrun looks for its own among those of its host's name.
        hosts = ["127.0.0.1 localhost", *(f"10.99.0.{number} node{number} one" for number in numbers)]
        (self.place / "hosts").write_text("".join(f"{line}\n" for line in hosts))
        (self.place / "munge.key").write_bytes(os.urandom(1024))
        (self.place / "munge.key").chmod(0o400)
        for name, module in (("paceline", "paceline"), ("torchrun", "torch.distributed.run")):
            command = self.place / "bin" / name
            command.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            command.chmod(0o755)
        spaces = ["--mount", "--pid", "--net", "--uts", "--fork", "--kill-child", "--mount-proc"]
        start = START.format(place=self.place, numbers=" ".join(map(str, numbers)))
        with (self.place / "log" / "start").open("wb") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "bash", "-c", start],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            self._wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait(COMMAND_SECONDS)
        until(lambda: not self.processes(), "all processes of the cluster to end", seconds=COMMAND_SECONDS)
        shutil.rmtree(self.place)

    def _wait_until_up(self):
        until((self.place / "run" / "began").exists, "the daemons to start", seconds=UP_SECONDS)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.inside = children[0]  # the first process of the namespace
        idle = ["sinfo", "--noheader", "--responding", "--states=idle", "--format=%D"]
        try:
            come = partial(self.run, *idle, check=False)
            until(lambda: come().strip() == str(NODES), "all nodes", seconds=UP_SECONDS, every_seconds=0.2)
        except AssertionError as error:
            logs = [self.place / "log" / name for name in ("start", "slurmctld.out", "node1.out")]
            texts = [f"{path.name}: {path.read_text()[-1000:]}" for path in logs if path.exists()]
            raise AssertionError("\n".join([str(error), *texts])) from None

    # -- what a user does --------------------------------------------------------------------------------------------

    def run(self, *command, check=True, more=None, text=None, seconds=COMMAND_SECONDS):
        """Run a command as a user on a login node of the cluster, and return what it prints."""
        ours = {"SLURM_CONF": f"{self.place}/slurm.conf", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        ours |= {"PATH": f"{self.place}/bin:{os.environ['PATH']}", "TMPDIR": f"{self.place}/tmp"}
        ours["TORCHINDUCTOR_CACHE_DIR"] = cache_dir()  # kernels that are compiled already
        enter = ["nsenter", f"--target={self.inside}", "--mount", "--net", "--uts", f"--wd={self.jobs}"]
        done = subprocess.run(
            [*enter, *command], env=os.environ | ours | (more or {}), check=False, input=text or "", text=True,
            capture_output=True, timeout=seconds,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def submit(self, script, *options, name="job", more=None):
        """Submit the text of a script, and return the job's number; its output is in NAME.out."""
        output = f"--output={self.jobs / name}.out"
        return self.run("sbatch", "--parsable", output, "--open-mode=append", *options, text=script, more=more).strip()

    def cancel_all(self):
        """Cancel all jobs; a test that failed leaves some, which would slow down those after it."""
        self.run("scancel", "--user=root")

    def output(self, name="job"):
        file = self.jobs / f"{name}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def facts(self, job):
        line = self.run("scontrol", "show", "job", "-o", job)
        return dict(word.split("=", 1) for word in line.split() if "=" in word)

    def ended(self, job, name="job", *, seconds=300.0):
        """Wait until a job is over, and return its state."""
        alive = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        over, log = (lambda: self.facts(job)["JobState"] not in alive), (lambda: self.output(name))
        until(over, f"job {job} to end", seconds=seconds, every_seconds=0.2, log=log)
        return self.facts(job)["JobState"]

    def processes(self, *, of_jobs=False):
        """Return the numbers and command lines of all processes in the cluster's folder, or in that of the jobs."""
        found = {}
        for about in Path("/proc").glob("[0-9]*"):
            try:
                if Path(os.readlink(about / "cwd")).is_relative_to(self.jobs if of_jobs else self.place):
                    found[int(about.name)] = (about / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
        return found

    def kill(self, words):
        """Kill one process of a job, of those in whose command line the words stand."""
        python = {pid: line for pid, line in self.processes(of_jobs=True).items() if line.startswith(sys.executable)}
        os.kill(next(pid for pid, line in python.items() if words in line), signal.SIGKILL)
