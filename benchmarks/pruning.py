"""What pruning saves and what it costs: training with fewer samples in some epochs, beside training with all.

The claims (Li, He, Ren and Mao 2018, tables 1 and 2): fine-pruning saves 7 to 14 % of the time of 200 epochs on
CIFAR-10, and loses 0.01 to 0.43 points. The bars here: fine-pruning saves 14 % at no more than 0.4 points; the best
policy saves 30 % at no more than 0.3.

Laboratory size: CIFAR-10, its images averaged to 16x16, varied by padding, cropping and mirroring, and two networks:
LeNet, which the paper has too, and a small CNN with batch normalisation. SGD with Nesterov momentum; the rate falls to
a fifth at 30, 60 and 80 % of the run, where the paper's does.

    none               torch's own random batches
    none, fewer epochs the same in 30 % fewer epochs, the falls of the rate moved along: saving without a method
    fine-pruning       the paper's schedule, scaled to the run; as little pruned as saves 15 % of the samples
    info-batch         Qin et al. 2024, ratio 0.5, delta 0.875
    take-turns         our own try (`pruning_turns.py`), ratio 0.6, delta 0.875; not in the library

A policy that is not ahead of `none, fewer epochs` at the same saving is not worth its name.

Every run has one thread, and as many run at once as there are cores (`--jobs`); seconds are measured beside whatever
runs next to them, so CPU time is the steadier figure. What is there is kept after every run, for every size in the same
file, and is not run again (`--no-resume` forgets the runs of this size). A run whose policy has other settings now is.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.options import Options
from benchmarks.output import save
from benchmarks.pool import run_all
from benchmarks.pruning_cases import POLICIES, Ending, Size, Task, jobs_of, size_of, tasks_of
from benchmarks.pruning_tables import show, task_line
from benchmarks.pruning_training import load, train

NAME = "pruning"
Studies = dict[Size, dict[Task, Ending]]


def run(options: Options) -> None:
    """`python -m benchmarks pruning`."""
    size, tasks, jobs = size_of(options), tasks_of(options), jobs_of(options)
    load(size)  # refused here, before any process is started
    studies = kept_studies(_file(options))
    endings = {task: ending for task, ending in studies.pop(size, {}).items() if still_so(size, task, ending)}
    studies[size] = endings
    if not options.resume:
        endings.clear()
    missing = [task for task in tasks if task not in endings]
    if len(missing) < len(tasks):
        print(f"pruning: {len(tasks) - len(missing)} runs are there already, in {_file(options)}", file=sys.stderr)

    def keep(task: Task, ending: Ending) -> None:
        endings[task] = ending
        save(options, NAME, document(studies))
        print(task_line(task, ending), file=sys.stderr)

    if options.quick:  # a pool's processes would take longer than the runs
        for task in missing:
            keep(task, train(size, task))
    elif missing:
        run_all(partial(train, size), missing, label="pruning: runs", done=keep, processes=jobs)
    show(size, endings, quick=options.quick)


# -- what is kept ----------------------------------------------------------------------------------------------------


def _file(options: Options) -> Path:
    return Path(options.out, f"{NAME}.json")


def document(studies: Studies) -> dict[str, Any]:
    """The raw numbers: for every size its runs."""
    return {
        "studies": [
            {
                "size": dataclasses.asdict(size),
                "runs": [dataclasses.asdict(task) | dataclasses.asdict(ending) for task, ending in endings.items()],
            }
            for size, endings in studies.items()
        ]
    }


def kept_studies(file: Path) -> Studies:
    """What a file has; a file that is no such document is refused, for a run would write over it."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return {
            Size(**study["size"] | {"falls_at": tuple(study["size"]["falls_at"])}): dict(map(_run_of, study["runs"]))
            for study in kept["studies"]
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} holds no runs of this benchmark ({error!r}); move it or give another --out") from None


def _run_of(kept: dict[str, Any]) -> tuple[Task, Ending]:
    def fields_of(kind: type[Any]) -> dict[str, Any]:
        return {field.name: kept[field.name] for field in dataclasses.fields(kind)}

    return Task(**fields_of(Task)), Ending(**fields_of(Ending))


def still_so(size: Size, task: Task, ending: Ending) -> bool:
    """Whether the policy of a run would have the same settings now."""
    way = POLICIES.get(task.policy)
    return way is not None and way.settings(size) == ending.settings
