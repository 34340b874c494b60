"""The ranks of a launch, as torchrun would start them: a free port, each rank's place, and an end to all of them.

port = free_port()
processes = run_all([functools.partial(start, place(rank, 2, port)) for rank in range(2)], seconds=60.0)
"""

from __future__ import annotations

import socket
import subprocess
import time


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def place(rank, world, port):
    """Return what torchrun writes into the environment of a rank on this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return {name: str(number) for name, number in numbers.items()} | where


def run_all(starts, seconds):
    """Call each of `starts`, wait for the processes that they return, and kill those that are left after `seconds`."""
    processes = []
    try:
        for start in starts:
            processes.append(start())
        deadline = time.monotonic() + seconds
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(20)
    return processes
