"""A model as a graph: by torch.export, or module by module where that fails and the model is a row of modules.

torch.export runs the model once on tensors without content and writes down every operation: loops are unrolled,
branches are taken, and `self.training` is what it was: a model in eval mode, or a part of it, trains so. Shapes are
those of one micro-batch.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
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
    """The graph of a model, in the modes that its modules are in, for inputs of these shapes.

    >>> traced = trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), (torch.ones(2, 4),))
    >>> [node.name for node in traced.graph.nodes if node.op == "call_function"]
    ['linear', 'relu']
    """
    with _modes_kept(model):
        program, why = _export(model, inputs)
        if program is not None:
            _check_outputs(program)
            try:
                return _with_weights(program, model)
            except Exception as error:  # an operation that cannot be played by itself
                why = f"its graph cannot be followed ({type(error).__name__}: {_first_line(error)})"
        if type(model) is nn.Sequential:
            note = f"torch.export failed ({why[:120]}), so the modules of the nn.Sequential are taken whole"
            return _in_a_row(model, inputs, note)
    raise PipelineError(
        f"torch.export cannot trace {type(model).__name__}: {why[:300]}; "
        "a model can be cut if torch.export traces it, or if it is an nn.Sequential whose modules pass one tensor on"
    )


@contextmanager
def _modes_kept(model: nn.Module) -> Iterator[None]:
    """Every module in the mode that it was in."""
    before = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def _export(model: nn.Module, inputs: Inputs) -> tuple[Any, str]:
    """The exported program; or None, and why not."""
    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")  # of attributes that export sets back; nothing that users could act on
        try:
            return torch.export.export(model, inputs, strict=False), ""
        except Exception as error:  # whatever the model's own code raises while it is traced
            return None, _first_line(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch prints pages about what it cannot trace; why is in the error."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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
        elif node.op == "get_attr":  # a part of the graph that runs without gradients, or under autocast
            attributes[str(node.target)] = program.graph_module.get_submodule(str(node.target))
    several = not program.call_spec.out_spec.is_leaf()
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
    """Whether it leaves something behind: normalisation moves its averages, though its schema does not say so."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    return node.target._schema.is_mutable or "running_mean" in names


def _check_outputs(program: Any) -> None:
    """Refuse what a pipeline cannot return."""
    spec = program.call_spec.out_spec
    plain = spec.is_leaf() or (spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()))
    kinds = {output.kind.name for output in program.graph_signature.output_specs}
    (returned,) = next(node for node in program.graph.nodes if node.op == "output").args
    tensors = all(isinstance(each, fx.Node) and isinstance(each.meta["val"], torch.Tensor) for each in returned)
    if not plain or not tensors or kinds - {"USER_OUTPUT"}:
        raise PipelineError(
            "the model must return a tensor or a tuple of tensors, and change nothing but its buffers in place "
            f"(it returns {spec if not plain else list(returned)})"
        )


def _in_a_row(model: nn.Sequential, inputs: Inputs, note: str) -> Traced:
    """The modules of a row, each taken whole. They are played once, in eval mode, to see what they pass on."""
    if len(inputs) != 1:
        raise PipelineError(f"an nn.Sequential takes one input (inputs={len(inputs)})")
    graph = fx.Graph()
    node, value = graph.placeholder("input"), inputs[0]
    node.meta["val"] = value
    attributes: dict[str, Any] = {}
    model.eval()  # so that no statistics move; `trace` sets every module back
    names: dict[nn.Module, str] = {}
    for place, module in model._modules.items():  # named_children would leave out what stands there twice
        if module is None:
            continue
        name = names.setdefault(module, place)
        with torch.enable_grad():
            value = module(value)
        if not isinstance(value, torch.Tensor):
            raise PipelineError(f"module {place} of the nn.Sequential must return a tensor ({type(value).__name__})")
        node = graph.create_node("call_module", name, (node,))
        node.meta |= {"val": value, "nn_module_stack": {place: (place, type(module).__name__)}}
        attributes[name] = module
    graph.output((node,))
    moved = frozenset(f"{name}.{inner}" for name, module in attributes.items() for inner, _ in module.named_buffers())
    return Traced(graph=graph, attributes=attributes, changed=moved, notes=(note,))
