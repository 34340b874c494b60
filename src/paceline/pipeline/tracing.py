"""A model as a graph: by torch.export, or module by module where that fails and the model is a row of modules.

torch.export runs the model once on tensors without content and writes down every operation: loops are unrolled,
branches are taken, and `self.training` is what it was. Shapes are those of one micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from paceline.pipeline.errors import PipelineError
from paceline.pipeline.switches import TRAINING, follow_training
from paceline.pipeline.values import Bound, Values

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """A graph whose placeholders are the model's inputs, and the attributes (weights, modules) that its nodes name."""

    graph: fx.Graph
    attributes: dict[str, Any]
    several_outputs: bool = False
    bound: tuple[Bound, ...] = ()
    changed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def trace(model: nn.Module, inputs: Inputs) -> Traced:
    """The graph of a model that trains, for inputs of these shapes.

    >>> traced = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(2, 4),))
    >>> [node.name for node in traced.graph.nodes if node.op == "call_function"]
    ['linear', 'relu']
    """
    with _training(model):
        program, why = _export(model, inputs)
        if program is not None:
            return _with_weights(program, model)
        if type(model) is nn.Sequential:
            note = f"torch.export failed ({why[:120]}), so the modules of the nn.Sequential are taken whole"
            return _in_a_row(model, inputs, note)
    raise PipelineError(
        f"torch.export cannot trace {type(model).__name__}: {why[:300]}; "
        "a model can be cut if torch.export traces it, or if it is an nn.Sequential whose modules pass one tensor on"
    )


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Train mode for a while; modules that are frozen in a model that trains stay so."""
    before = {module: module.training for module in model.modules()}
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _export(model: nn.Module, inputs: Inputs) -> tuple[Any, str]:
    """The exported program; or None, and why not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attributes that export sets back; nothing that users could act on
        try:
            return torch.export.export(model, inputs, strict=False), ""
        except Exception as error:  # whatever the model's own code raises while it is traced
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return None, lines[0]


def _with_weights(program: Any, model: nn.Module) -> Traced:
    graph, signature = program.graph, program.graph_signature
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    names = signature.inputs_to_parameters | signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
    attributes: dict[str, Any] = {TRAINING: True}
    canonical: dict[int, str] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in names:
            name = names[node.name]
            value = held[name] if name in held else program.constants[name]
            name = canonical.setdefault(id(value), name)  # a weight with two names is one weight
            attributes[name] = value
            _read(graph, node, name)
    several = _check_outputs(program)
    values = Values(graph, attributes)
    follow_training(graph)
    for node in reversed(list(graph.nodes)):
        if node.op in ("get_attr", "call_function") and not node.users and not _writes(node):
            graph.erase_node(node)
    notes = [f"{name} is not used by the model's forward" for name in held if not _reads(graph, canonical, held[name])]
    return Traced(
        graph=graph,
        attributes=attributes,
        several_outputs=several,
        bound=tuple(values.bound),
        changed=frozenset(values.changed),
        notes=tuple(notes),
    )


def _read(graph: fx.Graph, placeholder: fx.Node, name: str) -> None:
    """Let a weight be read where it is, in place of coming in as an argument."""
    with graph.inserting_before(placeholder):
        read = graph.create_node("get_attr", name)
    read.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(read)
    graph.erase_node(placeholder)


def _reads(graph: fx.Graph, canonical: dict[int, str], value: Any) -> bool:
    name = canonical.get(id(value))
    return any(node.op == "get_attr" and node.target == name for node in graph.nodes)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _check_outputs(program: Any) -> bool:
    """Whether the model returns several tensors; what a pipeline cannot return is refused."""
    spec = program.call_spec.out_spec
    plain = spec.is_leaf() or (spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()))
    kinds = {output.kind.name for output in program.graph_signature.output_specs}
    if not plain or kinds - {"USER_OUTPUT"}:
        raise PipelineError(
            "the model must return a tensor or a tuple of tensors, and change nothing but its buffers in place "
            f"(it returns {spec})"
        )
    return not spec.is_leaf()


def _in_a_row(model: nn.Sequential, inputs: Inputs, note: str) -> Traced:
    """The modules of a row, each taken whole. They are played once, in eval mode, to see what they pass on."""
    if len(inputs) != 1:
        raise PipelineError(f"an nn.Sequential takes one input (inputs={len(inputs)})")
    graph = fx.Graph()
    node, value = graph.placeholder("input"), inputs[0]
    node.meta["val"] = value
    attributes: dict[str, Any] = {}
    model.eval()  # so that no statistics move; `trace` sets every module back
    for name, module in model.named_children():
        value = module(value)
        if not isinstance(value, torch.Tensor):
            raise PipelineError(f"module {name} of the nn.Sequential must return a tensor ({type(value).__name__})")
        node = graph.call_module(name, (node,))
        node.meta |= {"val": value, "nn_module_stack": {name: (name, type(module).__name__)}}
        attributes[name] = module
    graph.output((node,))
    return Traced(graph=graph, attributes=attributes, notes=(note,))
