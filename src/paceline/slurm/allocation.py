"""What a job of Slurm has: its nodes, how many tasks each of them takes, and how many cores a task has.

    SLURM_JOB_NODELIST=node[1-3]  SLURM_TASKS_PER_NODE=2(x2),1  SLURM_CPUS_PER_TASK=4

    node1   server    worker 0         the server runs here, in the job's own process, in place of the first task
    node2   worker 1  worker 2
    node3   worker 3                   4 cores each

A batch script sees the variables of its job. A process that srun started (a shell of `srun --pty bash` or `salloc`)
sees those of its step instead: there SLURM_TASKS_PER_NODE and SLURM_NTASKS are the step's, and the job's number of
tasks is asked of `scontrol show job`. SLURM_STEP_ID tells the two apart: batch scripts have none (Slurm 22.05).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError

ASK_SECONDS = 30.0
_TIMES = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class SlurmError(PacelineError, ValueError):
    """A job that cannot carry out what is asked of it, with what to ask Slurm for.

    >>> raise SlurmError("job 17 has 4 tasks, and 5 are needed")
    Traceback (most recent call last):
    paceline.slurm.allocation.SlurmError: job 17 has 4 tasks, and 5 are needed
    """


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A job's share of the cluster. `here` is the node that this process is on; empty on a login node.

    >>> job = Allocation(job="17", nodes=("node1", "node2"), tasks=(2, 2), cpus_per_task=4, here="node1")
    >>> job.places(3, beside_server=True)
    ['node1', 'node2', 'node2']
    """

    job: str
    nodes: tuple[str, ...]
    tasks: tuple[int, ...]
    cpus_per_task: int
    here: str = ""
    restarts: int = 0

    def places(self, number: int, *, beside_server: bool) -> list[str]:
        """Return the node of each of so many processes; the server takes one task of the node that it runs on.

        >>> job = Allocation(job="17", nodes=("node1", "node2"), tasks=(2, 2), cpus_per_task=4, here="node1")
        >>> job.places(4, beside_server=True)
        Traceback (most recent call last):
        paceline.slurm.allocation.SlurmError: job 17 has 4 tasks, one for the server and 3 for workers, and the recipe \
has 4 workers: submit it with --ntasks=5, or give --workers 3
        """
        tasks = list(self.tasks)
        if beside_server:
            tasks[self.nodes.index(self.here) if self.here in self.nodes else 0] -= 1
        places = [node for node, count in zip(self.nodes, tasks, strict=True) for _ in range(count)]
        if len(places) >= number:
            return places[:number]
        has = f"job {self.job} has {sum(self.tasks)} tasks"
        needed = number + beside_server
        if not beside_server:
            raise SlurmError(
                f"{has}, and the recipe has {number} ranks: submit it with --ntasks={needed}, or change --workers "
                "(of a pipeline, its stages and replicas)"
            )
        fewer = f", or give --workers {len(places)}" if places else ""
        raise SlurmError(
            f"{has}, one for the server and {len(places)} for workers, and the recipe has {number} workers: submit it "
            f"with --ntasks={needed}{fewer}"
        )

    def idle(self, number: int, *, beside_server: bool) -> int:
        """Return how many tasks of the job nobody uses."""
        return sum(self.tasks) - beside_server - number


def allocation_in(environment: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process is in; None outside of a job."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return None
    nodes = node_names(environment.get("SLURM_JOB_NODELIST", ""))
    cpus = _per_node("SLURM_JOB_CPUS_PER_NODE", environment, len(nodes))
    if "SLURM_STEP_ID" in environment:
        about = _facts(_asked(["scontrol", "show", "job", "-o", job]))
        cpus_per_task = _number(about.get("CPUs/Task", ""), 0)
        tasks = spread(_number(about.get("NumTasks", ""), len(nodes)), [each // max(1, cpus_per_task) for each in cpus])
        asked = cpus_per_task if cpus_per_task > 1 else 0  # 1 is also what Slurm says where nothing was asked for
    else:
        tasks = _per_node("SLURM_TASKS_PER_NODE", environment, len(nodes))
        asked = _number(environment.get("SLURM_CPUS_PER_TASK", ""), 0)
    shares = [cores // count for cores, count in zip(cpus, tasks, strict=True) if count]
    return Allocation(
        job=job,
        nodes=tuple(nodes),
        tasks=tuple(tasks),
        cpus_per_task=asked or max(1, min(shares, default=1)),
        here=environment.get("SLURMD_NODENAME", "") if environment.get("SLURMD_NODENAME") in nodes else "",
        restarts=_number(environment.get("SLURM_RESTART_COUNT", ""), 0),
    )


def repeated(text: str) -> list[int]:
    """Return the numbers of a list as Slurm writes it.

    >>> repeated("2(x3),1")
    [2, 2, 2, 1]
    """
    found = [_TIMES.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise SlurmError(f"{text!r} is no list of numbers as Slurm writes it, such as 2(x3),1")
    return [int(each[1]) for each in found if each for _ in range(int(each[2] or 1))]


def spread(number: int, room: Sequence[int]) -> list[int]:
    """Spread so many tasks evenly over nodes, on none more than it has room for while another has.

    >>> spread(5, [4, 4, 1]), spread(3, [0, 0])
    ([2, 2, 1], [2, 1])
    """
    tasks = [0] * len(room)
    for _ in range(number):
        free = [node for node, most in enumerate(room) if tasks[node] < most] or range(len(room))
        tasks[min(free, key=lambda node: tasks[node])] += 1
    return tasks


def node_names(nodes: str) -> list[str]:
    """Return the names of a list of nodes, such as node[1-3], by Slurm's own reading of it."""
    names = _asked(["scontrol", "show", "hostnames", nodes]).split() if nodes else []
    if not names:
        raise SlurmError(f"SLURM_JOB_NODELIST is {nodes!r}: it must name the job's nodes, as Slurm sets it")
    return names


def address_of(node: str) -> str:
    """Return the name or address at which Slurm itself reaches a node (NodeAddr in slurm.conf)."""
    return _facts(_asked(["scontrol", "show", "node", "-o", node])).get("NodeAddr", "") or node


def _per_node(name: str, environment: Mapping[str, str], nodes: int) -> list[int]:
    numbers = repeated(environment.get(name, "") or f"1(x{nodes})")
    if len(numbers) != nodes:
        raise SlurmError(
            f"{name} is {environment.get(name)!r}, and the job has {nodes} nodes: it must be as Slurm sets it"
        )
    return numbers


def _number(text: str, default: int) -> int:
    return int(text) if text.isdigit() else default


def _facts(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _asked(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=ASK_SECONDS).stdout
    except FileNotFoundError:
        raise SlurmError(f"there is no {command[0]} here: Slurm's commands must be on the PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{' '.join(command)} did not answer within {ASK_SECONDS:g} s") from None
    except subprocess.CalledProcessError as error:
        raise SlurmError(f"{' '.join(command)}: {' '.join(error.stderr.split())}") from None
