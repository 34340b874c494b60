"""The engines that are compared: the loop, one pass for all, and the peer, `torch.func.vmap(grad(...))`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from paceline.workers.engine import CheckedGradients, make_engine
from paceline.workers.gradients import Assignment, LoopGradients, has_batch_norm
from paceline.workers.grouped import GroupedGradients, why_not_grouped

Compute: TypeAlias = Callable[[], torch.Tensor]
Choice: TypeAlias = Literal["loop", "grouped"]


def engines(module: nn.Module, assignments: Sequence[Assignment], *, peer: bool) -> dict[str, Compute]:
    """{name: a pass that gives a gradient row per worker}, of those that can do this network."""
    ready = {"loop": _bound(LoopGradients(copy.deepcopy(module)), assignments)}
    if why_not_grouped(module) is None:
        ready["grouped"] = _bound(GroupedGradients(copy.deepcopy(module)), assignments)
    if peer and _works(_vmapped(copy.deepcopy(module), assignments[:2])):
        ready["vmap"] = _vmapped(copy.deepcopy(module), assignments)
    return ready


def choice(module: nn.Module, assignments: Sequence[Assignment]) -> Choice:
    """What `make_engine` settles on for this network, once it has seen a round."""
    engine = make_engine(module)
    loop = LoopGradients(copy.deepcopy(module))
    engine.compute(loop.model.parameters.clone(), loop.model.buffers, assignments)
    return "grouped" if isinstance(engine, CheckedGradients) and engine.takes_one_pass(assignments) else "loop"


def exact(module: nn.Module, assignment: Assignment) -> torch.Tensor:
    """One worker's gradient in float64: what both engines are rounded from."""
    module = copy.deepcopy(module).double().train()
    parts = assignment.blocks if has_batch_norm(module) else 1
    for inputs, targets in zip(assignment.inputs.chunk(parts), assignment.targets.chunk(parts), strict=True):
        loss = F.cross_entropy(module(inputs.double()), targets, reduction="sum") / len(assignment.inputs)
        loss.backward()  # type: ignore[no-untyped-call]
    return torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters() if parameter.grad is not None])


def _bound(engine: LoopGradients | GroupedGradients, assignments: Sequence[Assignment]) -> Compute:
    parameters, buffers = engine.model.parameters.clone(), engine.model.buffers
    return lambda: engine.compute(parameters, buffers, assignments).gradients


def _vmapped(module: nn.Module, assignments: Sequence[Assignment]) -> Compute:
    module.train()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    inputs = torch.stack([assignment.inputs for assignment in assignments])
    targets = torch.stack([assignment.targets for assignment in assignments])

    def loss(values: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(module, dict(values), (x,)), y)

    by_worker = vmap(grad(loss), in_dims=(None, 0, 0))

    def compute() -> torch.Tensor:
        gradients = by_worker(parameters, inputs, targets)
        return torch.cat([gradients[name].flatten(1) for name in parameters], dim=1)

    return compute


def _works(compute: Compute) -> bool:
    """Batch norm does not: vmap refuses to update running statistics in place."""
    try:
        compute()
    except RuntimeError:
        return False
    return True
