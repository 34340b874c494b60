"""What each layer of a model costs: seconds forward and backward, bytes kept for backward.

All layers are played one after another, each by itself, as training plays them; then backward, last to first:

    round    forward   0 ──> 1 ──> 2 ──> ...      each layer's inputs are cut off from the graph before it
             backward  0 <── 1 <── 2 <── ...      with gradients that the layers after it sent back

In every other round only the gradients of inputs are computed; the difference is what the weights' gradients cost. The
first rounds warm caches and are not counted; of the others the median is taken. Whole rounds are repeated and not
layers, so that a layer finds the caches as training would leave them. Random numbers and buffers are put back
afterwards.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from paceline.pipeline.graph import ModelGraph
from paceline.pipeline.layers import INPUT, Layer, Profile, Tensor
from paceline.pipeline.pieces import Part, cut_part, cut_piece

OnRound = Callable[[int, int], None]
WARM_ROUNDS = 1
LEAST_REPEATS = 3


def measure(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    *,
    graph: ModelGraph | None = None,
    repeats: int = 5,
    seconds: float = 30.0,
    on_round: OnRound = lambda done, of: None,
) -> Profile:
    """The layers of a model and what they cost with one micro-batch, on the device where the model and inputs are.

    Rounds end after `repeats` of each kind, or once they took so many `seconds`, but not before three of each.

    >>> profile = measure(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(2, 4),), repeats=3)
    >>> [layer.name for layer in profile.layers], profile.crossing_bytes(1)
    (['0', '1'], 64)
    """
    graph = ModelGraph(model, inputs) if graph is None else graph
    inputs = tuple(each.clone() for each in inputs)  # a model may overwrite them
    with _put_back(model, inputs):
        rounds = _Rounds(graph, inputs)
        kept = rounds.kept_bytes()
        total, began = 2 * (WARM_ROUNDS + repeats), time.perf_counter()
        for number in range(total):
            enough = number >= 2 * (WARM_ROUNDS + LEAST_REPEATS) and number % 2 == 0
            if enough and time.perf_counter() - began > seconds:
                break
            rounds.play(weights=number % 2 == 0, counted=number >= 2 * WARM_ROUNDS)
            on_round(number + 1, total)
        on_round(total, total)
        evaluates, notes = _evaluates(model, graph, inputs)
    layers = [
        Layer(name=step.name, kind=step.kind, activation_bytes=kept.of_layer[place], **rounds.medians(place))
        for place, step in enumerate(graph.steps)
    ]
    tensors = [
        Tensor(
            name=value.name,
            bytes=value.bytes,
            producer=value.producer,
            last_use=value.last_use,
            needs_gradient=value.needs_gradient,
            kept=value.node in kept.nodes or value.producer == INPUT,
        )
        for value in graph.values
    ]
    return Profile(
        layers=tuple(layers),
        tensors=tuple(tensors),
        weights=graph.weights,
        notes=(*graph.notes, *notes),
        evaluates=evaluates,
    )


class _Kept:
    """What backward needs again: bytes by the layer that made them, and the values that are among them."""

    def __init__(self, layers: int) -> None:
        self.of_layer = [0] * layers
        self.nodes: set[fx.Node] = set()


class _Rounds:
    """Layers played one by one, forward and backward, with the times they took."""

    def __init__(self, graph: ModelGraph, inputs: tuple[torch.Tensor, ...]) -> None:
        self._graph = graph
        self._parts = [cut_part(graph, place) for place in range(len(graph.steps))]
        self._inputs = dict(zip(graph.inputs, inputs, strict=True))
        self._cuda = inputs[0].device.type == "cuda"
        self._forward: list[list[float]] = [[] for _ in self._parts]
        self._backward: list[list[float]] = [[] for _ in self._parts]
        self._input_only: list[list[float]] = [[] for _ in self._parts]

    def medians(self, place: int) -> dict[str, float]:
        """What layer `place` took."""
        backward, inputs = statistics.median(self._backward[place]), statistics.median(self._input_only[place])
        return {
            "forward_seconds": statistics.median(self._forward[place]),
            "input_seconds": min(inputs, backward),
            "weight_seconds": max(backward - inputs, 0.0),
        }

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def play(self, *, weights: bool, counted: bool) -> None:
        """One round; the gradients of weights are left out in every other."""
        played = list(self._forwards(counted))
        gradients: dict[fx.Node, torch.Tensor] = {}
        for node, value in self._outputs(played):
            gradients[node] = torch.ones_like(value)
        for place in reversed(range(len(self._parts))):
            taken = self._backwards(place, *played[place], gradients, weights=weights)
            if counted:
                (self._backward if weights else self._input_only)[place].append(taken)
            played.pop()

    def _forwards(self, counted: bool) -> Iterator[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]]:
        """Every layer's inputs and outputs."""
        live = dict(self._inputs)
        for place, part in enumerate(self._parts):
            taken = [_leaf(live[node]) for node in part.takes]
            began = self._now()
            given = part.module(*taken)
            if counted:
                self._forward[place].append(self._now() - began)
            live.update(zip(part.gives, given, strict=True))
            yield taken, given

    def _outputs(self, played: Sequence[Any]) -> Iterator[tuple[fx.Node, torch.Tensor]]:
        for part, (_, given) in zip(self._parts, played, strict=True):
            yield from ((n, v) for n, v in zip(part.gives, given, strict=True) if n in self._graph.outputs)

    def _backwards(
        self,
        place: int,
        taken: list[torch.Tensor],
        given: tuple[torch.Tensor, ...],
        gradients: dict[fx.Node, torch.Tensor],
        *,
        weights: bool,
    ) -> float:
        part = self._parts[place]
        sent_back = [(v, gradients.pop(n)) for n, v in zip(part.gives, given, strict=True) if n in gradients]
        sent_back = [(value, gradient) for value, gradient in sent_back if value.requires_grad]
        wanted = [(node, leaf) for node, leaf in zip(part.takes, taken, strict=True) if leaf.requires_grad]
        trained = [weight for weight in part.module.parameters() if weight.requires_grad] if weights else []
        sources = [leaf for _, leaf in wanted] + trained
        if not sent_back or not sources:
            return 0.0
        values, grads = zip(*sent_back, strict=True)
        began = self._now()
        found = torch.autograd.grad(values, sources, grads, allow_unused=True)
        seconds = self._now() - began
        for (node, _), gradient in zip(wanted, found, strict=False):
            if gradient is not None:
                gradients[node] = gradients[node] + gradient if node in gradients else gradient
        return seconds

    def kept_bytes(self) -> _Kept:
        """Play forward once, and see what autograd keeps. What several layers keep is counted where it was made."""
        kept, made_by = _Kept(len(self._parts)), dict[int, int]()
        place = 0  # the layer that is played
        nodes: dict[int, list[fx.Node]] = {}
        known = {_memory(tensor) for tensor in self._graph.attributes.values() if isinstance(tensor, torch.Tensor)}
        known |= {_memory(tensor) for part in self._parts for tensor in _all_of(part)}
        known |= {_memory(tensor) for tensor in self._inputs.values()}
        counted: set[int] = set()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            memory = _memory(tensor)
            if memory not in known and memory not in counted:
                counted.add(memory)
                kept.of_layer[made_by.setdefault(memory, place)] += tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            alive = []
            for played in self._forwards(counted=False):
                alive.append(played)  # else memory is used again, and taken for what it was
                for node, value in zip(self._parts[place].gives, played[1], strict=True):
                    made_by.setdefault(_memory(value), place)
                    nodes.setdefault(_memory(value), []).append(node)
                place += 1
        kept.nodes = {node for memory in counted for node in nodes.get(memory, ())}
        return kept


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _all_of(part: Part) -> Iterator[torch.Tensor]:
    yield from part.module.parameters()
    yield from part.module.buffers()


@contextmanager
def _put_back(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Buffers, modes and random numbers as they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = {module: module.training for module in model.modules()}
    devices = [inputs[0].device] if inputs[0].device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for module, training in modes.items():
            module.training = training


def _evaluates(model: nn.Module, graph: ModelGraph, inputs: tuple[torch.Tensor, ...]) -> tuple[bool, list[str]]:
    """Whether the graph does in eval mode what the model does."""
    whole = cut_piece(graph, 0, len(graph.steps)).module
    try:
        with torch.no_grad():
            given = [[each.clone() for each in inputs] for _ in range(2)]
            ours, theirs = whole.eval()(*given[0]), model.eval()(*given[1])
    except Exception as error:  # the model's own code, in a mode it may never have been in
        same, why = False, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    else:
        pairs = zip(_as_tuple(ours), _as_tuple(theirs), strict=False)
        same = len(_as_tuple(ours)) == len(_as_tuple(theirs)) and all(
            (mine.shape, mine.dtype) == (its.shape, its.dtype)
            and torch.allclose(mine, its, rtol=1e-3, atol=1e-5, equal_nan=True)
            for mine, its in pairs
        )
        why = "its forward takes another path"
    return same, [] if same else [f"in eval mode the model does not do what its traced graph does ({why})"]


def _as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
