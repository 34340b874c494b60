"""The gradients of a round's workers in one pass against a loop over workers, network by network.

All engines take turns on the same work and each keeps its best time, so that what else the machine does hits
them alike. The verdict is about the engine that `make_engine` chooses, because that is what a run uses: where it
chooses the loop, the ratio is 1 by definition. The peer is `torch.func.vmap(grad(...))` over workers, the obvious way.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from rich.progress import Progress

from benchmarks.gradients_cases import BATCH_SIZE, CASES, WORKERS, Case
from benchmarks.gradients_engines import Choice, Compute, choice, engines, exact
from benchmarks.gradients_tables import differences_table, speed_table
from benchmarks.options import Options, chosen
from benchmarks.output import progress_bar, save, tables
from paceline.models import count_parameters

NOISE = 0.03  # a ratio this little below its bar is within the noise of the machine


@dataclass(frozen=True, kw_only=True)
class Row:
    """One network at one number of threads. An engine that cannot do it, or was left out, has no seconds.

    `cpu_seconds`, the processor's time, is kept for machines that others use as well; the table shows the clock's.
    """

    case: Case
    parameters: int
    threads: int
    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    choice: Choice
    differences: dict[str, float]

    def ratio(self, engine: str) -> float | None:
        """How many times as fast as the loop."""
        return self.seconds["loop"] / self.seconds[engine] if engine in self.seconds else None

    @property
    def verdict(self) -> str:
        """PASS, MISS, or PASS within the noise."""
        ratio = self.ratio(self.choice) or 0.0
        if ratio >= self.case.at_least:
            return "PASS"
        return "PASS~" if ratio > self.case.at_least - NOISE else "MISS"

    def as_numbers(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "model": self.case.name,
            "input_shape": self.case.input_shape,
            "parameters": self.parameters,
            "threads": self.threads,
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "loop_over_grouped": self.ratio("grouped"),
            "loop_over_vmap": self.ratio("vmap"),
            "choice": self.choice,
            "bar": self.case.at_least,
            "verdict": self.verdict,
            "differences": self.differences,
        }


def run(options: Options) -> None:
    """`python -m benchmarks gradients`."""
    models = chosen(options.only, tuple(dict.fromkeys(case.model for case in CASES)), "network")
    cases = [case for case in CASES if case.model in models]
    if options.quick:
        cases = cases[:2]
    default = torch.get_num_threads()
    rows: list[Row] = []
    with progress_bar() as progress:
        bar = progress.add_task("gradients", total=sum(_repeats(case, options) for case in cases) * len({1, default}))
        try:
            for case, threads in product(cases, sorted({1, default})):
                torch.set_num_threads(threads)
                progress.update(bar, description=f"gradients: {case.name}, {threads} thread(s)")
                rows.append(_measure(case, threads, _repeats(case, options), progress))
                _save(options, rows)
        finally:
            torch.set_num_threads(default)
    console = tables()
    console.print(speed_table(rows, quick=options.quick))
    console.print(differences_table(rows))


def _save(options: Options, rows: Sequence[Row]) -> None:
    """After every row: the large networks take minutes each, and a run that is stopped keeps what it has."""
    numbers = {"workers": WORKERS, "batch_size": BATCH_SIZE, "rows": [row.as_numbers() for row in rows]}
    save(options, "gradients", numbers)


def _repeats(case: Case, options: Options) -> int:
    return 2 if options.quick else case.repeats


def _measure(case: Case, threads: int, repeats: int, progress: Progress) -> Row:
    module = case.build()
    ready = engines(module, case.assignments(workers=WORKERS, batch_size=BATCH_SIZE), peer=case.peer)
    seconds, cpu_seconds, gradients = _take_turns(ready, repeats, progress)
    return Row(
        case=case,
        parameters=count_parameters(module),
        threads=threads,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        choice=_choice(case),
        differences=_differences(gradients, _exact(case)),
    )


@cache
def _choice(case: Case) -> Choice:
    """Two workers are enough for the choice, and on large networks much sooner done."""
    return choice(case.build(), case.assignments(workers=2, batch_size=BATCH_SIZE))


@cache
def _exact(case: Case) -> torch.Tensor:
    return exact(case.build(), case.assignments(workers=1, batch_size=BATCH_SIZE)[0])


def _take_turns(
    ready: Mapping[str, Compute], repeats: int, progress: Progress
) -> tuple[dict[str, float], dict[str, float], dict[str, torch.Tensor]]:
    """The best time of each engine, by the clock and by the processor, and its gradients; who begins changes."""
    best, cpu_best = dict.fromkeys(ready, float("inf")), dict.fromkeys(ready, float("inf"))
    gradients: dict[str, torch.Tensor] = {}
    for repeat in range(repeats):
        for name in list(ready) if repeat % 2 == 0 else reversed(list(ready)):
            began, cpu_began = time.perf_counter(), time.process_time()
            gradients[name] = ready[name]()
            best[name] = min(best[name], time.perf_counter() - began)
            cpu_best[name] = min(cpu_best[name], time.process_time() - cpu_began)
        progress.advance(progress.task_ids[0])
    return best, cpu_best, gradients


def _differences(gradients: Mapping[str, torch.Tensor], first: torch.Tensor) -> dict[str, float]:
    """How far the one pass is from the loop, and the first worker's row of each from its gradient in float64."""
    if "grouped" not in gradients:
        return {}
    loop, grouped = gradients["loop"].double(), gradients["grouped"].double()
    apart = (loop - grouped).abs()
    return {
        "most": float(apart.max()),
        "most_over_largest": float(apart.max() / loop.abs().max()),
        "norm_over_norm": float(apart.norm() / loop.norm()),
        "loop_from_exact": float((loop[0] - first).norm() / first.norm()),
        "grouped_from_exact": float((grouped[0] - first).norm() / first.norm()),
    }
