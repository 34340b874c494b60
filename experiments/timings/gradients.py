"""The gradients of a round's workers in one pass against a loop over workers, network by network.

All engines take turns on the same work and each keeps its best time. The verdict is about the engine that
`make_engine` chooses, because that is what a run uses: where it chooses the loop, the ratio is 1 by definition. The
peer is `torch.func.vmap(grad(...))` over workers, the obvious way.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from experiments.core.story import Numbers, Size, Telling, chosen, experiment
from experiments.core.turns import bar, take_turns, verdict
from paceline.models import build_model, count_parameters
from paceline.randomness import torch_generator
from paceline.reports.table import PlainTable
from paceline.workers.engine import CheckedGradients, make_engine
from paceline.workers.gradients import Assignment, LoopGradients, has_batch_norm
from paceline.workers.grouped import GroupedGradients, why_not_grouped

Compute: TypeAlias = Callable[[], torch.Tensor]
Choice: TypeAlias = Literal["loop", "grouped"]

WORKERS, BATCH_SIZE, BLOCKS, CLASSES = 10, 32, 4, 10
DIGITS, CIFAR = (1, 8, 8), (3, 32, 32)
NOISE = 0.03  # a ratio this little below its bar is within the noise of the machine


class Case(NamedTuple):
    """A network on an input shape, the speed-up that is asked of the engine, and how often it is measured.

    The peer is left out where it takes minutes.
    """

    model: str
    input_shape: tuple[int, int, int]
    norm: str | None = None
    at_least: float = 1.0
    repeats: int = 3
    peer: bool = True

    @property
    def name(self) -> str:
        """The network and its normalisation."""
        return f"{self.model} {self.norm}" if self.norm else self.model

    def build(self) -> nn.Module:
        """Return the network, with seeded parameters."""
        return build_model(self.model, input_shape=self.input_shape, classes=CLASSES, norm=self.norm, seed=0)

    def assignments(self, workers: int) -> list[Assignment]:
        """Return a batch of random samples for every worker, all blocks done."""
        made = []
        for worker in range(workers):
            generator = torch_generator(0, "benchmark", worker)
            inputs = torch.randn(BATCH_SIZE, *self.input_shape, generator=generator)
            targets = torch.randint(CLASSES, (BATCH_SIZE,), generator=generator)
            made.append(Assignment(inputs=inputs, targets=targets, blocks=BLOCKS, blocks_done=BLOCKS))
        return made


CASES = (
    Case("mlp", DIGITS, at_least=1.5, repeats=100),
    Case("lenet", DIGITS, at_least=1.5, repeats=50),
    Case("mlp", CIFAR, repeats=30),
    Case("lenet", CIFAR, repeats=20),
    Case("vgg11", CIFAR, "none"),
    Case("vgg11", CIFAR, "group", peer=False),
    Case("vgg11", CIFAR, "batch"),
    *(Case(model, CIFAR, norm, repeats=2, peer=False)
      for model, norm in product(("resnet18", "mobilenetv2"), ("group", "batch"))),
    Case("alexnet", CIFAR, peer=False),
)  # fmt: skip


@experiment("gradients", question="all workers' gradients in one pass against a loop", minutes=15)
def gradients(size: Size, *, networks: tuple[str, ...] = ()) -> Telling:
    networks = chosen("network", networks, list(dict.fromkeys(case.model for case in CASES)))
    cases = [case for case in CASES if case.model in networks]
    default = torch.get_num_threads()
    speeds, agreements, claims, numbers = [], [], [], []
    try:
        for case, threads in product(size.pick(cases[:2], cases), sorted({1, default})):
            torch.set_num_threads(threads)
            module = case.build()
            ready, last = engines_for(module, case.assignments(WORKERS), case.peer), dict[str, torch.Tensor]()
            lanes = {name: timed(name, compute, last) for name, compute in ready.items()}
            label = f"{case.name}, {threads} thread{'s' if threads > 1 else ''}: "
            turns = yield from take_turns(lanes, size.pick(2, case.repeats), label=label)
            best = {name: min(seconds) for name, seconds in turns.items()}
            ratio = {name: best["loop"] / seconds for name, seconds in best.items()}
            used = choice(module, case.assignments(2))
            asked = bar(f"{label}{used}, times as fast as the loop", ratio[used], least=case.at_least)
            near = not asked.holds and ratio[used] > case.at_least - NOISE
            shape = "x".join(map(str, case.input_shape))
            speeds.append(
                (case.name, shape, f"{count_parameters(module):,}", str(threads), f"{1e3 * best['loop']:.1f}",
                 *(f"{ratio[name]:.2f}" if name in ratio else "-" for name in ("grouped", "vmap")),
                 "one pass" if used == "grouped" else "loop", "PASS~" if near else verdict(asked))
            )  # fmt: skip
            claims.append(asked)
            apart = differences(last, exact(case.build(), case.assignments(1)[0])) if "grouped" in last else {}
            if apart:
                same = bar(f"{label}largest difference / largest gradient", apart["most / largest"], most=1e-6)
                claims.append(same)
                shown = [f"{value:.1e}" for value in apart.values()]
                agreements.append((case.name, shape, str(threads), *shown, verdict(same)))
            numbers.append({"model": case.name, "shape": shape, "threads": threads, "seconds": best, "ratios": ratio,
                            "choice": used, "differences": apart})  # fmt: skip
    finally:
        torch.set_num_threads(default)
    yield PlainTable(
        title="Gradients of 10 workers, batch 32: how many times as fast as the loop",
        headings=("network", "input", "parameters", "threads", "loop ms", "one pass", "vmap", "used", ""),
        rows=speeds,
        caption="One pass: GroupedGradients; vmap: torch.func.vmap(grad), - where it does not work or was left out; "
        "used: make_engine's choice, which is judged; PASS~: below the bar by less than the noise, 0.03.",
    )
    yield PlainTable(
        title="One pass against the loop: differences of gradients",
        headings=("\nnetwork", "\ninput", "\nthreads", "\nlargest", "/ largest\ngradient", "norm /\nnorm",
                  "loop from\nfloat64", "one pass\nfrom float64", ""),
        rows=agreements,
        caption="The same sums in another order; from float64: norm of the first worker's error / of its gradient.",
    )  # fmt: skip
    yield from claims
    yield Numbers({"workers": WORKERS, "batch_size": BATCH_SIZE, "rows": numbers})


def timed(name: str, compute: Compute, last: dict[str, torch.Tensor]) -> Callable[[], float]:
    """Return what tells the seconds of a pass; of its gradients only the last stay, in `last`."""

    def lane() -> float:
        began = time.perf_counter()
        found = compute()
        seconds = time.perf_counter() - began
        last[name] = found
        return seconds

    return lane


def differences(last: Mapping[str, torch.Tensor], first: torch.Tensor) -> dict[str, float]:
    """Return how far the one pass is from the loop, and the first worker's row of each from its gradient in float64."""
    loop, grouped = last["loop"].double(), last["grouped"].double()
    apart = (loop - grouped).abs()
    return {
        "most": float(apart.max()),
        "most / largest": float(apart.max() / loop.abs().max()),
        "norm / norm": float(apart.norm() / loop.norm()),
        "loop from exact": float((loop[0] - first).norm() / first.norm()),
        "grouped from exact": float((grouped[0] - first).norm() / first.norm()),
    }


# -- the engines -------------------------------------------------------------------------------------------------------


def engines_for(module: nn.Module, assignments: Sequence[Assignment], peer: bool) -> dict[str, Compute]:
    """Return a pass that gives a gradient row per worker, by name, of those that can do this network."""
    ready = {"loop": bound(LoopGradients(copy.deepcopy(module)), assignments)}
    if why_not_grouped(module) is None:
        ready["grouped"] = bound(GroupedGradients(copy.deepcopy(module)), assignments)
    if peer and works(vmapped(copy.deepcopy(module), assignments[:2])):
        ready["vmap"] = vmapped(copy.deepcopy(module), assignments)
    return ready


def choice(module: nn.Module, assignments: Sequence[Assignment]) -> Choice:
    """Return what `make_engine` settles on once it has seen a round; two workers are enough, and much sooner done."""
    engine = make_engine(module)
    loop = LoopGradients(copy.deepcopy(module))
    engine.compute(loop.model.parameters.clone(), loop.model.buffers, assignments)
    return "grouped" if isinstance(engine, CheckedGradients) and engine.takes_one_pass(assignments) else "loop"


def exact(module: nn.Module, assignment: Assignment) -> torch.Tensor:
    """Return one worker's gradient in float64: what both engines are rounded from."""
    module = copy.deepcopy(module).double().train()
    parts = assignment.blocks if has_batch_norm(module) else 1
    for inputs, targets in zip(assignment.inputs.chunk(parts), assignment.targets.chunk(parts), strict=True):
        loss = F.cross_entropy(module(inputs.double()), targets, reduction="sum") / len(assignment.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters() if parameter.grad is not None])


def bound(engine: LoopGradients | GroupedGradients, assignments: Sequence[Assignment]) -> Compute:
    parameters, buffers = engine.model.parameters.clone(), engine.model.buffers
    return lambda: engine.compute(parameters, buffers, assignments).gradients


def vmapped(module: nn.Module, assignments: Sequence[Assignment]) -> Compute:
    module.train()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    inputs = torch.stack([assignment.inputs for assignment in assignments])
    targets = torch.stack([assignment.targets for assignment in assignments])

    def loss(values: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(module, dict(values), (x,)), y)

    by_worker = vmap(grad(loss), in_dims=(None, 0, 0))

    def compute() -> torch.Tensor:
        rows = by_worker(parameters, inputs, targets)
        return torch.cat([rows[name].flatten(1) for name in parameters], dim=1)

    return compute


def works(compute: Compute) -> bool:
    """Batch norm does not: vmap refuses to update running statistics in place."""
    try:
        compute()
    except RuntimeError:
        return False
    return True
