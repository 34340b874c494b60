"""A traced model as layers in one valid order, with the tensors that go between them; and runs of layers as modules.

    layer         0        1        2        3
                ┌────┐   ┌────┐   ┌────┐   ┌────┐
    input ─────>│conv├──>│ bn ├──>│conv├──>│add │──> output
                └─┬──┘   └────┘   └────┘   └─▲──┘
                  └──────────── skip ────────┘
    piece [1, 3)           comes in: conv            goes out: conv_1, conv (conv is only handed on)

A layer is one call of a module that has no modules inside (`layer1.0.conv1`; a module called twice is two layers), or
one operation that a larger module does itself (`layer1.0.add`). The order is that in which the model does them. Layers
that no cut may part are one layer, and `notes` says why.

A piece is a run of layers as a module: tensors that cross its front come in, those that cross its end go out. It holds
the model's own parameters and buffers, under the model's own names. What goes out is contiguous, and a tensor of its
own: the schedules detach what was sent, which autograd refuses for views.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from paceline.pipeline.profile import INPUT, Weight
from paceline.pipeline.tracing import Inputs, TracedModel, is_training_flag, trace


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedLayer:
    """A layer of a graph: the nodes that are computed together."""

    name: str
    kind: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Value:
    """A tensor that may cross a cut, made by layer `producer` and last read by layer `last_use`.

    Its name is the node's, which is the same wherever the same model is traced; its shape is that for one micro-batch.
    """

    node: fx.Node
    producer: int
    last_use: int

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.node.meta["val"].shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.node.meta["val"].dtype
        return dtype

    @property
    def bytes(self) -> int:
        value = self.node.meta["val"]
        return int(value.numel() * value.element_size())

    @property
    def needs_gradient(self) -> bool:
        return bool(self.node.meta["val"].requires_grad)

    def crosses(self, cut: int) -> bool:
        """Whether a cut before layer `cut` parts its producer from a reader."""
        return self.producer < cut <= self.last_use


class ModelGraph:
    """A model that can be cut, traced for micro-batches of one shape.

    >>> graph = ModelGraph(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(5, 4),))
    >>> [layer.name for layer in graph.layers]
    ['0', '1', '2']
    >>> [(value.name, value.shape) for value in graph.crossing(1)]
    [('linear', (5, 8))]
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        traced = trace(model, inputs)
        self.graph, self.attributes = traced.graph, traced.attributes
        self.several_outputs, self.notes = traced.several_outputs, traced.notes
        self.persistent = frozenset(model.state_dict(keep_vars=True))
        self.inputs = tuple(node for node in self.graph.nodes if node.op == "placeholder")
        outputs: list[fx.Node] = []
        fx.node.map_arg(next(node for node in self.graph.nodes if node.op == "output").args, outputs.append)
        self.outputs = tuple(outputs)
        self._set_layers(tuple(_layers(self.graph, _leaves(model))))
        self._merge(dict(self._impossible_cuts(traced)))
        self.values = tuple(self._values())

    def crossing(self, cut: int) -> tuple[Value, ...]:
        """Return the tensors that cross a cut, in the order in which they are handed on."""
        return tuple(value for value in self.values if value.crosses(cut))

    @functools.cached_property
    def fingerprint(self) -> str:
        """What two graphs must share for a cut of one to be a cut of the other: layers, tensors and weights by name.

        Sizes are not in it: the same model with another micro-batch has the same fingerprint.
        """
        lines = [layer.name for layer in self.layers]
        lines += [f"{value.name} {value.producer} {value.last_use}" for value in self.values]
        lines += [f"{weight.name} {weight.bytes} {weight.layers}" for weight in self.weights]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _set_layers(self, layers: tuple[TracedLayer, ...]) -> None:
        self.layers = layers
        self._layer_of = {node: place for place, layer in enumerate(layers) for node in layer.nodes}
        self.weights = tuple(self._weights())

    def _merge(self, impossible: dict[int, _Reason]) -> None:
        """Make one layer of those that no cut may part; `impossible` are such cuts, and why."""
        merged: list[list[TracedLayer]] = []
        whys: list[_Reason | None] = []
        for place, layer in enumerate(self.layers):
            if place in impossible:
                merged[-1].append(layer)
                whys[-1] = impossible[place]
            else:
                merged.append([layer])
                whys.append(None)
        alike: dict[str, list[tuple[list[TracedLayer], _Reason]]] = {}
        for layers, why in zip(merged, whys, strict=True):
            if why is not None:
                alike.setdefault(why.kind, []).append((layers, why))
        for (layers, why), *others in alike.values():  # a model of many blocks has the same reason in each of them
            first = f"{layers[0].name} to {layers[-1].name} ({len(layers)} layers)"
            more = f", and {len(others)} more such groups," if others else ""
            self.notes = (*self.notes, f"{first}{more} stay together: {why.name}{why.kind}")
        self._set_layers(tuple(_joined(layers) for layers in merged))

    # -- what uses what ------------------------------------------------------------------------------------------------

    def _readers(self, node: fx.Node) -> list[int]:
        """Return the layers that read a node; the model's output is read after the last."""
        places = [self._layer_of[user] for user in node.users if user in self._layer_of]
        return [*places, len(self.layers) - 1] if node in self.outputs else places

    def _weights(self) -> Iterator[Weight]:
        used: dict[int, tuple[str, torch.Tensor, set[int]]] = {}  # a weight with two names is one
        for place, layer in enumerate(self.layers):
            for name, weight in _used_by(layer, self.attributes):
                used.setdefault(id(weight), (name, weight, set()))[2].add(place)
        for node in self.outputs:
            if node.op == "get_attr":  # a weight that the model returns is held where it is returned
                weight = self.attributes[str(node.target)]
                used.setdefault(id(weight), (str(node.target), weight, set()))[2].add(len(self.layers) - 1)
        for name, weight, places in used.values():
            trained = isinstance(weight, nn.Parameter) and weight.requires_grad
            size = weight.numel() * weight.element_size()
            yield Weight(name=name, bytes=size, layers=tuple(sorted(places)), trained=trained)

    def _values(self) -> Iterator[Value]:
        for node in self.graph.nodes:
            producer = INPUT if node in self.inputs else self._layer_of.get(node)
            readers = self._readers(node)
            if producer is None or not readers or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if max(readers) > producer:
                yield Value(node=node, producer=producer, last_use=max(readers))

    def _impossible_cuts(self, traced: TracedModel) -> Iterator[tuple[int, _Reason]]:
        """Yield the cuts through what is not a tensor, what is overwritten, or a buffer that moves; and why."""
        for node, producer in self._layer_of.items():
            if not isinstance(node.meta.get("val"), torch.Tensor):
                last = max(self._readers(node), default=producer)
                yield from _between(producer, last, _Reason(node.name, " is not a tensor and cannot be sent"))
        for first, last_node in traced.bound:
            begin, end = self._layer_of.get(first, 0), self._layer_of.get(last_node, len(self.layers) - 1)
            yield from _between(begin, end, _Reason(first.name, " is overwritten in place, or reads what is"))
        for weight in self.weights:
            if not weight.trained and (weight.name in traced.changed or "running_" in weight.name):
                yield from _between(
                    weight.layers[0], weight.layers[-1], _Reason(weight.name, " is a buffer that they share")
                )


class _Reason(NamedTuple):
    """Why layers cannot be parted: the name of a value, and what is with it."""

    name: str
    kind: str


def _between(first: int, last: int, why: _Reason) -> Iterator[tuple[int, _Reason]]:
    """Yield the cuts between two layers, each with the same reason."""
    for cut in range(first + 1, last + 1):
        yield cut, why


def _joined(layers: Sequence[TracedLayer]) -> TracedLayer:
    if len(layers) == 1:
        return layers[0]
    nodes = tuple(node for layer in layers for node in layer.nodes)
    return TracedLayer(name=f"{layers[0].name}..{layers[-1].name}", kind=f"{len(layers)} layers", nodes=nodes)


def _leaves(model: nn.Module) -> frozenset[str]:
    """Return the paths of the modules that have no modules inside."""
    return frozenset(path for path, module in model.named_modules(remove_duplicate=False) if not any(module.children()))


def _layers(graph: fx.Graph, leaves: frozenset[str]) -> Iterator[TracedLayer]:
    """Yield the calls of a graph, those of one module's call together."""
    nodes: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_module") and not is_training_flag(node):
            if nodes and not _belongs_with(nodes[-1], node, leaves):
                yield _layer(nodes, leaves)
                nodes = []
            nodes.append(node)
    if nodes:
        yield _layer(nodes, leaves)


def _call_of(node: fx.Node) -> tuple[str, str, str]:
    """Return which call of which module a node belongs to: the call's key, the module's path and its class."""
    stack = node.meta.get("nn_module_stack") or {"": ("", "")}
    key, (path, kind) = list(stack.items())[-1]
    return key, path, str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def _belongs_with(before: fx.Node, node: fx.Node, leaves: frozenset[str]) -> bool:
    if node.target is operator.getitem and before in node.all_input_nodes:
        return True
    key, path, _ = _call_of(node)
    return path in leaves and key == _call_of(before)[0]


def _layer(nodes: Sequence[fx.Node], leaves: frozenset[str]) -> TracedLayer:
    first = nodes[0]
    key, path, kind = _call_of(first)
    if path in leaves and path:
        _, at, again = key.partition("@")
        return TracedLayer(name=path + at + again, kind=kind, nodes=tuple(nodes))
    operation = first.name.rstrip("_")
    return TracedLayer(
        name=f"{path}.{operation}" if path else operation, kind=operation.rstrip("0123456789_"), nodes=tuple(nodes)
    )


def _used_by(layer: TracedLayer, attributes: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for node in layer.nodes:
        if node.op == "call_module":
            module = attributes[str(node.target)]
            for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                yield f"{node.target}.{name}", tensor
        for read in node.all_input_nodes:
            if read.op == "get_attr" and isinstance(attributes[str(read.target)], torch.Tensor):
                yield str(read.target), attributes[str(read.target)]


# -- layers as modules -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class PieceModule:
    """Layers [begin, end) of a model. `takes` and `gives` are what crosses its front and its end, in order.

    >>> graph = ModelGraph(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(5, 4),))
    >>> piece = cut_piece(graph, 1, 3)
    >>> sorted(name for name, _ in piece.module.named_parameters())
    ['2.bias', '2.weight']
    >>> piece.module(torch.ones(5, 8)).shape
    torch.Size([5, 2])
    """

    begin: int
    end: int
    module: fx.GraphModule
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]


def cut_piece(graph: ModelGraph, begin: int, end: int) -> PieceModule:
    """Make a module of layers [begin, end): the first takes the model's inputs, the last returns what it returns."""
    takes, gives = _crossing(graph, begin), _crossing(graph, end)
    takes_nodes = graph.inputs if begin == 0 else [value.node for value in takes]
    last = end == len(graph.layers)
    made, nodes = _copied(graph, takes_nodes, begin, end, also=graph.outputs if last else (), laid_out=begin > 0)
    if last:
        results: list[Any] = [nodes[node] for node in graph.outputs]
        made.output(tuple(results) if graph.several_outputs else results[0])
    else:
        made.output(tuple(made.call_function(hand_on, (nodes[value.node],)) for value in gives))
    return PieceModule(begin=begin, end=end, module=_module(graph, made), takes=takes, gives=gives)


def cut_pieces(graph: ModelGraph, cuts: Sequence[int]) -> tuple[PieceModule, ...]:
    """Make modules of all pieces of a model, cut before these layers.

    >>> graph = ModelGraph(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(5, 4),))
    >>> [(piece.begin, piece.end) for piece in cut_pieces(graph, [2])]
    [(0, 2), (2, 3)]
    """
    ends = [0, *cuts, len(graph.layers)]
    return tuple(cut_piece(graph, begin, end) for begin, end in itertools.pairwise(ends))


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerModule:
    """One layer by itself, as it is measured: it takes what it reads, and gives what others read."""

    module: fx.GraphModule
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


def cut_layer(graph: ModelGraph, place: int) -> LayerModule:
    """Make a module of layer `place` by itself.

    >>> graph = ModelGraph(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(5, 4),))
    >>> layer = cut_layer(graph, 1)
    >>> layer.takes, layer.gives
    ((linear,), (relu,))
    """
    inside = dict.fromkeys(graph.layers[place].nodes)
    reads = dict.fromkeys(read for node in inside for read in node.all_input_nodes)
    takes = tuple(node for node in reads if node not in inside and node.op != "get_attr" and not is_training_flag(node))
    gives = tuple(
        node
        for node in inside
        if (node in graph.outputs or any(user not in inside for user in node.users))
        and isinstance(node.meta.get("val"), torch.Tensor)
    )
    made, nodes = _copied(graph, takes, place, place + 1)
    made.output(tuple(nodes[node] for node in gives))
    return LayerModule(module=_module(graph, made), takes=takes, gives=gives)


def _copied(
    graph: ModelGraph,
    takes: Iterable[fx.Node],
    begin: int,
    end: int,
    *,
    also: Iterable[fx.Node] = (),
    laid_out: bool = False,
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copy layers [begin, end) into a graph; weights and training flags come along with whoever reads them.

    What arrived is in one run of memory; where the model had it otherwise, it is laid out so again.
    """
    made = fx.Graph()
    nodes = {node: made.placeholder(node.name) for node in takes}
    for node in nodes if laid_out else ():
        strides = _dense_strides(node.meta["val"])
        if strides is not None:
            nodes[node] = made.call_function(lay_out, (nodes[node], strides))

    def copied(node: fx.Node) -> fx.Node:
        if node not in nodes:
            nodes[node] = made.node_copy(node, copied)
        return nodes[node]

    for node in itertools.chain(*(layer.nodes for layer in graph.layers[begin:end]), also):
        copied(node)
    return made, nodes


def _dense_strides(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of a value whose dimensions lie in another order, without gaps; None if they lie in order."""
    shape, strides = value.shape, value.stride()
    order = sorted(range(len(shape)), key=lambda place: -strides[place])
    real = [place for place in order if shape[place] > 1]
    if real == sorted(real) or 0 in (strides[place] for place in real):
        return None
    dense, step = list(strides), 1
    for place in reversed(order):
        dense[place], step = step, step * shape[place]
    return tuple(dense)


def _crossing(graph: ModelGraph, cut: int) -> tuple[Value, ...]:
    if cut == 0:
        return tuple(value for value in graph.values if value.node in graph.inputs)
    return graph.crossing(cut)


def _module(graph: ModelGraph, made: fx.Graph) -> fx.GraphModule:
    named = {str(node.target) for node in made.nodes if node.op in ("get_attr", "call_module")}
    module = fx.GraphModule({name: graph.attributes[name] for name in named}, made, class_name="Piece")
    for name in named - graph.persistent:
        path, _, field = name.rpartition(".")
        owner = module.get_submodule(path)
        if field in owner._buffers:  # a constant of the model's code, or a buffer that it does not keep
            owner.register_buffer(field, graph.attributes[name], persistent=False)
    module.training = True  # not of what is inside: a module that the user froze stays frozen
    return module


class _HandOn(torch.autograd.Function):
    """The same content in a tensor of its own, without a copy where the memory is in one run."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.contiguous()
        storage = whole.untyped_storage()
        return whole.new_empty(0).set_(storage, whole.storage_offset(), whole.shape, whole.stride())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def hand_on(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a piece gives it to the next: contiguous, and no view.

    >>> hand_on(torch.arange(6).reshape(2, 3).T).is_contiguous()
    True
    """
    if tensor.requires_grad:
        return _HandOn.apply(tensor)  # type: ignore[no-any-return, no-untyped-call]
    return tensor.contiguous().detach()  # no view either: it could not be detached in place


class _LayOut(torch.autograd.Function):
    """The same content with other strides."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        laid = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return laid.copy_(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def lay_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with the strides that it has in the model: a view that follows may count on them.

    >>> lay_out(torch.arange(6).reshape(2, 3), (1, 2)).stride()
    (1, 2)
    """
    return _LayOut.apply(tensor, tuple(strides))  # type: ignore[no-any-return, no-untyped-call]
