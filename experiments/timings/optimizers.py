"""The time of one step of LARS beside torch's SGD and the two LARS that others have made.

The parameters are ResNet-50's, 161 tensors with 25.6 million elements, on the CPU, each side with a copy of its own:
what is measured is passes through memory. A second table has 500 small matrices, where it is the calls that cost.
Sides take turns, one step each; the best of many is what counts. Sides that are not installed are left out, and a
remark says so (`make bench` has them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from experiments.core.story import Numbers, Size, Telling, experiment
from experiments.core.turns import bar, seconds_of, take_turns
from paceline import LARS
from paceline.models import build_model
from paceline.reports.table import PlainTable

SETTINGS: dict[str, Any] = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4}
OURS = "paceline LARS"
FOREACH_SGD = "torch SGD, foreach"
PEERS = {"pytorch_optimizer LARS": "pytorch_optimizer", "torch_optimizer LARS": "torch_optimizer"}
RESNET = "ResNet-50's 161 tensors"

Parameters = Iterable[torch.nn.Parameter]


@experiment("optimizers", question="a step of LARS against torch's SGD and others' LARS", minutes=0.3)
def optimizers(size: Size, *, turns: int = 60) -> Telling:
    turns = size.pick(3, turns)
    sets: dict[str, Callable[[], list[torch.nn.Parameter]]] = size.pick(
        {"8 matrices of 64 x 64": lambda: matrices(8)},
        {RESNET: resnet50, "500 matrices of 64 x 64": lambda: matrices(500)},
    )
    found, missing = {}, set[str]()
    for title, make_parameters in sets.items():
        ways = optimizers_here()
        missing = PEERS.keys() - ways
        lanes = {name: timed_step(make, make_parameters()) for name, make in ways.items()}
        times = yield from take_turns(lanes, turns, label=f"{title}: ")
        found[title] = best = {name: min(seconds) for name, seconds in times.items()}
        rows = [
            (name, f"{1e3 * seconds:.1f}", f"{seconds / best[OURS]:.2f}")
            for name, seconds in sorted(best.items(), key=lambda item: item[1])
        ]
        yield PlainTable(
            title=f"One optimiser step, CPU: {title}", headings=("optimiser", "milliseconds", "of ours"), rows=rows
        )
        if title == RESNET:
            yield bar(f"{OURS} / {FOREACH_SGD}", best[OURS] / best[FOREACH_SGD], most=1.0)
            for name in PEERS.keys() & best.keys():
                yield bar(f"{name} / {OURS}", best[name] / best[OURS], least=2.0)
    for name in sorted(missing):
        yield f"{name} is not installed: pip install -e '.[bench]'"
    yield Numbers({"seconds": found, "threads": torch.get_num_threads()})


def resnet50() -> list[torch.nn.Parameter]:
    return list(build_model("resnet50", input_shape=(3, 224, 224), classes=1000).parameters())


def matrices(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(count)]


def optimizers_here() -> dict[str, Callable[[Parameters], torch.optim.Optimizer]]:
    """Return every optimiser that can take part; those of peers only where they are installed."""
    ways: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
        "torch SGD, fused": lambda parameters: torch.optim.SGD(parameters, fused=True, **SETTINGS),
        FOREACH_SGD: lambda parameters: torch.optim.SGD(parameters, foreach=True, **SETTINGS),
        "torch SGD, default": lambda parameters: torch.optim.SGD(parameters, **SETTINGS),
        OURS: lambda parameters: LARS(parameters, **SETTINGS),
        f"{OURS}, foreach": lambda parameters: LARS(parameters, foreach=True, **SETTINGS),
        f"{OURS}, nesterov": lambda parameters: LARS(parameters, nesterov=True, **SETTINGS),
    }
    for name, module in PEERS.items():
        try:
            theirs = import_module(module).LARS
        except ImportError:
            continue
        ways[name] = partial(theirs, **SETTINGS)
    return ways


def timed_step(
    make: Callable[[Parameters], torch.optim.Optimizer], parameters: list[torch.nn.Parameter]
) -> Callable[[], float]:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = make(parameters)
    optimizer.step()  # makes the momentum
    return lambda: seconds_of(optimizer.step)
