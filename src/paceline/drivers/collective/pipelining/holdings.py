"""Which weights this rank holds, and with whom: those that its pieces use, under the model's own names.

    tied embedding     stage 0 [ embedding ]   stage 1 [ ... ]   stage 2 [ head ]
    held by            stage 0 ──────────────────────────────────── stage 2

A weight that pieces on several ranks use is held by each of them. They begin with the first one's values, and add up
their gradients after every step, so that all take the same step with it. What no piece uses is held by the first stage,
so that nothing is missing in the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.drivers.collective.pipelining.crew import Crew
from paceline.drivers.collective.pipelining.standins import like, put, same_device, tensors_of
from paceline.pipeline.graph import ModelGraph


@dataclass(frozen=True, kw_only=True)
class Share:
    """Weights that the same stages hold, in a group of theirs."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    group: dist.ProcessGroup


def holders(
    graph: ModelGraph, cuts: Sequence[int], stages: int, name_of: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """For each weight the stages that hold it; `name_of` has one name for all names of a weight.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> graph = ModelGraph(nn.Sequential(layer, nn.Linear(2, 2, bias=False), layer), (torch.ones(1, 2),))
    >>> holders(graph, [1, 2], 3, {"0.weight": "0.weight", "1.weight": "1.weight", "2.weight": "0.weight"})
    {'0.weight': (0, 2), '1.weight': (1,)}
    """
    ends = [*cuts, len(graph.layers)]
    used: dict[str, set[int]] = {name: set() for name in name_of.values()}
    for weight in graph.weights:
        if weight.name in name_of:  # a constant of the model's code is with whoever reads it
            used[name_of[weight.name]] |= {sum(layer >= end for end in ends) % stages for layer in weight.layers}
    return {name: tuple(sorted(found)) or (0,) for name, found in used.items()}


class Holdings:
    """The weights of a model as the ranks hold them; `others` of a model can be let go of."""

    def __init__(self, model: nn.Module, graph: ModelGraph, cuts: Sequence[int], crew: Crew) -> None:
        self.model, self._crew = model, crew
        tensors = tensors_of(model)
        first: dict[int, str] = {}
        in_graph = [weight.name for weight in graph.weights if weight.name in tensors]
        for name in [*in_graph, *tensors]:
            first.setdefault(id(tensors[name]), name)
        self.name_of = {name: first[id(tensor)] for name, tensor in tensors.items()}  # one for all names of a weight
        self._saved = tuple(name for name in model.state_dict(keep_vars=True) if name in tensors)
        self._of = holders(graph, cuts, crew.stages, self.name_of)
        self.ours = {name: tensors[name] for name, stages in self._of.items() if crew.stage in stages}
        self._move()
        self.shares = tuple(self._shares())

    def _move(self) -> None:
        """Bring what this rank holds to its device."""
        for name, tensor in self.ours.items():
            if same_device(tensor.device, self._crew.device):
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(self._crew.device)  # an optimiser may know it already
                continue
            self.ours[name] = tensor.to(self._crew.device)
            for other, canonical in self.name_of.items():
                if canonical == name:
                    put(self.model, other, self.ours[name])

    def _shares(self) -> Iterator[Share]:
        """All ranks make the groups of all of them, in one order."""
        together: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self._of.items():
            if len(stages) > 1:
                together.setdefault(stages, []).append(name)
        for stages, names in sorted(together.items()):
            firsts = range(0, self._crew.world, self._crew.stages)
            group = self._crew.rooms([[first + stage for stage in stages] for first in firsts])
            if group is not None:
                yield Share(names=tuple(names), stages=stages, group=group)

    @torch.no_grad()
    def begin_equal(self) -> None:
        """Give all holders the first one's values, and all replicas those of replica 0."""
        crew = self._crew
        for share in self.shares:
            source = crew.ranks[crew.replica * crew.stages + share.stages[0]]
            for name in share.names:
                _broadcast(self.ours[name], source, share.group)
        if crew.replicas > 1:
            for tensor in self.ours.values():
                _broadcast(tensor, crew.ranks[crew.stage], crew.column)

    def free_others(self) -> None:
        """Let go of what this rank does not hold: the model keeps tensors without content."""
        made: dict[str, torch.Tensor] = {}
        for name, tensor in tensors_of(self.model).items():
            canonical = self.name_of[name]
            if canonical not in self.ours:
                if canonical not in made:
                    made[canonical] = like(tensor, torch.empty_like(tensor, device="meta", requires_grad=False))
                put(self.model, name, made[canonical])

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's pieces, with the model's names."""
        for name, tensor in self.ours.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    # -- gradients -----------------------------------------------------------------------------------------------------

    def trained(self) -> dict[str, nn.Parameter]:
        """What this rank trains."""
        return {name: weight for name, weight in self.parameters() if weight.requires_grad}

    def alone(self) -> dict[str, nn.Parameter]:
        """What this rank trains and no other stage holds."""
        return {name: weight for name, weight in self.trained().items() if len(self._of[name]) == 1}

    def add_up_shared(self) -> None:
        """The gradients of weights that several stages hold, added up."""
        trained = self.trained()
        for share in self.shares:
            weights = [trained[name] for name in share.names if name in trained]
            for dtype in dict.fromkeys(weight.dtype for weight in weights):
                reduce_gradients([weight for weight in weights if weight.dtype is dtype], share.group)

    def squares(self) -> float:
        """The sum of the squares of the gradients that this stage is the first to hold."""
        first = [weight.grad for name, weight in self.parameters() if self._of[name][0] == self._crew.stage]
        return sum(float(gradient.double().square().sum()) for gradient in first if gradient is not None)

    def shared(self) -> dict[str, nn.Parameter]:
        """What this rank trains and other stages hold too."""
        return {name: weight for name, weight in self.trained().items() if len(self._of[name]) > 1}

    # -- states --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's part, under the model's names."""
        return {name: self.ours[real].detach() for name, real in self._named() if real in self.ours}

    def _named(self) -> list[tuple[str, str]]:
        return [(name, self.name_of[name]) for name in self._saved]

    def collected(self) -> dict[str, torch.Tensor] | None:
        """The whole state on rank 0, on the CPU: replica 0's, one tensor after the other. None elsewhere."""
        crew = self._crew
        if crew.replica:
            return None
        whole: dict[str, torch.Tensor] = {}
        tensors = tensors_of(self.model)
        for name, real in self._named():
            owner = self._of[real][0]
            if self.name_of[name] in whole:  # the same weight under another name
                whole[name] = whole[real]
            elif crew.stage == owner == 0:
                whole[name] = self.ours[real].detach().cpu().clone()
            elif crew.stage == owner:
                dist.send(_bytes(self.ours[real].detach()), crew.ranks[0], group=crew.row)
            elif crew.stage == 0:
                there = torch.empty_like(tensors[name], device=crew.device, memory_format=torch.contiguous_format)
                there = there.detach()
                dist.recv(_bytes(there), crew.ranks[owner], group=crew.row)
                whole[name] = there.cpu()
        return whole if crew.stage == 0 else None

    def why_not(self, state: Any) -> str:
        """Why this rank cannot take its part of a state; nothing if it can. It never raises: others wait for it."""
        try:
            return self._why_not(state)
        except Exception as error:  # whatever a mapping of the user's own does
            return f"this state cannot be read: {type(error).__name__}: {error}"

    def _why_not(self, state: Any) -> str:
        if not isinstance(state, Mapping):
            return f"a state must be a mapping of names to tensors ({type(state).__name__})"
        tensors = tensors_of(self.model)
        wanted = [name for name, real in self._named() if real in self.ours]
        missing = [name for name in wanted if name not in state]
        unknown = [str(name) for name in state if name not in tensors]
        if missing or unknown:
            return f"this state is of another model: {_some('it has no', missing)}{_some('it has', unknown)}".strip()
        for name in wanted:
            theirs = state[name]
            if not isinstance(theirs, torch.Tensor) or theirs.layout is not torch.strided or theirs.is_meta:
                return f"a state must have tensors with content ({name} is {_kind(theirs)})"
            if theirs.shape != tensors[name].shape:
                shapes = f"{tuple(theirs.shape)} (here {tuple(tensors[name].shape)})"
                return f"this state is of another model: {name} is {shapes}"
        return ""

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of a whole state."""
        for name, real in self._named():
            if real in self.ours:
                self.ours[real].copy_(state[name])


def _kind(value: Any) -> str:
    return f"{value.layout} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__


def _some(what: str, names: Sequence[str]) -> str:
    return f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} " if names else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory, whatever it holds: not every backend sends every type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(_bytes(copied), source, group=group)
        tensor.copy_(copied)


def gradients_of(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """All gradients in one vector; zeros where there is none.

    >>> gradients_of([nn.Parameter(torch.ones(2))]).tolist()
    [0.0, 0.0]
    """
    return torch.cat(_flat(weights))


@torch.no_grad()
def _flat(weights: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    every = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    return [(each.to_dense() if each.is_sparse else each).reshape(-1) for each in every]


def present(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """1 where a weight has a gradient, 0 where nothing computes one.

    >>> present([nn.Parameter(torch.ones(2))]).tolist()
    [0.0]
    """
    flags = [float(weight.grad is not None) for weight in weights]
    return torch.tensor(flags, dtype=weights[0].dtype, device=weights[0].device)


@torch.no_grad()
def set_gradients(weights: Sequence[nn.Parameter], vector: torch.Tensor, anywhere: torch.Tensor) -> None:
    """Give the parts of a vector back to the weights; none to one that has no gradient `anywhere` (0).

    >>> weight, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    >>> set_gradients([weight, unused], torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.0, 0.0]))
    >>> weight.grad.tolist(), unused.grad
    ([1.0, 2.0], None)
    """
    parts = torch.split(vector, [weight.numel() for weight in weights])
    for weight, part, has in zip(weights, parts, anywhere.tolist(), strict=True):
        if not has:
            continue
        if weight.grad is None or weight.grad.is_sparse:
            weight.grad = part.reshape(weight.shape).to(weight.dtype, copy=True)
        else:
            weight.grad.copy_(part.reshape(weight.shape))


def reduce_gradients(weights: Sequence[nn.Parameter], group: dist.ProcessGroup, factor: float = 1.0) -> None:
    """Add up `factor` times the gradients over the ranks of a group; the weights are of one type."""
    if weights:
        flags = present(weights)
        vector = torch.cat([*_flat(weights), flags])
        vector[: -len(flags)] *= factor
        dist.all_reduce(vector, group=group)
        set_gradients(weights, vector[: -len(flags)], vector[-len(flags) :])
