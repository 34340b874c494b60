"""The jobs of an experiment, spread over the cores; each outcome is kept as soon as it is there.

    out/jobs/<sum of function, settings and source>.json    an outcome, whoever asked for it
    out/<name>/results.json, report.html                    what an experiment came to

A job runs in a process of its own kind with one thread of torch, so that the same settings give the same bits whatever
else runs. An outcome is known by its function, its settings, the data, torch's version and a sum over the source that
it ran: paceline, this package's core and the folder of the function. Changed code computes anew. A file of an outcome
is read as plain values, and only if it names all of this.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import paceline
from experiments.core.story import Experiment, Findings, Job, JobFunction, Outcome, Runs, Size, Step, plain
from paceline.data import Dataset
from paceline.data.download import VARIABLE as DATA_VARIABLE
from paceline.decoding import DecodingError, parse_object
from paceline.errors import PacelineError
from paceline.files import read_plain, write_file

JOBS = "jobs"
MOST_OUTCOME_BYTES = 50_000_000
CORE = Path(__file__).parent


class ExperimentError(PacelineError, RuntimeError):
    """A job of an experiment that failed."""


Identity = dict[str, Any]
Wanted = tuple[str, Job, Mapping[str, Any], Identity]  # what it is called, the job, its settings, what it is known by


def run_experiment(
    experiment: Experiment,
    size: Size,
    out: Path,
    *,
    data: Mapping[str, str] | None = None,
    directory: str = "",
    processes: int | None = None,
    on_job: Callable[[str, float, float], None] | None = None,
    on_step: Callable[[Step], None] = lambda step: None,
    settings: Mapping[str, Any] | None = None,
) -> Findings:
    """Compute the jobs that are not kept in `out` yet, and return what follows from all of them.

    `data` are the data sets' fingerprints: an outcome on other data is another outcome. `directory` is where the data
    sets' files are. `on_job` hears the name of each job that is done, and its and all jobs' estimated seconds.
    """

    def answer(jobs: dict[Any, Job]) -> Runs:
        wanted: dict[str, Wanted] = {}
        places: dict[Any, list[str]] = {}
        for key, job in jobs.items():
            places[key] = []
            for seed in size.seeds:
                own = job.of(seed)
                known_by = identity(job.run, own, data or {})
                file = file_name(known_by)
                wanted.setdefault(file, (job_name(key, seed, size), job, own, known_by))
                places[key].append(file)
        total = sum(job.seconds for _, job, _, _ in wanted.values())

        def told(name: str, job: Job) -> None:
            if on_job is not None:
                on_job(name, job.seconds, total)

        outcomes: dict[str, Outcome] = {}
        for file, (name, job, _, known_by) in wanted.items():
            kept = read_outcome(out, known_by)
            if kept is not None:
                outcomes[file] = kept
                told(name, job)
        missing = [each for file, each in wanted.items() if file not in outcomes]
        for (name, job, _, known_by), outcome, seconds in computed(
            missing, 1 if experiment.timed else processes, directory
        ):
            outcomes[file_name(known_by)] = write_outcome(out, known_by, outcome, processor_seconds=seconds)
            told(name, job)
        return Runs({key: [outcomes[file] for file in files] for key, files in places.items()})

    return experiment.tell(size, answer, on_step=on_step, **(settings or {}))


def job_name(key: Any, seed: int, size: Size) -> str:
    """Return what a job is called where it is shown: its key, and the seed where there are several.

    >>> job_name(("lgc", 3, 0.5), 201, Size(seeds=(200, 201)))
    'lgc 3 0.5, seed 201'
    """
    text = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
    return f"{text}, seed {seed}" if len(size.seeds) > 1 else text


def computed(
    jobs: Sequence[Wanted], processes: int | None, directory: str
) -> Iterator[tuple[Wanted, dict[str, Any], float]]:
    """Yield each job with its outcome and processor time, in the order in which they end; the longest begin first."""
    if not jobs:
        return
    count = max(1, min(processes or os.cpu_count() or 1, len(jobs)))
    began = multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("spawn"), initializer=prepare_process, initargs=(directory,)
    )
    waiting = sorted(jobs, key=lambda each: each[1].seconds)
    under_way = dict[Future[tuple[dict[str, Any], float]], Wanted]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < count:  # none waits in the pool, which would begin it after a Ctrl-C
                each = waiting.pop()
                under_way[pool.submit(run_timed, each[1].run, dict(each[2]))] = each
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda one: one.exception() is not None):  # what is done is kept first
                each = under_way.pop(future)
                try:
                    outcome, seconds = future.result()
                except ValueError as error:
                    raise type(error)(f"{each[0]}: {error}") from error
                except OSError:
                    raise
                except Exception as error:
                    raise ExperimentError(f"{each[0]}: {type(error).__name__}: {error}") from error
                yield each, outcome, seconds
    finally:
        left = [one for one in multiprocessing.active_children() if one not in began] if under_way else []
        pool.shutdown(wait=False, cancel_futures=True)
        for process in left:  # of a job that failed, or a Ctrl-C: what would be thrown away is not waited for
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


# -- what an outcome is known by ---------------------------------------------------------------------------------------


def identity(run: JobFunction, settings: Mapping[str, Any], data: Mapping[str, str]) -> Identity:
    """Return what an outcome is known by, as plain values."""
    return {
        "function": f"{run.__module__}:{run.__qualname__}",
        "settings": json.loads(json.dumps(dict(settings), sort_keys=True)),
        "data": {name: data[name] for name in sorted(data)},
        "torch": version("torch"),
        "source": source_sum(run.__module__),
    }


def source_sum(module: str) -> str:
    """Return a sum over the source that a job of this module runs: paceline, this core, and the module's own folder."""
    file = importlib.import_module(module).__file__ or ""
    folders = {Path(paceline.__file__).parent, CORE, Path(file).parent}
    return _sum_of(tuple(sorted(folders)))


@cache
def _sum_of(folders: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            found.update(f"{file.relative_to(folder)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:32]


def fingerprint(data: Dataset) -> str:
    """Return what stands for a data set: how many samples it has, and a sum over every one of them."""
    sums = []
    for part in (data.train, data.test):
        found = 0
        for inputs, targets in part.parts(1000):
            for each in (inputs, targets):
                found = zlib.crc32(each.contiguous().numpy().tobytes(), found)
        sums.append(f"{found:08x}")
    return "-".join([str(len(data.train)), str(len(data.test)), *sums])


# -- outcomes as files -------------------------------------------------------------------------------------------------


def file_name(known_by: Identity) -> str:
    """Return the name of the file of an outcome."""
    return f"{hashlib.sha256(json.dumps(known_by, sort_keys=True).encode()).hexdigest()[:32]}.json"


def read_outcome(out: Path, known_by: Identity) -> dict[str, Any] | None:
    """Return a kept outcome; None where there is none, or where the file is of something else or damaged."""
    try:
        held = parse_object(read_plain(out / JOBS / file_name(known_by), most_bytes=MOST_OUTCOME_BYTES))
    except (OSError, ValueError, DecodingError):
        return None
    outcome, seconds = held.pop("outcome", None), held.pop("processor_seconds", None)
    return outcome if held == known_by and isinstance(outcome, dict) and isinstance(seconds, float) else None


def write_outcome(
    out: Path, known_by: Identity, outcome: Mapping[str, Any], *, processor_seconds: float
) -> dict[str, Any]:
    """Keep an outcome and the processor time that its job took; return it as it will be read: missing is None."""
    kept: dict[str, Any] = json.loads(json.dumps(plain(outcome)))
    text = json.dumps({**known_by, "outcome": kept, "processor_seconds": round(processor_seconds, 2)}, allow_nan=False)
    file = out / JOBS / file_name(known_by)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, text + "\n")
    return kept
