"""A worker of a run, as a task of Ray's: it meets the server over paceline's own protocol, and ends with the run.

Ray hands it its keys and the objects of the script; models and gradients go through no object store. Ray does not
retry it: the caller does (`run.py`), who knows whether the run still goes on and why a worker ended. Each task has a
process of its own (`max_calls=1`), so that threads and memory of one run are nobody else's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray

from paceline.ray.authority import SideKeys, keys_on_node
from paceline.recipes.assembly import Given
from paceline.runs.cluster import WorkerOptions, work_for

STARTED_WITHIN_SECONDS = 60.0


def work(attempt: int, address: str, keys: SideKeys, options: WorkerOptions, given: Given, server: Any) -> None:
    """Work for the server at `address` until training is over; `server` is its actor, which is told where this runs."""
    ray.get(server.note_started.remote(attempt, ray.util.get_node_ip_address()), timeout=STARTED_WITHIN_SECONDS)
    with keys_on_node(keys) as written:
        work_for(
            address,
            replace(options, tls=written.prefix, given=given),
            on_welcome=lambda worker, recipe: written.discard(),
        )
