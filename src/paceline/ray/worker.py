"""A worker of a run, as a task of Ray's: it meets the server over paceline's own protocol, and ends with the run.

Ray hands it its keys and the objects of the script; models and gradients go through no object store. Ray does not
retry it: the caller does (`run.py`), who knows whether the run still goes on and why a worker ended. Each task has a
process of its own (`max_calls=1`), so that threads and memory of one run are nobody else's.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import ray

from paceline.drivers.served.keys import SideKeys
from paceline.drivers.served.transport import tune_worker_process
from paceline.recipes.assembly import Given
from paceline.runs.cluster import WorkerOptions, work_for

ANSWERED_WITHIN_SECONDS = 60.0
ASK_AGAIN_SECONDS = 0.2


def work(attempt: int, keys: SideKeys, options: WorkerOptions, given: Given, server: Any) -> None:
    """Work for the run of an actor until training is over.

    The task has begun while the server still loads its data: it asks until there is an address.
    """
    here = ray.util.get_node_ip_address()
    while (address := ray.get(server.meet.remote(attempt, here), timeout=ANSWERED_WITHIN_SECONDS)) is None:
        time.sleep(ASK_AGAIN_SECONDS)
    if address:
        tune_worker_process()
        work_for(address, replace(options, tls=keys.context(), given=given))
