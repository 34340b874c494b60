"""Runs spread over all cores, one torch thread each, so that none waits for another's."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from benchmarks.output import progress_bar

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")


def run_all(
    function: Callable[[Task], Outcome],
    tasks: Sequence[Task],
    *,
    label: str,
    done: Callable[[Task, Outcome], None] | None = None,
    processes: int | None = None,
) -> list[Outcome]:
    """What the function gives for each task, in the order of the tasks, with a progress bar; `done` hears each."""
    processes = max(1, min(processes or os.cpu_count() or 1, len(tasks)))
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=one_thread)
    try:
        futures = {pool.submit(function, task): index for index, task in enumerate(tasks)}
        outcomes: dict[int, Outcome] = {}
        with progress_bar() as progress:
            bar = progress.add_task(label, total=len(tasks))
            for future in as_completed(futures):
                index = futures[future]
                outcomes[index] = future.result()
                if done is not None:
                    done(tasks[index], outcomes[index])
                progress.advance(bar)
        return [outcomes[index] for index in range(len(tasks))]
    finally:
        pool.shutdown(cancel_futures=True)  # else a Ctrl-C would wait for every run not yet begun


def one_thread() -> None:
    """For a process of a pool: what it computes, it computes with one thread."""
    import torch

    torch.set_num_threads(1)
