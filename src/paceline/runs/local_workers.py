"""`python -m paceline.runs.local_workers --numbers 0,1,2`: workers of one machine, forked from one process.

The address of the server comes as a line on standard input: torch is loaded while the server makes ready.

`paceline train` starts it; `paceline work` does the same for one worker.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from dataclasses import replace

from paceline.errors import show_warning
from paceline.runs.cluster import WorkerOptions, work_for
from paceline.runs.forked_workers import run_workers


def main(arguments: list[str] | None = None) -> int:
    """Start the workers and wait for them; returns the exit code."""
    import sklearn.datasets  # noqa: F401 - slow to import: once for all, before the fork
    import torch

    import paceline.drivers.served.job
    import paceline.training  # noqa: F401

    parser = argparse.ArgumentParser()
    parser.add_argument("--numbers", required=True)
    parser.add_argument("--reasons", type=int, help="an open file: where workers say why they failed")
    for name in ("--model", "--data", "--loss", "--data-directory", "--delay-file", "--run"):
        parser.add_argument(name, default="")
    given = parser.parse_args(arguments)
    logging.getLogger("paceline.served").setLevel(logging.ERROR)  # the server is in the same terminal, and tells it
    options = WorkerOptions(
        model=given.model,
        data=given.data,
        loss=given.loss,
        data_directory=given.data_directory,
        delay_file=given.delay_file,
        threads=1,
        run=given.run,
    )
    torch.set_num_threads(1)
    warnings.showwarning = show_warning
    address = sys.stdin.readline().strip()
    if not address:
        return 0  # whoever started us has gone
    numbers = [int(number) for number in given.numbers.split(",")]
    reasons = given.reasons
    failed = run_workers(numbers, lambda number: work_for(address, replace(options, wish=number)), reasons=reasons)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
