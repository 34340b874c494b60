"""A recipe with a server in a job of Slurm: this process serves, and one step of the job works.

    this process                        srun ── task 0 ── worker 0
    loads data, makes keys ── starts ──>    └── task 1 ── worker 1     torch loads meanwhile
    listens at a free port ── address and keys, by srun's stdin ──>
    rounds                 <── TLS ──>
    all rounds done        ── "over" ──>    the tasks end, and so does srun

The keys are this run's own: their CA is forgotten as soon as it has signed, no two jobs share any, and the server's
certificate names the node that this job runs on. They are in memory and in srun's pipes, and on no disk.

If all workers fail, the server ends with a checkpoint and the command fails with their reason. If this process fails,
srun ends the workers. So the state that Slurm shows of the job (COMPLETED or FAILED) is that of the training.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.recipes.extension import Extension
from paceline.recipes.recipe import Recipe
from paceline.runs.cluster import OnStanding, ServerEndpoint, Trained, names_to_give_again, serve_recipe
from paceline.slurm.allocation import Allocation, address_of
from paceline.slurm.requeue import claim
from paceline.slurm.steps import WORKERS_LOG, JobStep

if TYPE_CHECKING:
    from paceline.data import Dataset

WORKER = "paceline.slurm.worker"
ANYWHERE = "0.0.0.0:0"
PART_SECONDS = 30.0  # for workers that were told that it is over


def train_on_workers(
    recipe: Recipe,
    job: Allocation,
    *,
    out: Path,
    resume: bool = False,
    extension: Extension | None = None,
    listen: str = "",
    on_open: Callable[[str], None] = lambda address: None,
    on_standing: OnStanding = lambda standing: None,
) -> Trained:
    """Serve a recipe to workers that srun starts on the job's nodes, one for each worker of the recipe.

    `listen` is another address of this node than that at which Slurm reaches it, such as that of a faster network.
    """
    from paceline.drivers.served.keys import RunAuthority
    from paceline.drivers.served.security import join_address, parse_address

    workers = recipe.cluster.workers
    places = job.places(workers, beside_server=True)
    listen = listen or ANYWHERE
    host, _ = parse_address(listen)
    reached = address_of(job.here) if host in ("0.0.0.0", "::") else host
    authority = RunAuthority()
    tls, worker_keys = authority.server_keys(reached).context(), authority.worker_keys()
    del authority  # nobody can make more keys for this run
    started: list[JobStep] = []

    def start(dataset: Dataset) -> None:
        words = ["-m", WORKER, *names_to_give_again(recipe)]
        started.append(JobStep(words, places, job, log_file=out / WORKERS_LOG))

    def opened(address: str) -> None:
        claim(out, job)
        _, port = parse_address(address)
        about = {"address": join_address(reached, port), "keys": dict(worker_keys.files)}
        started[0].send(json.dumps(about) + "\n")
        on_open(join_address(reached, port))

    finished = False
    try:
        trained = serve_recipe(
            recipe,
            ServerEndpoint(listen=listen, tls=tls),
            out,
            resume=resume,
            extension=extension,
            on_ready=start,
            on_open=opened,
            on_standing=on_standing,
            workers_gone=lambda: started[0].reason if started[0].over else None,
        )
        finished = trained.outcome.finished
        return trained
    finally:
        for step in started:
            step.end(by_itself=finished, seconds=PART_SECONDS)
