"""The time of one step of LARS beside torch's SGD and the two LARS that others have made.

The parameters are ResNet-50's, 161 tensors with 25.6 million elements, on the CPU, each side with a copy of its own:
what is measured is passes through memory. A second table has 500 small matrices, where it is the calls that cost.
Sides take turns, one step each, so that a disturbance hits all alike; the best of many is what counts. Sides that are
not installed are left out, and the table says so (make bench has them).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module

import torch
from rich.table import Table

from benchmarks.options import Options
from benchmarks.output import Bar, coloured, progress_bar, save, tables, titled
from paceline import LARS
from paceline.models import build_model

TURNS = 60
SETTINGS = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4}
OURS = "paceline LARS"
FOREACH_SGD = "torch SGD, foreach"
PEERS = {"pytorch_optimizer LARS": "pytorch_optimizer", "torch_optimizer LARS": "torch_optimizer"}
BESIDE_SGD = Bar(sign="<=", limit=1.0)
BESIDE_PEERS = Bar(sign=">=", limit=2.0)

Parameters = Iterable[torch.nn.Parameter]


@dataclass(frozen=True)
class Side:
    """An optimiser that takes part: its name and one step of it."""

    name: str
    step: Callable[[], object]


def run(options: Options) -> None:
    """Time all sides on both sets of parameters and print the tables."""
    turns = 3 if options.quick else options.repeat or TURNS
    found: dict[str, dict[str, float]] = {}
    for title, make_parameters in (QUICK_SETS if options.quick else SETS).items():
        sides, missing = make_sides(make_parameters)
        found[title] = interleaved(sides, turns=turns)
        tables().print(_table(title, found[title], bars=make_parameters is _resnet50, quick=options.quick))
    for name in missing:
        tables().print(f"{name} is not installed: pip install -e '.[bench]'")
    save(options, "optimizers", {"seconds": found, "threads": torch.get_num_threads()})


def _resnet50() -> list[torch.nn.Parameter]:
    return list(build_model("resnet50", input_shape=(3, 224, 224), classes=1000).parameters())


def _matrices(count: int = 500) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(count)]


SETS = {"ResNet-50's 161 tensors": _resnet50, "500 matrices of 64 x 64": _matrices}
QUICK_SETS = {"8 matrices of 64 x 64": lambda: _matrices(8)}


def make_sides(make_parameters: Callable[[], list[torch.nn.Parameter]]) -> tuple[list[Side], list[str]]:
    """Everybody who can take part, and the names of those who cannot."""
    ways: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
        "torch SGD, fused": lambda parameters: torch.optim.SGD(parameters, fused=True, **SETTINGS),
        FOREACH_SGD: lambda parameters: torch.optim.SGD(parameters, foreach=True, **SETTINGS),
        "torch SGD, default": lambda parameters: torch.optim.SGD(parameters, **SETTINGS),
        OURS: lambda parameters: LARS(parameters, **SETTINGS),
        f"{OURS}, foreach": lambda parameters: LARS(parameters, foreach=True, **SETTINGS),
        f"{OURS}, nesterov": lambda parameters: LARS(parameters, nesterov=True, **SETTINGS),
    }
    missing = []
    for name, module in PEERS.items():
        try:
            theirs = import_module(module).LARS
        except ImportError:
            missing.append(name)
        else:
            ways[name] = lambda parameters, theirs=theirs: theirs(parameters, **SETTINGS)
    return [Side(name, _step_of(make, make_parameters())) for name, make in ways.items()], missing


def _step_of(
    make: Callable[[Parameters], torch.optim.Optimizer], parameters: list[torch.nn.Parameter]
) -> Callable[[], object]:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = make(parameters)
    optimizer.step()  # makes the momentum
    return optimizer.step


def interleaved(sides: list[Side], turns: int) -> dict[str, float]:
    """The shortest step of each side, in seconds."""
    best = {side.name: float("inf") for side in sides}
    with progress_bar() as bar:
        task = bar.add_task("steps", total=turns)
        for turn in range(turns):
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                begun = time.perf_counter()
                side.step()
                best[side.name] = min(best[side.name], time.perf_counter() - begun)
            bar.advance(task)
    return best


def _table(title: str, seconds: dict[str, float], *, bars: bool, quick: bool) -> Table:
    table = Table(title=titled(f"One optimiser step, CPU: {title}", quick=quick))
    table.add_column("optimiser")
    for column in ("milliseconds", "of ours", "bar", ""):
        table.add_column(column, justify="right")
    ours = seconds[OURS]
    for name, best in sorted(seconds.items(), key=lambda item: item[1]):
        limit = verdict = ""
        if name in PEERS and bars:
            limit, verdict = f"{BESIDE_PEERS} x ours", BESIDE_PEERS.verdict(best / ours)
        elif name == FOREACH_SGD and bars:
            limit, verdict = f"ours {BESIDE_SGD}", BESIDE_SGD.verdict(ours / best)
        table.add_row(name, f"{best * 1e3:.1f}", f"{best / ours:.2f}", limit, coloured(verdict))
    return table
