"""`python -m paceline.slurm.worker`: a task of the step that works for the server of a job.

The server's address and the keys come as a line of JSON on standard input, which srun passes on to every task: torch is
loaded while the server makes ready. If the server fails before that, its end of the line is closed, and the task ends.
The task's number (SLURM_PROCID) is the worker's: with the same nodes, a run that goes on has the same shards there.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass

from paceline.decoding import decode, parse_object
from paceline.errors import in_a_line, is_plain
from paceline.runs.cluster import GIVEN_AGAIN, WorkerOptions, work_for

MOST_LINE_BYTES = 100_000
ADDRESS_SECONDS = 3600.0  # for the server to read its data
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class ServerToJoin:
    """What a server tells its tasks: where it is, and the texts of a worker's key files.

    >>> decode(ServerToJoin, {"address": "10.0.0.7:29400", "keys": {"ca.crt": "..."}}).address
    '10.0.0.7:29400'
    """

    address: str
    keys: dict[str, str]


def read_server(descriptor: int, seconds: float = ADDRESS_SECONDS) -> ServerToJoin | None:
    """Wait for the server's line and return what it says; None if whoever was to write it has gone.

    >>> reading, writing = os.pipe()
    >>> _ = os.write(writing, b'{"address": "10.0.0.7:29400", "keys": {}}\\n')
    >>> os.close(writing)
    >>> read_server(reading).address, read_server(reading)
    ('10.0.0.7:29400', None)
    """
    line, deadline = b"", time.monotonic() + seconds
    while not line.endswith(b"\n"):
        if len(line) > MOST_LINE_BYTES:
            raise ValueError(f"what the server wrote is longer than {MOST_LINE_BYTES:,} bytes: it is no address")
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"the server has not said in {seconds:g} s where it listens")
        part = os.read(descriptor, MOST_LINE_BYTES)
        if not part:
            return None
        line += part
    found: ServerToJoin = decode(ServerToJoin, parse_object(line))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Work until training is over, and return the exit code."""
    import sklearn.datasets  # noqa: F401 - slow to import: while the server makes ready
    import torch

    import paceline.drivers.served.job
    import paceline.training  # noqa: F401
    from paceline.drivers.served.keys import SideKeys
    from paceline.drivers.served.transport import tune_worker_process

    parser = argparse.ArgumentParser()
    for option in GIVEN_AGAIN:
        parser.add_argument(option, default="")
    given = parser.parse_args(arguments)
    logging.getLogger("paceline.served").setLevel(logging.ERROR)  # the server tells who comes and goes
    torch.optim.SGD([torch.zeros(1)])  # loads what takes seconds
    tune_worker_process()
    number = int(os.environ.get("SLURM_PROCID", "0"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a worker that is asked to stop signs off first
    try:
        server = read_server(sys.stdin.fileno())
        if server is None:
            return 0  # the server has gone before it listened, and has told why
        options = WorkerOptions(
            tls=SideKeys(side="worker", files=server.keys).context(),
            model=given.model,
            data=given.data,
            loss=given.loss,
            data_directory=given.data_directory,
            delay_file=given.delay_file,
            wish=number,
            patience_seconds=PATIENCE_SECONDS,
        )
        work_for(server.address, options)
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not is_plain(error):  # a model's or data set's own: the log says where, its last line what
            traceback.print_exc()
        print(f"paceline: worker {number}: {in_a_line(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
