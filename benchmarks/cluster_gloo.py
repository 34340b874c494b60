"""The cluster benchmark's peer: the same training without a server, an all-reduce of gloo in every round.

Ten processes with the same batches, delays and optimiser as the workers of `full`: what is compared is what a round
costs beside waiting for the slowest.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.processes import Processes
from paceline.recipes import Recipe

GIVE_UP_SECONDS = 600.0


def gloo_run(recipe: Recipe) -> tuple[float, float]:
    """Train with all-reduces; the seconds from the first batch to the last step, and the loss after it."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = context.Process(target=_ranks, args=(recipe.to_document(), store, out))
        ranks.start()
        try:
            seconds, loss = out.get(timeout=GIVE_UP_SECONDS)
            ranks.join(30)
        finally:
            ranks.kill()  # its children die with it
    return seconds, loss


def _ranks(document: dict[str, Any], store: str, out: Any) -> None:
    """Load torch once, and fork the ranks."""
    import torch

    import paceline.optim
    import paceline.runs.cluster
    import paceline.training  # noqa: F401

    torch.set_num_threads(1)
    processes = Processes()

    def rank_of(rank: int) -> Callable[[], int]:
        return lambda: _rank(rank, document, store, out)

    for rank in range(Recipe.from_document(document).cluster.workers):
        processes.fork(rank_of(rank))
    processes.wait()


def _rank(rank: int, document: dict[str, Any], store: str, out: Any) -> int:
    import torch
    import torch.distributed as dist

    from paceline.optim import make_optimizer
    from paceline.recipes.assembly import load_data, make_training
    from paceline.runs.cluster import delay_of
    from paceline.training import Batches, measure
    from paceline.workers.flat import FlatModel
    from paceline.workers.gradients import accumulate

    recipe = Recipe.from_document(document)
    ranks = recipe.cluster.workers
    training, delay_seconds = make_training(recipe, load_data(recipe)), delay_of(recipe)
    module = training.module
    optimizer, schedule = make_optimizer(training.optimizer, module.parameters(), total_steps=training.total_steps)
    model, batches = FlatModel(module), Batches(training)
    batches.joined(rank, draw=0)
    module.train()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    dist.barrier()
    began = time.perf_counter()
    for draw in range(recipe.rounds):
        assignment = batches.assignment(worker=rank, shard=rank, draw=draw, blocks_done=training.blocks)
        no_sooner = time.perf_counter() + delay_seconds(rank, draw)
        model.gradient.zero_()
        accumulate(module, assignment, training.loss, parts=training.blocks)
        time.sleep(max(0.0, no_sooner - time.perf_counter()))
        dist.all_reduce(model.gradient)
        model.gradient.div_(ranks)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    seconds = time.perf_counter() - began
    dist.barrier()
    if rank == 0:
        module.eval()
        with torch.no_grad():
            out.put((seconds, measure(module, training).loss))
        out.close()
        out.join_thread()
    dist.destroy_process_group()
    return 0
