"""A run of layers as a module of its own: tensors that cross its front come in, those that cross its end go out.

    piece [1, 3) of   conv ──> bn ──> conv ──> add      comes in: conv            goes out: conv_1, conv
                       └────────────────────────┘                                 (conv is only handed on)

A piece holds the model's own parameters and buffers, under the model's own names. What goes out is contiguous, and a
tensor of its own: the schedules detach what was sent, which autograd refuses for views.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from paceline.pipeline.graph import ModelGraph, Value
from paceline.pipeline.switches import is_switch


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """Layers [begin, end) of a model. `takes` and `gives` are what crosses its front and its end, in order.

    >>> from torch import nn
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


def cut_piece(graph: ModelGraph, begin: int, end: int) -> Piece:
    """Layers [begin, end) as a module. The first takes the model's inputs, the last returns what the model returns."""
    takes, gives = _crossing(graph, begin), _crossing(graph, end)
    takes_nodes = graph.inputs if begin == 0 else [value.node for value in takes]
    last = end == len(graph.steps)
    made, nodes = _copied(graph, takes_nodes, begin, end, also=graph.outputs if last else (), laid_out=begin > 0)
    if last:
        results: list[Any] = [nodes[node] for node in graph.outputs]
        made.output(tuple(results) if graph.several_outputs else results[0])
    else:
        made.output(tuple(made.call_function(hand_on, (nodes[value.node],)) for value in gives))
    return Piece(begin=begin, end=end, module=_module(graph, made), takes=takes, gives=gives)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One layer by itself, as it is measured: it takes what it reads, and gives what others read."""

    module: fx.GraphModule
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]


def cut_part(graph: ModelGraph, place: int) -> Part:
    """Layer `place` by itself.

    >>> from torch import nn
    >>> graph = ModelGraph(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(5, 4),))
    >>> part = cut_part(graph, 1)
    >>> part.takes, part.gives
    ((linear,), (relu,))
    """
    inside = set(graph.steps[place].nodes)
    reads = dict.fromkeys(read for node in graph.steps[place].nodes for read in node.all_input_nodes)
    takes = tuple(node for node in reads if node not in inside and node.op != "get_attr" and not is_switch(node))
    gives = tuple(n for n in graph.steps[place].nodes if n in graph.outputs or any(u not in inside for u in n.users))
    gives = tuple(node for node in gives if isinstance(node.meta.get("val"), torch.Tensor))
    made, nodes = _copied(graph, takes, place, place + 1)
    made.output(tuple(nodes[node] for node in gives))
    return Part(module=_module(graph, made), takes=takes, gives=gives)


def _copied(
    graph: ModelGraph,
    takes: Iterable[fx.Node],
    begin: int,
    end: int,
    *,
    also: Iterable[fx.Node] = (),
    laid_out: bool = False,
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Layers [begin, end) in a graph of their own; weights and switches come along with whoever reads them.

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

    for step in graph.steps[begin:end]:
        for node in step.nodes:
            copied(node)
    for node in also:
        copied(node)
    return made, nodes


def _dense_strides(value: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a value whose dimensions lie in another order, without gaps; None if they lie as they stand."""
    shape, strides = value.shape, value.stride()
    order = sorted(range(len(shape)), key=lambda place: -strides[place])
    real = [place for place in order if shape[place] > 1]
    if real == sorted(real) or 0 in (strides[place] for place in real):
        return None
    dense, step = list(strides), 1
    for place in reversed(order):
        dense[place], step = step, step * shape[place]
    return tuple(dense)


def cut_pieces(graph: ModelGraph, cuts: Sequence[int]) -> tuple[Piece, ...]:
    """All pieces of a model, cut before these layers.

    >>> from torch import nn
    >>> graph = ModelGraph(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.ones(5, 4),))
    >>> [(piece.begin, piece.end) for piece in cut_pieces(graph, [2])]
    [(0, 2), (2, 3)]
    """
    ends = [0, *cuts, len(graph.steps)]
    return tuple(cut_piece(graph, begin, end) for begin, end in itertools.pairwise(ends))


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
    """What a piece gives to the next.

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
    """A tensor as the model had it, where a cut has put it in one run: a view that follows may count on it.

    >>> lay_out(torch.arange(6).reshape(2, 3), (1, 2)).stride()
    (1, 2)
    """
    return _LayOut.apply(tensor, tuple(strides))  # type: ignore[no-any-return, no-untyped-call]
