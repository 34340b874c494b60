"""The jobs of an experiment, spread over the cores; each outcome is kept as soon as it is there.

    out/jobs/<sum of function and settings>.json    an outcome, whoever asked for it
    out/<name>/results.json, report.html            what an experiment came to

A job runs in a process of its own kind with one thread of torch, so that the same settings give the same bits whatever
else runs. A file of an outcome is read as plain values, and only if it names this function, these settings and this
version of paceline; any other is computed anew.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.data.download import VARIABLE as DATA_VARIABLE
from paceline.decoding import DecodingError, parse_object
from paceline.errors import PacelineError
from paceline.files import read_plain, write_file
from paceline.reproduce.experiment import Experiment, ExperimentPlan, Findings, Job, JobFunction, Outcome

JOBS = "jobs"
MOST_OUTCOME_BYTES = 50_000_000


class ReproductionError(PacelineError, RuntimeError):
    """A job of an experiment that failed."""


def run_experiment(
    experiment: Experiment,
    plan: ExperimentPlan,
    out: Path,
    *,
    data: Mapping[str, str] | None = None,
    directory: str = "",
    processes: int | None = None,
    on_job: Callable[[str, float, float], None] | None = None,
) -> Findings:
    """Compute the jobs that are not kept in `out` yet, and return what follows from all of them.

    `data` are the data sets' fingerprints: an outcome on other data is another outcome. `directory` is where the data
    sets' files are. `on_job` hears the name of each job that is done, and its and all jobs' estimated seconds.
    """
    jobs = list(experiment.jobs(plan))
    check_names(jobs)
    total = sum(job.seconds for job in jobs)
    outcomes: dict[str, Outcome] = {}
    missing: list[Job] = []
    for job in jobs:
        kept = read_outcome(out, job, data or {})
        if kept is None:
            missing.append(job)
        else:
            outcomes[job.name] = kept
            if on_job is not None:
                on_job(job.name, job.seconds, total)
    for job, outcome, seconds in computed(missing, 1 if experiment.timed else processes, directory):
        write_outcome(out, job, data or {}, outcome, processor_seconds=seconds)
        outcomes[job.name] = outcome
        if on_job is not None:
            on_job(job.name, job.seconds, total)
    return experiment.conclude(plan, {job.name: outcomes[job.name] for job in jobs})


def check_names(jobs: Sequence[Job]) -> None:
    """Refuse an experiment of which two jobs have one name."""
    names = [job.name for job in jobs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"jobs of an experiment have names of their own ({sorted(twice)[0]!r} comes twice)")


def computed(jobs: Sequence[Job], processes: int | None, directory: str) -> Iterator[tuple[Job, dict[str, Any], float]]:
    """Yield each job with its outcome and processor time, in the order in which they end; the longest begin first."""
    if not jobs:
        return
    count = max(1, min(processes or os.cpu_count() or 1, len(jobs)))
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=prepare_process, initargs=(directory,)
    )
    waiting, under_way = sorted(jobs, key=lambda job: job.seconds), dict[Future[tuple[dict[str, Any], float]], Job]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < count:  # none waits in the pool, which would begin it after a Ctrl-C
                job = waiting.pop()
                under_way[pool.submit(run_timed, job.run, dict(job.settings))] = job
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda each: each.exception() is not None):  # what is done is kept first
                job = under_way.pop(future)
                try:
                    outcome, seconds = future.result()
                except ValueError as error:
                    raise type(error)(f"{job.name}: {error}") from error
                except OSError:
                    raise
                except Exception as error:
                    raise ReproductionError(f"{job.name}: {type(error).__name__}: {error}") from error
                yield job, outcome, seconds
    finally:
        processes_left = list((pool._processes or {}).values()) if under_way else []
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes_left:  # of a job that failed, or a Ctrl-C: nobody waits for what would be thrown away
            process.terminate()


def prepare_process(directory: str) -> None:
    """Let a process of the pool compute with one thread, on the data sets of this folder."""
    if directory:
        os.environ[DATA_VARIABLE] = directory
    import torch

    torch.set_num_threads(1)


def run_timed(run: JobFunction, settings: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return a job's outcome, and the processor time of this process while it ran, in seconds.

    That is user and system time of all its threads; child processes are not counted, and neither is waiting.

    >>> run_timed(lambda settings: {"length": len(settings)}, {})[0]
    {'length': 0}
    """
    began = time.process_time()
    return run(settings), time.process_time() - began


# -- outcomes as files -------------------------------------------------------------------------------------------------


def identity(job: Job, data: Mapping[str, str]) -> dict[str, Any]:
    """Return what an outcome is known by, as plain values."""
    function = f"{job.run.__module__}:{job.run.__qualname__}"
    settings = json.loads(json.dumps(dict(job.settings), sort_keys=True))
    used = {name: data[name] for name in sorted(data)}
    versions = {"paceline": __version__, "torch": version("torch")}
    return {"function": function, "settings": settings, "data": used, **versions}


def outcome_file(out: Path, job: Job, data: Mapping[str, str]) -> Path:
    """Return where the outcome of a job is kept."""
    text = json.dumps(identity(job, data), sort_keys=True)
    return out / JOBS / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_outcome(out: Path, job: Job, data: Mapping[str, str]) -> dict[str, Any] | None:
    """Return a kept outcome; None where there is none, or where the file is of something else or damaged."""
    try:
        held = parse_object(read_plain(outcome_file(out, job, data), most_bytes=MOST_OUTCOME_BYTES))
    except (OSError, ValueError, DecodingError):
        return None
    outcome = held.pop("outcome", None)
    held.pop("processor_seconds", None)
    return outcome if held == identity(job, data) and isinstance(outcome, dict) else None


def write_outcome(
    out: Path, job: Job, data: Mapping[str, str], outcome: Mapping[str, Any], *, processor_seconds: float
) -> None:
    """Keep an outcome, and the processor time that its job took."""
    file = outcome_file(out, job, data)
    try:
        took = {"processor_seconds": round(processor_seconds, 2)}
        text = json.dumps({**identity(job, data), "outcome": outcome, **took}, allow_nan=False)
    except ValueError as error:
        raise ReproductionError(f"{job.name}: its outcome has a figure that is not finite ({error})") from error
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, text + "\n")
