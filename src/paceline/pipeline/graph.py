"""A traced model as layers in one valid order, with the tensors that go between them: what can be cut, and where.

A layer is one call of a module that has no modules inside (`layer1.0.conv1`; a module called twice is two layers), or
one operation that a larger module does itself (`layer1.0.add`). The order is that in which the model does them. Layers
that no cut may part are one layer, and `notes` says why.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from paceline.pipeline.layers import INPUT, Weight
from paceline.pipeline.switches import is_switch
from paceline.pipeline.tracing import Inputs, Traced, trace


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """A layer of a graph: the nodes that are played together."""

    name: str
    kind: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Value:
    """A tensor that may cross a cut, made by layer `producer` and last read by layer `last_use`."""

    node: fx.Node
    producer: int
    last_use: int

    @property
    def name(self) -> str:
        """The node's name, which is the same wherever the same model is traced."""
        return self.node.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape for one micro-batch."""
        return tuple(self.node.meta["val"].shape)

    @property
    def dtype(self) -> torch.dtype:
        """What its elements are."""
        dtype: torch.dtype = self.node.meta["val"].dtype
        return dtype

    @property
    def bytes(self) -> int:
        """What it weighs on its way."""
        value = self.node.meta["val"]
        return int(value.numel() * value.element_size())

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient comes back for it."""
        return bool(self.node.meta["val"].requires_grad)

    def crosses(self, cut: int) -> bool:
        """Whether a cut before layer `cut` parts its producer from a reader."""
        return self.producer < cut <= self.last_use


class ModelGraph:
    """A model that can be cut, traced for micro-batches of one shape.

    >>> graph = ModelGraph(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(5, 4),))
    >>> [step.name for step in graph.steps]
    ['0', '1', '2']
    >>> [(value.name, value.shape) for value in graph.crossing(1)]
    [('linear', (5, 8))]
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        traced: Traced = trace(model, inputs)
        self.graph, self.attributes = traced.graph, traced.attributes
        self.several_outputs, self.notes = traced.several_outputs, traced.notes
        self.persistent = frozenset(model.state_dict(keep_vars=True))
        self.inputs = tuple(node for node in self.graph.nodes if node.op == "placeholder")
        self.outputs = _nodes_in(next(node for node in self.graph.nodes if node.op == "output").args)
        self._set_steps(tuple(_steps(self.graph, _leaves(model))))
        self._merge(dict(self._bound(traced)))
        self.values = tuple(self._values())

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """The tensors that cross a cut, in the order in which they are handed on."""
        return tuple(value for value in self.values if value.crosses(cut))

    @functools.cached_property
    def fingerprint(self) -> str:
        """What two graphs must share for a cut of one to be a cut of the other: layers, tensors and weights by name.

        Sizes are not in it: the same model with another micro-batch has the same fingerprint.
        """
        said = [step.name for step in self.steps]
        said += [f"{value.name} {value.producer} {value.last_use}" for value in self.values]
        said += [f"{weight.name} {weight.bytes} {weight.layers}" for weight in self.weights]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()

    def _set_steps(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self._place = {node: place for place, step in enumerate(steps) for node in step.nodes}
        self.weights = tuple(self._weights())

    def _merge(self, bound: dict[int, str]) -> None:
        """Make one layer of those that no cut may part; `bound` are such cuts, and why."""
        merged: list[list[Step]] = []
        whys: list[str] = []
        for place, step in enumerate(self.steps):
            if place in bound:
                merged[-1].append(step)
                whys[-1] = bound[place]
            else:
                merged.append([step])
                whys.append("")
        for steps, why in zip(merged, whys, strict=True):
            if len(steps) > 1:
                note = f"{steps[0].name} to {steps[-1].name} ({len(steps)} layers) stay together: {why}"
                self.notes = (*self.notes, note)
        self._set_steps(tuple(_together(steps) for steps in merged))

    # -- what uses what ------------------------------------------------------------------------------------------------

    def _readers(self, node: fx.Node) -> list[int]:
        """The layers that read a node; the model's output is read after the last."""
        places = [self._place[user] for user in node.users if user in self._place]
        return [*places, len(self.steps) - 1] if node in self.outputs else places

    def _weights(self) -> Iterator[Weight]:
        used: dict[int, tuple[str, torch.Tensor, set[int]]] = {}  # a weight with two names is one
        for place, step in enumerate(self.steps):
            for name, weight in _used_by(step, self.attributes):
                used.setdefault(id(weight), (name, weight, set()))[2].add(place)
        for node in self.outputs:
            if node.op == "get_attr":  # a weight that the model returns is held where it is returned
                weight = self.attributes[str(node.target)]
                used.setdefault(id(weight), (str(node.target), weight, set()))[2].add(len(self.steps) - 1)
        for name, weight, places in used.values():
            trained = isinstance(weight, nn.Parameter) and weight.requires_grad
            size = weight.numel() * weight.element_size()
            yield Weight(name=name, bytes=size, layers=tuple(sorted(places)), trained=trained)

    def _values(self) -> Iterator[Value]:
        for node in self.graph.nodes:
            producer = INPUT if node in self.inputs else self._place.get(node)
            readers = self._readers(node)
            if producer is None or not readers or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if max(readers) > producer:
                yield Value(node=node, producer=producer, last_use=max(readers))

    def _bound(self, traced: Traced) -> Iterator[tuple[int, str]]:
        """Cuts that are not possible: through what is not a tensor, what is overwritten, or a buffer that moves."""
        for node, producer in self._place.items():
            if not isinstance(node.meta.get("val"), torch.Tensor):
                last = max(self._readers(node), default=producer)
                yield from _each(producer, last, f"{node.name} is not a tensor and cannot be sent")
        for first, last_node in traced.bound:
            begin, end = self._place.get(first, 0), self._place.get(last_node, len(self.steps) - 1)
            yield from _each(begin, end, f"{first.name} is overwritten in place, or reads what is")
        for weight in self.weights:
            if not weight.trained and (weight.name in traced.changed or "running_" in weight.name):
                yield from _each(weight.layers[0], weight.layers[-1], f"they share the buffer {weight.name}")


def _each(first: int, last: int, why: str) -> Iterator[tuple[int, str]]:
    """The cuts between two layers."""
    for cut in range(first + 1, last + 1):
        yield cut, why


def _together(steps: Sequence[Step]) -> Step:
    if len(steps) == 1:
        return steps[0]
    nodes = tuple(node for step in steps for node in step.nodes)
    return Step(name=f"{steps[0].name}..{steps[-1].name}", kind=f"{len(steps)} layers", nodes=nodes)


def _nodes_in(arguments: Any) -> tuple[fx.Node, ...]:
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, found.append)
    return tuple(found)


def _leaves(model: nn.Module) -> frozenset[str]:
    """The paths of the modules that have no modules inside."""
    return frozenset(path for path, module in model.named_modules(remove_duplicate=False) if not any(module.children()))


def _steps(graph: fx.Graph, leaves: frozenset[str]) -> Iterator[Step]:
    """The calls of a graph, those of one module's call together."""
    nodes: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_module") and not is_switch(node):
            if nodes and not _goes_with(nodes[-1], node, leaves):
                yield _step(nodes, leaves)
                nodes = []
            nodes.append(node)
    if nodes:
        yield _step(nodes, leaves)


def _call_of(node: fx.Node) -> tuple[str, str, str]:
    """Which call of which module a node belongs to: the call's key, the module's path and its class."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    key, (path, kind) = list(stack.items())[-1]
    return key, path, str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def _goes_with(before: fx.Node, node: fx.Node, leaves: frozenset[str]) -> bool:
    if node.target is operator.getitem and before in node.all_input_nodes:
        return True
    key, path, _ = _call_of(node)
    return path in leaves and key == _call_of(before)[0]


def _step(nodes: Sequence[fx.Node], leaves: frozenset[str]) -> Step:
    first = nodes[0]
    key, path, kind = _call_of(first)
    if path in leaves and path:
        _, at, again = key.partition("@")
        return Step(name=path + at + again, kind=kind, nodes=tuple(nodes))
    operation = first.name.rstrip("_")
    return Step(
        name=f"{path}.{operation}" if path else operation, kind=operation.rstrip("0123456789_"), nodes=tuple(nodes)
    )


def _used_by(step: Step, attributes: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for node in step.nodes:
        if node.op == "call_module":
            for name, tensor in _held_by(attributes[str(node.target)]):
                yield f"{node.target}.{name}", tensor
        for read in node.all_input_nodes:
            if read.op == "get_attr" and isinstance(attributes[str(read.target)], torch.Tensor):
                yield str(read.target), attributes[str(read.target)]


def _held_by(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
