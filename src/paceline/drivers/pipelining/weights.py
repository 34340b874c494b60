"""Which weights this rank holds, and with whom: those that its pieces use, under the model's own names.

    tied embedding     stage 0 [ embedding ]   stage 1 [ ... ]   stage 2 [ head ]
    held by            stage 0 ──────────────────────────────────── stage 2

A weight that pieces on several ranks use is held by each of them. They begin with the first one's values, and add up
their gradients after every step, so that all take the same step with it. What no piece uses is held by the first stage,
so that nothing is missing in the whole state.

A model is traced on the device it will run on, for operations write their device down; and a model that needs a
pipeline may not fit there. torch.export looks at shapes alone, so while it runs every weight can be one number,
repeated:

    weight [4096, 4096] on the CPU, or on no device at all   ->   one 0 on the GPU, seen 4096 x 4096 times
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.drivers.pipelining.ranks import PipelineRanks
from paceline.pipeline.graph import ModelGraph


@dataclass(frozen=True, kw_only=True)
class SharedWeights:
    """Weights that the same stages hold, and the process group of those stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    group: dist.ProcessGroup


def holders(
    graph: ModelGraph, cuts: Sequence[int], stages: int, name_of: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """Return for each weight the stages that hold it; `name_of` has one name for all names of a weight.

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


class WeightOwnership:
    """The weights of a model as the ranks hold them.

    `ours` are those of this rank, by one name each; `name_of` has that one name for all names of a weight.
    """

    def __init__(self, model: nn.Module, graph: ModelGraph, cuts: Sequence[int], ranks: PipelineRanks) -> None:
        self.model, self._ranks = model, ranks
        tensors = tensors_of(model)
        first: dict[int, str] = {}
        in_graph = [weight.name for weight in graph.weights if weight.name in tensors]
        for name in [*in_graph, *tensors]:
            first.setdefault(id(tensors[name]), name)
        self.name_of = {name: first[id(tensor)] for name, tensor in tensors.items()}
        self._saved = tuple(name for name in model.state_dict(keep_vars=True) if name in tensors)
        self._of = holders(graph, cuts, ranks.stages, self.name_of)
        self.ours = {name: tensors[name] for name, stages in self._of.items() if ranks.stage in stages}
        self._move_to_device()
        self.shared = tuple(self._shared())

    def _move_to_device(self) -> None:
        for name, tensor in self.ours.items():
            if same_device(tensor.device, self._ranks.device):
                continue
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(self._ranks.device)  # an optimiser may know it already
                continue
            self.ours[name] = tensor.to(self._ranks.device)
            for other, canonical in self.name_of.items():
                if canonical == name:
                    set_tensor(self.model, other, self.ours[name])

    def _shared(self) -> Iterator[SharedWeights]:
        """Make the groups of all stages that share weights, on all ranks in one order; yield those of this rank."""
        together: dict[tuple[int, ...], list[str]] = {}
        for name, stages in self._of.items():
            if len(stages) > 1:
                together.setdefault(stages, []).append(name)
        for stages, names in sorted(together.items()):
            firsts = range(0, self._ranks.world, self._ranks.stages)
            group = self._ranks.make_group([[first + stage for stage in stages] for first in firsts])
            if group is not None:
                yield SharedWeights(names=tuple(names), stages=stages, group=group)

    @torch.no_grad()
    def begin_equal(self) -> None:
        """Give all holders the first one's values, and all replicas those of replica 0."""
        ranks = self._ranks
        for shared in self.shared:
            source = ranks.ranks[ranks.replica * ranks.stages + shared.stages[0]]
            for name in shared.names:
                _broadcast(self.ours[name], source, shared.group)
        if ranks.replicas > 1:
            for tensor in self.ours.values():
                _broadcast(tensor, ranks.ranks[ranks.stage], ranks.column)

    def free_others(self) -> None:
        """Free the weights that this rank does not hold: the model keeps tensors without content."""
        made: dict[str, torch.Tensor] = {}
        for name, tensor in tensors_of(self.model).items():
            canonical = self.name_of[name]
            if canonical not in self.ours:
                if canonical not in made:
                    made[canonical] = of_same_kind(tensor, torch.empty_like(tensor, device="meta", requires_grad=False))
                set_tensor(self.model, name, made[canonical])

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's pieces, with the model's names."""
        for name, tensor in self.ours.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def trained(self, *, shared: bool | None = None) -> dict[str, nn.Parameter]:
        """Return what this rank trains; with `shared` only what other stages hold too, or do not."""
        return {
            name: weight
            for name, weight in self.parameters()
            if weight.requires_grad and shared in (None, len(self._of[name]) > 1)
        }

    def squared_gradients(self) -> float:
        """Return the sum of the squares of the gradients that this stage is the first to hold."""
        first = [weight.grad for name, weight in self.parameters() if self._of[name][0] == self._ranks.stage]
        return sum(float(gradient.double().square().sum()) for gradient in first if gradient is not None)

    # -- states --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return this rank's part, under the model's names."""
        return {name: self.ours[real].detach() for name, real in self._named() if real in self.ours}

    def _named(self) -> list[tuple[str, str]]:
        return [(name, self.name_of[name]) for name in self._saved]

    def collect(self) -> dict[str, torch.Tensor] | None:
        """Return the whole state on rank 0, on the CPU: replica 0's, one tensor after the other. None elsewhere."""
        ranks = self._ranks
        if ranks.replica:
            return None
        whole: dict[str, torch.Tensor] = {}
        tensors = tensors_of(self.model)
        for name in dict.fromkeys(real for _, real in self._named()):  # a weight with several names travels once
            owner = self._of[name][0]
            if ranks.stage == owner == 0:
                whole[name] = self.ours[name].detach().cpu().clone()
            elif ranks.stage == owner:
                dist.send(_bytes(self.ours[name].detach()), ranks.ranks[0], group=ranks.row)
            elif ranks.stage == 0:
                there = torch.empty_like(tensors[name], device=ranks.device, memory_format=torch.contiguous_format)
                there = there.detach()
                dist.recv(_bytes(there), ranks.ranks[owner], group=ranks.row)
                whole[name] = there.cpu()
        return {name: whole[real] for name, real in self._named()} if ranks.stage == 0 else None

    def refusal(self, state: Any) -> str:
        """Return why this rank cannot load its part of a state, "" if it can. It never raises: others wait for it."""
        try:
            return self._refusal(state)
        except Exception as error:  # whatever a mapping of the user's own does
            return f"this state cannot be read: {type(error).__name__}: {error}"

    def _refusal(self, state: Any) -> str:
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
        """Load this rank's part of a whole state."""
        for name, real in self._named():
            if real in self.ours:
                self.ours[real].copy_(state[name])


def _kind(value: Any) -> str:
    return f"{value.layout} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__


def _some(verb: str, names: Sequence[str]) -> str:
    return f"{verb} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''} " if names else ""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as bytes: not every backend sends every type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(_bytes(copied), source, group=group)
        tensor.copy_(copied)


# -- tensors of a model ------------------------------------------------------------------------------------------------


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of a model by name; one that has several names is there under each.

    >>> sorted(tensors_of(nn.Linear(2, 2)))
    ['bias', 'weight']
    """
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def set_tensor(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Set the tensor that a model has under this name.

    >>> model = nn.Linear(2, 2)
    >>> set_tensor(model, "bias", nn.Parameter(torch.ones(2)))
    >>> model.bias.tolist()
    [1.0, 1.0]
    """
    path, _, field = name.rpartition(".")
    setattr(model.get_submodule(path), field, tensor)  # not past it: some modules keep lists of their weights


@contextmanager
def placeholders(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Replace all tensors that are elsewhere by tensors on `device` that take no memory, within the `with`.

    >>> model = nn.Linear(2, 2, device="meta")
    >>> with placeholders(model, torch.device("cpu")):
    ...     print(model.weight.device, model.weight.stride())
    cpu (0, 0)
    >>> model.weight.device
    device(type='meta')
    """
    before = {name: tensor for name, tensor in tensors_of(model).items() if not same_device(tensor.device, device)}
    made: dict[int, torch.Tensor] = {}
    try:
        for name, tensor in before.items():
            if id(tensor) not in made:
                zero = torch.zeros((), dtype=tensor.dtype, device=device)
                made[id(tensor)] = of_same_kind(tensor, zero.expand(tensor.shape))
            set_tensor(model, name, made[id(tensor)])
        yield
    finally:
        for name, tensor in before.items():
            set_tensor(model, name, tensor)


def of_same_kind(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return values as a parameter if a tensor is one, else as they are.

    >>> of_same_kind(nn.Parameter(torch.ones(1)), torch.zeros(1)).requires_grad
    True
    """
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether two devices are one; "cuda" is any of them.

    >>> same_device(torch.device("cpu"), torch.device("meta"))
    False
    """
    return one.type == other.type and (one.index is None or other.index is None or one.index == other.index)
